"""Rotary angles that the input decides: `rope.placement="selective"`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor, nn

from linrope.layers.linear import Float32Linear, accept_weights_without_linear
from linrope.rotary import RotaryEmbedding, rotate


class SelectiveRope(nn.Module):
    """Rotates pair m of token t by the angle Σ_{s ≤ t} θ_m (1 + tanh(w_m · x_s)). W = 0 at the start, which is RoPE.

    Each token adds an angle of 0 to 2θ_m, so that the rotation between tokens j < i depends on tokens j + 1 … i. The
    idea is that of Selective RoPE (arXiv 2511.17388).

    One token's angle rotates all later tokens, so that its gradient is a small difference of large sums. Angles are
    therefore summed in float64, and rotated vectors have float32 at least. Weight decay pulls W towards RoPE.
    """

    def __init__(self, d_model: int, n_heads: int, rope: RotaryEmbedding):
        super().__init__()
        self.n_heads = n_heads
        self.linear = _AngleLinear(d_model, n_heads * (rope.rotary_dim // 2), bias=False)
        accept_weights_without_linear(self)
        self.identity = RotaryEmbedding(rope.dim, [None] * n_heads, rotary_dim=rope.rotary_dim, signed=rope.signed)
        """What the operator is given: the dimensions of `rope`, already rotated here, with θ = 0."""

    def reset_parameters(self) -> None:
        """W = 0, as in a new layer."""
        self.linear.reset_parameters()

    @property
    def n_angles(self) -> tuple[int, int]:
        """(H, R/2): the angles of one row at one token."""
        return self.n_heads, self.identity.rotary_dim // 2

    def forward(self, x: Tensor) -> Tensor:
        """1 + tanh(W x): (B, T, d_model) -> (B, H, T, R/2), in float32 at least."""
        return rearrange(1 + self.linear(x).tanh(), "b t (h r) -> b h t r", h=self.n_heads)

    def angles(self, x: Tensor, theta: Tensor) -> Tensor:
        """The angle of each token of x (B, T, d_model) after the token before x, (B, H, T, R/2) float64 radians.

        θ is (R/2,) or (H, R/2) float64.
        """
        theta = theta if theta.ndim == 1 else theta[:, None]
        return (self(x).to(torch.float64) * theta).cumsum(dim=2)

    def rotation(
        self, x: Tensor, dtype: torch.dtype, rope: RotaryEmbedding, before: Callable[[Tensor], Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """The rotation of each token of x (B, T, d_model), (B, H, T, R/2) complex, for queries and keys of a dtype.

        `before` returns the last angle before x, (B, H, R/2), None for 0, from the angle by which x advances it. With
        the rotation comes the last token's angle modulo 2π, (B, H, R/2) float64.
        """
        angles = self.angles(x, rope.frequencies(x.device))
        past = before(angles[:, :, -1:].sum(dim=2))
        if past is None:
            past = x.new_zeros(x.shape[0], *self.n_angles, dtype=torch.float64)
        angles = (angles + past[:, :, None]).remainder(2 * math.pi)
        rounded = angles.to(torch.promote_types(dtype, torch.float32))
        rotation = torch.complex(rounded.cos(), rounded.sin())
        return rotation, angles[:, :, -1].clone() if x.shape[1] else past

    def rotate(self, y: Tensor, rotation: Tensor, rope: RotaryEmbedding) -> Tensor:
        """Queries or keys (B, H, T, D) rotated by `rotation`, in float32 at least."""
        return rotate(y.to(torch.promote_types(y.dtype, torch.float32)), rotation, rope.interleaved)


class _AngleLinear(Float32Linear):
    """`W x`, (B, T, d_model) -> (B, T, H R/2)."""

    def reset_parameters(self) -> None:
        """W = 0, without a random draw: a seed gives the other weights the values that they have without this layer."""
        nn.init.zeros_(self.weight)
