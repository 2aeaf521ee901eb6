"""The recurrent operators: the standard ones from opset 27 on, and a decomposition for lower opsets."""

from __future__ import annotations

import numpy as np

from linrope.interop.onnx.graph import Graph, Value

WITH_LINEAR_ATTENTION = 27
"""The first opset with `LinearAttention` and `CausalConvWithState`."""


def linear_attention(
    g: Graph, q: Value, k: Value, v: Value, past: Value, log_decay: Value | None, n_heads: int
) -> tuple[Value, Value]:
    """The sums over all tokens up to each one, and the state after the last.

        S_t = exp(log_decay_t) S_{t-1} + k_t v_tᵀ        o_t = S_tᵀ q_t

    Args:
        q, k: (B, T, H·F) float32, one head after another.
        v: (B, T, H·E) float32.
        past: S before these tokens, (B, H, F, E) float32.
        log_decay: (B, T, H) float64; None for 0.

    Returns:
        o (B, T, H·E), and S (B, H, F, E).
    """
    if g.opset < WITH_LINEAR_ATTENTION:
        return _all_pairs(g, q, k, v, past, log_decay, n_heads)
    inputs = [q, k, v, past] if log_decay is None else [q, k, v, past, g.cast(log_decay, np.float32)]
    rule = "linear" if log_decay is None else "gated"
    heads = {"q_num_heads": n_heads, "kv_num_heads": n_heads}
    return g.op("LinearAttention", *inputs, n_outputs=2, update_rule=rule, scale=1.0, **heads)


def _all_pairs(
    g: Graph, q: Value, k: Value, v: Value, past: Value, log_decay: Value | None, n_heads: int
) -> tuple[Value, Value]:
    """The same by the weights of all pairs of new tokens: with G the running sum of log_decay from the first on,

    o_i = e^{G_i} Sᵀ q_i + Σ_{j ≤ i} e^{G_i - G_j} (q_iᵀ k_j) v_j        S' = e^{G_T} S + Σ_j e^{G_T - G_j} k_j v_jᵀ
    """
    q, k, v = (_split_heads(g, x, n_heads) for x in (q, k, v))  # (B, H, T, F or E)
    weights = g.op("Trilu", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), upper=0)
    if log_decay is not None:
        axis = np.array(2)
        total = g.op("CumSum", g.op("Transpose", log_decay, perm=[0, 2, 1]), axis)  # (B, H, T)
        row, column = (g.op("Unsqueeze", total, np.array([n])) for n in (3, 2))
        # the differences above the diagonal are positive, and their exponentials could overflow
        between = g.op("Trilu", g.op("Sub", row, column), upper=0)
        weights = g.op("Mul", weights, _exp(g, between))
        last = g.slice(row, 2, -1)  # (B, H, 1, 1)
        q, k = g.op("Mul", q, _exp(g, row)), g.op("Mul", k, _exp(g, g.op("Sub", last, row)))
    o = g.op("Add", g.op("MatMul", weights, v), g.op("MatMul", q, past))
    if log_decay is not None:
        past = g.op("Mul", past, _exp(g, last))
    state = g.op("Add", past, g.op("MatMul", g.op("Transpose", k, perm=[0, 1, 3, 2]), v))
    return g.reshape(g.op("Transpose", o, perm=[0, 2, 1, 3]), 0, 0, -1), state


def _exp(g: Graph, x: Value) -> Value:
    return g.cast(g.op("Exp", x), np.float32)


def _split_heads(g: Graph, x: Value, n_heads: int) -> Value:
    """(B, T, H·F) -> (B, H, T, F)."""
    return g.op("Transpose", g.reshape(x, 0, 0, n_heads, -1), perm=[0, 2, 1, 3])


def short_convolution(g: Graph, x: Value, weight: Value, past: Value, channels: int) -> tuple[Value, Value]:
    """Depthwise causal convolution: y_t = Σ_i w_i x_{t - W + 1 + i}.

    Args:
        x: (B, C, T) float32.
        weight: (C, 1, W).
        past: the inputs before these tokens, (B, C, W - 1).

    Returns:
        y (B, C, T), and the last inputs (B, C, W - 1).
    """
    if g.opset >= WITH_LINEAR_ATTENTION:
        return g.op("CausalConvWithState", x, weight, None, past, n_outputs=2)
    padded = g.op("Concat", past, x, axis=2)
    length = g.op("Shape", x, start=2)
    return g.op("Conv", padded, weight, group=channels), g.slice(padded, 2, length)
