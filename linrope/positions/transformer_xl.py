"""Sinusoids of the distance with two learned biases (Transformer-XL, arXiv 1901.02860)."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from linrope.positions.base import Pairs, PositionEncoding, PositionsConfig, Sizes, by_distance
from linrope.positions.sinusoidal import sinusoids


class TransformerXL(PositionEncoding):
    """e_ij = (q_iᵀk_j + q_iᵀ W̃_k r_(i-j) + uᵀk_j + vᵀ W̃_k r_(i-j)) / √D, with the sinusoids r of the distance.

    Section 3.3 there. u and v are (H, D), W̃_k is (H·D, d_model).
    """

    def __init__(self, config: PositionsConfig, sizes: Sizes) -> None:
        super().__init__(config, sizes)
        self.u = nn.Parameter(torch.empty(sizes.n_heads, sizes.head_dim))
        self.v = nn.Parameter(torch.empty_like(self.u))
        width = sizes.d_model + sizes.d_model % 2
        self.w_k = nn.Parameter(torch.empty(sizes.n_heads * sizes.head_dim, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for bias in (self.u, self.v):
            nn.init.zeros_(bias)
        nn.init.kaiming_uniform_(self.w_k, a=5**0.5)  # as a linear layer

    def score(self, q: Tensor, k: Tensor, pairs: Pairs) -> Tensor:
        u, v, w_k = (x.to(q.dtype) for x in (self.u, self.v, self.w_k))
        farthest = pairs.n_keys - 1
        distances = torch.arange(1 - pairs.n_queries, farthest + 1, device=q.device)
        r = sinusoids(distances, self.w_k.shape[1]).to(q.dtype) @ w_k.mT  # (T + S - 1, H·D)
        r = rearrange(r, "n (h d) -> h d n", h=self.sizes.n_heads)
        of_distance = by_distance((q + v[:, None]) @ r, pairs.distance + pairs.n_queries - 1)
        return of_distance + (k @ u[..., None]).mT  # (B, H, T, S) + (B, H, 1, S)
