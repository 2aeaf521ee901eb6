"""The lowest and the highest value of integer tensors, where values can be read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import debug_unwrap


def extremes(x: Tensor) -> tuple[int, int] | None:
    """The lowest and the highest of the integers x; None if x is empty or has no values (traced, meta or fake tensors).
    Under vmap they are those of all rows."""
    if torch.compiler.is_compiling() or x.is_meta or not x.numel():
        return None
    values = debug_unwrap(x)
    try:
        lowest, highest = (int(end) for end in values.to(torch.int64).aminmax())
    except RuntimeError:
        if type(values) is Tensor:  # an error of the device, and not of a fake tensor
            raise
        return None
    return lowest, highest
