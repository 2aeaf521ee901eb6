"""Attention layers: projections, rotary positions, and the options around the operator.

`LinearAttention` and `SoftmaxAttention` share everything but the attention itself, so that swapping one for the other
is a fair comparison. Both map (B, T, d_model) to (B, T, d_model) and hand their past on in an `AttentionState`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from linrope.errors import InputError, require_choice
from linrope.layers.selective_rope import SelectiveRope
from linrope.layers.short_convolution import ShortConvolution
from linrope.layers.state import AttentionState
from linrope.ops.documents import check_segment_ids
from linrope.rotary import RotaryEmbedding

CONV_SILU = ("qkv", "v")


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
        self.selective: SelectiveRope | None = None  # where a subclass has it
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
            raise InputError(
                "state.angle was given to a layer without rope.placement='selective': pass what this layer returned."
            )


def _head_dim(d_model: int, n_heads: int, head_dim: int | None) -> int:
    if n_heads < 1 or d_model < 1:
        raise InputError(f"d_model={d_model} and n_heads={n_heads} must be at least 1.")
    if head_dim is None and d_model % n_heads:
        raise InputError(f"n_heads={n_heads} does not divide d_model={d_model}: change one, or give head_dim.")
    return d_model // n_heads if head_dim is None else head_dim
