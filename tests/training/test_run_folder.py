"""Where a run writes: its folder, its metrics.csv, and the loggers beside it."""

import csv
import errno
import multiprocessing
import re
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import Logger

from linrope.cli.main import main
from linrope.training import run_folder as run_folder_module
from linrope.training.metrics_file import MetricsFile
from linrope.training.run_folder import RunFolder, new_run_folder
from linrope.utils.files import whole_file
from tests.processes import Run
from tests.training.test_resume import interrupt, load, losses, version


class Recording(Logger):
    """Keeps what it is given."""

    seen: list[tuple] = []  # noqa: RUF012 (of the class: Lightning makes the instance)
    name = version = "recording"

    def log_metrics(self, metrics, step=None):
        self.seen.append((step, metrics))

    def log_hyperparams(self, params, *args, **kwargs):
        self.seen.append(("options", params))


def read(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv") as file:
        return list(csv.DictReader(file))


RECORDING = "--trainer.logger=tests.training.test_run_folder.Recording"


@pytest.mark.parametrize("logger", [RECORDING, "--trainer.logger=false", "--trainer.logger=CSVLogger"])
def test_a_logger_is_added_to_the_run_folder(tiny, run_folder, logger):
    Recording.seen.clear()
    assert main(["fit", *tiny, logger, "--trainer.log_every_n_steps=1"]) == 0
    for name in ("config.yaml", "metrics.csv", "checkpoints/last.ckpt", "checkpoints/best.ckpt"):
        assert (run_folder / name).is_file()
    assert list(losses(run_folder)) == [1, 2]
    if "Recording" in logger:
        (_, options), *metrics = Recording.seen
        assert options["model"]["d_model"] == 16
        assert options["trainer"]["max_steps"] == 2
        logged = [float(values["train_loss"]) for _, values in metrics if "train_loss" in values]
        assert logged == [float(value) for value in losses(run_folder).values()]


def test_a_list_of_loggers_and_a_folder_of_their_own(tiny, run_folder, tmp_path):
    loggers = '[{"class_path": "CSVLogger", "init_args": {"save_dir": "%s"}}]' % (tmp_path / "other")
    assert main(["fit", *tiny, f"--trainer.logger={loggers}"]) == 0
    assert (tmp_path / "other" / "lightning_logs" / "version_0" / "hparams.yaml").is_file()
    assert losses(run_folder, "val_loss").keys() == {2}


def test_a_logger_whose_package_is_missing_is_named(tiny, run_folder, error_of):
    err = error_of("fit", *tiny, "--trainer.logger=CometLogger")
    assert "comet" in err
    assert "Traceback" not in err
    if find_spec("tensorboard") is None:
        said = "linrope: error: trainer.logger=TensorBoardLogger needs a package: pip install tensorboard.\n"
        assert error_of("fit", *tiny, "--trainer.logger=TensorBoardLogger") == said
    assert not run_folder.exists()


def test_a_resumed_run_goes_on_in_its_folder_and_another_name_asks_for_a_new_one(tiny, run_folder):
    every = [*tiny, "--trainer.log_every_n_steps=1"]
    assert main(["fit", *every]) == 0
    two = read(run_folder)
    longer = [*every, "--ckpt_path=last", "--trainer.max_steps=4"]
    assert main(["fit", *longer, "--run.health_every_n_steps=4"]) == 0  # one column more
    assert [row["step"] for row in read(run_folder)] == ["1", "2", "2", "3", "4", "4", "4"]
    assert [{name: row[name] for name in two[0]} for row in read(run_folder)[:3]] == two
    assert list(run_folder.parent.iterdir()) == [run_folder]
    assert not list(run_folder.glob("*.partial"))
    last = run_folder / "checkpoints" / "last.ckpt"
    other = [f"--ckpt_path={last}", "--run.name=other", "--trainer.max_steps=5"]
    assert main(["fit", *every, *other]) == 0
    assert list(losses(run_folder.parents[1] / "other" / "version_0")) == [1, 2, 3, 4, 5]
    assert list(losses(run_folder)) == [1, 2, 3, 4]


def test_a_resumed_run_that_logs_nothing_has_the_rows_of_its_steps(tiny, run_folder):
    every = ["--trainer.log_every_n_steps=1", "--run.health_every_n_steps=0", "--trainer.val_check_interval=50"]
    kept = ["--run.checkpoint_every_n_steps=2", "--run.keep_checkpoints=9"]
    assert main(["fit", *tiny, *every, *kept, "--trainer.max_steps=4"]) == 0
    folder = run_folder / "checkpoints"
    (folder / "step_2.ckpt").replace(folder / "last.ckpt")  # as if the run had been killed after two steps more
    rare = ["--trainer.log_every_n_steps=50", *every[1:], "--trainer.max_steps=3", "--ckpt_path=last"]
    assert main(["fit", *tiny, *rare]) == 0
    assert list(losses(run_folder)) == [1, 2]


def test_an_earlier_checkpoint_overwrites_no_later_one(tiny, run_folder, capsys):
    assert main(["fit", *tiny, "--trainer.max_steps=3", "--trainer.val_check_interval=2"]) == 0
    before = (run_folder / "checkpoints" / "last.ckpt").read_bytes()
    best = run_folder / "checkpoints" / "best.ckpt"
    resume = [f"--ckpt_path={best}", "--trainer.max_steps=4", "--trainer.log_every_n_steps=1"]
    assert main(["fit", *tiny, *resume]) == 0
    assert f"{best} is not the last checkpoint of a run in {run_folder.parent}" in capsys.readouterr().err
    assert (run_folder / "checkpoints" / "last.ckpt").read_bytes() == before
    assert load(version(run_folder, 1))["global_step"] == 4
    assert list(losses(version(run_folder, 1))) == [3, 4]


def test_a_resumed_run_that_is_refused_changes_nothing(tiny, run_folder, error_of):
    assert main(["fit", *tiny]) == 0
    files = [file for file in run_folder.rglob("*") if file.is_file()]
    before = {file: file.read_bytes() for file in files}
    assert "data.seed" in error_of("fit", *tiny, "--ckpt_path=last", "--trainer.max_steps=3", "--data.seed=7")
    assert {file: file.read_bytes() for file in files} == before


def test_a_run_that_fails_to_start_leaves_no_folder(tiny, run_folder, error_of):
    for wrong in ("--trainer.accelerator=gpuu", "--data.path=/nowhere", "--trainer.max_steps=0"):
        error_of("fit", *tiny, wrong)
        assert not run_folder.exists()


def test_rows_of_steps_that_are_done_again_are_dropped_and_a_half_row_too(tmp_path):
    whole = "step,train_loss\r\n1,5.0\r\n2,4.0\r\n3,3.0\r\n"
    (tmp_path / "metrics.csv").write_text(whole + "2,4.")
    log = MetricsFile(tmp_path, tmp_path / "metrics.csv", step=2)
    assert (tmp_path / "metrics.csv").read_text().endswith("2,4.")  # until something is logged
    log.log_metrics({"train_loss": torch.tensor(2.5)}, step=2)
    log.log_metrics({"val_loss": 2.25}, step=2)
    assert read(tmp_path) == [
        {"step": "1", "train_loss": "5.0", "val_loss": ""},
        {"step": "2", "train_loss": "4.0", "val_loss": ""},
        {"step": "3", "train_loss": "2.5", "val_loss": ""},
        {"step": "3", "train_loss": "", "val_loss": "2.25"},
    ]


def claim_version(runs: Path, start, claimed) -> None:
    start.wait()
    claimed.put(new_run_folder(runs).path.name)


def test_a_folder_with_nothing_but_what_a_logger_opened_is_removed_and_any_other_stays(tmp_path):
    for name, stays in (("events.out.tfevents.17.host.0", False), ("config.yaml", True)):
        folder = new_run_folder(tmp_path / "runs" / "name")
        (folder.path / name).touch()
        folder.release()
        assert folder.path.exists() == stays
    assert sorted(file.name for file in folder.path.iterdir()) == [".lock", "config.yaml"]


def test_runs_that_start_at_once_have_folders_of_their_own(tmp_path):
    context = multiprocessing.get_context("fork")
    start, claimed = context.Barrier(8), context.Queue()
    processes = [context.Process(target=claim_version, args=(tmp_path / "runs", start, claimed)) for _ in range(8)]
    for process in processes:
        process.start()
    names = sorted(claimed.get(timeout=30) for _ in processes)
    for process in processes:
        process.join()
    assert names == [f"version_{number}" for number in range(8)]


@pytest.mark.exhaustive
def test_a_run_that_is_being_trained_is_not_resumed_beside_it(tiny, run_folder, tmp_path, error_of):
    every = [*tiny, "--trainer.log_every_n_steps=1", "--run.checkpoint_every_n_steps=1"]
    run = Run(["fit", *every, "--trainer.max_steps=1000000"], tmp_path)
    run.wait_for_steps(2)
    resume = ["--ckpt_path=last", "--trainer.max_steps=1000000"]
    assert "its run is being trained by another process" in error_of("fit", *tiny, *resume)
    run.send(signal.SIGKILL)
    run.wait()
    (run_folder / "checkpoints" / "last.ckpt.0123abcd.partial").touch()
    assert main(["fit", *tiny]) == 0  # a new run
    assert not list(run_folder.rglob("*.partial"))
    step = load(run_folder)["global_step"] + 1
    last = run_folder / "checkpoints" / "last.ckpt"
    assert main(["fit", *every, f"--ckpt_path={last}", f"--trainer.max_steps={step}"]) == 0
    assert load(run_folder)["global_step"] == step


def test_a_run_in_a_folder_that_cannot_be_written_asks_for_another_name(tiny, run_folder, error_of):
    assert main(["fit", *tiny]) == 0
    (run_folder / ".lock").unlink()
    (run_folder / ".lock").mkdir()  # root may write to any folder
    err = error_of("fit", *tiny, "--ckpt_path=last", "--trainer.max_steps=3")
    assert re.search(
        r"--ckpt_path='\S+': its run cannot be continued there \(Is a directory\): set another run\.name", err
    )


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_folder_in_use_keeps_its_partial_files(tmp_path, monkeypatch, has_locks):
    def no_locks(file, inherited=True):
        raise OSError(errno.ENOSYS, "Function not implemented")

    if not has_locks:
        monkeypatch.setattr(run_folder_module, "lock", no_locks)
    (tmp_path / "version_0").mkdir()
    folder = RunFolder(tmp_path / "version_0")
    assert folder.lock()
    (tmp_path / "version_0" / "a.partial").touch()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=new_run_folder, args=(tmp_path,))
    process.start()
    process.join()
    assert (tmp_path / "version_1").is_dir()
    assert (tmp_path / "version_0" / "a.partial").is_file()


@pytest.mark.parametrize("gone", ["removed", "read-only"])
def test_a_folder_that_goes_away_is_one_clear_line(tiny, run_folder, monkeypatch, capsys, gone):
    def lose(trainer) -> bool:
        if trainer.global_step == 2 and gone == "removed":
            shutil.rmtree(run_folder)
        elif trainer.global_step == 2:  # root may write to any folder, but not where a file is
            (run_folder / "metrics.csv").unlink()
            (run_folder / "metrics.csv").mkdir()
        return False

    interrupt(monkeypatch, lose, signal.SIGTERM)
    assert main(["fit", *tiny, "--trainer.max_steps=9", "--trainer.log_every_n_steps=1"]) == 1
    said = r"linrope: error: \S+/version_0/metrics\.csv could not be written: [^\n]+, then resume with --ckpt_path\.\n"
    assert re.fullmatch(said, capsys.readouterr().err)


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    with whole_file(tmp_path / "file") as one, whole_file(tmp_path / "file") as two:
        one.write(b"one")
        two.write(b"two")
    assert (tmp_path / "file").read_text() == "one"  # that ended last
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
