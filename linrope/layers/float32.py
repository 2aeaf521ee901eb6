"""A linear map in float32, for what must not be rounded: decays and angles."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def float32_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """`layer(x)` in float32 (float64 for float64 x), also under autocast and with weights of half precision."""
    with torch.autocast(x.device.type, enabled=False):
        dtype = torch.promote_types(x.dtype, torch.float32)
        bias = None if layer.bias is None else layer.bias.to(dtype)
        return F.linear(x.to(dtype), layer.weight.to(dtype), bias)
