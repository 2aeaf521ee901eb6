"""Write values into a parameter, also into one that is divided among devices."""

from __future__ import annotations

import torch
from torch import Tensor


def fill(parameter: Tensor, values: Tensor) -> None:
    """Copy values into a parameter of their shape. One that is divided (a DTensor) takes each device's part of the
    values of the first device."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor  # not in every build; loaded where there is a DTensor

        values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
    with torch.no_grad():
        parameter.copy_(values)
