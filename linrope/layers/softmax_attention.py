"""`SoftmaxAttention`: softmax attention with RoPE, the baseline with the same projections as `LinearAttention`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from linrope.errors import InputError
from linrope.layers.attention import Attention, AttentionOptions, checked_head_dim
from linrope.layers.initialisation import reset
from linrope.layers.state import RemotePast
from linrope.ops.softmax import KeyValueCache, extend_cache, softmax_attention
from linrope.positions.base import PositionsConfig, Sizes
from linrope.positions.table import encoding_of, rope_beside
from linrope.rotary import RotaryConfig, RotaryEmbedding, check_config
from linrope.utils.options import require_whole

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SoftmaxAttention(Attention):
    """RoPE on q and k, then `scaled_dot_product_attention`; a key-value cache for decoding.

    Args:
        d_model, n_heads, head_dim, causal: as in `LinearAttention`.
        rope: as there; its placement is ignored.
        positions: the position encoding; None for RoPE as `rope` says, which another one replaces. Those in the
            attention weights form the matrix of all pairs (T, S) in each call; sinusoidal and learned ones are for the
            model to add to its embeddings.
        window: see the last `window` tokens only, the present one included. Time and memory are then linear in the
            length, and the cache holds `window - 1` tokens. None sees all.
        options: those of all layers, see `AttentionOptions`.

    Raises:
        InputError: sizes that do not fit, a window below 1, `short_conv` or a window with `causal=False`, a window or
            options of `rope` with another encoding, `n_kv_heads` with a base for each head; in a call: more tokens than
            `positions.length` (tupe).
    """

    past_type = KeyValueCache

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        head_dim: int | None = None,
        rope: RotaryConfig | None = RotaryConfig(),
        positions: PositionsConfig | None = None,
        window: int | None = None,
        causal: bool = True,
        **options: Unpack[AttentionOptions],
    ):
        if window is not None:
            require_whole("window", window, ", the token itself; None sees all")
            if not causal:
                raise InputError(f"window={window} sees earlier tokens only: it needs causal=True.")
        check_config(rope)
        rope = rope_beside(positions, rope)
        head_dim = checked_head_dim(d_model, n_heads, head_dim)
        if rope is not None:
            rope = RotaryEmbedding.from_config(head_dim, replace(rope, placement="numerator"))
        super().__init__(d_model, n_heads, head_dim=head_dim, rope=rope, causal=causal, **options)
        if rope is not None and isinstance(rope.base, tuple) and self.n_kv_heads != n_heads:
            raise InputError(
                f"n_kv_heads={self.n_kv_heads} has query heads share keys, which softmax layers rotate once, and "
                "rope.base has one base for each query head: give one base, or set n_kv_heads to None."
            )
        self.window = window
        self.encoding = encoding_of(positions, Sizes(d_model, n_heads, head_dim, causal))
        if self.encoding is not None and window is not None:
            raise InputError(
                f"window={window} does not go with positions.name={positions.name!r}, which needs the matrix of all "
                "pairs: set window to None, or positions.name to 'rope'."
            )

    def reset_parameters(self) -> None:
        super().reset_parameters()
        reset(self.encoding)

    def _check(self, x, state):
        super()._check(x, state)
        if self.window is None and state is not None and isinstance(state.past, RemotePast):
            raise InputError(
                "softmax attention without a window sees all keys, which no rank holds: set window, make the layer "
                "linear, or do not split the sequence."
            )

    def of_query_heads(self, x):
        return x  # the cache holds keys and values once for each group

    def attend(self, x, queries, k, v, past, segment_ids, key_mask, positions, outputs):
        q, scale = queries(), None
        if self.rope is not None:
            offset = 0 if past is None else past.length
            k = self.rope.rotate(k, offset)
            if outputs:
                q = self.rope.rotate(q, offset)
            if self.rope.logit_scale != 1.0:
                scale = self.rope.logit_scale**2 * self.head_dim**-0.5
        if isinstance(past, RemotePast):
            past = past.exchange_cache(k, v, key_mask, self.window)
        options = {"window": self.window, "key_mask": key_mask, "segment_ids": segment_ids, "cache": past}
        if not outputs:
            return None, extend_cache(k, v, **options)
        attend = None if self.encoding is None else partial(self.encoding.attend, positions=positions)
        return softmax_attention(q, k, v, causal=self.causal, scale=scale, attend=attend, **options)

    @property
    def sees_positions(self):
        return self.encoding is not None or super().sees_positions

    def past_bytes(self, context, dtype):
        kept = context if self.window is None else min(context, self.window - 1)
        return 2 * self.n_kv_heads * self.head_dim * kept * dtype.itemsize
