"""`SoftmaxAttention`: the RoPE baseline with the same projections as `LinearAttention`."""

from __future__ import annotations

from dataclasses import replace

from linrope.errors import InputError
from linrope.layers.attention import _Attention, _head_dim
from linrope.layers.linear_attention import _embedding
from linrope.ops.softmax import KeyValueCache, softmax_attention
from linrope.rotary import RotaryConfig, check_config


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
            rope=_embedding(None if rope is None else replace(rope, placement="numerator"), head_dim),
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
