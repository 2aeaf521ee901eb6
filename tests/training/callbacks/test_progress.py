"""The lines of a run whose output is no terminal."""

import time
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from linrope.training.callbacks.progress import ProgressReport

METRICS = {"train_loss": torch.tensor(2.5), "tokens_per_second": torch.tensor(1000.0)}


@pytest.fixture
def line(monkeypatch):
    """The end of the line that is printed after so many seconds at that step, of a run to step 10,000."""
    trainer = SimpleNamespace(
        global_step=0, max_steps=10_000, callback_metrics=dict(METRICS), accumulate_grad_batches=1
    )
    console = Console(width=200)
    report = ProgressReport(console, every_n_steps=10)
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    report.on_train_start(trainer, None)

    def line(seconds: float, step: int) -> str:
        monkeypatch.setattr(time, "perf_counter", lambda: 100.0 + seconds)
        trainer.global_step = step
        with console.capture() as captured:
            report.on_train_batch_end(trainer, None, None, None, step - 1)
        return captured.get().rstrip().rpartition("tok/s  ")[2]

    return line


def test_the_time_left(line):
    assert line(10, 10) == "2:46:30 left"
    assert line(2000, 2000) == "2:13:20 left"
    assert line(9000, 9000) == "16:40 left"
    assert line(10_000, 10_000) == "0:00 left"


def test_the_time_left_forgets_slow_first_steps(line):
    """Those that compile, at ten seconds each; later ones take one."""
    lines = [line(100 + step - 10, step) for step in range(10, 110, 10)]
    assert lines[0] == "27:45:00 left"
    assert lines[-1] == "2:45:00 left"


def test_a_dumb_terminal_gets_lines_and_the_speed_stands_there_once_it_is_known(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    metrics = dict(METRICS)
    speed = metrics.pop("tokens_per_second")
    trainer = SimpleNamespace(global_step=0, max_steps=100, callback_metrics=metrics, accumulate_grad_batches=1)
    console = Console(width=200, force_terminal=True)
    report = ProgressReport(console, every_n_steps=10)
    with console.capture() as captured:
        report.on_train_start(trainer, None)
        for step in (10, 11, 20):
            trainer.global_step = step
            report.on_train_batch_end(trainer, None, None, None, step - 1)
            metrics["tokens_per_second"] = speed
    first, second = captured.get().splitlines()
    assert first.startswith("step 10/100  loss 2.500  ")
    assert "tok/s" not in first
    assert second.startswith("step 20/100  loss 2.500  1,000 tok/s  ")


def test_predictions_have_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    state = SimpleNamespace(fn="predict")
    numbers = {"num_predict_batches": [3], "global_step": 0, "max_steps": -1}
    trainer = SimpleNamespace(predicting=True, sanity_checking=False, state=state, **numbers)
    report = ProgressReport(Console(width=80, force_terminal=True), every_n_steps=10)
    with report.console.capture() as captured:
        report.on_predict_start(trainer, None)
        report.on_predict_batch_end(trainer, None, None, None, 0)
        report._progress.refresh()
        report.on_predict_end(trainer, None)
    assert " ".join(captured.get().split()).count("1/3")
    assert report._progress is None
