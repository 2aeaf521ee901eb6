"""The forget gate that linear attention layers may have: a decay for each head and token, learned from the input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from linrope.errors import InputError

START = 4.0
"""b at the start for r = 1: at every token σ(4) = 0.982 is left of what was."""


class ForgetGate(nn.Linear):
    """`log_decay = logsigmoid(W x + b) / r`, with W = 0 at the start, and half forgotten in 38 √r tokens.

    Args:
        d_model: width of x.
        n_heads: number of heads H.
        normalizer: r ≥ 1, one number or one for each head (GLA, arXiv 2312.06635, has 16). The larger it is, the longer
            a head remembers, and the less it can forget at once. It starts between r = 1's memory and r times that, for
            there the gate learns: nearer to either end it would be saturated, or far from what it is to learn.

    Raises:
        InputError: a normalizer below 1 or not finite, or not one for each head.
    """

    def __init__(self, d_model: int, n_heads: int, normalizer: float | Sequence[float] = 1.0):
        super().__init__(d_model, n_heads)
        divisors = _one_for_each_head(normalizer, n_heads)
        nn.init.zeros_(self.weight)
        with torch.no_grad():
            self.bias.copy_(torch.tensor([_bias(r) for r in divisors]))
        self.normalizer = tuple(divisors)  # no buffer: it is neither loaded nor rounded by `module.to(torch.bfloat16)`

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d_model) -> (B, H, T) in float32 at least: decays live near 0, and sums of bfloat16's three digits
        drift."""
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, torch.float32)
            logits = F.linear(x.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
            decays = F.logsigmoid(logits)
            if any(r != 1 for r in self.normalizer):
                decays = decays / torch.stack([decays.new_full((), r) for r in self.normalizer])
            return rearrange(decays, "b t h -> b h t")

    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict.pop(f"{prefix}normalizer", None)  # older checkpoints hold one
        super()._load_from_state_dict(state_dict, prefix, *args)


def _bias(normalizer: float) -> float:
    """The b whose logsigmoid is √normalizer times that of START."""
    log_sigmoid = -math.sqrt(normalizer) * math.log1p(math.exp(-START))
    return log_sigmoid - math.log(-math.expm1(log_sigmoid))


def _one_for_each_head(normalizer: float | Sequence[float], n_heads: int) -> list[float]:
    """The normalizer of each head, checked."""
    if not isinstance(normalizer, Real | Sequence) or isinstance(normalizer, str):
        raise InputError(f"gate_normalizer={normalizer!r} must be a number, or one for each head.")
    divisors = [normalizer] * n_heads if isinstance(normalizer, Real) else list(normalizer)
    if len(divisors) != n_heads:
        raise InputError(
            f"gate_normalizer has {len(divisors)} entries for n_heads={n_heads}: "
            "give one for each head, or a single number for all."
        )
    if not all(isinstance(r, Real) and 1 <= r < float("inf") for r in divisors):
        raise InputError(f"gate_normalizer={normalizer!r} must be finite numbers, at least 1.")
    return [float(r) for r in divisors]
