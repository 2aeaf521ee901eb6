"""Sinusoidal absolute positions (arXiv 1706.03762, section 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from linrope.rotary import frequencies, unit_rotations


def sinusoids(positions: Tensor, d_model: int) -> Tensor:
    """sin(t·θ_m) in dimension 2m and cos(t·θ_m) in dimension 2m + 1, θ_m = 10000^(-2m / d_model).

    Args:
        positions: (...) integers t.
        d_model: even.

    Returns:
        (..., d_model) float64, exact at any position.
    """
    rotation = unit_rotations(positions, frequencies(d_model, 10000.0, positions.device))
    return torch.stack((rotation.imag, rotation.real), dim=-1).flatten(-2)
