"""Contiguous batches: each row of a batch continues the same row of the batch before (truncated BPTT).

So a state can be carried from batch to batch, which windows drawn at random do not allow. The order is arithmetic:
batch `n` of a run follows from the corpus, the seed and `n` alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from linrope.data.batches.shuffling import mix
from linrope.data.batches.windows import window
from linrope.data.corpus.sequences import TokenSequence
from linrope.errors import InputError


class ContiguousBatches(Dataset[dict[str, Tensor]]):
    """The endless training batches of one rank: batch `n` for every `n ≥ 0`.

    The corpus is cut into `batch_size · world_size` parts of one length. Each row of a batch reads one part; a rank has
    `batch_size` of them. One pass reads every part once. Each pass shifts all parts by an offset of its own.

    A batch has the keys of `window`, each int64 (batch_size, context), and `fresh`, bool (batch_size,): rows that start
    without a state. These are all rows when a pass begins, and with a document mask also rows whose first token is the
    first of a document.

    Args:
        corpus, context, document_mask: as in `TrainingWindows`.
        batch_size: rows of a batch.
        seed: decides the offsets.
        rank, world_size: number of this device, and of all devices.

    Raises InputError if the corpus is too short for a batch, or if a document mask finds no separator in it.
    """

    def __init__(
        self,
        corpus: TokenSequence,
        context: int,
        batch_size: int,
        seed: int = 0,
        document_mask: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if document_mask:
            corpus.require_documents()
        self.corpus, self.context, self.batch_size = corpus, context, batch_size
        self.seed, self.document_mask, self.rank = seed, document_mask, rank
        self.row_tokens = (len(corpus) - 1) // (batch_size * world_size)
        n_contexts = self.row_tokens // context
        # One batch fewer than fit, so that there is room to shift them by up to a whole row; not of two, since a state
        # passes from the first to the second.
        self.batches_per_pass = n_contexts - 1 if n_contexts > 2 else n_contexts
        self._max_offset = min(context - 1, self.row_tokens - self.batches_per_pass * context)
        if self.batches_per_pass < 1:
            raise InputError(
                f"the train split holds {len(corpus):,} tokens, too few for data.batch_size={batch_size} contiguous "
                f"rows of data.context={context} on each of {world_size} devices: lower one of them, or give more text."
            )

    def start_of(self, n: int, row: int) -> int:
        """The first token of a row of batch `n`."""
        number, batch = divmod(n, self.batches_per_pass)
        offset = mix(self.seed, number) % (self._max_offset + 1)
        return (self.rank * self.batch_size + row) * self.row_tokens + offset + batch * self.context

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        starts = [self.start_of(n, row) for row in range(self.batch_size)]
        rows = [window(self.corpus, start, self.context, self.document_mask) for start in starts]
        fresh = torch.full((self.batch_size,), n % self.batches_per_pass == 0)
        if self.document_mask:
            separator = self.corpus.separator
            before = [self.corpus.tokens(start - 1, start).item() if start else separator for start in starts]
            fresh |= torch.tensor(before) == separator
        return {**default_collate(rows), "fresh": fresh}
