"""The layers of a language model as nodes, one function each. Activations are (B, T, d_model) float32.

Queries, keys and values are (B, T, H·D), one head after another, as the standard operators take them.
"""

from __future__ import annotations

import numpy as np
from torch import nn

from linrope.interop.onnx.feature_maps import features
from linrope.interop.onnx.graph import END, Graph, Value
from linrope.interop.onnx.operators import linear_attention, short_convolution
from linrope.interop.onnx.tokens import Rotation, Tokens
from linrope.layers.attention import Attention
from linrope.layers.cosine_attention import CosineAttention
from linrope.layers.forget_gate import ForgetGate
from linrope.layers.linear_attention import LinearAttention
from linrope.layers.short_convolution import ShortConvolution
from linrope.layers.softmax_attention import SoftmaxAttention
from linrope.models.language_model import Block, GatedMLP
from linrope.rotary import RotaryEmbedding

TINY = 1e-12
"""The smallest norm that `torch.nn.functional.normalize` divides by."""


def block(g: Graph, layer: Block, x: Value, tokens: Tokens) -> Value:
    """x + attention(norm(x)), then x + mlp(norm(x))."""
    normed = rms_norm(g, layer.attention_norm, "attention_norm", x)
    with g.scope("attention"):
        attended = attention(g, layer.attention, normed, tokens)
    x = g.op("Add", x, attended)
    normed = rms_norm(g, layer.mlp_norm, "mlp_norm", x)
    with g.scope("mlp"):
        return g.op("Add", x, gated_mlp(g, layer.mlp, normed))


def rms_norm(g: Graph, layer: nn.RMSNorm, name: str, x: Value) -> Value:
    """RMSNorm over the last axis."""
    return g.op("RMSNormalization", x, g.weight(f"{name}.weight", layer.weight), axis=-1, epsilon=layer.eps)


def dense(g: Graph, layer: nn.Linear, name: str, x: Value) -> Value:
    """x Wᵀ + b."""
    y = g.op("MatMul", x, g.weight(f"{name}.weight", layer.weight.mT))
    return y if layer.bias is None else g.op("Add", y, g.weight(f"{name}.bias", layer.bias))


def gated_mlp(g: Graph, layer: GatedMLP, x: Value) -> Value:
    """W_out (silu(W_gate x) ∘ W_up x)."""
    gate, up = g.op("Split", dense(g, layer.gate_up, "gate_up", x), n_outputs=2, axis=-1, num_outputs=2)
    return dense(g, layer.out, "out", g.op("Mul", g.silu(gate), up))


def attention(g: Graph, layer: Attention, x: Value, tokens: Tokens) -> Value:
    """Attention of any type: projections, heads, norm, gate, output."""
    q, k, v = _projected(g, layer, x)
    o = ATTEND[type(layer)](g, layer, x, q, k, v, tokens)
    if layer.norm is not None:
        heads = g.reshape(o, 0, 0, layer.n_heads, -1)
        o = g.reshape(rms_norm(g, layer.norm, "norm", heads), 0, 0, -1)
    if layer.gate is not None:
        o = g.op("Mul", o, g.silu(dense(g, layer.gate, "gate", x)))
    return dense(g, layer.out, "out", o)


def _projected(g: Graph, layer: Attention, x: Value) -> tuple[Value, Value, Value]:
    """q, k and v, after the short convolution."""
    y = dense(g, layer.qkv, "qkv", x)
    if layer.conv is not None:
        y = _convolved(g, layer.conv, y)
    q, k, v = g.op("Split", y, n_outputs=3, axis=-1, num_outputs=3)
    if layer.conv is not None and layer.conv.without_silu:
        v = g.silu(v)
    return q, k, v


def _convolved(g: Graph, layer: ShortConvolution, y: Value) -> Value:
    """The short convolution, (B, T, C) -> (B, T, C), with its SiLU unless only the values have one."""
    channels, width = layer.weight.shape
    weight = g.weight("conv.weight", layer.weight[:, None])
    past = g.past("conv_tail", (channels, width - 1))
    y, tail = short_convolution(g, g.op("Transpose", y, perm=[0, 2, 1]), weight, past, channels)
    g.present("conv_tail", tail, (channels, width - 1))
    y = g.op("Transpose", y, perm=[0, 2, 1])
    return y if layer.without_silu else g.silu(y)


def _linear(g: Graph, layer: LinearAttention, x: Value, q: Value, k: Value, v: Value, tokens: Tokens) -> Value:
    """Linear attention: φ, the rotation, the forget gate."""
    rope = layer.rope
    signed = 0 if rope is None else rope.signed_dim
    rotation = scale = None
    if rope is not None:
        rotation = tokens.rotation(_theta(rope))
    if layer.log_scale is not None:
        scale = g.weight("scale", layer.log_scale.exp().repeat_interleave(layer.head_dim))

    def rotate(y: Value) -> Value:
        return y if rotation is None else _rotate(g, y, rope, rotation, layer.n_heads)

    def rotated_and_plain(y: Value) -> tuple[Value, Value | None]:
        """The features of queries or keys, rotated and as they are; the latter without those that are signed."""
        y = y if scale is None else g.op("Mul", y, scale)
        if signed == layer.head_dim:
            return rotate(y), None
        if layer.before_map:
            y = rotate(y)
        heads = g.reshape(y, 0, 0, layer.n_heads, -1)
        mapped = features(g, g.slice(heads, 3, signed) if signed else heads, layer.feature_map)
        plain = g.reshape(mapped, 0, 0, -1)
        if layer.before_map:
            return plain, plain
        if signed:
            mapped = g.op("Concat", g.slice(heads, 3, 0, signed), mapped, axis=-1)
        return rotate(g.reshape(mapped, 0, 0, -1)), plain

    rotated, plain = zip(*(rotated_and_plain(y) for y in (q, k)))
    log_decay = None if layer.forget is None else _log_decay(g, layer.forget, x)
    normalize, eps = layer.options["normalize"], layer.options["eps"]
    sums = _Sums(g, tokens, layer.n_heads, log_decay)
    numerator = sums.of_values("kv", *rotated, v, layer.n_features, layer.head_dim)
    if normalize == "none":
        return numerator
    if normalize == "rotary":
        return sums.normalized(numerator, "k_rotated_sum", *rotated, layer.n_features, eps, signed=True)
    return sums.normalized(numerator, "k_sum", *plain, layer.n_features - signed, eps)


def _cosine(g: Graph, layer: CosineAttention, x: Value, q: Value, k: Value, v: Value, tokens: Tokens) -> Value:
    """Linear attention with the features [q/|q| ; 1], all but the last one rotated."""
    rope = layer.rope

    def normalized(y: Value) -> Value:
        heads = g.reshape(y, 0, 0, layer.n_heads, -1)
        norm = g.op("Max", g.op("ReduceL2", heads, np.array([3]), keepdims=1), np.float32(TINY))
        one = g.op("Unsqueeze", tokens.ones(layer.n_heads), np.array([3]))
        y = g.reshape(g.op("Concat", g.op("Div", heads, norm), one, axis=-1), 0, 0, -1)
        return y if rope is None else _rotate(g, y, rope, tokens.rotation(_theta(rope)), layer.n_heads)

    pair = normalized(q), normalized(k)
    sums, n_features = _Sums(g, tokens, layer.n_heads, None), layer.head_dim + 1
    numerator = sums.of_values("kv", *pair, v, n_features, layer.head_dim)
    return sums.normalized(numerator, "k_sum", *pair, n_features, layer.options["eps"], signed=rope is not None)


class _Sums:
    """The sums over the sequence of one layer, with a tensor of the state each."""

    def __init__(self, g: Graph, tokens: Tokens, n_heads: int, log_decay: Value | None) -> None:
        self.g, self.tokens, self.n_heads, self.log_decay = g, tokens, n_heads, log_decay

    def of_values(self, name: str, q: Value, k: Value, v: Value, n_features: int, width: int) -> Value:
        """Σ_{j ≤ i} e^{G_i - G_j} (q_iᵀ k_j) v_j, (B, T, H·E), with E = `width`."""
        shape = self.n_heads, n_features, width
        past = self.g.past(name, shape)
        o, state = linear_attention(self.g, q, k, v, past, self.log_decay, self.n_heads)
        self.g.present(name, state, shape)
        return o

    def normalized(
        self, numerator: Value, name: str, q: Value, k: Value, n_features: int, eps: float, signed: bool = False
    ) -> Value:
        """The numerator (B, T, H·E) divided by the sum of ones, plus ε. A sum that may be negative is `signed`, and so
        is its ε."""
        g, ones = self.g, self.tokens.ones(self.n_heads)
        denominator = self.of_values(name, q, k, ones, n_features, 1)  # (B, T, H)
        epsilon = np.float32(eps)
        if signed:
            epsilon = g.op("Where", g.op("Less", denominator, np.float32(0)), -epsilon, epsilon)
        divisor = g.op("Unsqueeze", g.op("Add", denominator, epsilon), np.array([3]))
        heads = g.reshape(numerator, 0, 0, self.n_heads, -1)
        return g.reshape(g.op("Div", heads, divisor), 0, 0, -1)


def _log_decay(g: Graph, gate: ForgetGate, x: Value) -> Value:
    """The forget gate, logsigmoid(W x + b) / r = (min(y, 0) - ln(1 + e^-|y|)) / r, (B, T, H) float64.

    Float32 would round 1 + e^-|y|, of which slow gates need the digits.
    """
    y = g.cast(dense(g, gate.linear, "forget", x), np.float64)
    small = g.op("Exp", g.op("Neg", g.op("Abs", y)))
    decay = g.op("Sub", g.op("Min", y, np.float64(0)), g.op("Log", g.op("Add", small, np.float64(1))))
    return g.op("Div", decay, np.array(gate.normalizer))


def _softmax(g: Graph, layer: SoftmaxAttention, x: Value, q: Value, k: Value, v: Value, tokens: Tokens) -> Value:
    """Softmax attention to the keys of the cache and to new ones; with a window the cache holds `window - 1`."""
    width, window = layer.n_heads * layer.head_dim, layer.window
    scale = layer.head_dim**-0.5
    if layer.rope is not None:
        scale *= layer.rope.logit_scale**2
        rotation = tokens.rotation(_theta(layer.rope))
        q, k = (_rotate(g, y, layer.rope, rotation, layer.n_heads) for y in (q, k))
    shape = ("cached" if window is None else window - 1, width)
    past = g.past("k", shape), g.past("v", shape)
    k, v = (g.op("Concat", before, new, axis=1) for before, new in zip(past, (k, v)))
    for name, y in {"k": k, "v": v}.items():
        kept = y if window is None else g.slice(y, 1, 1 - window) if window > 1 else g.slice(y, 1, END)
        g.present(name, kept, ("total" if window is None else window - 1, width))
    slots = g.op("Squeeze", g.op("Shape", past[0], start=1, end=2)) if window is None else window - 1
    heads = {"q_num_heads": layer.n_heads, "kv_num_heads": layer.n_heads}
    return g.op("Attention", q, k, v, tokens.visible(slots, window), scale=scale, **heads)


def _theta(rope: RotaryEmbedding) -> np.ndarray:
    """θ in radians per position, float64: (R/2,), or (H, R/2) with one base for each head."""
    return rope.frequencies().detach().cpu().numpy()


def _rotate(g: Graph, x: Value, rope: RotaryEmbedding, rotation: Rotation, n_heads: int) -> Value:
    """RoPE on each head of x, (B, T, H·D) -> (B, T, H·D)."""
    options = {"interleaved": int(rope.interleaved), "num_heads": 1 if rotation.per_head else n_heads}
    if rope.rotary_dim < rope.dim:
        options["rotary_embedding_dim"] = rope.rotary_dim
    if not rotation.per_head:
        return g.op("RotaryEmbedding", x, rotation.cos, rotation.sin, **options)
    heads = g.reshape(x, 0, -1, rope.dim)  # (B, T·H, D), as if each head were a token
    return g.reshape(g.op("RotaryEmbedding", heads, rotation.cos, rotation.sin, **options), 0, -1, n_heads * rope.dim)


ATTEND = {LinearAttention: _linear, SoftmaxAttention: _softmax, CosineAttention: _cosine}
"""The attention itself, q, k, v -> (B, T, H·E), by the type of the layer."""
