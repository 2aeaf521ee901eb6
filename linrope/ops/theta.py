"""The gradient of trained frequencies."""

from __future__ import annotations

import torch
from torch import Tensor

from linrope.rotary import as_pairs


class ThetaGradient:
    """∂θ_m = Σ_t t·(q̃_t × ∂q̃_t + k̃_t × ∂k̃_t)_m, in float64 around the middle of the sequence."""

    def __init__(self, theta: Tensor, length: int, interleaved: bool):
        self.total = torch.zeros(theta.shape, dtype=torch.float64, device=theta.device)
        self.middle, self.interleaved = length // 2, interleaved

    def add(self, start: int, turned: Tensor, gradient: Tensor) -> None:
        """The share of q̃ or k̃ (b, h, t, D), tokens from `start` on."""
        cross = self.cross(turned, gradient).sum(dim=(0, 1))
        positions = torch.arange(start, start + len(cross), dtype=torch.float64, device=cross.device)
        self.total += ((positions - self.middle)[:, None] * cross).sum(dim=0)

    def add_origin(self, start: int, first: tuple[Tensor, Tensor], last: tuple[Tensor, Tensor]) -> None:
        """The middle's own position times the whole sum of crosses. To turn all tokens at once is to turn the states at
        both ends instead, so that sum is read off the states and their gradients: exactly 0 where there are none."""
        d_turn = self.cross(*last).sum(dim=(0, 1, 2)) - self.cross(*first).sum(dim=(0, 1, 2))
        self.total += (start + self.middle) * d_turn

    def cross(self, x: Tensor, dx: Tensor) -> Tensor:
        """x × ∂x of each pair: (..., D) -> (..., R/2), float64."""
        width = 2 * len(self.total)
        pairs, d_pairs = as_pairs(x, width, self.interleaved), as_pairs(dx, width, self.interleaved)
        return (pairs.conj() * d_pairs).imag.to(torch.float64)
