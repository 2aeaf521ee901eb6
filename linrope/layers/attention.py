"""The base of attention layers: projections, options, and the checks of what a layer is called with."""

from __future__ import annotations

import math
from numbers import Real
from typing import TypedDict

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from linrope.errors import InputError, require_choice
from linrope.layers.initialisation import reset
from linrope.layers.linear import ALL, Linear
from linrope.layers.norm import RMSNorm
from linrope.layers.short_convolution import ShortConvolution
from linrope.layers.state import AttentionState, RemotePast, token_positions
from linrope.ops.checks import check_tensor
from linrope.ops.softmax import KeyValueCache, repeat_heads
from linrope.ops.state import State
from linrope.rotary import RotaryEmbedding
from linrope.utils.options import require_whole

CONV_SILU = ("qkv", "v")


class AttentionOptions(TypedDict, total=False):
    """Options of all attention layers."""

    short_conv: int
    """Tokens seen by a depthwise causal convolution with SiLU on q, k and v (4 is usual); 0, the default, for none."""
    conv_silu: str
    """Where SiLU follows that convolution: "qkv" (default), or "v" alone, so that q and k take either sign. After SiLU
    they are at least -0.28 and elu + 1 of them is at least 0.75: no feature comes close to 0."""
    output_norm: bool
    """RMSNorm (ε = 10⁻⁵, one weight for all heads) over each head's output, before the gate. It cancels the division by
    the denominator, up to ε: the scale of each o_i is lost."""
    output_gate: bool
    """Multiply the heads' output by `silu(W x)`."""
    bias: bool
    """Whether the projections have biases."""
    rotate_values: bool
    """Rotate the values by their positions too, as `rotary_value` of transformers' RoFormer does; needs `rope`."""
    n_kv_heads: int | None
    """Heads of keys and values, which divide the query heads: each is shared by as many query heads (grouped queries,
    arXiv 2305.13245). None for as many as there are query heads."""
    qkv_bias: bool
    """Whether queries, keys and values have biases where the other projections have none, as in Qwen2."""
    qk_norm: float | None
    """ε of RMSNorms over each head's queries and keys, before they are rotated, with one weight for all heads, as in
    Qwen3; None for no norms."""


class Attention(nn.Module):
    """Base of the attention layers: from x to q, k and v, and from the heads' outputs back to d_model.

    The layers differ in the attention itself only, so that a comparison is fair. A subclass sets
    `past_type` and defines `attend` and `past_bytes`.

    Args:
        d_model, n_heads, head_dim, causal: see `LinearAttention`.
        rope: rotates queries and keys; None for no positions.
        short_conv, conv_silu, output_norm, output_gate, bias, rotate_values, n_kv_heads, qkv_bias, qk_norm: see
            `AttentionOptions`.
    """

    past_type: type
    """Type of `AttentionState.past`."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        head_dim: int,
        rope: RotaryEmbedding | None,
        causal: bool = True,
        short_conv: int = 0,
        conv_silu: str = "qkv",
        output_norm: bool = False,
        output_gate: bool = False,
        bias: bool = False,
        rotate_values: bool = False,
        n_kv_heads: int | None = None,
        qkv_bias: bool = False,
        qk_norm: float | None = None,
    ):
        super().__init__()
        if rotate_values and (rope is None or rope.dim != head_dim):
            found = "None" if rope is None else f"one of {rope.dim} features"
            raise InputError(
                f"rotate_values=True rotates values of {head_dim} features as queries and keys, and the layer's rope "
                f"is {found}: set rope, and no feature map or layer that adds or removes features."
            )
        if short_conv and not causal:
            raise InputError(f"short_conv={short_conv} sees earlier tokens only: it needs causal=True.")
        require_choice("conv_silu", conv_silu, CONV_SILU)
        if conv_silu != "qkv" and not short_conv:
            raise InputError(f"conv_silu={conv_silu!r} is an option of the short convolution: set short_conv.")
        if rope is not None:
            rope.check_heads(n_heads)
        _check_qk_norm(qk_norm)
        self.d_model, self.n_heads, self.head_dim, self.causal = d_model, n_heads, head_dim, causal
        self.n_kv_heads = checked_kv_heads(n_heads, n_kv_heads)
        inner, of_keys = n_heads * head_dim, self.n_kv_heads * head_dim
        self.rope, self.rotate_values = rope, rotate_values
        self.qkv = Linear(d_model, inner + 2 * of_keys, bias=bias or qkv_bias)
        self.q_norm = None if qk_norm is None else RMSNorm(head_dim, eps=qk_norm)
        self.k_norm = None if qk_norm is None else RMSNorm(head_dim, eps=qk_norm)
        without_silu = inner + of_keys if conv_silu == "v" else 0
        self.conv = ShortConvolution(inner + 2 * of_keys, short_conv, without_silu) if short_conv else None
        self.norm = RMSNorm(head_dim, eps=1e-5) if output_norm else None
        self.gate = Linear(d_model, inner, bias=bias) if output_gate else None
        self.out = Linear(inner, d_model, bias=bias)

    def reset_parameters(self) -> None:
        """Initialise the layer anew, after `to_empty` for example: with the same seed, as its constructor does."""
        for module in (self.rope, self.qkv, self.q_norm, self.k_norm, self.conv, self.norm, self.gate, self.out):
            reset(module)

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        segment_ids: Tensor | None = None,
        return_state: bool = False,
        key_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, AttentionState]:
        """Attention within x, and through `state` to the tokens before x.

        Args:
            x: (B, T, d_model) floats.
            state: returned by an earlier call on the same rows; causal layers only.
            segment_ids: (B, T) integers of packed rows: each run of equal numbers is a document, which attends to
                itself only. The first one continues that of `state`: `state.reset_rows` where a new document begins.
            return_state: also return the state after the last token.
            key_mask: (B, T) booleans, False for padding: no other token sees it, also through the convolution, and the
                past is not forgotten there. It has positions, so pad on the left where a row is to be continued.
                Without causality padding sees the tokens of its row, and a row of padding alone has outputs of 0 before
                `out`.

        Returns:
            (B, T, d_model), or that and the AttentionState. Outputs at padding mean nothing.

        Raises:
            InputError: x, segment_ids or key_mask of the wrong shape or dtype, a state of another layer or batch.
        """
        x = self._checked(x, state, key_mask)
        o, gate, state = self._run(x, state, segment_ids, key_mask, outputs=True)
        if self.norm is not None:
            o = self.norm(o.to(self.norm.weight.dtype))  # float32 under autocast, which keeps norms in it
        o = rearrange(o, "b h t d -> b t (h d)")
        if self.gate is not None:
            o = o * F.silu(self.gate(x) if gate is None else gate)
        y = self.out(o)
        return (y, state) if return_state else y

    def advance(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        segment_ids: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> AttentionState:
        """The state that `forward` returns, without the time for the outputs; the arguments are those of `forward`."""
        return self._run(self._checked(x, state, key_mask), state, segment_ids, key_mask, outputs=False)[-1]

    def _run(
        self,
        x: Tensor,
        state: AttentionState | None,
        segment_ids: Tensor | None,
        key_mask: Tensor | None,
        outputs: bool,
    ) -> tuple[Tensor | None, Tensor | None, AttentionState]:
        """The heads' outputs (B, H, T, D), None without `outputs`; what the gate's layer returns, None if it was not
        called; and the state after x."""
        positions, document_start = token_positions(x, state, segment_ids)
        before = AttentionState(None) if state is None else state
        projected = _Projected(self, x, before, segment_ids, key_mask, outputs)
        k, v = (self.of_query_heads(x) for x in projected.keys_and_values())
        if self.rotate_values:
            v = self.rope.rotate(v, **positions_within(before.past, positions))
        o, past = self.attend(x, projected.queries, k, v, before.past, segment_ids, key_mask, positions, outputs)
        return o, projected.gate, AttentionState(past, projected.tail(), document_start)

    def of_query_heads(self, x: Tensor) -> Tensor:
        """Keys or values (B, n_kv_heads, T, D) as `attend` takes them: here of each query head, (B, H, T, D)."""
        return repeat_heads(x, self.n_heads)

    def attend(self, x, queries, k, v, past, segment_ids, key_mask, positions, outputs):
        """Outputs (B, H, T, D), None without `outputs`, and the past after these tokens.

        The past is None at the start, and a `RemotePast` where other devices hold earlier tokens: then `queries()`,
        which returns q, is called while their state is under way. `positions` are those within documents (B, T); None
        if they are those of the row.
        """
        raise NotImplementedError

    @property
    def past_rope(self) -> RotaryEmbedding | None:
        """What has rotated the keys that the past holds; None if nothing has."""
        return self.rope

    @property
    def sees_positions(self) -> bool:
        """Whether outputs depend on positions themselves, and not on their differences alone."""
        return self.rotate_values

    def past_bytes(self, context: int, dtype: torch.dtype) -> int:
        """Bytes of one row's past after `context` tokens, with activations in `dtype`."""
        raise NotImplementedError

    def state_bytes(self, context: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of one row's state after `context` tokens, with activations in `dtype`."""
        tail = 0 if self.conv is None else self.conv.weight[:, 1:].numel() * dtype.itemsize
        return tail + self.past_bytes(context, dtype)

    def _checked(self, x: Tensor, state: AttentionState | None, key_mask: Tensor | None) -> Tensor:
        """x with 0 in place of padding, which may hold anything; without causality, where padding has outputs, only in
        place of what is not finite. InputError if they do not fit the layer."""
        self._check(x, state)
        if key_mask is None:
            return x
        check_tensor("key_mask", key_mask, "booleans", "(B, T)", x.shape[:2], x.device)
        hidden = ~key_mask[..., None]
        return x.masked_fill(hidden if self.causal else hidden & ~x.isfinite(), 0)

    def _check(self, x: Tensor, state: AttentionState | None) -> None:
        if not isinstance(x, Tensor):
            raise InputError(f"x is a {type(x).__name__}: pass a tensor (B, T, d_model={self.d_model}) of floats.")
        if x.ndim != 3 or x.shape[2] != self.d_model or not x.is_floating_point():
            raise InputError(f"x is {tuple(x.shape)} {x.dtype}: pass floats of shape (B, T, d_model={self.d_model}).")
        if isinstance(state, AttentionState) and isinstance(state.past, RemotePast):
            state = state.past.initial
        if state is None:
            return
        if not self.causal:
            raise InputError("state was given to a layer with causal=False: only causal layers continue a sequence.")
        if not isinstance(state, AttentionState) or not isinstance(state.past, self.past_type):
            found = type(getattr(state, "past", state)).__name__
            hint = " q, k and v are all made from x; a padding mask is `key_mask`." if isinstance(state, Tensor) else ""
            raise InputError(
                f"state holds a {found}: pass the AttentionState that {type(self).__name__} returned.{hint}"
            )
        tail = None if self.conv is None else (x.shape[0], self.conv.width - 1, self.conv.weight.shape[0])
        found = None if state.conv_tail is None else tuple(state.conv_tail.shape)
        if found != tail:
            raise InputError(
                f"state.conv_tail is {found}, this call needs {tail}: pass the state that this layer, or one with the "
                "same short_conv, returned for the same rows."
            )


class _Projected:
    """Queries, keys and values of one call, after the convolution.

    Where other devices hold earlier tokens, linear layers exchange the state that keys and values leave. There these
    two come first. Queries and the output gate are computed while the exchange is under way.
    """

    def __init__(
        self,
        layer: Attention,
        x: Tensor,
        before: AttentionState,
        segment_ids: Tensor | None,
        key_mask: Tensor | None,
        outputs: bool,
    ) -> None:
        self.layer, self.x, self.segment_ids, self.outputs = layer, x, segment_ids, outputs
        self.hidden = None
        if key_mask is not None and layer.causal:
            # for the convolution padding is as the zeros before a row, whatever the bias
            self.hidden = ~key_mask[..., None]
        self.is_remote = isinstance(before.past, RemotePast)
        # an adapter around `qkv` has no parts, and a window's keys are not waited for apart
        self.in_parts = self.is_remote and layer.past_type is State and isinstance(layer.qkv, Linear)
        self.of_queries = slice(0, layer.n_heads * layer.head_dim)
        self.tail_before = None
        if layer.conv is not None:
            self.tail_before, n = before.conv_tail, layer.conv.width - 1
            if self.is_remote:
                self.tail_before = before.past.exchange_tail(self._last_inputs(n), n)
        self.q: Tensor | None = None
        self.gate: Tensor | None = None
        self.tails: list[Tensor] = []

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """k and v, (B, n_kv_heads, T, D)."""
        n_heads, n_kv_heads = self.layer.n_heads, self.layer.n_kv_heads
        if self.in_parts:
            k, v = self._heads(slice(self.of_queries.stop, self.layer.qkv.out_features), n_kv_heads, n_kv_heads)
        else:
            q, k, v = self._heads(ALL, n_heads, n_kv_heads, n_kv_heads)
            self.q = _normed(q, self.layer.q_norm)
        return _normed(k, self.layer.k_norm), v

    def queries(self) -> Tensor:
        """q, (B, H, T, D); with `outputs` also the gate, where there is an exchange to be waited for."""
        if self.q is None:
            (q,) = self._heads(self.of_queries, self.layer.n_heads)
            self.q = _normed(q, self.layer.q_norm)
        if self.is_remote and self.outputs and self.layer.gate is not None:
            self.gate = self.layer.gate(self.x)
        return self.q

    def tail(self) -> Tensor | None:
        """The `conv_tail` after x."""
        if self.layer.conv is None:
            return None
        if self.q is None:
            self.queries()
        return self.tails[0] if len(self.tails) == 1 else torch.cat(self.tails[::-1], dim=-1)

    def _heads(self, channels: slice, *n_heads: int) -> list[Tensor]:
        """These of queries, keys and values, each (B, n, T, D) with its number n of heads."""
        y = self._hide(self.layer.qkv(self.x) if channels == ALL else self.layer.qkv(self.x, channels))
        if self.layer.conv is not None:
            before = None if self.tail_before is None else self.tail_before[..., channels]
            y, tail = self.layer.conv(y, before, self.segment_ids, channels)
            self.tails.append(tail)
        d = self.layer.head_dim
        return [rearrange(part, "b t (h d) -> b h t d", d=d) for part in y.split([n * d for n in n_heads], dim=-1)]

    def _last_inputs(self, n: int) -> Tensor:
        """The convolution's inputs at the last n tokens, or all if there are fewer, (B, ≤ n, C)."""
        return self._hide(self.layer.qkv(self.x[:, -n:]), last=n)

    def _hide(self, y: Tensor, last: int = 0) -> Tensor:
        return y if self.hidden is None else y.masked_fill(self.hidden[:, -last:], 0)


def _normed(x: Tensor, norm: nn.RMSNorm | None) -> Tensor:
    return x if norm is None else norm(x.to(norm.weight.dtype)).to(x.dtype)


def positions_within(
    past: State | KeyValueCache | RemotePast | None, positions: Tensor | None
) -> dict[str, Tensor | int]:
    """Arguments of `RotaryEmbedding.rotate` for what is no function of i - j alone: documents of a packed row each
    start at 0. `past` and `positions` are those of `Attention.attend`."""
    if positions is not None:
        return {"positions": positions}
    return {"offset": 0 if past is None else past.length}


def checked_head_dim(d_model: int, n_heads: int, head_dim: int | None) -> int:
    """Size of each head: `head_dim`, or d_model / n_heads if it is None."""
    require_whole("d_model", d_model)
    require_whole("n_heads", n_heads)
    if head_dim is not None:
        require_whole("head_dim", head_dim, "; None for d_model / n_heads")
    if head_dim is None and d_model % n_heads:
        raise InputError(f"n_heads={n_heads} does not divide d_model={d_model}: change one, or give head_dim.")
    return d_model // n_heads if head_dim is None else head_dim


def _check_qk_norm(eps: float | None) -> None:
    """Raise InputError unless it is None or a number that keeps the root of a mean of squares away from 0."""
    if eps is not None and (isinstance(eps, bool) or not isinstance(eps, Real) or not 0 < eps < math.inf):
        raise InputError(
            f"qk_norm={eps!r} must be ε of the norms of queries and keys, a finite number above 0, 1e-6 for example; "
            "None for no norms."
        )


def checked_kv_heads(n_heads: int, n_kv_heads: int | None) -> int:
    """Number of heads of keys and values: `n_kv_heads`, or `n_heads` if it is None."""
    if n_kv_heads is None:
        return n_heads
    require_whole("n_kv_heads", n_kv_heads, "; None for n_heads")
    if n_heads % n_kv_heads:
        raise InputError(
            f"n_kv_heads={n_kv_heads} must divide n_heads={n_heads}: as many query heads share each head of keys and "
            "values. Change one, or give None for no groups."
        )
    return n_kv_heads
