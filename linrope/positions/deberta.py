"""Disentangled attention: content to position and position to content (DeBERTa, arXiv 2006.03654)."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from linrope.positions.base import Pairs, PositionEncoding, PositionsConfig, Sizes, by_distance


class DeBERTa(PositionEncoding):
    """e_ij = (q_iᵀk_j + q_iᵀ W_kr p_δ(i,j) + k_jᵀ W_qr p_δ(j,i)) / √(3D).

    Equations 3 and 4 there: δ(i, j) = clip(i - j + max_distance, 0, 2·max_distance - 1). p is
    (2·max_distance, d_model), W_qr and W_kr are (H·D, d_model); every layer has its own.
    """

    terms = 3

    def __init__(self, config: PositionsConfig, sizes: Sizes) -> None:
        super().__init__(config, sizes)
        self.table = nn.Parameter(torch.empty(2 * config.max_distance, sizes.d_model))
        self.w_qr = nn.Parameter(torch.empty(sizes.n_heads * sizes.head_dim, sizes.d_model))
        self.w_kr = nn.Parameter(torch.empty_like(self.w_qr))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table)  # as large as what a norm gives to the layer
        for matrix in (self.w_qr, self.w_kr):
            nn.init.kaiming_uniform_(matrix, a=5**0.5)  # as a linear layer

    def score(self, q: Tensor, k: Tensor, pairs: Pairs) -> Tensor:
        table = self.table.to(q.dtype)
        q_r, k_r = (
            rearrange(table @ w.to(q.dtype).mT, "n (h d) -> h d n", h=self.sizes.n_heads)
            for w in (self.w_qr, self.w_kr)
        )
        content_to_position = by_distance(q @ k_r, self._row(pairs.distance))
        position_to_content = by_distance(k @ q_r, self._row(-pairs.distance.mT)).mT
        return content_to_position + position_to_content

    def _row(self, distance: Tensor) -> Tensor:
        limit = self.config.max_distance
        return (distance + limit).clamp(0, 2 * limit - 1)
