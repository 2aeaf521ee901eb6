"""The base class of recall tasks: rows of a case, and checks of cases."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from linrope.errors import InputError

Case = tuple[int, ...]
"""The integers that describe a row: its length, then those of the task."""

Stage = tuple[int, ...]
"""A case, followed by its share of all rows."""


class RecallTask:
    """Makes rows. A task is a frozen dataclass of plain values, which can be sent to workers; it writes `draw` and
    `require`."""

    vocab_size: int
    """Number of tokens in the rows."""

    def rows(self, n_rows: int, case: Case, seed: int | Sequence[int]) -> tuple[Tensor, Tensor]:
        """Rows of a case; `seed` is one or more integers from 0.

        Returns:
            (inputs, targets), each int64 (n_rows, case[0]). `targets[:, t]` is the token that a model must predict
            after `inputs[:, t]`, or IGNORE.

        Raises:
            InputError: an invalid case, or a number out of range.
        """
        self.require(case)
        if n_rows < 0 or np.min(seed) < 0:
            raise InputError(f"n_rows={n_rows} and seed={seed} must be 0 or more.")
        return self.draw(n_rows, case, seed)

    def draw(self, n_rows: int, case: Case, seed: int | Sequence[int]) -> tuple[Tensor, Tensor]:
        """`rows` of valid arguments."""
        raise NotImplementedError

    def require(self, case: Case) -> None:
        """Raise InputError unless the case is valid."""
        raise NotImplementedError

    def name(self, case: Case) -> str:
        """The name of a case (length,) or (length, depth) in metrics: "1024" or "1024@50%"."""
        return "@".join((str(case[0]), *(f"{depth}%" for depth in case[1:])))


def require_numbers(case: Case, *names: str) -> None:
    """Raise InputError unless the case has one number for each name."""
    if len(case) != len(names):
        raise InputError(f"{case} must be ({', '.join(names)}), in stages followed by a share of rows.")


def depth_of(case: Case) -> int | None:
    """The depth in percent of a case (length, depth), None of (length,). InputError if it is no percentage."""
    if len(case) == 1:
        return None
    require_numbers(case, "length", "depth")
    depth = case[1]
    if not (isinstance(depth, int) and 0 <= depth <= 100):
        raise InputError(f"depth={depth!r} must be a whole number of percent, 0 (the row's start) to 100 (its end).")
    return depth
