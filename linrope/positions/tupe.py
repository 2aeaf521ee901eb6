"""Positions untied from the words (TUPE, arXiv 2006.15595)."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from linrope.positions.base import TABLE_STD, Pairs, PositionEncoding, PositionsConfig, Sizes, require_within
from linrope.positions.t5 import bias_of


class TUPE(PositionEncoding):
    """e_ij = (q_iᵀk_j + (U_q p_i)ᵀ(U_k p_j)) / √(2D) + b_(h, bucket(i - j)).

    Equation 8 there (TUPE-R), with T5's buckets. Without causality the first token, [CLS], is untied: in place of the
    correlation of positions its queries have θ₁, and the other queries have θ₂ for it as a key, one of each a head
    (equation 9). p is (length, d_model), U_q and U_k are (H·D, d_model); every layer has its own.
    """

    terms = 2

    def __init__(self, config: PositionsConfig, sizes: Sizes) -> None:
        super().__init__(config, sizes)
        self.table = nn.Parameter(torch.empty(config.length, sizes.d_model))
        self.u_q = nn.Parameter(torch.empty(sizes.n_heads * sizes.head_dim, sizes.d_model))
        self.u_k = nn.Parameter(torch.empty_like(self.u_q))
        self.by_bucket = nn.Parameter(torch.empty(sizes.n_heads, config.n_buckets))
        self.theta = None if sizes.causal else nn.Parameter(torch.empty(2, sizes.n_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table)  # as large as what a norm gives to the layer
        for matrix in (self.u_q, self.u_k):
            nn.init.kaiming_uniform_(matrix, a=5**0.5)  # as a linear layer
        nn.init.normal_(self.by_bucket, std=TABLE_STD)
        if self.theta is not None:
            nn.init.zeros_(self.theta)

    def bias(self, pairs: Pairs) -> Tensor:
        """Raises InputError for a position that has no row in the table."""
        of_query, of_key = pairs.within_documents
        require_within(of_query, self.config.length, "tupe")
        table, u_q, u_k = (x.to(pairs.dtype) for x in (self.table, self.u_q, self.u_k))
        q, k = (
            rearrange(table[at] @ u.mT, "b t (h d) -> b h t d", h=self.sizes.n_heads)
            for at, u in ((of_query, u_q), (of_key, u_k))
        )
        of_positions = q @ k.mT * (self.terms * self.sizes.head_dim) ** -0.5
        if self.theta is not None:
            from_cls, to_cls = self.theta.to(pairs.dtype)[:, None, :, None, None]
            of_positions = torch.where((of_key == 0)[:, None, None, :], to_cls, of_positions)
            of_positions = torch.where((of_query == 0)[:, None, :, None], from_cls, of_positions)
        return of_positions + bias_of(self.by_bucket, pairs, self.config.max_distance, self.sizes.causal)
