"""Cross entropy of tokens, and bits per byte."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
"""The target of positions without a loss; not a token."""


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross entropies in nats, float32 or float64, of logits (B, T, V); targets (B, T) of IGNORE add 0."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORE)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropies in nats, (B, T) float32, of logits (B, T, V); 0 where a target (B, T) is IGNORE."""
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORE)
    return losses.view_as(targets)


def bits_per_byte(nats: float, n_bytes: float) -> float:
    """Bits per byte of a text: the nats of all its tokens, separators included, over its bytes; NaN without bytes."""
    return nats / math.log(2) / n_bytes if n_bytes else math.nan
