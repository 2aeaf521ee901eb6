"""A learned bias for each bucket of distances (T5, arXiv 1910.10683, section 2.1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from linrope.positions.base import TABLE_STD, Pairs, PositionEncoding, PositionsConfig, Sizes


class T5(PositionEncoding):
    """e_ij = q_iᵀk_j / √D + b_(h, bucket(i - j)).

    (T5 itself has no 1/√D and starts with smaller queries instead.) Buckets are single distances up to half of them,
    then grow with the logarithm up to `max_distance`. Without causality one half serves later keys.
    """

    def __init__(self, config: PositionsConfig, sizes: Sizes) -> None:
        super().__init__(config, sizes)
        self.table = nn.Parameter(torch.empty(sizes.n_heads, config.n_buckets))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=TABLE_STD)

    def bias(self, pairs: Pairs) -> Tensor:
        return bias_of(self.table, pairs, self.config.max_distance, self.sizes.causal)


def bias_of(table: Tensor, pairs: Pairs, max_distance: int, causal: bool) -> Tensor:
    """The bias of each pair, (1, H, T, S), by its bucket in a table (H, n_buckets)."""
    return table.to(pairs.dtype)[:, buckets(pairs.distance, table.shape[1], max_distance, causal)][None]


def buckets(distance: Tensor, n_buckets: int, max_distance: int, causal: bool) -> Tensor:
    """The bucket of each distance i - j, int64 in 0 … n_buckets - 1; a later key counts as distance 0 if causal."""
    first = torch.zeros_like(distance)
    if causal:
        distance = distance.clamp(min=0)
    else:
        n_buckets //= 2
        first, distance = (distance < 0) * n_buckets, distance.abs()
    exact = n_buckets // 2
    share = (distance.clamp(min=1).double() / exact).log() / math.log(max_distance / exact)
    far = exact + (share * (n_buckets - exact)).long()
    return first + torch.where(distance < exact, distance, far.clamp(max=n_buckets - 1))
