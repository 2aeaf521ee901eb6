"""Attention layers: projections, rotary positions, and the options around the operator.

`LinearAttention` and `SoftmaxAttention` share everything but the attention itself, so that swapping one for the other
is a fair comparison. Both map (B, T, d_model) to (B, T, d_model) and hand their past on in an `AttentionState`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from linrope.convolution import ShortConvolution
from linrope.errors import InputError, require_choice
from linrope.feature_maps import MapModule, make_feature_map
from linrope.forgetting import ForgetGate
from linrope.ops import BACKENDS, NORMALIZE, State, linear_attention
from linrope.ops.inputs import check_eps, check_segment_ids, check_signed
from linrope.rotary import RotaryConfig, RotaryEmbedding, check_config, half_of
from linrope.selective import SelectiveRotation
from linrope.softmax import KeyValueCache, softmax_attention

__all__ = ["AttentionState", "KeyValueCache", "LinearAttention", "ShortConvolution", "SoftmaxAttention"]

CONV_SILU = ("qkv", "v")


@dataclass(frozen=True)
class AttentionState:
    """What one attention layer keeps of the past.

    Attributes:
        past: the operator's `State` (linear) or a `KeyValueCache` (softmax).
        conv_tail: (B, short_conv - 1, channels), the short convolution's last inputs; None without one.
        document_start: (B,) int64, the position at which each row's open document began; None where all began at 0.
        angle: (B, H, R/2) float64, where the last token stands with `rope.selective`, in radians modulo 2π; None
            without it.
    """

    past: State | KeyValueCache
    conv_tail: Tensor | None = None
    document_start: Tensor | None = None
    angle: Tensor | None = None


def document_positions(
    x: Tensor, state: AttentionState | None, segment_ids: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Where the tokens of x (B, T, ...) stand in their own documents, for what depends on more than distances.

    Returns:
        (B, T) int64 positions, or None where row and document are one; and the `document_start` after x.

    Raises:
        InputError: a state of another batch.
    """
    start = None if state is None else state.document_start
    if start is not None and start.shape != x.shape[:1]:
        raise InputError(f"state.document_start is {tuple(start.shape)}, this call needs ({x.shape[0]},).")
    if x.shape[1] == 0 or (start is None and segment_ids is None):
        return None, start
    offset = 0 if state is None else state.past.length
    position = torch.arange(offset, offset + x.shape[1], device=x.device)
    starts = torch.zeros_like(position[:1, None]) if start is None else start[:, None]
    if segment_ids is not None:
        is_first = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))
        starts = torch.where(is_first, position, starts).cummax(dim=1).values
    return position - starts, starts[:, -1].clone()


class _Attention(nn.Module):
    """What both attentions share: q, k and v from x, the way back to d_model, and the options on that way.

    A subclass names its `past_type` and gives `attend(x, q, k, v, past, segment_ids, positions) -> (o, past)`: from
    queries, keys and values (B, H, T, D) to outputs of that shape, and the past with this call's tokens in it. Its
    `past_bytes(context, dtype)` is the size of that past for one row.
    """

    past_type: type

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        head_dim: int,
        rope: RotaryEmbedding | None,
        causal: bool,
        short_conv: int,
        conv_silu: str,
        output_norm: bool,
        output_gate: bool,
        bias: bool,
    ):
        super().__init__()
        if short_conv and not causal:
            raise InputError(f"short_conv={short_conv} looks back only: it needs causal=True.")
        require_choice("conv_silu", conv_silu, CONV_SILU)
        if conv_silu != "qkv" and not short_conv:
            raise InputError(f"conv_silu={conv_silu!r} says where SiLU follows the convolution: set short_conv.")
        if rope is not None:
            rope.check_heads(n_heads)
        self.d_model, self.n_heads, self.head_dim, self.causal = d_model, n_heads, head_dim, causal
        inner = n_heads * head_dim
        self.rope = rope
        self.selective: SelectiveRotation | None = None  # where a subclass has it
        self.qkv = nn.Linear(d_model, 3 * inner, bias=bias)
        without_silu = 2 * inner if conv_silu == "v" else 0
        self.conv = ShortConvolution(3 * inner, short_conv, without_silu) if short_conv else None
        self.norm = nn.RMSNorm(head_dim, eps=1e-5) if output_norm else None
        self.gate = nn.Linear(d_model, inner, bias=bias) if output_gate else None
        self.out = nn.Linear(inner, d_model, bias=bias)

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        segment_ids: Tensor | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, AttentionState]:
        """Attend within x and, through `state`, to what came before it.

        Args:
            x: (B, T, d_model) floats.
            state: what an earlier call on the same rows returned; causal layers only.
            segment_ids: (B, T) integers: each run of equal numbers is a document that attends to itself alone.
            return_state: also return the state after the last token.

        Returns:
            (B, T, d_model), or that and the AttentionState.

        Raises:
            InputError: x or segment_ids of another shape or dtype, a state of another layer or batch.
        """
        self._check(x, state, segment_ids)
        tail = None if state is None else state.conv_tail
        qkv = self.qkv(x)
        if self.conv is not None:
            qkv, tail = self.conv(qkv, tail, segment_ids)
        q, k, v = rearrange(qkv, "b t (three h d) -> three b h t d", three=3, h=self.n_heads)
        angle = None if state is None else state.angle
        if self.selective is not None:  # documents go on with the angle of the last: only differences count
            q, k, angle = self.selective.turn(x, q, k, self.rope, angle)
        positions, document_start = document_positions(x, state, segment_ids)
        o, past = self.attend(x, q, k, v, None if state is None else state.past, segment_ids, positions)
        if self.norm is not None:
            o = self.norm(o.to(self.norm.weight.dtype))  # in float32 under autocast, as autocast has its norms
        o = rearrange(o, "b h t d -> b t (h d)")
        if self.gate is not None:
            o = o * F.silu(self.gate(x))
        y = self.out(o)
        return (y, AttentionState(past, tail, document_start, angle)) if return_state else y

    def state_bytes(self, context: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the state of one row after `context` tokens, with activations in `dtype`."""
        tail = 0 if self.conv is None else self.conv.weight[:, 1:].numel() * dtype.itemsize
        return tail + self.past_bytes(context, dtype)

    def _check(self, x: Tensor, state: AttentionState | None, segment_ids: Tensor | None) -> None:
        if x.ndim != 3 or x.shape[2] != self.d_model or not x.is_floating_point():
            raise InputError(f"x is {tuple(x.shape)} {x.dtype}: pass floats of shape (B, T, d_model={self.d_model}).")
        if segment_ids is not None:
            check_segment_ids(segment_ids, x.shape[0], x.shape[1], x.device)
        if state is None:
            return
        if not self.causal:
            raise InputError("state was given to a layer with causal=False: only causal layers continue a sequence.")
        if not isinstance(state, AttentionState) or not isinstance(state.past, self.past_type):
            kind = type(getattr(state, "past", state)).__name__
            raise InputError(f"state holds a {kind}: pass the AttentionState that {type(self).__name__} returned.")
        if (state.conv_tail is None) != (self.conv is None):
            raise InputError("state.conv_tail does not fit short_conv: pass the state that this layer returned.")
        if self.conv is not None:
            expected = (x.shape[0], self.conv.width - 1, self.conv.weight.shape[0])
            if state.conv_tail.shape != expected:
                raise InputError(f"state.conv_tail is {tuple(state.conv_tail.shape)}, this call needs {expected}.")
        if self.selective is not None:
            self.selective.check_past(state.angle, x.shape[0])
        elif state.angle is not None:
            raise InputError("state.angle was given to a layer without rope.selective: pass what this layer returned.")


def _head_dim(d_model: int, n_heads: int, head_dim: int | None) -> int:
    if n_heads < 1 or d_model < 1:
        raise InputError(f"d_model={d_model} and n_heads={n_heads} must be at least 1.")
    if head_dim is None and d_model % n_heads:
        raise InputError(f"n_heads={n_heads} does not divide d_model={d_model}: change one, or give head_dim.")
    return d_model // n_heads if head_dim is None else head_dim


def _embedding(rope: RotaryConfig | None, head_dim: int, n_features: int | None = None) -> RotaryEmbedding | None:
    """What turns heads, or the features made of them: an odd number of those all but the last."""
    if rope is None:
        return None
    if n_features is None or rope.before_map:
        return RotaryEmbedding.from_config(head_dim, rope)
    if rope.rotary_dim is None and n_features != head_dim:
        rope = replace(rope, rotary_dim=half_of(head_dim) if rope.signed else n_features // 2 * 2)
    return RotaryEmbedding.from_config(n_features, rope)


def _signed_dim(rope: RotaryConfig | None, head_dim: int, normalize: str) -> int:
    """How many dimensions of a head skip the feature map, since they turn with either sign."""
    if rope is None or not rope.signed:
        return 0
    if rope.before_map:
        raise InputError("rope.before_map=True turns what φ is of, rope.signed=True what it is not of: drop one.")
    signed = half_of(head_dim) if rope.rotary_dim is None else rope.rotary_dim
    check_signed(signed, head_dim, normalize)
    return signed


def _check_selective(rope: RotaryConfig | None, causal: bool) -> None:
    if rope is None or not rope.selective:
        return
    if not rope.signed:
        raise InputError("rope.selective=True turns dimensions that skip the feature map: set rope.signed=True too.")
    if not causal:
        raise InputError("rope.selective=True sums angles along the row: it needs causal=True.")


class LinearAttention(_Attention):
    """Linear attention with rotary positions in the numerator only (RoFormer eq. 19), as a layer.

    By default the plain form: q, k, v = W x, `linear_attention`, W_o. Its state does not grow with the length.

    Where RoPE stands is one of five: in neither sum (`rope=None`), in the numerator (the default), in both
    (`normalize="rotary"`), before φ (`RotaryConfig(before_map=True)`), where both sums see φ of what was turned:
    weights stay positive, and depend on positions themselves, not on distances alone; or in the numerator with either
    sign (`RotaryConfig(signed=True)`): half of the dimensions turn, and skip φ and the denominator. Those can turn by
    angles that the input decides (`RotaryConfig(signed=True, selective=True)`, see `linrope.selective`).

    Args:
        d_model: width of the model.
        n_heads: number of heads H.
        head_dim: size of each head; None for d_model / n_heads.
        rope: how queries and keys turn; None for no positions.
        feature_map: φ, a name of `linrope.feature_maps.FEATURE_MAP_NAMES`, or a callable that keeps the head's size (a
            module is trained and saved with the layer). "favor", "hedgehog" and "taylor" are modules made for these
            heads; RoPE turns their features, all or all but the last.
        temperature: learn a scale for each head inside φ: φ(e^τ x) with τ = 0 at the start, for queries and keys alike
            (and for dimensions that skip φ).
        normalize: the denominator: "plain", "rotary" or "none" (see `linear_attention`).
        causal: see earlier tokens only; False sees all.
        short_conv: tokens seen by a depthwise causal convolution with SiLU on q, k and v (4 is usual); 0 for none.
        conv_silu: where SiLU follows that convolution: "qkv", or "v" alone, so that q and k take either sign. After
            SiLU they are at least -0.28 and elu + 1 of them at least 0.75: no feature comes near 0.
        forget_gate: learn a decay for each head and token, `log_decay = logsigmoid(W x + b)`, which starts slow
            (W = 0, b = 4: half is forgotten in 38 tokens).
        gate_normalizer: r ≥ 1 that divides the forget gate's log decay, a number for all heads (16 in GLA, arXiv
            2312.06635) or one for each: the larger, the longer a head remembers (see `linrope.forgetting`).
        output_norm: RMSNorm (ε = 10⁻⁵, one weight for all heads) over each head's output, before the gate. It undoes
            the division by the denominator, up to ε: the scale of each o_i is lost.
        output_gate: multiply the heads' output by `silu(W x)`.
        bias: whether the projections have biases.
        eps: ε of the denominator.
        backend: see `linear_attention`.

    Raises:
        InputError: sizes that do not fit, unknown names, `short_conv` or `forget_gate` with `causal=False`,
            `rope.before_map` or `rope.signed` with `normalize="rotary"`, or with each other, `rope.selective` without
            `rope.signed` or with `causal=False`.
    """

    past_type = State

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        head_dim: int | None = None,
        rope: RotaryConfig | None = RotaryConfig(),
        feature_map: str | Callable[[Tensor], Tensor] = "elu1",
        temperature: bool = False,
        normalize: str = "plain",
        causal: bool = True,
        short_conv: int = 0,
        conv_silu: str = "qkv",
        forget_gate: bool = False,
        gate_normalizer: float | Sequence[float] = 1.0,
        output_norm: bool = False,
        output_gate: bool = False,
        bias: bool = False,
        eps: float = 1e-6,
        backend: str = "auto",
    ):
        if forget_gate and not causal:
            raise InputError("forget_gate=True needs causal=True: forgetting is defined for causal attention only.")
        if gate_normalizer != 1 and not forget_gate:
            raise InputError(f"gate_normalizer={gate_normalizer} divides the forget gate's log decay: set forget_gate.")
        require_choice("normalize", normalize, NORMALIZE)
        require_choice("backend", backend, ("auto", *BACKENDS))
        check_eps(eps)
        check_config(rope)
        before_map = rope is not None and rope.before_map
        if before_map and normalize == "rotary":
            raise InputError("rope.before_map=True turns nothing after φ, normalize='rotary' sums what is: drop one.")
        _check_selective(rope, causal)
        head_dim = _head_dim(d_model, n_heads, head_dim)
        signed = _signed_dim(rope, head_dim, normalize)
        phi = make_feature_map(feature_map, n_heads, head_dim - signed)
        n_features = signed + phi.n_features if isinstance(phi, MapModule) else head_dim
        super().__init__(
            d_model,
            n_heads,
            head_dim=head_dim,
            rope=_embedding(rope, head_dim, n_features),
            causal=causal,
            short_conv=short_conv,
            conv_silu=conv_silu,
            output_norm=output_norm,
            output_gate=output_gate,
            bias=bias,
        )
        self.feature_map = phi  # a module becomes part of this one
        self.n_features = n_features
        self.before_map = before_map
        self.options = {"normalize": normalize, "eps": eps, "backend": backend}
        self.watch: Callable[..., None] | None = None  # see linrope.watching
        self.log_scale = nn.Parameter(torch.zeros(n_heads)) if temperature else None
        self.forget = ForgetGate(d_model, n_heads, gate_normalizer) if forget_gate else None
        if rope is not None and rope.selective:
            self.selective = SelectiveRotation(d_model, n_heads, self.rope)

    def attend(self, x, q, k, v, past, segment_ids, positions):
        if self.log_scale is not None:
            scale = self.log_scale.exp()[:, None, None]
            q, k = (q * scale).to(q.dtype), (k * scale).to(k.dtype)
        if self.before_map:
            # φ(R_i q)ᵀφ(R_j k) is no function of i - j alone: documents of a packed row each start at 0
            where = (
                {"positions": positions} if positions is not None else {"offset": 0 if past is None else past.length}
            )
            q, k = self.rope.rotate(q, **where), self.rope.rotate(k, **where)
        rope = self.rope if self.selective is None else self.selective.at_rest
        options = {
            "rope": None if self.before_map else rope,
            "log_decay": None if self.forget is None else self.forget(x),
            "causal": self.causal,
            "segment_ids": segment_ids,
            "state": past,
            "feature_map": self.feature_map,
            **self.options,
        }
        dtype = v.dtype
        # turned by the input: rounded, the gradients of q and k would not cancel where those of angles do
        with nullcontext() if self.selective is None else torch.autocast(q.device.type, enabled=False):
            v = v.to(q.dtype)
            o, final = linear_attention(q, k, v, **options, return_state=True)
        if self.watch is not None:
            self.watch(q, k, v, options, o, final)
        return o.to(dtype), final

    def past_bytes(self, context, dtype):
        sums = 2 if self.options["normalize"] == "rotary" else 1
        working = torch.promote_types(dtype, torch.float32)
        angles = 0 if self.selective is None else math.prod(self.selective.n_angles) * torch.float64.itemsize
        return self.n_heads * (self.n_features * (self.head_dim + sums) + 1) * working.itemsize + angles


class SoftmaxAttention(_Attention):
    """The baseline: RoPE on q and k, then `scaled_dot_product_attention`; a key-value cache for decoding.

    The arguments are those of `LinearAttention`, without the ones that only linear attention has, and:

    Args:
        window: see the last `window` tokens only, the present one included, in time and memory linear in the length and
            with a cache that holds `window - 1`; None sees all.

    Raises:
        InputError: sizes that do not fit, a window below 1, `short_conv` or a window with `causal=False`.
    """

    past_type = KeyValueCache

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        head_dim: int | None = None,
        rope: RotaryConfig | None = RotaryConfig(),
        window: int | None = None,
        causal: bool = True,
        short_conv: int = 0,
        conv_silu: str = "qkv",
        output_norm: bool = False,
        output_gate: bool = False,
        bias: bool = False,
    ):
        if window is not None and window < 1:
            raise InputError(f"window={window} must be at least 1, the token itself; None sees all.")
        if window is not None and not causal:
            raise InputError(f"window={window} looks back only: it needs causal=True.")
        check_config(rope)
        head_dim = _head_dim(d_model, n_heads, head_dim)
        super().__init__(
            d_model,
            n_heads,
            head_dim=head_dim,
            rope=_embedding(None if rope is None else replace(rope, signed=False), head_dim),
            causal=causal,
            short_conv=short_conv,
            conv_silu=conv_silu,
            output_norm=output_norm,
            output_gate=output_gate,
            bias=bias,
        )
        self.window = window

    def attend(self, x, q, k, v, past, segment_ids, positions):
        scale = None
        if self.rope is not None:
            offset = 0 if past is None else past.length
            q, k = self.rope.rotate(q, offset), self.rope.rotate(k, offset)
            if self.rope.logit_scale != 1.0:
                scale = self.rope.logit_scale**2 * self.head_dim**-0.5
        return softmax_attention(
            q, k, v, causal=self.causal, window=self.window, segment_ids=segment_ids, cache=past, scale=scale
        )

    def past_bytes(self, context, dtype):
        kept = context if self.window is None else min(context, self.window - 1)
        return 2 * self.n_heads * self.head_dim * kept * dtype.itemsize
