"""`linrope fit` on two devices trains what it trains on one, prints it once, and resumes to the bit."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from linrope import LanguageModel
from linrope.cli import output
from linrope.cli.main import main
from linrope.errors import InputError
from linrope.losses import IGNORE
from linrope.training import LanguageModelingModule, TextDataModule
from linrope.training.run_folder import RunFolder
from tests.conftest import write_documents
from tests.processes import Run
from tests.training.attached import attached
from tests.training.test_resume import TRAINED, equal, load, losses

TWO = ["--trainer.devices=2", "--trainer.strategy=ddp"]
MODEL = ["--model.d_model=16", "--model.n_layers=1", "--model.n_heads=2"]
MODEL += ["--model.short_conv=3", "--model.forget_gate=true"]
# The learning rate does not depend on the last step, so that a longer run repeats a shorter one.
CONSTANT = ["--optimizer.lr=0.01", "--optimizer.warmup_steps=2", "--optimizer.final_lr_fraction=1"]
PLAIN = ["--model.dropout=0.2", "--trainer.max_steps=6", "--data.context=24"]
# Lightning's own sampler would deal out samples a second time
PLAIN_ON_TWO = [*PLAIN, "--trainer.val_check_interval=6", "--trainer.use_distributed_sampler=true"]
PACKED = ["--data.document_mask=true", "--trainer.precision=64-true", "--trainer.max_steps=6"]
ALONE = [*PLAIN, "--trainer.accumulate_grad_batches=2", "--trainer.max_steps=8", "--trainer.val_check_interval=12"]
CONTIGUOUS = ["--data.contiguous=true", "--data.document_mask=true", "--trainer.accumulate_grad_batches=2"]
CONTIGUOUS_EXACT = [*CONTIGUOUS, "--trainer.precision=64-true", "--trainer.max_steps=8"]
RESUMED = [*CONTIGUOUS, "--model.dropout=0.2", "--segment_length=20", "--trainer.max_steps=20"]
RESUMED += ["--run.checkpoint_every_n_steps=2", "--trainer.val_check_interval=20", "--trainer.limit_val_batches=2"]


def curriculum(batch_size: int) -> str:
    """Rows of 8 tokens, then half as many of 32: with 32 rows in a step three steps of those, then three of these."""
    stages = [(3 * 32 * 8, 8, batch_size), (1, 32, batch_size // 2)]
    return "--data.curriculum=" + json.dumps([dict(zip(("tokens", "seq_len", "batch_size"), one)) for one in stages])


def ask_for_some(self: TextDataModule, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
    """Leaves out all targets of every row whose tokens sum to an odd number, and some of each other row."""
    odd = batch["inputs"].sum(1, keepdim=True) % 2 == 1
    return {**batch, "targets": batch["targets"].masked_fill(odd | (batch["inputs"] % 5 == 0), IGNORE)}


def write_exchanges(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """In runs to come each rank appends to FOLDER/RANK, for every bucket of gradients that it exchanges: the optimizer
    steps before, the micro-batch, the numbers."""

    def on_train_start(self: LanguageModelingModule) -> None:
        def exchange(_, bucket):  # torch refuses all but its own annotations, spelt its own way
            with open(folder / str(self.global_rank), "a") as file:
                print(self.trainer.global_step, self.trainer.fit_loop.batch_idx, bucket.buffer().numel(), file=file)
            done = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
            return done.then(lambda future: future.value()[0])

        before(self)
        self.trainer.strategy.model.register_comm_hook(None, exchange)

    before = LanguageModelingModule.on_train_start
    patch.setattr(LanguageModelingModule, "on_train_start", on_train_start)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> list[str]:
    """Options of all runs: a small model on 86 documents of 1 to 199 bytes."""
    folder = tmp_path_factory.mktemp("ddp")
    texts = write_documents(folder / "texts", (1 + 37 * number % 199 for number in range(86)))
    options = [f"--data.path={texts}", "--data.context=32", "--data.batch_size=2", f"--run.folder={folder}"]
    options += ["--data.fractions=[0.7, 0.2, 0.1]", "--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1"]
    return ["fit", *MODEL, *CONSTANT, *options]


def texts_of(base: list[str]) -> Path:
    return Path(next(option.partition("=")[2] for option in base if option.startswith("--data.path=")))


def folder_of(base: list[str], name: str) -> Path:
    """Where the first run of that name leaves its logs and checkpoints."""
    return texts_of(base).parent / name / "version_0"


def last(run_folder: Path) -> Path:
    return run_folder / "checkpoints" / "last.ckpt"


def printed_by(run: Run) -> tuple[str, str]:
    code, out, err = run.wait()
    assert code == 0, out + err
    return out, err


@pytest.fixture(scope="module")
def alone(base) -> Path:
    """The folder of the run of one process that repeats the plain one of two, and then takes two steps more."""
    assert main([*base, *ALONE, "--run.name=alone"]) == 0
    return folder_of(base, "alone")


@pytest.fixture(scope="module")
def two(base, alone, tmp_path_factory) -> dict[str, tuple[str, str]]:
    """What two runs of two processes print that are not stopped: stdout and stderr by name. The ranks of "packed" write
    what they exchange into the folder of all runs. Processes that are forked after a run of this one begin sooner."""

    def start(name: str, options: list[str]) -> Run:
        return Run([*base, *TWO, *options, f"--run.name={name}"], tmp_path_factory.mktemp(name), ranks=2)

    runs = {"plain": start("plain", PLAIN_ON_TWO)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextDataModule, "on_after_batch_transfer", ask_for_some)
        write_exchanges(patch, texts_of(base).parent)
        packed = [*PACKED, curriculum(8), "--segment_length=11", "--trainer.accumulate_grad_batches=2"]
        runs["packed"] = start("packed", packed)
    return {name: printed_by(run) for name, run in runs.items()}


@pytest.fixture(scope="module")
def contiguous(two, base, tmp_path_factory) -> tuple[str, str]:
    """What a third one prints, whose ranks carry states from batch to batch."""
    options = [*base, *TWO, *CONTIGUOUS_EXACT, "--run.name=contiguous"]
    return printed_by(Run(options, tmp_path_factory.mktemp("contiguous"), ranks=2))


def test_two_processes_train_to_the_bit_what_one_does_with_two_micro_batches(two, base, alone):
    """With dropout: a sum of two halves has one value, whoever adds them, and draws go by the number of the batch."""
    ours = folder_of(base, "plain")
    assert all(equal(load(ours)[key], load(alone, "best")[key]) for key in TRAINED)  # of the validation after step 6
    for name in ("train_loss", "train_bpb", "grad_norm", "lr"):
        assert len(losses(ours, name)) == 6
        assert losses(ours, name).items() <= losses(alone, name).items()
    assert float(losses(ours)[6]) < float(losses(ours)[1]) - 0.1  # it has learned

    # So a run of two devices may go on with one, where that has as many batches in a step.
    assert main([*base, *ALONE, f"--ckpt_path={last(ours)}", "--run.name=moved"]) == 0
    assert all(equal(load(folder_of(base, "moved"))[key], load(alone)[key]) for key in TRAINED)


@pytest.mark.exhaustive
def test_lightning_starts_the_second_process_where_no_launcher_does(two, base, tmp_path):
    out, _ = printed_by(Run([*base, *TWO, *PLAIN_ON_TWO, "--run.name=launched"], tmp_path))
    assert out.count("step 6/6 ") == 1
    ours, launched = folder_of(base, "plain"), folder_of(base, "launched")
    assert losses(launched) == losses(ours)
    assert all(equal(load(launched)[key], load(ours)[key]) for key in TRAINED)


def test_validation_is_over_all_windows_of_both_ranks(two, base, alone):
    """One rank has more batches than the other."""
    options = {"context": 24, "stage": "validate", "fractions": [0.7, 0.2, 0.1]}
    dealt = [attached(texts_of(base), rank=rank, world_size=2, **options) for rank in range(2)]
    assert len(dealt[0].val_dataloader()) == len(dealt[1].val_dataloader()) + 1
    ours, whole = (losses(folder, "val_loss") for folder in (folder_of(base, "plain"), alone))
    assert list(ours) == list(whole) == [6]
    assert float(ours[6]) == pytest.approx(float(whole[6]), rel=1e-6)  # float32 sums over other batches


@pytest.mark.parametrize(
    ("name", "printed"), [("packed", "two"), pytest.param(*["contiguous"] * 2, marks=pytest.mark.exhaustive)]
)
def test_a_step_is_that_of_all_its_rows_at_once(base, request, monkeypatch, name, printed):
    """The loss is the mean over the targets of the step, however they lie among devices and micro-batches: some
    rows have none. In float64, so that nothing but a wrong weight of a batch shows."""
    request.getfixturevalue(printed)
    whole = {"packed": [*PACKED, curriculum(32)], "contiguous": [*CONTIGUOUS_EXACT, "--data.batch_size=4"]}
    if name == "packed":
        monkeypatch.setattr(TextDataModule, "on_after_batch_transfer", ask_for_some)
    assert main([*base, *whole[name], f"--run.name={name}-at-once"]) == 0
    ours, at_once = folder_of(base, name), folder_of(base, f"{name}-at-once")
    for column in ("train_loss", "train_bpb", "grad_norm"):
        found, expected = (list(map(float, losses(run, column).values())) for run in (ours, at_once))
        assert len(found) > 5
        assert found == pytest.approx(expected, rel=1e-6)  # logged as float32
    for key, weights in load(at_once)["state_dict"].items():
        torch.testing.assert_close(load(ours)["state_dict"][key], weights, rtol=1e-9, atol=1e-9)


def test_gradients_are_exchanged_once_a_step_whatever_the_segments_and_micro_batches(two, base):
    n_parameters = LanguageModel.from_pretrained(last(folder_of(base, "packed"))).n_parameters
    for rank in range(2):
        numbers: dict[int, int] = {}
        for line in (texts_of(base).parent / str(rank)).read_text().splitlines():
            step, micro_batch, n = map(int, line.split())
            assert micro_batch % 2 == 1  # the last of its step
            numbers[step] = numbers.get(step, 0) + n
        assert numbers == dict.fromkeys(range(6), n_parameters)


@pytest.fixture(scope="module")
def whole(two, base, tmp_path_factory) -> tuple[str, str]:
    """What the run prints that `stopped` repeats with its ends and beginnings."""
    return printed_by(Run([*base, *TWO, *RESUMED, "--run.name=whole"], tmp_path_factory.mktemp("whole"), ranks=2))


@pytest.fixture(scope="module")
def stopped(two, base, tmp_path_factory) -> list[tuple[str, str]]:
    """What the processes of a run print that is killed, resumed, asked to stop, and resumed to its end."""
    printed, resume = [], []
    for stop in (signal.SIGKILL, signal.SIGTERM, None):
        run = Run([*base, *TWO, *RESUMED, "--run.name=stopped", *resume], tmp_path_factory.mktemp("run"), ranks=2)
        resume = ["--ckpt_path=last"]
        if stop is not None:
            run.wait_for_steps(3)  # at least one of these steps leaves a checkpoint
            run.send(stop)
        code, out, err = run.wait()
        printed.append((out, err))
        assert code == {signal.SIGKILL: -9, signal.SIGTERM: 143, None: 0}[stop], err
    return printed


@pytest.mark.exhaustive
def test_two_processes_stopped_and_resumed_end_with_the_weights_of_two_that_were_not(whole, stopped, base):
    """Contiguous batches, so with the state that each rank carries; dropout, micro-batches, segments, document mask."""
    expected, ended = (load(folder_of(base, name)) for name in ("whole", "stopped"))
    assert all(equal(expected[key], ended[key]) for key in TRAINED)
    carried = expected["linrope"]["carried"]
    assert equal(carried, ended["linrope"]["carried"])
    assert len(carried) == 2
    assert not equal(carried[0], carried[1])
    logged = losses(folder_of(base, "stopped"))
    assert logged.items() <= losses(folder_of(base, "whole")).items()
    assert len(logged) >= 19  # SIGKILL may have come between a checkpoint and its row
    assert max(logged) == 20


@pytest.mark.exhaustive
def test_only_the_first_rank_writes_and_prints(two, contiguous, whole, stopped, base):
    for n_steps, (out, err) in ((6, two["plain"]), (6, two["packed"]), (8, contiguous), (20, whole)):
        assert "linrope:" not in err
        assert out.count(f"step {n_steps}/{n_steps} ") == out.count("\ncheckpoint  ") == 1
    (_, killed), (out, asked), (rest, ended) = stopped
    assert "Traceback" not in asked + ended
    assert all(line.startswith("linrope: rank 1: ") for line in re.findall(r"^linrope:.*$", killed, re.M))
    assert asked.count("--ckpt_path=last is") == ended.count("--ckpt_path=last is") == 1
    assert asked.count("finishing this step") == asked.count("stopped after step") == 1
    assert "rank 1" not in asked + ended
    steps = re.findall(r"^step (\d+)/20 ", out + rest, re.M)
    assert len(steps) == len(set(steps))
    runs = folder_of(base, "stopped").parent
    # neither best.ckpt, which the killed run was too short for, nor what it may have been writing
    files = {str(file.relative_to(runs)) for file in runs.rglob("*") if file.suffix in (".yaml", ".csv", ".ckpt")}
    own = ("config.yaml", "metrics.csv", "checkpoints/last.ckpt")
    assert files - {"version_0/checkpoints/best.ckpt"} == {f"version_0/{name}" for name in own}


@pytest.mark.exhaustive
def test_a_run_with_carried_states_goes_on_with_as_many_devices_only(contiguous, base, error_of):
    checkpoint = last(folder_of(base, "contiguous"))
    before = checkpoint.read_bytes()
    longer = [*base, *CONTIGUOUS_EXACT, "--trainer.max_steps=9", f"--ckpt_path={checkpoint}", "--run.name=fewer"]
    err = error_of(*longer)
    assert "data.contiguous rows × devices: 4 in the checkpoint, 2 here" in err
    assert "trainer.accumulate_grad_batches × devices: 4 in the checkpoint, 2 here" in err
    assert "Traceback" not in err
    assert checkpoint.read_bytes() == before
    assert not list(folder_of(base, "fewer").rglob("*.ckpt"))
    # the same rows and batches in a step, but not on the same device
    err = error_of(*longer, "--data.batch_size=4", "--trainer.accumulate_grad_batches=4")
    assert "data.batch_size: 2 in the checkpoint, 4 here" in err


@pytest.mark.exhaustive
def test_what_the_first_rank_refuses_stops_all_and_is_said_once(two, base, tmp_path):
    folder = RunFolder(folder_of(base, "plain"))
    assert folder.lock()
    before = (folder.path / "config.yaml").read_text()
    run = Run([*base, *TWO, *PLAIN, "--run.name=plain", "--ckpt_path=last", "--trainer.max_steps=9"], tmp_path, ranks=2)
    code, _, err = run.wait()
    folder.release()
    assert code == 2
    said = r"linrope: error: --ckpt_path='\S+last\.ckpt': its run is being trained by another process: [^\n]+\n"
    assert re.fullmatch(said, err.partition("\n")[2])
    assert (folder.path / "config.yaml").read_text() == before


@pytest.mark.parametrize(("stage", "split"), [("fit", "val"), ("validate", "val"), ("test", "test")])
def test_a_split_with_fewer_samples_than_devices_is_refused(base, stage, split):
    texts, options = texts_of(base), {"context": 300, "fractions": [0.7, 0.2, 0.1]}
    n = len(attached(texts, stage=stage, **options).evaluation_windows(split))
    attached(texts, stage=stage, world_size=n, **options)
    said = rf"the {split} split holds {n} × data\.context=300 tokens, but {n + 1} devices"
    with pytest.raises(InputError, match=said):
        attached(texts, stage=stage, world_size=n + 1, **options)


def test_rank_0_prints_what_all_ranks_meet_and_others_print_their_own(monkeypatch, capsys):
    def own_error(args: list[str]) -> None:
        raise RuntimeError("of this rank")

    monkeypatch.setattr(output, "HEAD_START", 0.0)
    monkeypatch.setattr("linrope.cli.test.run", own_error)
    monkeypatch.setattr(rank_zero_only, "rank", 3)
    assert main(["fit", "--model.d_modle=3"]) == 2
    assert capsys.readouterr().err == ""
    assert main(["test"]) == 1
    assert re.match(r"linrope: rank 3: Traceback .*RuntimeError: of this rank\n", capsys.readouterr().err, re.S)
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    assert main(["fit", "--model.d_modle=3"]) == 2
    assert capsys.readouterr().err.startswith("linrope: error: unknown option 'model.d_modle'.")
    with pytest.raises(RuntimeError, match="of this rank"):
        main(["test"])
