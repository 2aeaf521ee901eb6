"""`CosineAttention`: linear attention with the similarity 1 + cos, whose weights are never negative, as a layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from linrope.errors import InputError, require_choice
from linrope.layers.attention import Attention, AttentionOptions, checked_head_dim
from linrope.layers.linear_attention import run_operator, start_exchange
from linrope.ops.backends import BACKENDS
from linrope.ops.call import without_autocast
from linrope.ops.checks import check_eps
from linrope.ops.state import State
from linrope.positions.base import PositionsConfig
from linrope.positions.table import require_without_weights, rope_beside
from linrope.rotary import RotaryConfig, RotaryEmbedding, check_config

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CosineAttention(Attention):
    """Linear attention with sim(q_i, k_j) = 1 + (R_i q_i/|q_i|)ᵀ (R_j k_j/|k_j|) in both sums.

    o_i = Σ_j sim(q_i, k_j) v_j / (Σ_j sim(q_i, k_j) + ε)

    A rotation keeps the norm, so the similarity lies in [0, 2]: the weights are not negative and sum to one, up to ε,
    although RoPE stands in the denominator too. (RoFormer's other linear form; arXiv 2104.09864, section 3.3.) It is
    `linear_attention` with the features [q/|q| ; 1] and `normalize="rotary"`, where RoPE rotates all but the last one.
    A query or key of norm 0 has the similarity 1 with all others.

    Args:
        d_model, n_heads, head_dim, causal: as in `LinearAttention`.
        rope: rotates q and k; None for no positions. Its placement must be the default.
        positions: as in `LinearAttention`.
        eps: ε.
        backend: of `linear_attention`.
        options: those of all layers, see `AttentionOptions`.

    Raises:
        InputError: sizes that do not fit, a rotary_dim above head_dim, another placement, `short_conv` with
            `causal=False`.
    """

    past_type = State

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        head_dim: int | None = None,
        rope: RotaryConfig | None = RotaryConfig(),
        positions: PositionsConfig | None = None,
        causal: bool = True,
        eps: float = 1e-6,
        backend: str = "auto",
        **options: Unpack[AttentionOptions],
    ):
        check_config(rope)
        require_without_weights(positions, "cosine")
        rope = rope_beside(positions, rope)
        head_dim = checked_head_dim(d_model, n_heads, head_dim)
        if rope is not None:
            require_choice("rope.placement", rope.placement, ("numerator",))
            rotary_dim = head_dim // 2 * 2 if rope.rotary_dim is None else rope.rotary_dim
            if rotary_dim > head_dim:  # it would rotate the constant feature, and weights could be negative
                raise InputError(f"rope.rotary_dim={rotary_dim} must be at most {head_dim}, the head_dim.")
            rope = RotaryEmbedding.from_config(head_dim + 1, replace(rope, rotary_dim=rotary_dim))
        require_choice("backend", backend, ("auto", *BACKENDS))
        check_eps(eps)
        super().__init__(d_model, n_heads, head_dim=head_dim, rope=rope, causal=causal, **options)
        self.options = {"feature_map": "identity", "eps": eps, "backend": backend}

    def attend(self, x, queries, k, v, past, segment_ids, key_mask, positions, outputs):
        dtype = v.dtype
        options = {
            "rope": self.rope,
            "normalize": "plain" if self.rope is None else "rotary",
            "causal": self.causal,
            "key_mask": key_mask,
            "segment_ids": segment_ids,
            **self.options,
        }
        with without_autocast(k):
            k = with_one(k)
            v = v.to(k.dtype)
            before = start_exchange(k, v, options, past)
        q = queries()
        with without_autocast(k):
            o, final = run_operator(with_one(q), k, v, options, before(), outputs)
        return None if o is None else o.to(dtype), final

    def past_bytes(self, context, dtype):
        sums = 1 if self.rope is None else 2
        working = torch.promote_types(dtype, torch.float32)
        return self.n_heads * ((self.head_dim + 1) * (self.head_dim + sums) + 1) * working.itemsize


def with_one(x: Tensor) -> Tensor:
    """[x/|x| ; 1] of (..., D), (..., D + 1) in float32 (float64 for float64): a denominator near 0 needs the digits."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.cat((F.normalize(x, dim=-1), torch.ones_like(x[..., :1])), dim=-1)
