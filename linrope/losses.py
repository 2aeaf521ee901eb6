"""Cross entropy of tokens, and bits per byte."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats of all targets (B, T), in float32 at least, of logits (B, T, V); targets of -100 count nothing."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


IGNORE = -100
"""The target where nothing is asked of a model; no token."""


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats, float32, shape (B, T), of logits (B, T, V) of any dtype against targets (B, T).

    It is 0 where a target is IGNORE.
    """
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORE
    )
    return losses.view_as(targets)


def bits_per_byte(nats: float, n_bytes: float) -> float:
    """Bits per byte of text: all the nats of a text, its separators' too, over its bytes alone."""
    return nats / math.log(2) / n_bytes if n_bytes else math.nan
