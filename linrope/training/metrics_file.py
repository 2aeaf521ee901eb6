"""metrics.csv: the metrics of one run from its first step on, however often it was resumed."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from linrope.errors import CheckpointError
from linrope.evaluation.run_curves import METRICS_FILE
from linrope.utils.files import whole_file


class MetricsFile(Logger):
    """A logger of Lightning's that writes `metrics.csv` in a run's folder: a row each time that metrics are logged.

    The column `step` has the finished optimizer steps, as the console has; a validation within a step counts that step
    too. The file of a resumed run begins with the rows of `earlier` up to the step of its checkpoint.

    Args:
        folder: the run's folder.
        earlier: metrics.csv of the run that is resumed, perhaps this very file.
        step: the step of the checkpoint.

    Raises:
        CheckpointError: when logging, if the file could not be written.
    """

    def __init__(self, folder: Path, earlier: Path | None = None, step: int = 0) -> None:
        super().__init__()
        self.path = folder / METRICS_FILE
        self._earlier, self._step = earlier, step
        self._columns: list[str] = []  # none before the file is begun: a run that fails to start changes none

    @property
    def name(self) -> str:
        return self.path.parents[1].name

    @property
    def version(self) -> str:
        return self.path.parent.name

    @property
    def log_dir(self) -> str:
        return str(self.path.parent)

    @property
    def save_dir(self) -> str:
        return self.log_dir  # what Lightning takes for `trainer.log_dir`

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Begin the file if nothing was logged before; config.yaml beside it has the options."""
        if not self._columns:
            with self._errors_named():
                self._begin(["step"])

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        row = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        row["step"] = (step or 0) + 1  # Lightning counts from 0
        with self._errors_named():
            if not self._columns:
                self._begin(row)
            elif new := row.keys() - set(self._columns):
                self._rewrite([*self._columns, *new], list(_rows(self.path)))
            with open(self.path, "r+", newline="") as file:  # not "a", which would make a file without columns
                file.seek(0, 2)
                file.write(_line(row, self._columns))

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.path} could not be written: {error.strerror}. Make room for it or change run.folder, then "
                "resume with --ckpt_path."
            ) from error

    def _begin(self, columns: Iterable[str]) -> None:
        earlier = [] if self._earlier is None or not self._earlier.is_file() else list(_rows(self._earlier))
        kept = [row for row in earlier if (row["step"] or "").isdecimal() and int(row["step"]) <= self._step]
        self._rewrite([*columns, *(name for row in kept for name in row)], kept)

    def _rewrite(self, columns: Iterable[str], rows: list[dict[str, Any]]) -> None:
        self._columns = sorted(set(columns))
        with whole_file(self.path) as file:
            text = _line({name: name for name in self._columns}, self._columns)
            file.write((text + "".join(_line(row, self._columns) for row in rows)).encode())


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file; of the last one a killed process may have left a part, which is dropped."""
    with open(path, newline="") as file:
        whole_lines = file.read().rpartition("\n")[0]
    yield from csv.DictReader(StringIO(whole_lines))


def _line(row: dict[str, Any], columns: list[str]) -> str:
    text = StringIO()
    csv.DictWriter(text, columns).writerow(row)
    return text.getvalue()
