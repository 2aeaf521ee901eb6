"""`linrope fit` with a model that is divided among two devices trains what one device trains, and resumes anywhere."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness.trainer import quiet_trainer
from linrope import LanguageModel
from linrope.cli.main import main
from linrope.errors import InputError
from linrope.models import sharded_checkpoint
from linrope.models.saving import open_checkpoint
from linrope.models.sharded_checkpoint import read_sharded_checkpoint
from linrope.models.sharded_files import is_sharded_checkpoint, remove_others
from linrope.training import LanguageModelingModule, TextDataModule, WholeCheckpointIO, sharding
from linrope.training.callbacks.saving import LastCheckpoint
from tests.conftest import write_documents
from tests.processes import Run
from tests.training.attached import attached
from tests.training.test_ddp import CONSTANT, MODEL, folder_of, last, texts_of
from tests.training.test_resume import load, losses

pytestmark = pytest.mark.exhaustive  # processes that exchange much; test_ddp.py has two of them by default
SHARDED = ["--trainer.devices=2", "--trainer.strategy=fsdp2"]
ONE_FILE = ["--trainer.devices=2", "--trainer.strategy=lightning.pytorch.strategies.ModelParallelStrategy"]
ONE_FILE += ["--trainer.strategy.save_distributed_checkpoint=false", "--trainer.strategy.data_parallel_size=2"]
ONE_FILE += ["--trainer.strategy.tensor_parallel_size=1"]
ALONE = ["--trainer.accumulate_grad_batches=2", "--trainer.val_check_interval=12"]
OTHER_OPTIONS = ["--optimizer.lr=0.003", "--optimizer.betas=[0.8, 0.9]", "--optimizer.weight_decay=0.5"]
HALF, WHOLE = "--trainer.max_steps=6", "--trainer.max_steps=12"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> list[str]:
    """Options of all runs: a small model, tied, with dropout, on 86 documents of 1 to 199 bytes."""
    folder = tmp_path_factory.mktemp("fsdp")
    texts = write_documents(folder / "texts", (1 + 37 * number % 199 for number in range(86)))
    options = [f"--data.path={texts}", "--data.context=24", "--data.batch_size=2", f"--run.folder={folder}"]
    options += ["--data.fractions=[0.7, 0.2, 0.1]", "--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1"]
    options += ["--trainer.val_check_interval=6", "--run.checkpoint_every_n_steps=3"]
    return [
        "fit",
        *MODEL,
        "--model.n_layers=2",
        "--model.dropout=0.1",
        "--model.tie_embeddings=true",
        *CONSTANT,
        *options,
    ]


@pytest.fixture(scope="module")
def fit(base, tmp_path_factory):
    """Runs two processes and returns the folder of the run, or what they print if they should end with a `code`."""

    def run(name: str, *options: str, code: int = 0) -> Path | str:
        process = Run([*base, *SHARDED, *options, f"--run.name={name}"], tmp_path_factory.mktemp("run"), ranks=2)
        found, out, err = process.wait()
        assert found == code, out + err
        return err if code else folder_of(base, name)

    return run


@pytest.fixture(scope="module")
def half(fit) -> Path:
    """The run of two processes that share a model, of 6 steps."""
    return fit("half", HALF)


@pytest.fixture(scope="module")
def alone(base) -> dict[str, Path]:
    """The same run of one process, of 6 steps and of 12."""
    assert main([*base, *ALONE, HALF, "--run.name=alone-half"]) == 0
    assert main([*base, *ALONE, WHOLE, "--run.name=alone"]) == 0
    return {"half": folder_of(base, "alone-half"), "whole": folder_of(base, "alone")}


def checkpoint_of(run_folder: Path) -> dict:
    """The last checkpoint of a run with all its tensors, from a file or a folder."""
    path = last(run_folder)
    return read_sharded_checkpoint(path) if is_sharded_checkpoint(path) else load(run_folder)


def require_same_training(ours: Path, expected: Path) -> None:
    """Weights and moments are equal up to float32 rounding: sums over the ranks have another order."""
    found, wanted = checkpoint_of(ours), checkpoint_of(expected)
    assert found["global_step"] == wanted["global_step"]
    torch.testing.assert_close(found["state_dict"], wanted["state_dict"], rtol=1e-5, atol=1e-5)
    (moments,), (expected_moments,) = found["optimizer_states"], wanted["optimizer_states"]
    torch.testing.assert_close(_by_place(moments), _by_place(expected_moments), rtol=1e-5, atol=1e-5)


def _by_place(state: dict) -> list:
    """The moments in the order of the groups: parameters are numbered in any order."""
    return [state["state"][number] for group in state["param_groups"] for number in group["params"]]


def test_predictions_are_of_one_device():
    mesh = SimpleNamespace(size=lambda: 2)
    sharding.require_shareable(mesh, "test", False)
    with pytest.raises(InputError, match=r"predict on one device \(trainer\.devices=1\), or with .*=ddp"):
        sharding.require_shareable(mesh, "predict", False)


def test_muon_steps_a_shared_model_as_a_whole_one_and_resumes(fit, base):
    """Muon orthogonalises in bfloat16, whose rounding follows the order of sums: so the first step is compared, whose
    size is known. Its entries have a mean square of (0.2 lr)²."""
    muon, one_step = ["--optimizer.name=muon"], ["--trainer.max_steps=1", "--trainer.limit_val_batches=0"]
    assert main([*base, *ALONE, *muon, *one_step, "--run.name=alone-muon"]) == 0
    shared, alone = fit("muon", *muon, *one_step), load(folder_of(base, "alone-muon"))
    found, matrices = checkpoint_of(shared)["state_dict"], 0
    for name, expected in alone["state_dict"].items():
        if name.endswith(("qkv.weight", "gate_up.weight", "out.weight")):
            assert (found[name] - expected).square().mean().sqrt() < 0.02 * 0.2 * 0.01
            matrices += 1
        else:
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-5)
    assert matrices == 8
    fit("muon", *muon, "--trainer.max_steps=3", "--ckpt_path=last")
    assert len(losses(shared)) == 3
    assert "has the states of muon: set muon" in fit("muon", "--trainer.max_steps=4", "--ckpt_path=last", code=2)


def test_two_devices_that_share_a_model_train_it_as_one_does(half, alone):
    require_same_training(half, alone["half"])
    for name in ("train_loss", "train_bpb", "grad_norm", "lr", "val_loss"):
        found, expected = losses(half, name), losses(alone["half"], name)
        assert found.keys() == expected.keys() != set()
        assert list(map(float, found.values())) == pytest.approx(list(map(float, expected.values())), rel=1e-5)
    assert float(losses(half)[6]) < float(losses(half)[1]) - 0.1  # it has learned


def test_both_ranks_continue_the_sample_and_one_prints_it(base, half, tmp_path, capsys):
    sample = ["--sample.prompt=ab", "--sample.max_new_tokens=12", "--sample.seed=3", "--trainer.max_steps=7"]
    resumed = [f"--ckpt_path={last(half)}", "--run.name=sample", "--trainer.enable_checkpointing=false"]
    code, out, _ = Run([*base, *SHARDED, *sample, *resumed], tmp_path, ranks=2).wait()
    assert code == 0
    capsys.readouterr()
    assert main([*base, *ALONE, *sample, *resumed]) == 0
    assert "\nab" in out
    assert out.partition("\nab")[2] == capsys.readouterr().out.partition("\nab")[2]


def test_a_rank_with_fewer_batches_takes_part_in_the_validation_of_the_others(half, base):
    options = {"context": 24, "stage": "validate", "fractions": [0.7, 0.2, 0.1]}
    dealt = [attached(texts_of(base), rank=rank, world_size=2, **options) for rank in range(2)]
    assert len(dealt[0].val_dataloader()) == len(dealt[1].val_dataloader()) + 1
    assert len(losses(half, "val_loss")) == 1  # and it ended


def test_a_folder_of_shards_goes_on_with_two_devices_and_with_one(half, alone, base, fit):
    assert is_sharded_checkpoint(last(half))
    require_same_training(fit("two", WHOLE, f"--ckpt_path={last(half)}"), alone["whole"])
    assert main([*base, *ALONE, WHOLE, f"--ckpt_path={last(half)}", "--run.name=one"]) == 0
    require_same_training(folder_of(base, "one"), alone["whole"])


def test_a_file_of_one_device_goes_on_with_two_that_share_the_model_and_write_a_file(alone, base, fit):
    """A parameter's number in the file is not its place among the model's parameters: groups come one after another."""
    ours = fit("file", *ONE_FILE, WHOLE, f"--ckpt_path={last(alone['half'])}")
    assert last(ours).is_file()
    require_same_training(ours, alone["whole"])
    longer = ["--trainer.max_steps=13", f"--ckpt_path={last(ours)}"]
    assert main([*base, *ALONE, *longer, "--run.name=file-one"]) == 0
    assert main([*base, *ALONE, "--trainer.max_steps=13", f"--ckpt_path={last(alone['whole'])}", "--run.name=13"]) == 0
    require_same_training(folder_of(base, "file-one"), folder_of(base, "13"))


@pytest.mark.parametrize("source", ["folder", "file"])
def test_the_optimizer_options_of_this_run_win(half, alone, base, fit, source):
    """The strategy restores the optimizer itself, with the options of the checkpoint's run."""
    checkpoint = last(half if source == "folder" else alone["half"])
    ours = fit(f"options-{source}", WHOLE, *OTHER_OPTIONS, f"--ckpt_path={checkpoint}")
    options = [WHOLE, *OTHER_OPTIONS, f"--ckpt_path={last(alone['half'])}", f"--run.name=options-{source}-one"]
    assert main([*base, *ALONE, *options]) == 0
    require_same_training(ours, folder_of(base, f"options-{source}-one"))
    for group in checkpoint_of(ours)["optimizer_states"][0]["param_groups"]:
        assert (group["lr"], group["betas"]) == (0.003, (0.8, 0.9))
    assert float(losses(ours, "lr")[12]) == pytest.approx(0.003)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_that_is_killed_while_it_saves_loses_nothing(alone, fit, monkeypatch, when):
    """It is killed at step 6, before or after the new folder takes the place of that of step 3."""
    link, saved = sharding._link, []

    def killed(path: Path, folder: Path) -> None:
        saved.append(path)
        if when == "before" and len(saved) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        link(path, folder)
        if when == "after" and len(saved) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(sharding, "_link", killed)
        fit(f"killed-{when}", WHOLE, "--trainer.val_check_interval=100", code=-signal.SIGKILL)
        folder = fit_folder(alone["whole"], f"killed-{when}")
    assert open_checkpoint(last(folder))["global_step"] == (3 if when == "before" else 6)
    fit(f"killed-{when}", WHOLE, "--ckpt_path=last")
    require_same_training(folder, alone["whole"])
    checkpoints = sorted(path.name for path in last(folder).parent.iterdir())
    assert [name for name in checkpoints if name.startswith("last")] == ["last.ckpt", os.readlink(last(folder))]


def test_a_full_disk_stops_all_ranks_with_one_message_and_keeps_the_last_checkpoint(half, fit, monkeypatch):
    new_folder, folders = sharding.new_folder, []

    def disk_fills_up(path: Path) -> Path:
        folders.append(path)
        if len(folders) == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return new_folder(path)

    monkeypatch.setattr(sharding, "new_folder", disk_fills_up)
    err = fit("full", HALF, "--trainer.val_check_interval=100", code=1)
    path = last(fit_folder(half, "full"))
    assert f"error: checkpoint {path} could not be written: File too large. Make room for it" in err
    assert f"then resume from {path}, the last that was written whole." in err
    assert "Traceback" not in err
    assert open_checkpoint(path)["global_step"] == 3
    assert sorted(place.name for place in path.parent.iterdir()) == ["last.ckpt", "last.ckpt.1"]


@pytest.mark.parametrize("noticed", ["at the start", "when saving"])
def test_a_folder_of_runs_that_ranks_do_not_share_is_refused(fit, tmp_path, monkeypatch, noticed):
    setup = LastCheckpoint.setup

    def setup_elsewhere(self, trainer, task, stage):
        if trainer.global_rank == 1:
            (tmp_path / "other").mkdir()
            os.chdir(tmp_path / "other")
        setup(self, trainer, task, stage)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LastCheckpoint, "setup", setup_elsewhere)
    if noticed == "when saving":
        monkeypatch.setattr(LastCheckpoint, "_require_shared", lambda self, trainer, task: None)
    err = fit("unshared", HALF, "--run.folder=runs", code=2 if noticed == "at the start" else 1)
    said = {
        "at the start": "error: run.folder: what rank 0 writes into 'runs/unshared/version_0/checkpoints' is not there "
        "on rank 1, and each rank",
        "when saving": "last.ckpt could not be written: it has no part __1_0.distcp, so the ranks do not share",
    }
    assert said[noticed] in err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("runs/unshared/version_0/**/last.ckpt*"))


def fit_folder(other: Path, name: str) -> Path:
    return other.parent.parent / name / "version_0"


def test_every_command_reads_a_folder_of_shards(half, alone, tmp_path, capsys):
    path = str(last(half))
    capsys.readouterr()
    on_one = ["--trainer.devices=1", "--trainer.strategy=auto"]
    assert main(["validate", "--ckpt_path", path, *on_one]) == 0
    assert main(["validate", "--ckpt_path", str(last(alone["half"]))]) == 0
    ours, expected = (line for line in capsys.readouterr().out.splitlines() if line.startswith("val_loss"))
    run = Run(["test", "--ckpt_path", path], tmp_path, ranks=2)  # on the devices of the run
    code, out, _ = run.wait()
    assert code == 0
    assert main(["test", "--ckpt_path", path, *on_one]) == 0
    assert ours == expected
    assert capsys.readouterr().out.splitlines()[-1] == out.splitlines()[-1]
    assert main(["generate", "--ckpt_path", path, "--prompt", "ab", "--max_new_tokens", "3"]) == 0
    assert main(["export", "--ckpt_path", path, "--output", str(tmp_path / "exported")]) == 0
    assert main(["average", path, path, "--output", str(tmp_path / "mean")]) == 0
    for model in (LanguageModel.from_pretrained(folder) for folder in (path, tmp_path / "exported", tmp_path / "mean")):
        assert model.output.weight is model.embedding.weight
        weights = {f"model.{name}": weight for name, weight in model.state_dict().items()}
        torch.testing.assert_close(weights, checkpoint_of(alone["half"])["state_dict"], rtol=1e-5, atol=1e-5)


def test_a_new_run_starts_from_a_folder_of_shards(half, base):
    assert main([*base, "--trainer.max_steps=1", f"--run.start_from={last(half)}", "--run.name=started"]) == 0
    assert float(losses(folder_of(base, "started"))[1]) < float(losses(half)[1]) - 0.1


def test_modules_and_trainers_of_one_device_read_a_folder_of_shards(half, base):
    expected = checkpoint_of(half)["state_dict"]
    options = {"map_location": lambda storage, place: storage, "strict": True}
    module = LanguageModelingModule.load_from_checkpoint(last(half), **options)
    torch.testing.assert_close(dict(module.state_dict()), expected, rtol=0, atol=0)
    assert module.model.tokenizer == {"kind": "bytes"}
    other = LanguageModelingModule(module.model_config)
    data = TextDataModule(texts_of(base), context=24, batch_size=2, fractions=[0.7, 0.2, 0.1])
    trainer = quiet_trainer(max_steps=1, callbacks=[], limit_val_batches=1)
    trainer.validate(other, data, ckpt_path=last(half), verbose=False)
    torch.testing.assert_close(dict(other.state_dict()), expected, rtol=0, atol=0)
    assert type(trainer.strategy.checkpoint_io) is WholeCheckpointIO


@pytest.mark.parametrize("place", ["copied", "linked"])
def test_a_file_replaces_a_folder_of_shards_once_it_is_written(half, tmp_path, place):
    path, io = tmp_path / "last.ckpt", WholeCheckpointIO()
    shutil.copytree(last(half), path if place == "copied" else tmp_path / "last.ckpt.7")
    if place == "linked":
        path.symlink_to("last.ckpt.7")
    (tmp_path / "last.ckpt.note").mkdir()  # of the user
    with pytest.raises(AttributeError):
        io.save_checkpoint({"step": lambda: None}, path)
    assert open_checkpoint(path)["global_step"] == 6
    io.save_checkpoint({"step": 8}, path)
    assert torch.load(path) == {"step": 8}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["last.ckpt", "last.ckpt.note"]


def test_to_remove_the_link_of_a_folder_of_shards_removes_the_folder(half, tmp_path):
    for number in (7, 8):
        shutil.copytree(last(half), tmp_path / f"last.ckpt.{number}")
    (tmp_path / "last.ckpt").symlink_to("last.ckpt.7")
    WholeCheckpointIO().remove_checkpoint(tmp_path / "last.ckpt")
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt.8"]


def test_a_folder_of_shards_that_its_run_replaces_is_read_whole(half, tmp_path, monkeypatch):
    for number in (1, 2):
        shutil.copytree(last(half), tmp_path / f"last.ckpt.{number}")
    meta = torch.load(tmp_path / "last.ckpt.2" / "meta.pt")
    torch.save({**meta, "global_step": 9}, tmp_path / "last.ckpt.2" / "meta.pt")
    (tmp_path / "last.ckpt").symlink_to("last.ckpt.1")
    load, folders = sharded_checkpoint.load_plainly, []

    def saved_meanwhile(state: dict, path: Path, no_dist: bool = False) -> None:
        folders.append(path.name)
        sharding._link(tmp_path / "last.ckpt", tmp_path / "last.ckpt.2")
        remove_others(tmp_path / "last.ckpt")
        load(state, path, no_dist)

    monkeypatch.setattr(sharded_checkpoint, "load_plainly", saved_meanwhile)
    assert read_sharded_checkpoint(tmp_path / "last.ckpt")["global_step"] == 9
    assert folders == ["last.ckpt.1", "last.ckpt.2"]


@pytest.mark.parametrize("file", [".metadata", "meta.pt"])
def test_a_folder_with_code_in_it_is_refused(half, tmp_path, file):
    copy = shutil.copytree(last(half), tmp_path / "copy.ckpt")
    assert LanguageModel.from_pretrained(copy).config.n_layers == 2

    class Code:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "run"),)

    (copy / file).write_bytes(pickle.dumps(Code()))
    with pytest.raises(InputError, match="cannot be read safely"):
        LanguageModel.from_pretrained(copy)
    assert not (tmp_path / "run").exists()


def test_a_folder_with_a_damaged_part_is_refused(half, tmp_path):
    copy = shutil.copytree(last(half), tmp_path / "copy.ckpt")
    (copy / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(InputError, match=r"copy\.ckpt' cannot be loaded: "):
        LanguageModel.from_pretrained(copy)
    (copy / "__0_0.distcp").unlink()
    with pytest.raises(InputError, match=r"copy\.ckpt' cannot be loaded: .*No such file"):
        LanguageModel.from_pretrained(copy)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--segment_length=8", "--trainer.precision=bf16-true"],
            "segment_length=8 with a sharded model of torch.bfloat16 would sum the gradients of all segments in that",
        ),
        (["--run.ema_decay=0.9"], "run.ema_decay keeps a whole second model on each device"),
        ([*ONE_FILE, "--trainer.strategy.tensor_parallel_size=2"], "strategy.tensor_parallel_size=2 must be 1."),
    ],
)
def test_what_a_sharded_model_cannot_do_is_refused_on_all_ranks(fit, options, said):
    err = fit("refused", HALF, *options, code=2)
    assert said in " ".join(err.split())
    assert "Traceback" not in err
