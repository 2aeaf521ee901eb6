"""Sinusoidal absolute positions (arXiv 1706.03762, section 3.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linrope.rotary import frequencies, unit_rotations

if TYPE_CHECKING:
    pass


def sinusoids(positions: Tensor, d_model: int) -> Tensor:
    """sin(t·θ_m) and cos(t·θ_m) in turn, θ_m = 10000^(-2m / d_model) (arXiv 1706.03762, section 3.5).

    Args:
        positions: (...) integers t.
        d_model: even.

    Returns:
        (..., d_model) float64, exact at any position.
    """
    turn = unit_rotations(positions, frequencies(d_model, 10000.0, positions.device))
    return torch.stack((turn.imag, turn.real), dim=-1).flatten(-2)
