"""The interface of recall tasks: rows of a case, and checks of cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from linrope.errors import InputError

Case = tuple[int, ...]
"""The integers that describe a row: its length, then those of the task."""


Stage = tuple[int, ...]
"""A case, followed by its share of all rows."""


class RecallTask(Protocol):
    """Makes rows; a frozen dataclass of plain values, so that it can be sent to workers."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the rows."""

    def rows(self, n_rows: int, case: Case, seed: int | Sequence[int]) -> tuple[Tensor, Tensor]:
        """(inputs, targets), each int64 (n_rows, case[0])."""

    def require(self, case: Case) -> None:
        """Raise InputError unless the case is valid."""

    def name(self, case: Case) -> str:
        """The name of the case in metrics."""


def require_numbers(case: Case, *names: str) -> None:
    """Raise InputError unless the case has one number for each name."""
    if len(case) != len(names):
        raise InputError(f"{case} must be ({', '.join(names)}), in stages followed by a share of rows.")


def at_depth(case: Case) -> str:
    """The name of a case (length,) or (length, depth) in metrics: "1024" or "1024@50%"."""
    return "@".join((str(case[0]), *(f"{depth}%" for depth in case[1:])))
