"""Learned absolute positions (arXiv 1705.03122, section 3.1; BERT, arXiv 1810.04805)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linrope.positions.base import TABLE_STD, PositionEncoding, PositionsConfig, Sizes, require_within


class Learned(PositionEncoding):
    """x_t + p_t, with a learned p for each of `length` positions."""

    def __init__(self, config: PositionsConfig, sizes: Sizes) -> None:
        super().__init__(config, sizes)
        self.table = nn.Parameter(torch.empty(config.length, sizes.d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=TABLE_STD)

    def embed(self, positions: Tensor) -> Tensor:
        """Raises InputError for a position that has no row."""
        require_within(positions, self.config.length, "learned")
        return self.table[positions]
