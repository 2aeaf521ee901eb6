"""A penalty that grows with the distance (ALiBi, arXiv 2108.12409)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from linrope.positions.base import Pairs, PositionEncoding


class ALiBi(PositionEncoding):
    """e_ij = q_iᵀk_j / √D - m_h |i - j|, with the slopes m_h of `slopes`; nothing is learned."""

    def bias(self, pairs: Pairs) -> Tensor:
        m = torch.tensor(slopes(self.sizes.n_heads), dtype=pairs.dtype, device=pairs.device)
        return -m[:, None, None] * pairs.distance.abs()[None, None]


def slopes(n_heads: int) -> list[float]:
    """2^(-8/H), 2^(-16/H), …, 2^(-8) for a power of two H; else those of the largest power of two P below, and then
    every second one of those of 2P (section 3 there, and the authors' code)."""
    below = 2 ** int(math.log2(n_heads))
    first = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    between = [2 ** (-4 * (i + 1) / below) for i in range(0, 2 * below, 2)]
    return first + between[: n_heads - below]
