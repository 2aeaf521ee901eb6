"""What tensors hold, where it can be read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import debug_unwrap


def extremes(x: Tensor) -> tuple[int, int] | None:
    """The lowest and the highest of the integers x, under a transform of `torch.func` those of all its calls; None
    without any, and where they have no values: in a graph that is traced, on the device meta, in fake tensors."""
    if torch.compiler.is_compiling() or x.is_meta or not x.numel():
        return None
    try:
        lowest, highest = (bound.item() for bound in debug_unwrap(x).to(torch.int64).aminmax())
    except RuntimeError:  # of a fake tensor
        return None
    return lowest, highest
