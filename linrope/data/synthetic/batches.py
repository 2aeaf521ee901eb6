"""Endless training batches of a recall task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from linrope.data.synthetic.recall_task import RecallTask, Stage

Batch = dict[str, Any]

CHOICE, TRAIN, VAL, TEST = range(4)
"""First numbers of seeds, one for each use, so that no two uses draw the same rows."""


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
