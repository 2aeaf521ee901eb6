"""`CrossAttention`: a target attends to a source, softmax or linear, with RoPE on both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from linrope.errors import InputError, require_choice
from linrope.feature_maps import MapModule, get_feature_map, make_feature_map
from linrope.layers.attention import checked_head_dim
from linrope.layers.initialisation import reset
from linrope.layers.linear import Linear
from linrope.layers.state import map_state
from linrope.ops.call import map_features, without_autocast
from linrope.ops.checks import check_eps, check_tensor
from linrope.ops.softmax import masked_attention
from linrope.rotary import RotaryConfig, RotaryEmbedding, check_config


@dataclass(frozen=True)
class SourceMemory:
    """What cross-attention keeps of a source, computed once.

    Attributes:
        kv: linear: Σ_j R_j φ(k_j) v_jᵀ, (B, H, F, E) float32 or float64; softmax: None.
        k_sum: linear: Σ_j φ(k_j), (B, H, F) of the same dtype; softmax: None.
        k, v: softmax: rotated keys and the values, (B, H, S, D); linear: None.
        key_mask: softmax: (B, S) booleans, False for padding, or None; linear: None.
    """

    kv: Tensor | None = None
    k_sum: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    key_mask: Tensor | None = None

    @property
    def n_rows(self) -> int:
        """B."""
        return len(self.kv if self.k is None else self.k)

    def select_rows(self, rows: Tensor) -> SourceMemory:
        """Row i of the result is row `rows[i]`; rows are (N,) integers, with repetitions or not."""
        return map_state(lambda _, x: x[rows], self)


class CrossAttention(nn.Module):
    """Attention of T target tokens to S source tokens; both are rotated by their own positions.

        linear:   o_i = Σ_j (R_i φ(q_i))ᵀ(R_j φ(k_j)) v_j / (Σ_j φ(q_i)ᵀφ(k_j) + ε)   (RoFormer, eq. 19)
        softmax:  o_i = Σ_j softmax_j((R_i q_i)ᵀ(R_j k_j) / √D) v_j

    Linear attention keeps sums of fixed size, whatever the length of the source. A source whose keys are all masked
    gives zeros.

    Args:
        d_model: width of target and source.
        n_heads: number of heads H; it divides d_model.
        kind: "softmax" or "linear".
        rope: how queries and keys are rotated; None for no positions. Linear attention takes `placement="numerator"`
            only.
        feature_map: φ of linear attention, see `LinearAttention`.
        bias: add biases to the projections.
        eps: ε of the denominator of linear attention.

    Raises:
        InputError: sizes that do not fit, unknown names, another placement with linear attention.
    """

    forward_methods = ("memory",)
    """As in `linrope.models.base.Model`."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        kind: str = "linear",
        rope: RotaryConfig | None = RotaryConfig(),
        feature_map: str | Callable[[Tensor], Tensor] = "elu1",
        bias: bool = False,
        eps: float = 1e-6,
    ):
        super().__init__()
        require_choice("kind", kind, ("softmax", "linear"))
        check_config(rope)
        check_eps(eps)
        head_dim = checked_head_dim(d_model, n_heads, None)
        if kind == "linear" and rope is not None and rope.placement != "numerator":
            raise InputError(
                f"rope.placement={rope.placement!r} is not one of linear cross-attention: pass 'numerator'."
            )
        self.d_model, self.n_heads, self.head_dim, self.kind, self.eps = d_model, n_heads, head_dim, kind, eps
        phi = make_feature_map(feature_map, n_heads, head_dim) if kind == "linear" else None
        self.feature_map = phi
        n_features = phi.n_features if isinstance(phi, MapModule) else head_dim
        if rope is not None:
            rope = replace(rope, placement="numerator")
            if rope.rotary_dim is None and n_features != head_dim:
                rope = replace(rope, rotary_dim=n_features // 2 * 2)
            rope = RotaryEmbedding.from_config(n_features, rope)
        self.rope = rope
        self.q = Linear(d_model, d_model, bias=bias)
        self.kv = Linear(d_model, 2 * d_model, bias=bias)
        self.out = Linear(d_model, d_model, bias=bias)

    def reset_parameters(self) -> None:
        """Initialise the layer anew: with the same seed, as its constructor does."""
        if isinstance(self.feature_map, nn.Module):
            reset(self.feature_map)
        for module in (self.rope, self.q, self.kv, self.out):
            reset(module)

    def memory(self, source: Tensor, key_mask: Tensor | None = None) -> SourceMemory:
        """What `forward` needs of a source.

        Args:
            source: (B, S, d_model) floats.
            key_mask: (B, S) booleans, False for padding, which no query sees and which may hold anything.

        Raises:
            InputError: a wrong shape or dtype.
        """
        self._check("source", source)
        if key_mask is not None:
            check_tensor("key_mask", key_mask, "booleans", "(B, S)", source.shape[:2], source.device)
            source = source.masked_fill(~key_mask[..., None], 0)
        k, v = rearrange(self.kv(source), "b s (two h d) -> two b h s d", two=2, h=self.n_heads)
        if self.kind == "softmax":
            return SourceMemory(k=self._rotated(k, 0), v=v, key_mask=key_mask)
        with without_autocast(k):
            k, v = self._features("source", k), v.to(torch.promote_types(v.dtype, torch.float32))
            if key_mask is not None:  # after φ, which makes a zero key 1; in both sums
                k = k.masked_fill(~key_mask[:, None, :, None], 0)
            return SourceMemory(kv=self._rotated(k, 0).mT @ v, k_sum=k.sum(dim=2))

    def forward(self, x: Tensor, memory: SourceMemory, offset: int = 0) -> Tensor:
        """(B, T, d_model) floats -> the same shape: each target token's view of the source.

        Args:
            x: the target.
            memory: of this layer's `memory`, for the same rows.
            offset: position of the first target token.

        Raises:
            InputError: x of a wrong shape or dtype, a memory of another kind of layer or of another batch.
        """
        self._check("x", x)
        found = memory.kv if self.kind == "linear" else memory.k
        if found is None or (*found.shape[:2], found.shape[-1]) != (len(x), self.n_heads, self.head_dim):
            raise InputError(
                f"memory is of another layer or has {memory.n_rows} rows, x {len(x)}: pass what memory() of this layer "
                "returned for the same rows."
            )
        q = rearrange(self.q(x), "b t (h d) -> b h t d", h=self.n_heads)
        o = self._softmax(q, memory, offset) if self.kind == "softmax" else self._linear(q, memory, offset)
        return self.out(rearrange(o, "b h t d -> b t (h d)"))

    def _softmax(self, q: Tensor, memory: SourceMemory, offset: int) -> Tensor:
        scale = None if self.rope is None else self.rope.logit_scale**2 * self.head_dim**-0.5
        q, mask = self._rotated(q, offset), memory.key_mask
        k, v = memory.k.to(q.dtype), memory.v.to(q.dtype)  # another one if autocast was on for one of the two calls
        if mask is None:
            return F.scaled_dot_product_attention(q, k, v, scale=scale)
        return masked_attention(q, k, v, mask[:, None], scale)

    def _linear(self, q: Tensor, memory: SourceMemory, offset: int) -> Tensor:
        dtype = q.dtype
        with without_autocast(q):
            q = self._features("x", q)
            numerator = self._rotated(q, offset) @ memory.kv
            denominator = q @ memory.k_sum[..., None]
            return (numerator / (denominator + self.eps)).to(dtype)

    def _features(self, name: str, x: Tensor) -> Tensor:
        working = torch.promote_types(x.dtype, torch.float32)
        return map_features(name, x, get_feature_map(self.feature_map), self.feature_map, working)

    def _rotated(self, x: Tensor, offset: int) -> Tensor:
        return x if self.rope is None else self.rope.rotate(x, offset)

    def _check(self, name: str, x: Tensor) -> None:
        if x.ndim != 3 or x.shape[2] != self.d_model or not x.is_floating_point():
            raise InputError(
                f"{name} is {tuple(x.shape)} {x.dtype}: pass floats of shape (B, length, d_model={self.d_model})."
            )
