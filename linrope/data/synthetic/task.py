"""What a recall task is: rows of a case, and the checks of cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from linrope.errors import InputError

Case = tuple[int, ...]
"""What a row is like: its length, and what else the task has; all whole numbers."""


Stage = tuple[int, ...]
"""A case, and its share of all rows."""


class Task(Protocol):
    """A way of making rows; a frozen dataclass of plain values, so that workers can have it."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the rows."""

    def rows(self, n_rows: int, case: Case, seed: int | Sequence[int]) -> tuple[Tensor, Tensor]:
        """(inputs, targets), each int64 (n_rows, case[0])."""

    def require(self, case: Case) -> None:
        """Raise InputError unless there are such rows."""

    def name(self, case: Case) -> str:
        """The case as metrics call it."""


def require_numbers(case: Case, *names: str) -> None:
    """Raise InputError unless the case has a number for each name."""
    if len(case) != len(names):
        raise InputError(f"{case} must be ({', '.join(names)}), in stages with a share of rows after it.")


def at_depth(case: Case) -> str:
    """A case (length,) or (length, depth) as metrics call it: "1024" or "1024@50%"."""
    return "@".join((str(case[0]), *(f"{depth}%" for depth in case[1:])))
