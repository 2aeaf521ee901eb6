"""Loss by position in the row, in buckets whose edges double."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linrope.data.tokenizers.bytes import bytes_of
from linrope.losses import IGNORE, bits_per_byte

FIRST_BUCKET = 16
"""Positions in the first bucket, and in the second; each further bucket is twice as long as the one before."""
N_BUCKETS = 48  # enough for rows of 10¹⁵ tokens


@dataclass(frozen=True)
class Bucket:
    """Positions `first` … `last` of rows, counted from 1, and the loss of their targets."""

    first: int
    last: int
    tokens: int
    bits_per_byte: float


class LossByPosition:
    """Sums of losses by position in the row, in buckets whose edges double."""

    def __init__(self) -> None:
        self.sums = torch.zeros(N_BUCKETS, 3, dtype=torch.float64)  # nats, bytes and targets
        self.longest = 0  # length of the longest row

    def add(
        self, losses: Tensor, targets: Tensor, n_bytes: Tensor | None = None, positions: Tensor | None = None
    ) -> None:
        """Add losses in nats, targets and the targets' byte counts (None if tokens are bytes), all (B, T).

        `positions` (T,) are those in the row, of a part of its tokens; None for a whole row.
        """
        n_bytes, asked = bytes_of(targets, n_bytes), targets != IGNORE
        sums = torch.stack([losses.sum(0).cpu(), n_bytes.sum(0).cpu(), asked.sum(0).cpu()], dim=1)
        positions = torch.arange(targets.shape[1]) if positions is None else positions.cpu()
        self.sums.index_add_(0, bucket_of(positions), sums.double())
        self.longest = max(self.longest, int(positions[-1]) + 1)

    def __add__(self, other: LossByPosition) -> LossByPosition:
        """The losses of both, for example of two ranks."""
        both = LossByPosition()
        both.sums, both.longest = self.sums + other.sums, max(self.longest, other.longest)
        return both

    @property
    def totals(self) -> Tensor:
        """(3,) float64: nats, bytes and targets of all positions."""
        return self.sums.sum(0)

    @property
    def bits_per_byte(self) -> float:
        nats, n_bytes, _ = self.totals.tolist()
        return bits_per_byte(nats, n_bytes)

    def buckets(self) -> list[Bucket]:
        """The buckets with at least one byte, in order."""
        found, first = [], 0
        for number, (nats, n_bytes, tokens) in enumerate(self.sums.tolist()):
            last = FIRST_BUCKET << number
            if n_bytes:
                found.append(Bucket(first + 1, min(last, self.longest), int(tokens), bits_per_byte(nats, n_bytes)))
            first = last
        return found


def bucket_of(positions: Tensor) -> Tensor:
    """The number of the bucket of each position, counted from 0."""
    doublings = (positions // FIRST_BUCKET).clamp(min=1).double().log2().floor().long() + 1
    return torch.where(positions < FIRST_BUCKET, 0, doublings)
