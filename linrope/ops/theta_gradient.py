"""The gradient of trained frequencies, for both kernels."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from linrope.rotary import as_pairs


class ThetaGradient:
    """∂θ_m = Σ_t t·(q̃_t × ∂q̃_t + k̃_t × ∂k̃_t)_m, in float64 around the middle of the sequence."""

    def __init__(self, theta: Tensor, length: int, interleaved: bool):
        self.total = torch.zeros(theta.shape, dtype=torch.float64, device=theta.device)
        self.middle, self.interleaved = length // 2, interleaved
        self.sharing = (0, 1) if theta.ndim == 1 else (0,)  # the axes of (b, h, ...) that share one θ

    def of_heads(self, heads: slice) -> ThetaGradient:
        """For some heads: adds to the same total."""
        if self.total.ndim == 1:
            return self
        part = copy.copy(self)
        part.total = self.total[heads]
        return part

    def add(self, start: int, rotated: Tensor, gradient: Tensor) -> None:
        """The share of q̃ or k̃ (b, h, t, D), tokens from `start` on."""
        cross = self.cross(rotated, gradient).sum(dim=self.sharing)
        positions = torch.arange(start, start + cross.shape[-2], dtype=torch.float64, device=cross.device)
        self.total += ((positions - self.middle)[:, None] * cross).sum(dim=-2)

    def add_origin(self, start: int, first: tuple[Tensor, Tensor], last: tuple[Tensor, Tensor]) -> None:
        """Add the position of the middle times the sum of all crosses. Rotating all tokens at once equals rotating the
        states at both ends, so that sum follows from the states and their gradients, and is exactly 0 without them."""
        dims = (*self.sharing, 2)
        d_rotation = self.cross(*last).sum(dim=dims) - self.cross(*first).sum(dim=dims)
        self.total += (start + self.middle) * d_rotation

    def cross(self, x: Tensor, dx: Tensor) -> Tensor:
        """x × ∂x of each pair: (..., D) -> (..., R/2), float64."""
        width = 2 * self.total.shape[-1]
        pairs, d_pairs = as_pairs(x, width, self.interleaved), as_pairs(dx, width, self.interleaved)
        return (pairs.conj() * d_pairs).imag.to(torch.float64)
