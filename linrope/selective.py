"""Rotary angles that depend on the input: how far each token turns is learned."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from linrope.errors import InputError
from linrope.rotary import RotaryEmbedding, rotate


class SelectiveRotation(nn.Linear):
    """Turns pair m of token t by the angle Σ_{s ≤ t} θ_m (1 + tanh(w_m · x_s)), with W = 0 at the start: RoPE.

    So each token turns all that comes after it against all that came before, by 0 to 2θ_m, and two tokens meet at an
    angle that only those between them decide. The idea is that of Selective RoPE (arXiv 2511.17388).

    Args:
        d_model: width of x.
        n_heads: number of heads H.
        rope: θ, how pairs lie, and how many dimensions of a head turn.
    """

    def __init__(self, d_model: int, n_heads: int, rope: RotaryEmbedding):
        super().__init__(d_model, n_heads * (rope.rotary_dim // 2), bias=False)
        nn.init.zeros_(self.weight)
        self.n_heads = n_heads
        self.at_rest = RotaryEmbedding(rope.dim, [None] * n_heads, rotary_dim=rope.rotary_dim, signed=rope.signed)
        """What is left for the operator to turn: nothing, by dimensions laid out as those of `rope` are."""

    @property
    def n_angles(self) -> tuple[int, int]:
        """(H, R/2): angles that a row has at each token."""
        return self.n_heads, self.at_rest.rotary_dim // 2

    def forward(self, x: Tensor) -> Tensor:
        """1 + tanh(W x): (B, T, d_model) -> (B, H, T, R/2), in float32 at least whatever autocast says."""
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, torch.float32)
            pace = 1 + F.linear(x.to(dtype), self.weight.to(dtype)).tanh()
        return rearrange(pace, "b t (h r) -> b h t r", h=self.n_heads)

    def angles(self, x: Tensor, theta: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The angles of x's tokens, summed in float64: sums of fewer digits drift.

        Args:
            x: (B, T, d_model).
            theta: (R/2,) or (H, R/2), radians for each token, float64.
            past: (B, H, R/2), the angle at which the token before x stands; None for 0.

        Returns:
            (B, H, T, R/2) float64, and the last of them modulo 2π, (B, H, R/2).
        """
        theta = theta if theta.ndim == 1 else theta[:, None]
        angles = (self(x).to(torch.float64) * theta).cumsum(dim=2)
        if past is None:
            past = angles.new_zeros(x.shape[0], *self.n_angles)
        angles = angles + past[:, :, None]
        return angles, angles[:, :, -1].remainder(2 * math.pi) if x.shape[1] else past

    def check_past(self, angle: Tensor | None, batch: int) -> None:
        """Raise InputError unless a state's angle is one of this rotation's, for so many rows."""
        expected = batch, *self.n_angles
        if angle is None or angle.shape != expected:
            found = "None" if angle is None else tuple(angle.shape)
            raise InputError(f"state.angle is {found}, this call needs {expected}: pass what this layer returned.")


def turn(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Turn the first pairs of x (B, H, T, D) by angles (B, H, T, R/2); half precisions in float32, rounded once."""
    working = torch.promote_types(x.dtype, torch.float32)
    angles = angles.remainder(2 * math.pi).to(working)  # few digits are left of a large angle
    return rotate(x.to(working), torch.complex(angles.cos(), angles.sin()), interleaved).to(x.dtype)
