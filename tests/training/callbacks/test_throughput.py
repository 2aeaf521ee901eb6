"""How fast a run is: rates by the clock and the formula, the peaks of GPUs, time spent waiting."""

import time
from types import SimpleNamespace

import pytest
import torch

from linrope import LanguageModel, LanguageModelConfig
from linrope.cli.main import main
from linrope.profiling.flops import step_flops
from linrope.training import Throughput
from linrope.training.callbacks import throughput
from linrope.training.data_modules.base import TimedLoader
from tests.cli.conftest import read_csv
from tests.training.test_resume import losses


def test_the_peak_is_that_of_the_device_in_the_runs_precision(monkeypatch):
    asked = []
    monkeypatch.setattr(throughput, "get_available_flops", lambda device, dtype: asked.append(dtype) or 5e12)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    for precision in ("bf16-mixed", "16-true", "32-true", "64-true", "transformer-engine"):
        trainer = SimpleNamespace(
            precision=precision, strategy=SimpleNamespace(root_device=torch.device("cuda")), train_dataloader=None
        )
        rate = Throughput()
        rate.on_train_start(trainer, None)
        assert rate._peak == (None if precision == "transformer-engine" else 5e12)
    assert asked == [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def test_a_timed_loader_counts_the_time_in_which_batches_are_made():
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            time.sleep(0.02)
            return i

    loader = TimedLoader(Slow(), batch_size=None)
    got = []
    for i in loader:
        got.append(i)
        time.sleep(0.05)  # work, not waiting
    assert got == [0, 1, 2]
    assert 3 * 0.02 <= loader.waited < 3 * 0.05


def test_rates_are_sums_over_the_window_and_validation_does_not_count(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    model, logged = LanguageModel(LanguageModelConfig(d_model=16, n_layers=1, n_heads=2)), []
    module = SimpleNamespace(log_dict=logged.append, step_flops=lambda batch: step_flops(model, *batch["inputs"].shape))
    loader = TimedLoader([0])
    trainer = SimpleNamespace(
        world_size=2,
        global_rank=0,
        accumulate_grad_batches=2,
        global_step=0,
        max_steps=3,
        log_every_n_steps=2,
        train_dataloader=loader,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    rate = Throughput(window=2)
    rate.on_train_start(trainer, module)
    rate._peak = 1e9
    for number, (seconds, waited) in enumerate([(9, 0), (2, 1.0), (6, 0.5)]):
        if number == 2:
            rate.on_validation_start(trainer, module)
            now[0] += 1000
            rate.on_validation_end(trainer, module)
        now[0] += seconds
        loader.waited += waited
        for micro_batch, shape in enumerate([(2, 16), (1, 32)]):
            trainer.global_step = number + micro_batch  # the second one finishes the step
            rate.on_train_batch_end(trainer, module, None, {"inputs": torch.zeros(shape)}, 2 * number + micro_batch)
    assert len(logged) == 2  # after the steps 2, which the trainer logs, and 3, the last
    assert logged[0]["tokens_per_second"] == pytest.approx(2 * 64 / 2)  # without the first step, which compiles
    # the last two steps took eight seconds; of this device's rows
    flops = 2 * (step_flops(model, 2, 16) + step_flops(model, 1, 32)) / 8
    assert logged[-1]["tokens_per_second"] == pytest.approx(2 * 2 * 64 / 8)
    assert logged[-1]["tflops_per_device"] == pytest.approx(flops / 1e12)
    assert logged[-1]["share_of_peak"] == pytest.approx(flops / 1e9)
    assert logged[-1]["waiting_for_data"] == pytest.approx(1.5 / 8)
    assert logged[-1]["tokens"] == 3 * 2 * 64
    assert logged[-1]["seconds"] == pytest.approx(17)


def test_a_resumed_run_goes_on_counting_tokens_and_seconds(tiny, run_folder):
    assert main(["fit", *tiny, "--trainer.log_every_n_steps=1"]) == 0
    resume = ["--trainer.max_steps=4", f"--ckpt_path={run_folder}/checkpoints/last.ckpt"]
    assert main(["fit", *tiny, "--trainer.log_every_n_steps=1", *resume]) == 0
    logs = sorted(run_folder.parent.glob("version_*/metrics.csv"))
    rows = [row for log in logs for row in read_csv(log) if row["tokens"]]
    assert [float(row["tokens"]) for row in rows if row["val_loss"]] == [128, 256]
    counted = {float(row["tokens"]): float(row["seconds"]) for row in rows}
    assert list(counted) == [64, 128, 192, 256]
    assert 0 < counted[64] < counted[128] < counted[192] < counted[256]


def test_a_run_logs_them(tiny, run_folder):
    assert main(["fit", *tiny, "--trainer.log_every_n_steps=1"]) == 0
    assert 0 < float(losses(run_folder, "waiting_for_data")[1]) < 1
    assert float(losses(run_folder, "tflops_per_device")[1]) > 0
    assert 0.1 < float(losses(run_folder, "peak_memory_gib")[1]) < 64  # of a process with PyTorch and Lightning in it
    assert not losses(run_folder, "share_of_peak")  # a CPU has none in the table
