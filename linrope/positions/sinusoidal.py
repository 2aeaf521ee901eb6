"""Sinusoidal absolute positions (arXiv 1706.03762, section 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from linrope.errors import InputError
from linrope.positions.base import TABLE_STD, PositionEncoding, PositionsConfig, Sizes
from linrope.rotary import frequencies, unit_rotations


class Sinusoidal(PositionEncoding):
    """x_t + c·p_t with p_(t, 2m) = sin(t·θ_m), p_(t, 2m+1) = cos(t·θ_m): see `sinusoids`.

    The mean square of a sine is ½, and c = 0.02·√2 makes that of c·p the one of the token embeddings at the start.
    """

    def __init__(self, config: PositionsConfig, sizes: Sizes) -> None:
        super().__init__(config, sizes)
        if sizes.d_model % 2:
            raise InputError(
                f"positions.name='sinusoidal' needs embeddings of an even width, not {sizes.d_model}: each θ has a "
                "sine and a cosine."
            )

    def embed(self, positions: Tensor) -> Tensor:
        return TABLE_STD * 2**0.5 * sinusoids(positions, self.sizes.d_model)


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
