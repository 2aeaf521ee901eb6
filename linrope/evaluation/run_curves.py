"""The curves of training runs, from their metrics.csv: loss against tokens and time."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import yaml

from linrope.errors import InputError
from linrope.utils.files import in_newest_version

METRICS_FILE = "metrics.csv"
Split = Literal["train", "val"]
Axis = Literal["tokens", "seconds"]


@dataclass(frozen=True)
class Point:
    """A measured loss, and how far the run was by then."""

    tokens: float
    seconds: float
    loss: float
    """In the unit of the comparison: bits per byte, or the loss of the runs' task."""


@dataclass(frozen=True)
class RunCurves:
    """A run's training and validation losses, in order."""

    name: str
    train: list[Point]
    val: list[Point]
    tokens: float
    """Tokens of the whole run so far."""
    seconds: float
    """Seconds of training so far, without validations."""

    @property
    def last(self) -> float:
        """The last validation loss; infinite without one."""
        return self.val[-1].loss if self.val else math.inf

    @property
    def best(self) -> float:
        """The lowest validation loss; infinite without one."""
        return min((point.loss for point in self.val), default=math.inf)

    @property
    def end_of_training(self) -> float:
        """Mean training loss over the last tenth of the tokens; NaN if none was logged."""
        late = [point.loss for point in self.train if point.tokens > 0.9 * self.tokens]
        return float(np.mean(late)) if late else math.nan

    def val_at(self, axis: Axis, where: float) -> float | None:
        """The validation loss at a number of tokens or seconds, on the line between two validations; None outside of
        them."""
        at = [getattr(point, axis) for point in self.val]
        if not at or not at[0] <= where <= at[-1]:
            return None
        return float(np.interp(where, at, [point.loss for point in self.val]))


def shared(runs: Sequence[RunCurves], axis: Axis) -> float | None:
    """The most tokens or seconds at which each run has a validation loss; None if there are none."""
    if not all(run.val for run in runs):
        return None
    end = min(getattr(run.val[-1], axis) for run in runs)
    return end if end >= max(getattr(run.val[0], axis) for run in runs) else None


def read_runs(paths: Sequence[str]) -> tuple[list[RunCurves], str]:
    """The runs' curves, the best first, and the unit of their losses: "bits per byte", or "loss", that of the task,
    where no run logged them.

    A path is a run's folder, the folder of its versions, which stands for the newest, or a metrics.csv.

    Raises:
        InputError: no log at a path, a run named twice, a log that is damaged or has no losses, tokens or seconds, or
            losses of different tasks.
    """
    files = [find_log(path) for path in paths]
    for path, file in zip(paths, files):
        if files.count(file) > 1:
            raise InputError(f"run {path!r} is named twice: {file}.")
    logs = [read_log(file) for file in files]
    names = names_of(files)
    without = [name for name, log in zip(names, logs) if not _columns(log) & {"train_bpb", "val_bpb"}]
    metric, unit = ("loss", "loss") if without else ("bpb", "bits per byte")
    if without:
        _require_one_task(names, files)
        if len(without) < len(logs):
            raise InputError(
                f"{without[0]} has no bits per byte, and others have: losses per token of different tokenizers do not "
                "compare. Train it with data.tokenizer set, or name runs of its kind alone."
            )
    runs = [_curves(*run, metric) for run in zip(names, files, logs)]
    return sorted(runs, key=lambda run: (run.last, run.end_of_training)), unit


def find_log(path: str) -> Path:
    """The metrics.csv of a run. InputError if there is none."""
    given = Path(path).expanduser()
    if given.is_file():
        return given.resolve()
    for file in (given / METRICS_FILE, in_newest_version(given, METRICS_FILE)):
        if file is not None and file.is_file():
            return file.resolve()
    raise InputError(
        f"run {path!r} has no {METRICS_FILE}: name a folder that `linrope fit` wrote, runs/NAME/version_N."
    )


def names_of(files: Sequence[Path]) -> list[str]:
    """A name for each log, as short as tells them apart: NAME, NAME/version_N, or the whole folder."""
    folders = [file.parent for file in files]
    for short in (lambda folder: folder.parent.name, lambda folder: "/".join(folder.parts[-2:])):
        names = [short(folder) if folder.name.startswith("version_") else folder.name for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _require_one_task(names: Sequence[str], files: Sequence[Path]) -> None:
    """The losses of several tasks have no order. A run without config.yaml, of a script's own Trainer, may be any."""
    tasks = {}
    for name, config in zip(names, (file.with_name("config.yaml") for file in files)):
        if config.is_file() and (task := (yaml.safe_load(config.read_text(encoding="utf-8")) or {}).get("task")):
            tasks.setdefault(task, name)
    if len(tasks) > 1:
        found = ", ".join(f"{name} of {task}" for task, name in tasks.items())
        raise InputError(f"the losses of different tasks do not compare: {found}. Name runs of one task.")


Log = list[dict[str, float]]


def _columns(log: Log) -> set[str]:
    return set().union(*log)


def read_log(file: Path) -> Log:
    """The rows of a log, each with its finite numbers by column, but for a last line that is still being written."""
    try:
        text = file.read_text(encoding="utf-8")
        rows = list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines(), restkey="", restval=""))
        numbers = [{name: float(cell) for name, cell in row.items() if name and cell} for row in rows]
    except (UnicodeDecodeError, csv.Error, ValueError) as error:
        raise InputError(f"{file} is not a log of `linrope fit`: {error}.") from error
    return [{name: number for name, number in row.items() if math.isfinite(number)} for row in numbers]


def _curves(name: str, file: Path, log: Log, metric: str) -> RunCurves:
    progress = [row for row in log if {"tokens", "seconds"} <= row.keys()]
    train, val = (_points(progress, f"{split}_{metric}") for split in ("train", "val"))
    if not (train or val):
        raise InputError(
            f"{file} has no row with tokens, seconds and a loss: the run must have logged one (every "
            "trainer.log_every_n_steps), with the callback Throughput where the Trainer is your own."
        )
    return RunCurves(name, train, val, *(max(row[axis] for row in progress) for axis in ("tokens", "seconds")))


def _points(rows: Log, column: str) -> list[Point]:
    """The points of a column, in order. Of steps that were done again, after a kill, the later row counts."""
    points: list[Point] = []
    for row in reversed(rows):
        if column in row and (not points or row["tokens"] < points[-1].tokens):
            points.append(Point(row["tokens"], row["seconds"], row[column]))
    return points[::-1]
