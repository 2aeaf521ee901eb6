"""Attention layers: projections, rotary positions, and the options around the operator.

`LinearAttention` and `SoftmaxAttention` share everything but the attention itself, so that swapping one for the other
is a fair comparison. Both map (B, T, d_model) to (B, T, d_model) and hand their past on in an `AttentionState`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from linrope.errors import InputError, require_choice
from linrope.feature_maps import get_feature_map
from linrope.ops import BACKENDS, NORMALIZE, State, linear_attention
from linrope.ops.inputs import check_segment_ids, number_documents
from linrope.rotary import RotaryConfig, RotaryEmbedding


@dataclass(frozen=True)
class KeyValueCache:
    """The past of softmax attention: every key and value, so it grows with the length.

    Attributes:
        k, v: (B, H, S, D) rotated keys, and values.
        visible: (B, S) False for keys of documents that have ended; None where all are visible.
    """

    k: Tensor
    v: Tensor
    visible: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens seen; the next token stands at this position."""
        return self.k.shape[2]


@dataclass(frozen=True)
class AttentionState:
    """What one attention layer keeps of the past.

    Attributes:
        past: the operator's `State` (linear) or a `KeyValueCache` (softmax).
        conv_tail: (B, short_conv - 1, channels), the short convolution's last inputs; None without one.
    """

    past: State | KeyValueCache
    conv_tail: Tensor | None = None


class ShortConvolution(nn.Module):
    """Depthwise causal convolution over the last few tokens, then SiLU.

        y_t = silu(Σ_i w_i x_{t - width + 1 + i})

    Args:
        channels: C, each with its own `width` weights.
        width: tokens seen, the present one included; at least 2.
    """

    def __init__(self, channels: int, width: int):
        super().__init__()
        if width < 2:
            raise InputError(f"short_conv={width}: a convolution sees at least 2 tokens (0 leaves it out).")
        self.width = width
        self.weight = nn.Parameter(torch.empty(channels, width).uniform_(-(width**-0.5), width**-0.5))

    def forward(self, x: Tensor, tail: Tensor | None = None, segment_ids: Tensor | None = None):
        """(B, T, C) -> (B, T, C) and the tail (B, width - 1, C) to continue from. Documents do not see each other."""
        if tail is None:
            tail = x.new_zeros(x.shape[0], self.width - 1, x.shape[2])
        padded = torch.cat((tail.to(x.dtype), x), dim=1)
        tail = padded[:, x.shape[1] :].clone()  # a view would keep all of `padded` alive
        if segment_ids is None or x.shape[1] == 0:
            # oneDNN's convolution is three times faster on long inputs, and slower on short ones and in float64
            fast = x.shape[1] >= 256 and x.dtype != torch.float64
            return F.silu(self._as_image(padded) if fast else self._sum_of_taps(padded)), tail
        document = F.pad(number_documents(segment_ids), (self.width - 1, 0))  # the tail belongs to the first one
        still_open = (document == document[:, -1:])[:, x.shape[1] :, None]
        return F.silu(self._sum_of_taps(padded, document)), tail * still_open

    def _sum_of_taps(self, padded: Tensor, document: Tensor | None = None) -> Tensor:
        """The formula: (B, width - 1 + T, C) -> (B, T, C), each token seeing those of its own document."""
        weight, length = self.weight.to(padded.dtype), padded.shape[1] - self.width + 1
        y = padded[:, self.width - 1 :] * weight[:, -1]
        for i in range(self.width - 1):
            seen = padded[:, i : i + length]
            if document is not None:
                seen = seen * (document[:, i : i + length] == document[:, self.width - 1 :])[..., None]
            y = torch.addcmul(y, seen, weight[:, i])
        return y

    def _as_image(self, padded: Tensor) -> Tensor:
        """The same as a channels-last conv2d of height 1, for which (B, T, C) needs no copy."""
        image = padded.mT.unsqueeze(2)
        weight = self.weight.to(padded.dtype)[:, None, None, :]
        return F.conv2d(image, weight, groups=weight.shape[0]).squeeze(2).mT


class _Attention(nn.Module):
    """What both attentions share: q, k and v from x, the way back to d_model, and the options on that way.

    A subclass names its `past_type` and gives `attend(x, q, k, v, past, segment_ids) -> (o, past)`: from queries, keys
    and values (B, H, T, D) to outputs of that shape, and the past with this call's tokens in it. Its
    `past_bytes(context, dtype)` is the size of that past for one row.
    """

    past_type: type

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        head_dim: int | None,
        rope: RotaryConfig | None,
        causal: bool,
        short_conv: int,
        output_gate: bool,
        bias: bool,
    ):
        super().__init__()
        if n_heads < 1 or d_model < 1:
            raise InputError(f"d_model={d_model} and n_heads={n_heads} must be at least 1.")
        if head_dim is None and d_model % n_heads:
            raise InputError(f"n_heads={n_heads} does not divide d_model={d_model}: change one, or give head_dim.")
        if short_conv and not causal:
            raise InputError(f"short_conv={short_conv} looks back only: it needs causal=True.")
        self.d_model, self.n_heads, self.causal = d_model, n_heads, causal
        self.head_dim = d_model // n_heads if head_dim is None else head_dim
        inner = n_heads * self.head_dim
        self.rope = None if rope is None else RotaryEmbedding.from_config(self.head_dim, rope)
        self.qkv = nn.Linear(d_model, 3 * inner, bias=bias)
        self.conv = ShortConvolution(3 * inner, short_conv) if short_conv else None
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
        o, past = self.attend(x, q, k, v, None if state is None else state.past, segment_ids)
        o = rearrange(o, "b h t d -> b t (h d)")
        if self.gate is not None:
            o = o * F.silu(self.gate(x))
        y = self.out(o)
        return (y, AttentionState(past, tail)) if return_state else y

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


class LinearAttention(_Attention):
    """Linear attention with rotary positions in the numerator only (RoFormer eq. 19), as a layer.

    By default the plain form: q, k, v = W x, `linear_attention`, W_o. Its state does not grow with the length.

    Args:
        d_model: width of the model.
        n_heads: number of heads H.
        head_dim: size of each head; None for d_model / n_heads.
        rope: how queries and keys turn; None for no positions.
        feature_map: φ, a name of `linrope.feature_maps.FEATURE_MAPS`, or a callable that keeps the head's size (a
            module is trained and saved with the layer).
        normalize: the denominator: "plain", "rotary" or "none" (see `linear_attention`).
        causal: see earlier tokens only; False sees all.
        short_conv: tokens seen by a depthwise causal convolution with SiLU on q, k and v (4 is usual); 0 for none.
        forget_gate: learn a decay for each head and token, `log_decay = logsigmoid(W x + b)`, which starts slow
            (W = 0, b = 4: half is forgotten in 38 tokens).
        output_gate: multiply the heads' output by `silu(W x)`.
        bias: whether the projections have biases.
        eps: ε of the denominator.
        backend: see `linear_attention`.

    Raises:
        InputError: sizes that do not fit, unknown names, `short_conv` or `forget_gate` with `causal=False`.
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
        normalize: str = "plain",
        causal: bool = True,
        short_conv: int = 0,
        forget_gate: bool = False,
        output_gate: bool = False,
        bias: bool = False,
        eps: float = 1e-6,
        backend: str = "auto",
    ):
        super().__init__(
            d_model,
            n_heads,
            head_dim=head_dim,
            rope=rope,
            causal=causal,
            short_conv=short_conv,
            output_gate=output_gate,
            bias=bias,
        )
        if forget_gate and not causal:
            raise InputError("forget_gate=True needs causal=True: forgetting is defined for causal attention only.")
        get_feature_map(feature_map)
        require_choice("normalize", normalize, NORMALIZE)
        require_choice("backend", backend, ("auto", *BACKENDS))
        self.feature_map = feature_map  # a module becomes part of this one
        self.options = {"normalize": normalize, "eps": eps, "backend": backend}
        self.forget = nn.Linear(d_model, n_heads) if forget_gate else None
        if self.forget is not None:
            nn.init.zeros_(self.forget.weight)
            nn.init.constant_(self.forget.bias, 4.0)

    def attend(self, x, q, k, v, past, segment_ids):
        return linear_attention(
            q,
            k,
            v,
            self.rope,
            log_decay=self._log_decay(x),
            causal=self.causal,
            segment_ids=segment_ids,
            state=past,
            return_state=True,
            feature_map=self.feature_map,
            **self.options,
        )

    def past_bytes(self, context, dtype):
        sums = 2 if self.options["normalize"] == "rotary" else 1
        working = torch.promote_types(dtype, torch.float32)
        return self.n_heads * (self.head_dim**2 + sums * self.head_dim + 1) * working.itemsize

    def _log_decay(self, x: Tensor) -> Tensor | None:
        """(B, H, T) in float32 at least: decays live near 0, and sums of bfloat16's three digits drift."""
        if self.forget is None:
            return None
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, torch.float32)
            logits = F.linear(x.to(dtype), self.forget.weight.to(dtype), self.forget.bias.to(dtype))
            return rearrange(F.logsigmoid(logits), "b t h -> b h t")


class SoftmaxAttention(_Attention):
    """The baseline: RoPE on q and k, then `scaled_dot_product_attention`; a key-value cache for decoding.

    The arguments are those of `LinearAttention`, without the ones that only linear attention has.
    """

    past_type = KeyValueCache

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        head_dim: int | None = None,
        rope: RotaryConfig | None = RotaryConfig(),
        causal: bool = True,
        short_conv: int = 0,
        output_gate: bool = False,
        bias: bool = False,
    ):
        super().__init__(
            d_model,
            n_heads,
            head_dim=head_dim,
            rope=rope,
            causal=causal,
            short_conv=short_conv,
            output_gate=output_gate,
            bias=bias,
        )

    def attend(self, x, q, k, v, past, segment_ids):
        if self.rope is not None:
            offset = 0 if past is None else past.length
            q, k = self.rope.rotate(q, offset), self.rope.rotate(k, offset)
        visible = None
        if past is not None:
            if past.k.shape[:2] != k.shape[:2] or past.k.shape[3] != k.shape[3]:
                raise InputError(f"state.past.k is {tuple(past.k.shape)}, this call's keys are {tuple(k.shape)}.")
            k, v = torch.cat((past.k.to(k.dtype), k), dim=2), torch.cat((past.v.to(v.dtype), v), dim=2)
            visible = past.visible
        mask = self._mask(q.shape[2], k.shape[2], visible, segment_ids, q.device)
        if q.shape[2] == 0:
            o = v[:, :, :0]
        else:
            whole = self.causal and mask is None and q.shape[2] > 1
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=whole)
        # k and v may be views of all three projections, which a cache should not keep alive
        k, v = k.contiguous(), v.contiguous()
        return o, KeyValueCache(k, v, self._still_visible(q.shape[2], k.shape[2], visible, segment_ids))

    def past_bytes(self, context, dtype):
        return 2 * self.n_heads * self.head_dim * context * dtype.itemsize

    def _mask(self, n_queries: int, n_keys: int, visible, segment_ids, device) -> Tensor | None:
        """(B or 1, 1, T, S) booleans, or None where causality alone, or nothing, hides a key."""
        n_past = n_keys - n_queries
        if visible is None and segment_ids is None and (n_past == 0 or n_queries == 1):
            return None
        mask = torch.ones(1, n_queries, n_keys, dtype=torch.bool, device=device)
        if self.causal:
            mask = mask.tril(n_past)
        if segment_ids is not None and n_queries:
            document = number_documents(segment_ids)
            of_key = F.pad(document, (n_past, 0))  # the past belongs to the first document
            mask = mask & (document[:, :, None] == of_key[:, None, :])
        if visible is not None:
            mask = mask & F.pad(visible, (0, n_queries), value=True)[:, None, :]
        return mask[:, None]

    @staticmethod
    def _still_visible(n_queries: int, n_keys: int, visible, segment_ids) -> Tensor | None:
        """Which keys the next call may see: those of the last document."""
        if visible is not None:
            visible = F.pad(visible, (0, n_queries), value=True)
        if segment_ids is None or n_queries == 0:
            return visible
        document = number_documents(segment_ids)
        last = F.pad(document, (n_keys - n_queries, 0)) == document[:, -1:]
        return last if visible is None else last & visible
