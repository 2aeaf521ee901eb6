"""Clipped relative positions in keys and values (Shaw et al., arXiv 1803.02155)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linrope.positions.base import TABLE_STD, Pairs, PositionEncoding, PositionsConfig, Sizes, by_distance


class Shaw(PositionEncoding):
    """e_ij = q_iᵀ(k_j + a^K_δ) / √D,  o_i = Σ_j α_ij (v_j + a^V_δ),  δ = clip(j - i, -max_distance, max_distance).

    Equations 3 and 4 there. The heads share a^K and a^V, (2·max_distance + 1, D).
    """

    def __init__(self, config: PositionsConfig, sizes: Sizes) -> None:
        super().__init__(config, sizes)
        self.keys = nn.Parameter(torch.empty(2 * config.max_distance + 1, sizes.head_dim))
        self.of_values = nn.Parameter(torch.empty_like(self.keys))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in (self.keys, self.of_values):
            nn.init.normal_(table, std=TABLE_STD)

    def score(self, q: Tensor, k: Tensor, pairs: Pairs) -> Tensor:
        return by_distance(q @ self.keys.to(q.dtype).mT, self._row(pairs))

    def values(self, weights: Tensor, pairs: Pairs) -> Tensor:
        index = self._row(pairs).expand_as(weights)
        summed = weights.new_zeros(*weights.shape[:3], len(self.of_values)).scatter_add(-1, index, weights)
        return summed @ self.of_values.to(weights.dtype)  # (B, H, T, 2·max_distance + 1) -> (B, H, T, D)

    def _row(self, pairs: Pairs) -> Tensor:
        """The row of δ in the tables, (T, S)."""
        limit = self.config.max_distance
        return (-pairs.distance).clamp(-limit, limit) + limit
