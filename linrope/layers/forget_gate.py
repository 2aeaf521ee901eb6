"""The forget gate of linear attention layers: a decay for each head and token, learned from the input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from linrope.errors import InputError
from linrope.layers.linear import Float32Linear, accept_weights_without_linear
from linrope.utils.filling import fill

INITIAL_BIAS = 4.0
"""b at the start for r = 1: each token keeps σ(4) = 0.982 of the past."""


class ForgetGate(nn.Module):
    """`log_decay = logsigmoid(W x + b) / r`. At the start W = 0, and half is forgotten in 38 √r tokens.

    The normalizer r ≥ 1 is one number or one for each head (16 in GLA, arXiv 2312.06635). With a larger r a head
    remembers longer, and can forget less at one token. At the start a head remembers √r times as long as with r = 1:
    between 1 and r times, where the gate still has a gradient and is close to its final value.
    """

    def __init__(self, d_model: int, n_heads: int, normalizer: float | Sequence[float] = 1.0):
        super().__init__()
        # not a buffer: neither loaded nor rounded by `module.to(torch.bfloat16)`
        self.normalizer = tuple(_one_for_each_head(normalizer, n_heads))
        self.linear = _GateLinear(d_model, self.normalizer)
        accept_weights_without_linear(self)

    def reset_parameters(self) -> None:
        """The weights of a new gate: W = 0, and b by the normalizer."""
        self.linear.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d_model) -> (B, H, T) log decays, in float32 at least: they are close to 0 and their sums long."""
        decays = F.logsigmoid(self.linear(x))
        if any(r != 1 for r in self.normalizer):
            decays = decays / torch.stack([decays.new_full((), r) for r in self.normalizer])
        return rearrange(decays, "b t h -> b h t")


class _GateLinear(Float32Linear):
    """`W x + b`, (B, T, d_model) -> (B, T, H)."""

    def __init__(self, d_model: int, normalizer: tuple[float, ...]):
        self.normalizer = normalizer  # the constructor of nn.Linear calls reset_parameters
        super().__init__(d_model, len(normalizer))

    def reset_parameters(self) -> None:
        super().reset_parameters()  # numbers that are drawn and not used: the figures in benchmarks/results need them
        nn.init.zeros_(self.weight)
        fill(self.bias, torch.tensor([_initial_bias(r) for r in self.normalizer], device=self.bias.device))


def _initial_bias(normalizer: float) -> float:
    """The b whose logsigmoid is √normalizer times that of INITIAL_BIAS."""
    log_sigmoid = -math.sqrt(normalizer) * math.log1p(math.exp(-INITIAL_BIAS))
    return log_sigmoid - math.log(-math.expm1(log_sigmoid))


def _one_for_each_head(normalizer: float | Sequence[float], n_heads: int) -> list[float]:
    """The normalizer of each head, checked."""
    if not isinstance(normalizer, Real | Sequence) or isinstance(normalizer, str):
        raise InputError(f"gate_normalizer={normalizer!r} must be a number, or a list with one for each head.")
    divisors = [normalizer] * n_heads if isinstance(normalizer, Real) else list(normalizer)
    if len(divisors) != n_heads:
        raise InputError(
            f"gate_normalizer has {len(divisors)} entries for n_heads={n_heads}: "
            "give one for each head, or a single number for all."
        )
    if not all(isinstance(r, Real) and 1 <= r < math.inf for r in divisors):
        raise InputError(f"gate_normalizer={normalizer!r} must be finite numbers, at least 1.")
    return [float(r) for r in divisors]
