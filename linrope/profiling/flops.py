"""How many floating-point operations a training step takes, by formula: multiplications and additions of its products.

Counted are matrix products and convolutions, as PyTorch's own counter (`torch.utils.flop_counter`) counts them: of
softmax attention all pairs, those that causality hides among them; of the linear kernel the products that it computes,
the backward's recomputation included. Activations, norms and sums are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from linrope.feature_maps import Favor, MapModule
from linrope.layers.linear_attention import LinearAttention
from linrope.layers.softmax_attention import SoftmaxAttention
from linrope.models.language_model import LanguageModel
from linrope.ops.torch_kernel.flops import causal_flops


@dataclass(frozen=True)
class Flops:
    """Of one pass forward, and of one back."""

    forward: int = 0
    backward: int = 0

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.forward + other.forward, self.backward + other.backward)

    @classmethod
    def of_product(cls, forward: int, factors: int = 2) -> Flops:
        """Of a product whose factors, so many of them, both have gradients: each takes as much again."""
        return cls(forward, factors * forward)


def step_flops(model: LanguageModel, batch_size: int, length: int, segment_length: int | None = None) -> int:
    """Of a training step on rows of `length` tokens, at once or in segments, which are read forward twice."""
    total = 0
    for past, n in _pieces(length, segment_length):
        flops = _piece_flops(model, batch_size, n, past, followed=past + n < length)
        total += flops.forward * (1 if segment_length is None else 2) + flops.backward
    return total


def forward_flops(model: LanguageModel, batch_size: int, length: int) -> int:
    """Of reading rows of `length` tokens without learning."""
    return _piece_flops(model, batch_size, length, past=0, followed=False).forward


def _pieces(length: int, segment_length: int | None) -> Iterator[tuple[int, int]]:
    """(tokens before it, tokens) of each piece of a row."""
    size = segment_length or length
    for start in range(0, length, size):
        yield start, min(size, length - start)


def _piece_flops(model: LanguageModel, batch: int, n: int, past: int, followed: bool) -> Flops:
    total = Flops()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            total += Flops.of_product(2 * batch * n * module.in_features * module.out_features)
    for block in model.blocks:
        attention = block.attention
        if attention.conv is not None:
            total += Flops.of_product(2 * batch * n * attention.conv.weight.numel())
        if isinstance(attention, LinearAttention):
            total += _feature_map_flops(attention, batch, n) + _linear_flops(attention, batch, n, followed)
        else:
            total += _softmax_flops(attention, batch, n, past)
    return total


def _feature_map_flops(attention: LinearAttention, batch: int, n: int) -> Flops:
    """Of the matrices of maps that have them, for queries and keys."""
    phi = attention.feature_map
    if not isinstance(phi, MapModule):
        return Flops()
    forward = 2 * 2 * batch * n * phi.weight.numel()
    return Flops.of_product(forward, factors=1 if isinstance(phi, Favor) else 2)  # FAVOR's matrix is not trained


def _linear_flops(attention: LinearAttention, batch: int, n: int, followed: bool) -> Flops:
    heads, features, width = attention.n_heads, attention.n_features, attention.head_dim
    normalize = attention.options["normalize"]
    if normalize == "rotary":  # its denominator is one more column of values
        width += 1
    sums = 2 if normalize == "plain" else int(followed)  # a later segment hands back a gradient of the sum of keys
    forward = causal_flops(batch, heads, n, features, width, 1, backward=False)
    return Flops(forward, causal_flops(batch, heads, n, features, width, sums, backward=True))


def _softmax_flops(attention: SoftmaxAttention, batch: int, n: int, past: int) -> Flops:
    window = attention.window
    if window is None:
        pairs = n * (past + n)
    else:
        first, seen = min(n, window), min(past, window - 1)
        blocks = -(-(n - first) // window)
        pairs = first * (seen + first) + blocks * window * 2 * window
    return Flops.of_product(2 * 2 * batch * attention.n_heads * attention.head_dim * pairs)
