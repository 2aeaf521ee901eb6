"""Rotary angles that depend on the input: how far each token turns is learned."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from linrope.errors import InputError
from linrope.rotary import RotaryEmbedding, rotate


class SelectiveRope(nn.Linear):
    """Turns pair m of token t by the angle Σ_{s ≤ t} θ_m (1 + tanh(w_m · x_s)), with W = 0 at the start: RoPE.

    So each token turns what is read from it on against all before it, by 0 to 2θ_m, and tokens j < i meet at an angle
    that j + 1 … i decide. The idea is that of Selective RoPE (arXiv 2511.17388).

    A change of one token's angle turns everything after it, so that its gradient is a small difference of large sums:
    angles are summed in float64, and what is turned stays in float32 at least. Weight decay draws W towards RoPE.

    Args:
        d_model: width of x.
        n_heads: number of heads H.
        rope: how many dimensions of a head turn.
    """

    def __init__(self, d_model: int, n_heads: int, rope: RotaryEmbedding):
        super().__init__(d_model, n_heads * (rope.rotary_dim // 2), bias=False)
        self.n_heads = n_heads
        self.at_rest = RotaryEmbedding(rope.dim, [None] * n_heads, rotary_dim=rope.rotary_dim, signed=rope.signed)
        """What is left for the operator to turn: nothing, by dimensions laid out as those of `rope` are."""

    def reset_parameters(self) -> None:
        """W = 0. Nothing is drawn: a seed makes the other weights that it makes without this."""
        nn.init.zeros_(self.weight)

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

    def angles(self, x: Tensor, theta: Tensor, past: Tensor | None = None) -> Tensor:
        """Where the tokens of x stand.

        Args:
            x: (B, T, d_model).
            theta: (R/2,) or (H, R/2) radians, float64.
            past: (B, H, R/2), the angle of the token before x; None for 0.

        Returns:
            (B, H, T, R/2) float64 radians.
        """
        theta = theta if theta.ndim == 1 else theta[:, None]
        angles = (self(x).to(torch.float64) * theta).cumsum(dim=2)
        return angles if past is None else angles + past[:, :, None]

    def turn(
        self, x: Tensor, q: Tensor, k: Tensor, rope: RotaryEmbedding, past: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Turn queries and keys (B, H, T, D) of the tokens x (B, T, d_model), the token before them standing at `past`.

        Returns:
            Both, in float32 at least, and the last token's angle modulo 2π, (B, H, R/2) float64.
        """
        if past is None:
            past = x.new_zeros(x.shape[0], *self.n_angles, dtype=torch.float64)
        angles = self.angles(x, rope.frequencies(x.device), past).remainder(2 * math.pi)
        working = torch.promote_types(q.dtype, torch.float32)
        rounded = angles.to(working)
        turns = torch.complex(rounded.cos(), rounded.sin())
        q, k = (rotate(y.to(working), turns, rope.interleaved) for y in (q, k))
        return q, k, angles[:, :, -1].clone() if x.shape[1] else past

    def check_past(self, angle: Tensor | None, batch: int) -> None:
        """Raise InputError unless a state's angle is one of this rotation's, for so many rows."""
        expected = batch, *self.n_angles
        if angle is None or angle.shape != expected:
            found = "None" if angle is None else tuple(angle.shape)
            raise InputError(f"state.angle is {found}, this call needs {expected}: pass what this layer returned.")
