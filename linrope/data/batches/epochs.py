"""Batches of rows in shuffled epochs, one after another without end."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from linrope.data.batches.shuffling import permute


class ShuffledEpochs:
    """The batches of one rank, each a list of row numbers; batch `i` of the run follows from the seed and `i`.

    Sample `s` of the run is row `permute(s mod n_rows)` of epoch `s div n_rows`: each epoch has every row once, and an
    epoch may end within a batch. Batches are dealt to the ranks in turn, so that two ranks train on what one trains on
    in two batches.

    Args:
        n_rows: rows of an epoch.
        batch_size: rows of a batch.
        seed: decides the order.
        batches_done: batches of this rank that are finished.
        rank, world_size: this process, and their number.
    """

    def __init__(
        self, n_rows: int, batch_size: int, seed: int, batches_done: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        self.n_rows, self.batch_size, self.seed = n_rows, batch_size, seed
        self.batches_done, self.rank, self.world_size = batches_done, rank, world_size

    def __iter__(self) -> Iterator[list[int]]:
        for batch in count(self.batches_done * self.world_size + self.rank, self.world_size):
            yield [self._row(batch * self.batch_size + i) for i in range(self.batch_size)]

    def _row(self, sample: int) -> int:
        epoch, at = divmod(sample, self.n_rows)
        return permute(at, self.n_rows, self.seed, epoch)
