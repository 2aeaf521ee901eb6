"""`linrope plan`: what it says is what a run of that configuration is."""

import re
from pathlib import Path

import pytest
import torch

from linrope import LanguageModel, LanguageModelConfig
from linrope.cli.main import main
from linrope.data.batches.curriculum import CurriculumStage, TrainingPlan
from linrope.losses import IGNORE
from linrope.models.encoder import EncoderConfig
from linrope.profiling import run_plan as plan
from linrope.profiling.flops import step_flops
from linrope.profiling.memory_estimate import WORKSPACE
from linrope.profiling.run_plan import Setting, Variant, longest_that_fits, variants
from linrope.training.optimizer import MuonWithAdamW
from linrope.training.task_plan import measure_step
from linrope.training.tasks.masked_lm import MaskedLMModule
from linrope.utils.formatting import BYTES, COUNTS, duration_text, in_one_unit, parse_bytes

ROOT = Path(__file__).parents[2]
SMALL = LanguageModelConfig(d_model=16, n_layers=1, n_heads=2, forget_gate=True)


def setting(**options) -> Setting:
    values = {"model": SMALL, "plan": TrainingPlan([CurriculumStage(1, 64, 8)]), "devices": 1, "max_steps": 100}
    others = {"segment_length": None, "document_mask": False, "averaged": False, "optimizer": "adamw"}
    return Setting(**{**values, **others, "precision": "32-true", "device": "cpu", **options})


@pytest.fixture(autouse=True)
def no_table(monkeypatch):
    monkeypatch.setattr(plan, "MULTIPLES", ())


def test_the_command_says_all_before_anything_runs(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plan, "MULTIPLES", (1, 4))
    monkeypatch.setattr(plan, "LONGEST", 2**13)
    options = ["--data.context=64", "--trainer.max_steps=100", "--trainer.accumulate_grad_batches=2"]
    args = ["plan", *tiny, *options, "--memory=60MiB", "--tokens_per_second=128"]
    assert main(args) == 0
    out = capsys.readouterr().out
    model = LanguageModel(LanguageModelConfig(d_model=16, n_layers=1, n_heads=2))
    assert re.search(rf"^parameters +{model.n_parameters:,}$", out, re.M)
    assert re.search(r"^decoding state +584 B at 64 tokens$", out, re.M)
    # 64 · 2 rows · 2 batches = 256 tokens a step, 100 steps of them at 128 a second
    assert re.search(r"^the run +100 steps, 25,600 tokens: 3 min 20 s at 128 tokens per second$", out, re.M)
    assert re.search(r"^a step +256 tokens, ", out, re.M)
    assert re.findall(r"^ +(64|256) +(\d+) ", out, re.M) == [("64", "2"), ("256", "1")]
    fits = dict(re.findall(r"^fits 60MiB: (.+): a row of ([\d,]+) tokens", out, re.M))
    assert re.search(r"^length +rows +(\w+) +token +\1 +token +\1 +token *$", out, re.M)  # one unit for all cells
    assert fits.keys() == {"this model", "with softmax", "in segments"}
    length = int(fits["this model"].replace(",", ""))
    variant = Variant("", LanguageModelConfig(d_model=16, n_layers=1, n_heads=2))
    assert variant.memory(setting(), length, 1) <= parse_bytes("60MiB") < variant.memory(setting(), 2 * length, 1)
    assert not list(tmp_path.rglob("*.ckpt"))
    assert not (tmp_path / "runs").exists()


def test_a_plan_needs_no_gpu_and_no_text(capsys):
    options = ["--model.d_model=16", "--model.n_layers=1", "--model.n_heads=2", "--data.path=/nowhere"]
    options += ["--trainer.accelerator=gpu", "--trainer.devices=4", "--trainer.precision=bf16-mixed"]
    assert main(["plan", *options]) == 0
    out = capsys.readouterr().out
    assert "32,768 tokens" in out  # 1024 · 8 rows on each of four devices
    assert "trainer.max_steps is not set" in out
    assert "the GPU's allocator" in out


def test_automatic_precision_is_planned_for(tiny, monkeypatch):
    found = []
    monkeypatch.setattr("linrope.cli.plan.show_plan", lambda console, setting, *_: found.append(setting.precision))
    for native in (True, False):
        monkeypatch.setattr("linrope.training.precision.has_fast_bfloat16", lambda native=native: native)
        assert main(["plan", *tiny, "--trainer.precision=auto"]) == 0
    assert found == ["bf16-mixed", "32-true"]


def test_a_moving_average_is_planned_for(tiny, monkeypatch):
    found = []
    monkeypatch.setattr("linrope.cli.plan.show_plan", lambda console, setting, *_: found.append(setting.averaged))
    for options in ([], ["--run.ema_decay=0.9"]):
        assert main(["plan", *tiny, *options]) == 0
    assert found == [False, True]
    memory = [Variant("", SMALL).memory(setting(averaged=averaged), 64, 1) for averaged in found]
    assert memory[1] - memory[0] == 4 * LanguageModel(SMALL).n_parameters


def test_a_measured_rate_is_that_of_the_run_s_optimizer(tiny, monkeypatch):
    n_steps = []
    monkeypatch.setattr(MuonWithAdamW, "step", lambda optimizer: n_steps.append(1))
    assert main(["plan", *tiny, "--measure", "--optimizer.name=muon", "--data.document_mask=true"]) == 0
    assert len(n_steps) == 1 + plan.MEASURED_STEPS


def test_a_measured_rate_is_of_real_steps_and_devices_add_up(tiny, capsys, monkeypatch):
    assert main(["plan", *tiny, "--measure"]) == 0
    assert re.search(r"2 steps, 128 tokens: .* at [\d,]+ tokens per second", capsys.readouterr().out)
    monkeypatch.setattr("linrope.cli.plan.measure_rate", lambda *setting: 64.0)
    assert main(["plan", *tiny, "--measure", "--trainer.devices=2", "--trainer.num_nodes=3"]) == 0
    out = capsys.readouterr().out
    assert "measured on one device, and counted 6 times" in out
    assert re.search(r"2 steps, 768 tokens: 2 s at 384 tokens per second", out)  # 64 · 6


def test_a_curriculum_is_planned_stage_by_stage(tiny, capsys, error_of, monkeypatch):
    """8 steps of 2 · 64 tokens hold 1,000, then 92 of 8 · 512."""
    monkeypatch.setattr(plan, "MULTIPLES", (1,))
    stages = "[{tokens: 1000, seq_len: 64, batch_size: 2}, {tokens: 1000, seq_len: 512, batch_size: 8}]"
    args = ["plan", *tiny, "--data.context=64", "--data.batch_size=2", f"--data.curriculum={stages}"]
    assert main([*args, "--trainer.max_steps=100", "--tokens_per_second=1000"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^from step 0 +rows of 64: 128 tokens, ", out, re.M)
    assert re.search(r"^from step 8 +rows of 512: 4,096 tokens, ", out, re.M)
    assert "100 steps, 377,856 tokens: 6 min 18 s" in out
    assert re.search(r"^ +512 +8 ", out, re.M)  # the table is of the largest batches
    assert "trainer.max_steps=5 ends before data.curriculum does" in error_of(*args, "--trainer.max_steps=5")


def test_rows_are_no_longer_than_the_table_of_positions(tiny, capsys, error_of, monkeypatch):
    monkeypatch.setattr(plan, "MULTIPLES", (1, 4))
    monkeypatch.setattr(plan, "LONGEST", 2**10)
    learned = ["--model.positions.name=learned", "--model.positions.length=100"]
    args = ["plan", *tiny, *learned]
    assert main([*args, "--memory=1GiB", "--data.context=64"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^ +(64|256) +\d+ ", out, re.M) == ["64"]
    assert "fits 1GiB: this model: a row of 100 tokens\n" in out
    message = "data.context=128 is longer than the rows of model.positions.length=100"
    for command in ("plan", "fit"):
        assert message in error_of(command, *tiny, *learned, "--data.context=128")
    # with the document mask each document starts at position 0
    assert main([*args, "--data.context=128", "--data.document_mask=true"]) == 0


def test_what_is_compared_follows_from_the_model():
    assert [variant.name for variant in variants(setting())] == ["this model", "with softmax", "in segments"]
    growing = LanguageModelConfig(d_model=16, n_layers=1, n_heads=2, attention="softmax")
    assert [variant.name for variant in variants(setting(model=growing))] == ["this model", "with softmax"]
    in_segments = {variant.name: variant.segment_length for variant in variants(setting(segment_length=32))}
    assert in_segments == {"this model": 32, "with softmax": None, "without segments": None}
    variant = variants(setting())[2]
    assert variant.flops(128, 2) == step_flops(LanguageModel(SMALL), 2, 128, plan.DEFAULT_SEGMENT)


def test_the_longest_that_fits_is_the_last_power_of_two_within_the_memory():
    for memory, longest in ((50_000, 4096), (40_960, 4096), (10_239, 0)):
        assert longest_that_fits(lambda length: 10 * length, memory) == longest
    assert longest_that_fits(lambda length: 1, 2) == plan.LONGEST


def test_durations_are_in_two_units():
    expected = {0.25: "0.25 s", 59: "59 s", 61: "1 min 1 s", 3600 * 2 + 61: "2 h 1 min", 86400 * 3 + 3600: "3 d 1 h"}
    expected |= {59.7: "1 min 0 s", 3599.8: "1 h 0 min", 86399: "1 d 0 h", 3580: "59 min 40 s", 84960: "23 h 36 min"}
    assert {seconds: duration_text(seconds) for seconds in expected} == expected


def test_a_column_has_one_unit():
    assert in_one_unit([1.5 * 2**20, 3 * 2**30], BYTES, 1024) == ("MiB", ["1.5", "3,072"])
    assert in_one_unit([5.53e6, 408e6, 11.2e9], COUNTS, 1000) == ("M", ["5.53", "408", "11,200"])


def test_mistakes_are_named(tiny, error_of):
    for options, message in [
        (["--memory=much"], "'much' is no size: give one such as 4GiB"),
        (["--tokens_per_second=0"], "--tokens_per_second=0.0 must be above 0"),
        (["--tokens_per_second=5", "--measure"], "exclude each other"),
        (["--trainer.precision=64-true"], "trainer.precision='64-true' is unknown to `linrope plan`"),
        (["--segment_length=0"], "segment_length=0 must be a whole number"),
        (["--segment_length=8", "--model.attention=softmax"], "softmax attention without a window"),
    ]:
        assert message in error_of("plan", *tiny, *options)


TASKS = ["mlm-small", "finetune-classification", pytest.param("translation-small", marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("name", TASKS)
def test_other_tasks_are_planned_by_their_first_batch(name, capsys):
    options = ["--model.d_model=16", "--model.n_heads=2", "--trainer.precision=32-true"]
    options += ["--trainer.accumulate_grad_batches=2"]
    assert main(["plan", f"--config={ROOT / 'configs' / name}.yaml", *options]) == 0
    found = dict(re.findall(r"^(parameters|a step|memory|the run) +(.+?) *$", capsys.readouterr().out, re.M))
    assert found.keys() == {"parameters", "a step", "memory", "the run"}
    n_targets, flops = re.match(r"([\d,]+) targets, ([\d.]+) [MG]FLOP$", found["a step"]).groups()
    if name == "finetune-classification":
        assert n_targets == "32"  # two batches of 16
    assert float(flops) > 1
    # an epoch is 209 and 126 batches, so 105 and 63 steps of two
    steps = {"mlm-small": "1,200", "finetune-classification": f"{4 * 105}", "translation-small": f"{4 * 63}"}
    assert found["the run"].startswith(f"{steps[name]} steps: ")


def test_the_first_stage_of_a_curriculum_is_planned_and_the_others_are_named(tiny, capsys):
    """32 rows of 16 for 3 steps, then 2 of 64."""
    stages = "[{tokens: 1536, seq_len: 16, batch_size: 32}, {tokens: 1, seq_len: 64, batch_size: 2}]"
    args = ["plan", "--task=masked_lm", *(option for option in tiny if not option.startswith("--sample"))]
    assert main([*args, f"--data.curriculum={stages}", "--trainer.max_steps=10"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^the run +3 steps: ", out, re.M)
    assert "Of the first stage of data.curriculum. The others are 2 rows of 64 from step 3: for one of them" in out


def test_the_step_of_a_task_is_counted_by_hand():
    """A masked LM of one layer: FLOPs of its products, and memory between that of the weights and ten times that."""
    model = EncoderConfig(d_model=16, n_layers=1, n_heads=2, attention="softmax", dropout=0.0)
    task = MaskedLMModule(model)
    tokens = torch.randint(256, (2, 10))
    targets = torch.full_like(tokens, IGNORE)
    targets[:, 3] = 5
    step = measure_step(task, {"inputs": tokens, "targets": targets}, None)
    of_projections = 20 * (4 * 16 * 16 + 2 * 16 * 64)  # q, k, v, out, and the MLP
    of_head = 2 * (16 * 16 + 16 * 261)
    of_attention = 2 * 2 * 10 * 10 * 2 * 8  # rows, heads, pairs, q k and weights v
    assert step.n_targets == 2
    least = 3 * 2 * (of_projections + of_head)  # forward, and two products backward
    assert least <= step.flops <= least + 7 * of_attention
    weights = 4 * task.model.n_parameters
    assert 4 * weights + WORKSPACE <= step.memory <= 10 * weights + WORKSPACE
    assert all(parameter.grad is None for parameter in task.parameters())
    averaged = measure_step(task, {"inputs": tokens, "targets": targets}, None, averaged=True)
    assert averaged.memory - step.memory == weights
