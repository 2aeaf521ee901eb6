"""A corpus read from end to end in lanes: each row of a batch goes on where the same row of the batch before ended.

So a state can be carried from batch to batch, which windows drawn at random do not allow. As with those, the order is
arithmetic: batch `n` of a run follows from the corpus, the seed and `n` alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from linrope.data.batches.shuffling import mix
from linrope.data.batches.windows import document_numbers, require_documents
from linrope.data.corpus.sequences import TokenSequence
from linrope.errors import InputError


class ContiguousBatches(Dataset[dict[str, Tensor]]):
    """The endless training batches of one rank: batch `n` for every `n ≥ 0`.

    The corpus is cut into `batch_size · world_size` lanes of one length, of which a rank has `batch_size`. A pass reads
    each lane once; each pass shifts all lanes by an offset of its own and begins anew.

    Batches are `inputs` and `targets`, int64 (batch_size, context), and `fresh`, bool (batch_size,): the rows that go
    on from nothing. These are all rows where a pass begins and, where documents are apart, those whose first token is
    the first of a document. Where tokens are no bytes, `n_bytes`, int64 (batch_size, context), says how many each
    target stands for. Apart, there are `segment_ids` too: see `document_numbers`.

    Args:
        corpus: what to read.
        context: tokens of a row.
        batch_size: rows of a batch.
        seed: names the offsets.
        documents: "flow" or "apart".
        rank, world_size: which of how many devices.

    Raises:
        InputError: the corpus is too short for a batch.
    """

    def __init__(
        self,
        corpus: TokenSequence,
        context: int,
        batch_size: int,
        seed: int = 0,
        documents: str = "flow",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        require_documents(corpus, documents)
        self.corpus, self.context, self.batch_size = corpus, context, batch_size
        self.seed, self.documents, self.rank = seed, documents, rank
        n_lanes = batch_size * world_size
        self.lane = (len(corpus) - 1) // n_lanes
        # One batch fewer than fit, so that there is room to shift them by up to a whole row.
        self.batches_per_pass = max(min(1, self.lane // context), self.lane // context - 1)
        self._max_offset = min(context - 1, self.lane - self.batches_per_pass * context)
        if self.batches_per_pass < 1:
            raise InputError(
                f"the train split holds {len(corpus):,} tokens, too few for data.batch_size={batch_size} lanes of "
                f"data.context={context} on each of {world_size} devices: lower one of them, or give more text."
            )

    def start_of(self, n: int, row: int) -> int:
        """The first token of a row of batch `n`."""
        number, batch = divmod(n, self.batches_per_pass)
        offset = mix(self.seed, number) % (self._max_offset + 1)
        return (self.rank * self.batch_size + row) * self.lane + offset + batch * self.context

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        starts = [self.start_of(n, row) for row in range(self.batch_size)]
        tokens = torch.stack([self.corpus.tokens(start, start + self.context + 1) for start in starts])
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        n_bytes = [self.corpus.text_bytes(start + 1, start + self.context + 1) for start in starts]
        if n_bytes[0] is not None:
            batch["n_bytes"] = torch.stack(n_bytes)
        begins = n % self.batches_per_pass == 0
        if self.documents == "flow":
            return {**batch, "fresh": torch.full((self.batch_size,), begins)}
        separator = self.corpus.separator
        ended = [start == 0 or self.corpus.tokens(start - 1, start).item() == separator for start in starts]
        return {
            **batch,
            "segment_ids": document_numbers(batch["inputs"], separator),
            "fresh": torch.tensor(ended) | begins,
        }
