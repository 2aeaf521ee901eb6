"""A run that is stopped, however it is stopped, and resumed is bit for bit the run that was not."""

import csv
import errno
import os
import re
import resource
import shutil
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer

from linrope.cli.main import main
from linrope.errors import InputError
from linrope.models.language_model import LanguageModel, LanguageModelConfig
from linrope.models.saving import open_checkpoint
from linrope.training.callbacks.saving import GracefulStop
from linrope.training.checkpoint import WholeCheckpointIO, find_last, start_from
from linrope.training.metrics_file import MetricsFile
from linrope.training.tasks.language_modeling import LanguageModelingModule
from linrope.utils.files import whole_file
from tests.conftest import tiny_options, write_documents, write_text_file
from tests.processes import Run

SMALL = LanguageModelConfig(d_model=16, n_layers=1, n_heads=2)
TRAINED = ("state_dict", "optimizer_states", "lr_schedulers")


def load(run_folder: Path, name: str = "last") -> dict:
    return torch.load(run_folder / "checkpoints" / f"{name}.ckpt", weights_only=True)


def equal(a: object, b: object) -> bool:
    """Whether two trees of tensors and plain values are the same, bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def losses(run_folder: Path, name: str = "train_loss") -> dict[int, str]:
    """A loss by the logged step, as metrics.csv writes it."""
    with open(run_folder / "metrics.csv") as file:
        return {int(row["step"]): row[name] for row in csv.DictReader(file) if row.get(name)}


def logged_steps(run_folder: Path) -> list[tuple[str, bool]]:
    """The step of each row of metrics.csv, and whether it is of a validation."""
    with open(run_folder / "metrics.csv") as file:
        return [(row["step"], bool(row["val_loss"])) for row in csv.DictReader(file)]


def version(run_folder: Path, number: int) -> Path:
    return run_folder.with_name(f"version_{number}")


def interrupt(patch: pytest.MonkeyPatch, when: Callable[[Trainer], bool], signum: int) -> None:
    """Sends this process a signal in the backward pass of the batch for which `when` holds."""
    backward = LanguageModelingModule.on_after_backward

    def interrupted(self):
        if when(self.trainer):
            os.kill(os.getpid(), signum)
        backward(self)

    patch.setattr(LanguageModelingModule, "on_after_backward", interrupted)


def stop_early(patch: pytest.MonkeyPatch, last_batch: int) -> None:
    """Ends training after that batch as max_time does."""

    def stopped(self, outputs, batch, batch_idx):
        self.trainer.should_stop = batch_idx == last_batch

    patch.setattr(LanguageModelingModule, "on_train_batch_end", stopped)


def exact_options(options: list[str]) -> list[str]:
    """Options of a run in which any inexactness shows."""
    return [*options, "--model.dropout=0.2", "--trainer.accumulate_grad_batches=2", "--trainer.log_every_n_steps=1"]


@pytest.fixture
def exact(tiny) -> list[str]:
    return exact_options(tiny)


@pytest.mark.exhaustive
def test_a_process_stopped_again_and_again_trains_the_very_weights_of_one_that_was_not(exact, run_folder, tmp_path):
    n_steps = 50
    options = [f"--trainer.max_steps={n_steps}", "--run.checkpoint_every_n_steps=3", "--trainer.val_check_interval=20"]
    assert main(["fit", *exact, *options, "--run.name=whole"]) == 0
    whole = run_folder.parents[1] / "whole" / "version_0"

    resume: list[str] = []
    stops = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    for stop in stops:
        run = Run(["fit", *exact, *options, *resume], tmp_path)
        run.wait_for_steps(4)  # at least one of these steps leaves a checkpoint
        run.send(stop)
        code, _, err = run.wait()
        assert code == (-stop if stop == signal.SIGKILL else 128 + stop), err
        resume = ["--ckpt_path=last"]
    assert main(["fit", *exact, *options, *resume]) == 0

    assert list(run_folder.parent.iterdir()) == [run_folder]
    assert all(equal(load(whole)[key], load(run_folder)[key]) for key in TRAINED)
    for name in ("train_loss", "val_loss"):
        logged, steps = losses(run_folder, name), set(losses(whole, name))
        assert logged.items() <= losses(whole, name).items()
        assert len(steps - set(logged)) <= 1  # of the step that a checkpoint was written in when SIGKILL came
    assert len(logged_steps(run_folder)) == len(set(logged_steps(run_folder)))


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_whole_process_group_finishes_the_step(tiny, run_folder, tmp_path, stop):
    """As a terminal's Ctrl-C and a scheduler send them; the loader's workers must not end before the run does."""
    endless = ["--trainer.max_steps=100000", "--data.num_workers=2", "--trainer.log_every_n_steps=1"]
    endless += ["--trainer.limit_val_batches=0"]  # a signal in a validation finishes that
    run = Run(["fit", *tiny, *endless], tmp_path)
    run.wait_for_steps(3)
    run.send(stop, to_group=True)
    code, _, err = run.wait()
    assert code == 128 + stop, err
    assert err.count("finishing this step") == 1
    assert load(run_folder)["global_step"] >= 3


@pytest.mark.exhaustive
def test_a_checkpoint_of_the_middle_of_a_step_goes_on_from_its_beginning(exact, run_folder, monkeypatch):
    exact = [*exact, "--trainer.max_steps=7", "--trainer.val_check_interval=3"]
    assert main(["fit", *exact]) == 0
    with monkeypatch.context() as patch:
        stop_early(patch, 8)  # 9 batches: a validation, and half a step
        assert main(["fit", *exact]) == 0
    stopped = version(run_folder, 1)
    shutil.copytree(stopped, version(run_folder, 2))
    for resumed, name in ((stopped, "best"), (version(run_folder, 2), "last")):
        assert load(resumed, name)["global_step"] == 4
        assert main(["fit", *exact, f"--ckpt_path={resumed}/checkpoints/{name}.ckpt"]) == 0
        assert all(equal(load(run_folder)[key], load(resumed)[key]) for key in TRAINED)
        assert losses(resumed) == losses(run_folder)
    assert not version(run_folder, 3).exists()


def test_a_validation_that_was_due_is_finished_before_the_run_stops(exact, run_folder, monkeypatch):
    exact = [*exact, "--trainer.max_steps=4", "--trainer.val_check_interval=4"]
    with monkeypatch.context() as patch:
        interrupt(patch, lambda trainer: trainer.fit_loop.total_batch_idx == 3, signal.SIGTERM)  # ends the second step
        assert main(["fit", *exact]) == 128 + signal.SIGTERM
    assert (sorted(losses(run_folder)), sorted(losses(run_folder, "val_loss"))) == ([1, 2], [2])
    (best,) = (state for name, state in load(run_folder)["callbacks"].items() if name.startswith("BestCheckpoint"))
    assert best["best_model_score"] is not None
    assert main(["fit", *exact, "--ckpt_path=last"]) == 0
    assert (sorted(losses(run_folder)), sorted(losses(run_folder, "val_loss"))) == ([1, 2, 3, 4], [2, 4])


def test_a_checkpoint_with_an_address_goes_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    io, file = WholeCheckpointIO(), "memory://bucket/folder/a.ckpt"
    io.save_checkpoint({"step": 3}, file)
    assert io.load_checkpoint(file, weights_only=True) == {"step": 3}
    assert not list(tmp_path.iterdir())
    io.remove_checkpoint(file)
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(file)


def test_the_best_checkpoint_of_a_run_whose_folder_was_moved_keeps_its_score(tiny, run_folder, tmp_path):
    assert main(["fit", *tiny]) == 0
    contents, last = load(run_folder), run_folder / "checkpoints" / "last.ckpt"
    (name,) = (name for name in contents["callbacks"] if name.startswith("BestCheckpoint"))
    state = contents["callbacks"][name]
    state["best_model_score"] = torch.tensor(1.0)  # which no later step reaches
    state["best_k_models"] = {path: torch.tensor(1.0) for path in state["best_k_models"]}
    torch.save(contents, last)
    shutil.move(run_folder.parents[1], tmp_path / "moved")
    run_folder = tmp_path / "moved" / "tiny" / "version_0"
    folder = [f"--run.folder={run_folder.parents[1]}"]
    assert main(["fit", *tiny, *folder, "--ckpt_path=last", "--trainer.max_steps=4"]) == 0
    resumed = load(run_folder)["callbacks"]
    assert resumed[name]["best_model_score"] == 1.0
    assert resumed[name]["best_model_path"] == str(run_folder / "checkpoints" / "best.ckpt")
    assert load(run_folder, "best")["global_step"] == 2


def test_draws_follow_from_the_seed_and_the_number_of_the_batch():
    module = LanguageModelingModule(SMALL, seed=3)

    def draw(batch_idx: int, global_step: int, accumulate: int = 1, world_size: int = 1, rank: int = 0) -> float:
        module.trainer = SimpleNamespace(
            global_step=global_step,
            accumulate_grad_batches=accumulate,
            world_size=world_size,
            global_rank=rank,
            strategy=None,
        )
        module.on_train_batch_start({}, batch_idx)
        return torch.rand(()).item()

    alone = [draw(i, i // 2, accumulate=2) for i in range(8)]
    assert len(set(alone)) == 8
    assert [draw(i, i // 2, accumulate=2) for i in range(8)] == alone
    assert [draw(i // 2, i // 2, world_size=2, rank=i % 2) for i in range(8)] == alone  # as the data are dealt
    module.seed = 4
    assert draw(0, 0, accumulate=2) not in alone


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[list[str], Path]:
    """A command line that goes on after a run of two steps, and the folder of that run. Tests only read it."""
    folder = tmp_path_factory.mktemp("finished")
    fit = ["fit", *exact_options(tiny_options(write_text_file(folder), folder))]
    assert main(fit) == 0
    return [*fit, "--trainer.max_steps=3"], folder / "runs" / "tiny" / "version_0"


def test_text_that_was_edited_at_equal_size_is_noticed(tiny, text_file, run_folder, tmp_path, monkeypatch, capsys):
    assert main(["fit", *tiny]) == 0
    last = run_folder / "checkpoints" / "last.ckpt"
    more = [*tiny, "--trainer.max_steps=3"]
    text, times = text_file.read_text(), text_file.stat()
    text_file.write_text(text.replace("fox", "cat", 1))
    os.utime(text_file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert main(["fit", *more, f"--ckpt_path={last}"]) == 2
    assert re.search(r"data\.text_hash: '\w+' in the checkpoint, '\w+' here", capsys.readouterr().err)


@pytest.mark.exhaustive
def test_a_text_too_large_to_hash_whole_warns_of_another_time(tiny, text_file, run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("linrope.data.corpus.sequences.HASHED_BLOCK", 64)
    monkeypatch.setattr("linrope.data.corpus.sequences.HASHED_BLOCKS", 10)
    resume = ["--trainer.max_steps=3", f"--ckpt_path={tmp_path / 'copy.ckpt'}"]
    os.utime(text_file, (0, 0))
    assert main(["fit", *tiny]) == 0
    shutil.copy(run_folder / "checkpoints" / "last.ckpt", tmp_path / "copy.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["fit", *tiny, *resume]) == 0
    os.utime(text_file, (0, 86400))
    with pytest.warns(match=r"of 1970-01-02 00:00:00.000\+00:00, and of 1970-01-01 .*If any file was edited, start a"):
        assert main(["fit", *tiny, *resume]) == 0
    data = bytearray(text_file.read_bytes())
    data[30] ^= 1  # in the first block
    text_file.write_bytes(data)
    assert main(["fit", *tiny, *resume]) == 2


def test_what_differs_from_the_run_to_resume_is_said_and_stops_it(finished, tmp_path, error_of):
    fit, run_folder = finished
    text = tmp_path / "longer.txt"
    text.write_text((run_folder.parents[2] / "corpus.txt").read_text() + "one more line\n")
    for changed, said in {
        "--data.seed=7": r"data\.seed: 0 in the checkpoint, 7 here",
        "--data.batch_size=4": r"data\.batch_size: 2 in the checkpoint, 4 here",
        "--data.context=16": r"data\.context: 32 in the checkpoint, 16 here",
        "--data.fractions=[0.8,0.1,0.1]": r"data\.fractions: \[0\.9, 0\.05, 0\.05\] in the checkpoint, \[0\.8, 0\.1, 0",
        "--trainer.accumulate_grad_batches=4": "accumulate_grad_batches × devices: 2 in the checkpoint, 4 here",
        "--seed_everything=5": "seed_everything: 1 in the checkpoint, 5 here",
        f"--data.path={text}": r"data\.train_tokens: \d+ in the checkpoint, \d+ here",
    }.items():
        err = error_of(*fit, "--ckpt_path=last", changed)
        assert re.search(said, err)
        assert f"pass --config {run_folder / 'config.yaml'}, or make these equal" in err
        assert "Traceback" not in err
    assert not list(run_folder.parent.glob("version_[1-9]/checkpoints/*"))


def test_a_damaged_checkpoint_is_one_clear_message(finished, tmp_path, error_of):
    fit, run_folder = finished
    good = (run_folder / "checkpoints" / "last.ckpt").read_bytes()
    weights = load(run_folder)["state_dict"]["model.embedding.weight"].numpy().tobytes()
    flipped = good.replace(weights, bytes([weights[0] ^ 1]) + weights[1:], 1)
    assert flipped != good
    (tmp_path / "last.ckpt").touch()
    for content in (flipped, *(good[:length] for length in (0, 1, 100, len(good) // 2, len(good) - 1))):
        (tmp_path / "damaged.ckpt").write_bytes(content)
        assert re.fullmatch(
            r"linrope: error: checkpoint '.*damaged\.ckpt' is damaged or no checkpoint: it cannot be read safely\. "
            r"Give another, perhaps one of those beside it: last\.ckpt\.\n",
            error_of(*fit, f"--ckpt_path={tmp_path / 'damaged.ckpt'}"),
        )


def test_weights_alone_cannot_be_resumed(finished, tmp_path, error_of):
    fit, run_folder = finished
    weights = {key: value for key, value in load(run_folder).items() if key in ("state_dict", "linrope")}
    torch.save(weights, tmp_path / "weights.ckpt")
    LanguageModel(SMALL).save_pretrained(tmp_path / "saved")
    for name, said in {
        "weights.ckpt": "cannot be resumed from: it has no global_step, loops, lr_schedulers, optimizer_states",
        "saved": "saved' holds weights, but no training state to resume: name a .ckpt",
    }.items():
        assert said in error_of(*fit, f"--ckpt_path={tmp_path / name}")


def test_a_new_run_starts_from_the_weights_of_a_model_with_a_shorter_window(tiny, tmp_path, run_folder, capsys):
    source = LanguageModel(replace(SMALL, attention="softmax", window=8))
    source.save_pretrained(tmp_path / "saved")
    longer = [*tiny, "--model.attention=softmax", "--model.window=16", "--optimizer.lr=1e-9", "--trainer.max_steps=1"]
    assert main(["fit", *longer, f"--run.start_from={tmp_path / 'saved'}"]) == 0
    told = "".join(capsys.readouterr().out.split())  # lines are folded anywhere
    assert f"weightsof{tmp_path / 'saved'},model.window:8inthecheckpoint,16here" in told
    shutil.rmtree(tmp_path / "saved")
    last = run_folder / "checkpoints" / "last.ckpt"
    resume = [f"--config={run_folder / 'config.yaml'}", "--trainer.max_steps=2", f"--ckpt_path={last}"]
    assert main(["fit", *resume]) == 0  # the folder is not looked for again
    assert main(["fit", *longer, f"--run.start_from={last}"]) == 0
    for number, step in enumerate((2, 1)):
        checkpoint = load(version(run_folder, number))
        assert checkpoint["global_step"] == step
        assert checkpoint["linrope"]["config"]["window"] == 16
        for name, weight in source.state_dict().items():  # Adam moves a weight by about the learning rate at most
            assert torch.allclose(checkpoint["state_dict"][f"model.{name}"], weight, rtol=0, atol=1e-7), name


def model_of(**options: object) -> LanguageModel:
    return LanguageModel(LanguageModelConfig.from_dict({"d_model": 16, "n_layers": 1, "n_heads": 2, **options}))


def start_from_saved(source: LanguageModel, model: LanguageModel, folder: Path) -> list[str]:
    source.save_pretrained(folder / "saved")
    return start_from(model, str(folder / "saved"), [0.9, 0.1, 0.0])


GATED = {"forget_gate": True, "gate_normalizer": [1.0, 64.0]}


SCALED = {"rope": {"base": 500_000.0, "scaling": {"rule": "linear", "factor": 4.0}}}
OF_ROPE = [
    "rope.base: 10000.0 in the checkpoint, 500000.0 here",
    "rope.scaling.factor: None in the checkpoint, 4.0 here",
    "rope.scaling.rule: None in the checkpoint, 'linear' here",
]


@pytest.mark.parametrize(
    ("theirs", "ours", "told"),
    [
        ({"forget_gate": True}, GATED, ["gate_normalizer: 1.0 in the checkpoint, [1.0, 64.0] here"]),
        ({**GATED, "gate_normalizer": 4.0}, GATED, ["gate_normalizer: 4.0 in the checkpoint, [1.0, 64.0] here"]),
        ({"rope": {}}, SCALED, OF_ROPE),
    ],
    ids=["no normalizer", "another normalizer", "slower frequencies"],
)
def test_what_no_weight_depends_on_may_differ_in_a_new_run(theirs, ours, told, tmp_path):
    source, model = model_of(**theirs), model_of(**ours)
    assert start_from_saved(source, model, tmp_path) == [f"model.{line}" for line in told]
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in source.state_dict().items())
    if ours == GATED:
        assert model.blocks[0].attention.forget.normalizer == (1.0, 64.0)


def test_weights_that_a_run_cannot_start_from_are_refused(tiny, tmp_path, error_of):
    start = f"--run.start_from={tmp_path / 'saved'}"
    said = r"error: run\.start_from='.*/saved': checkpoint .* does not exist\. Name a \.ckpt file or"
    assert re.search(said, error_of("fit", *tiny, start))
    source = LanguageModel(SMALL)
    source.tokenizer = {"kind": "bytes"}
    source.save_pretrained(tmp_path / "saved")
    torch.arange(4000, dtype=torch.int16).remainder(256).numpy().tofile(tmp_path / "tokens.bin")
    err = error_of("fit", *tiny, start, f"--data.path={tmp_path / 'tokens.bin'}")
    assert "was trained with the tokenizer bytes" in err
    assert not list(tmp_path.rglob("*.ckpt"))


TRAINED_THETA = {"rope": {"trainable": True}}


@pytest.mark.parametrize(
    ("theirs", "ours", "told"),
    [
        ({"d_model": 32}, {}, "model.d_model: 32 in the checkpoint, 16 here"),
        ({"n_heads": 4}, {}, "model.n_heads: 4 in the checkpoint, 2 here"),  # the same shapes
        ({"tie_embeddings": False}, {}, "model.tie_embeddings: False in the checkpoint, True here"),  # two into one
        (TRAINED_THETA, {}, "model.rope.trainable: True in the checkpoint, False here"),
        (TRAINED_THETA, {"base": 500.0}, "model.rope.base: 10000.0 in the checkpoint, 500.0 here"),
        (TRAINED_THETA, {"scaling": {"rule": "linear", "factor": 4.0}}, "scaling.factor: None in the checkpoint, 4.0"),
    ],
)
def test_a_model_whose_weights_mean_something_else_is_no_start(theirs, ours, told, tmp_path):
    source, model = model_of(**theirs), model_of(**({"rope": {"trainable": True, **ours}} if ours else {}))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(InputError, match=r"differs in more than model\.window, model\.dropout") as raised:
        start_from_saved(source, model, tmp_path)
    assert told in str(raised.value)
    assert equal(dict(model.state_dict()), before)


def test_text_that_a_checkpoint_may_have_learned_is_not_held_out_in_silence(tiny, run_folder, capsys):
    split = "--data.fractions=[0.5, 0.25, 0.25]"
    assert main(["fit", *tiny, "--trainer.max_steps=1", split]) == 0
    last = run_folder / "checkpoints" / "last.ckpt"
    told = "trained with data.fractions=[0.5, 0.25, 0.25], and here they are [0.9, 0.05, 0.05]"
    for command in (
        ["fit", *tiny, "--trainer.max_steps=1", f"--run.start_from={last}"],
        ["validate", *tiny, f"--ckpt_path={last}"],
    ):
        with pytest.warns(UserWarning, match=re.escape(told)):
            assert main([*command, "--data.fractions=[0.9, 0.05, 0.05]"]) == 0
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*data.fractions")
            assert main([*command, split]) == 0


@pytest.mark.exhaustive
def test_a_text_that_has_grown_is_not_cut_elsewhere_in_silence(tiny, run_folder, tmp_path):
    texts = write_documents(tmp_path / "texts", [200] * 8)
    options = [*tiny, f"--data.path={texts}", "--data.fractions=[0.5, 0.25, 0.25]", "--trainer.max_steps=1"]
    assert main(["fit", *options]) == 0
    last = run_folder / "checkpoints" / "last.ckpt"
    commands = ["fit", *options, f"--run.start_from={last}"], ["validate", *options, f"--ckpt_path={last}"]
    told = "the training split is not that of the checkpoint's run, and that run is cut by position"
    for command in commands:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="the training split is not that")
            assert main(command) == 0
    (texts / "z.txt").write_text("more text\n" * 20)
    for command in commands:
        with pytest.warns(UserWarning, match=told):
            assert main(command) == 0
    apart = ["--data.split=document", "--run.name=apart"]  # a file's split does not depend on the others
    assert main(["fit", *options, *apart]) == 0
    (texts / "zz.txt").write_text("more text\n" * 20)
    last = run_folder.parents[1] / "apart" / "version_0" / "checkpoints" / "last.ckpt"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the training split is not that")
        assert main(["validate", *options, *apart, f"--ckpt_path={last}"]) == 0


def test_an_empty_path_is_not_the_working_folder(tiny, error_of):
    assert "data.path is empty: give a path" in error_of("fit", *tiny, "--data.path=")
    assert "--path is empty: give a path" in error_of("prepare", "--path=", "--output=out")
    assert "data.path is empty" in error_of("fit", "--task=classification", "--data.path=")
    assert "data.path is empty" in error_of("fit", "--task=translation", "--data.path=")


def test_a_run_folder_that_could_not_be_written_is_refused(exact, tmp_path, error_of):
    (tmp_path / "file").touch()
    err = error_of("fit", *exact, f"--run.folder={tmp_path / 'file' / 'runs'}")
    assert "run.folder='" in err
    assert "cannot write there (Not a directory). Give another folder" in err


def test_last_is_the_newest_run_that_has_one(tmp_path):
    for number, name in ((2, "last.ckpt"), (10, "last.ckpt"), (11, "last.ckpt.partial"), (12, "best.ckpt")):
        (tmp_path / f"version_{number}" / "checkpoints").mkdir(parents=True)
        (tmp_path / f"version_{number}" / "checkpoints" / name).touch()
    assert find_last(tmp_path) == tmp_path / "version_10" / "checkpoints" / "last.ckpt"


def test_last_serves_all_commands_and_without_one_its_folder_is_named(finished, tiny, run_folder, error_of, capsys):
    for command in ("fit", "validate", "test"):
        err = error_of(command, *tiny, "--ckpt_path=last")
        assert err.startswith(f"linrope: error: --ckpt_path=last: no run in '{run_folder.parent}' has a last.ckpt.")
    fit, newest = finished
    assert main(["validate", *fit[1:], "--ckpt_path=last"]) == 0
    assert f"--ckpt_path=last is {newest / 'checkpoints' / 'last.ckpt'}\n" in capsys.readouterr().err


def test_a_full_disk_keeps_the_last_good_checkpoint(exact, run_folder, capsys, monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    start = LanguageModelingModule.on_train_batch_start

    def disk_fills_up(self, batch, batch_idx):
        if self.trainer.global_step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        start(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModelingModule, "on_train_batch_start", disk_fills_up)
    exact = [*exact, "--trainer.max_steps=9", "--trainer.val_check_interval=4", "--run.checkpoint_every_n_steps=2"]
    try:
        assert main(["fit", *exact]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    last = run_folder / "checkpoints" / "last.ckpt"
    err = capsys.readouterr().err
    assert f"error: checkpoint {last} could not be written: File too large. Make room for it" in err
    assert f"then resume from {last}, the last that was written whole." in err
    assert "Traceback" not in err
    assert open_checkpoint(last)["global_step"] == 2
    assert not list(run_folder.rglob("*.partial"))


def test_a_log_that_cannot_be_written_is_one_clear_message(tiny, capsys, monkeypatch):
    def no_room(self, columns, rows):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.csv")

    monkeypatch.setattr(MetricsFile, "_rewrite", no_room)
    assert main(["fit", *tiny, "--trainer.log_every_n_steps=1"]) == 1
    said = "could not be written: No space left on device. Make room for it or change run.folder, then resume with"
    assert re.fullmatch(rf"linrope: error: .*/metrics\.csv {said} --ckpt_path\.\n", capsys.readouterr().err)


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")

    def write_half(failure: type[BaseException]) -> None:
        with whole_file(path) as file:
            file.write(b"af")
            raise failure

    for failure in (OSError, KeyboardInterrupt):
        with pytest.raises(failure):
            write_half(failure)
        assert list(tmp_path.iterdir()) == [path]
        assert path.read_text() == "before"
    with whole_file(path) as file:
        file.write(b"after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"


def test_a_second_fit_with_the_same_callback_leaves_signals_as_they_were():
    """Lightning sets handlers again that it found when training began: the first fit leaves that of the callback."""
    stop, before = GracefulStop(None), {signum: signal.getsignal(signum) for signum in GracefulStop.SIGNALS}
    trainer = SimpleNamespace(is_global_zero=True)
    heard = []
    try:
        signal.signal(signal.SIGTERM, lambda *_: heard.append("before"))
        for _ in range(2):
            stop.setup(trainer, None, "fit")
            stop.on_train_end(trainer, None)
            signal.signal(signal.SIGTERM, stop._on_signal)
        signal.raise_signal(signal.SIGTERM)
        assert heard == ["before"]
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
