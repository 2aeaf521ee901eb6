"""The base class of recall tasks: rows of a case, checks of cases, and endless training batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from linrope.errors import InputError

Case = tuple[int, ...]
"""The integers that describe a row: its length, then those of the task."""
Stage = tuple[int, ...]
"""A case, followed by its share of all rows."""
Batch = dict[str, Any]
CHOICE, TRAIN, VAL, TEST = range(4)
"""First numbers of seeds, one for each use, so that no two uses draw the same rows."""


class RecallTask:
    """Makes rows. A task is a frozen dataclass of plain values, which can be sent to workers; it writes `draw` and
    `require`."""

    vocab_size: int
    """Number of tokens in the rows."""

    def rows(self, n_rows: int, case: Case, seed: int | Sequence[int]) -> tuple[Tensor, Tensor]:
        """Rows of a case; `seed` is one or more integers from 0.

        Returns (inputs, targets), each int64 (n_rows, case[0]): `targets[:, t]` is the token that a model must predict
        after `inputs[:, t]`, or IGNORE. Raises InputError for an invalid case, or a number out of range.
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


class RecallBatches(IterableDataset[Batch]):
    """The training batches of one rank: endless, from number `first` on.

    A batch has rows of one stage, which follows from (seed, number): all ranks then do the same work at the same time.
    Its rows follow from (seed, number, rank).

    Args:
        task: makes the rows.
        stages: cases with their shares of all rows, in proportion to the last number of each.
        tokens_per_batch: tokens of a batch, rounded down to whole rows.
        seed, rank: decide the rows and their order.
        first: number of the first batch.
    """

    def __init__(
        self,
        task: RecallTask,
        stages: Sequence[Stage],
        tokens_per_batch: int,
        seed: int = 0,
        rank: int = 0,
        first: int = 0,
    ) -> None:
        self.task, self.stages, self.tokens_per_batch = task, stages, tokens_per_batch
        self.seed, self.rank, self.first = seed, rank, first
        batches = np.array([rows / self._n_rows(length) for length, *_, rows in stages])
        self._shares = batches / batches.sum()  # of batches, which have fewer rows if those are long

    def _n_rows(self, length: int) -> int:
        return self.tokens_per_batch // length

    def __getitem__(self, number: int) -> Batch:
        """Batch `number ≥ 0`."""
        stage = np.random.default_rng((CHOICE, self.seed, number)).choice(len(self.stages), p=self._shares)
        case = tuple(self.stages[stage][:-1])
        inputs, targets = self.task.rows(self._n_rows(case[0]), case, (TRAIN, self.seed, number, self.rank))
        return {"inputs": inputs, "targets": targets}

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()  # a loader reads its workers in turn, so the order is that of one process
        mine = count(self.first + worker.id, worker.num_workers) if worker else count(self.first)
        return map(self.__getitem__, mine)
