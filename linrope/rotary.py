"""Rotary position embedding (RoFormer, arXiv 2104.09864, section 3.2) with angles that stay exact at any position.

A rotation is held as unit complex numbers `turn = exp(i·t·θ_m)`, one for each position `t` and pair `m`: the pair
`(x1, x2)` of a vector is the complex number `x1 + i·x2`, and turning it is one elementwise multiplication (eq. 34).
Angles are products in float64, never a matrix product and never in a lower precision, whatever autocast or the
matmul precision say; only the finished `turn` is rounded to the precision of what it multiplies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linrope.errors import InputError

MAX_POSITION = 2**53
"""Positions are exact in float64 up to here, and no further."""


def frequencies(rotary_dim: int, base: float, device: torch.device | None = None) -> Tensor:
    """θ_m = base^(-2m / rotary_dim) for m = 0 … rotary_dim/2 - 1, float64, in radians per position (eq. 15)."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    return base**-exponents


def check_positions(name: str, first: int, count: int) -> None:
    """Raise InputError unless the positions `first … first + count` are exact in float64."""
    if not -MAX_POSITION <= first <= first + count <= MAX_POSITION:
        raise InputError(
            f"{name}={first} with {count} tokens after it leaves ±2^53, beyond which positions are no longer exact: "
            "start again from a smaller position (only differences of positions matter)."
        )


def unit_rotations(positions: Tensor, theta: Tensor) -> Tensor:
    """exp(i·t·θ) to full float64 accuracy for every |t| ≤ 2^53, differentiable in θ.

    A rounded product t·θ is wrong by up to t·θ·2^-53 (1e-7 radians at position 10⁹), so the part that rounding took
    away is computed too (Dekker's product of two halves each) and turned as a second, small rotation.

    Args:
        positions: (...) integers.
        theta: (R/2,) frequencies in radians per position.

    Returns:
        (..., R/2) complex128.
    """
    t = positions.to(torch.float64).unsqueeze(-1)
    theta = theta.to(torch.float64)
    angle = t * theta
    with torch.no_grad():
        t_low = t.fmod(2**26)
        t_high = t - t_low
        spread = theta * (2**27 + 1)
        theta_high = spread - (spread - theta)
        theta_low = theta - theta_high
        lost = (t_high * theta_high - angle) + t_high * theta_low + t_low * theta_high + t_low * theta_low
        correction = torch.complex(lost.cos(), lost.sin())
    return torch.complex(angle.cos(), angle.sin()) * correction


def as_pairs(x: Tensor, rotary_dim: int, interleaved: bool) -> Tensor:
    """The first `rotary_dim` of the last dimension as complex numbers: (..., D) -> (..., rotary_dim/2)."""
    x = x[..., :rotary_dim]
    if interleaved:
        return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.complex(*(half.contiguous() for half in x.chunk(2, dim=-1)))


def rotate(x: Tensor, turn: Tensor | None, interleaved: bool, out: Tensor | None = None) -> Tensor:
    """Multiply the pairs of x by `turn`; dimensions beyond the rotary ones pass through (eq. 34).

    Args:
        x: (..., D), float32 or float64.
        turn: (R/2,) or anything that broadcasts to (..., R/2), complex; None leaves x as it is.
        interleaved: pair dimensions (2m, 2m+1), as RoFormer does; False pairs (m, m + R/2), as GPT-NeoX and Llama do.
        out: (..., D) of x's dtype to write to, not x itself and not differentiable; None for a new tensor.

    Returns:
        (..., D) in x's dtype.
    """
    if turn is None:
        return x
    rotary_dim = 2 * turn.shape[-1]
    if out is not None:
        return _rotate_into(x, turn, rotary_dim, interleaved, out)
    pairs = as_pairs(x, rotary_dim, interleaved)
    pairs = pairs * turn.to(pairs.dtype)
    turned = torch.view_as_real(pairs).flatten(-2) if interleaved else torch.cat((pairs.real, pairs.imag), dim=-1)
    return turned if rotary_dim == x.shape[-1] else torch.cat((turned, x[..., rotary_dim:]), dim=-1)


def _rotate_into(x: Tensor, turn: Tensor, rotary_dim: int, interleaved: bool, out: Tensor) -> Tensor:
    """One complex product where the pairs lie as complex numbers do, else its four real ones."""
    if rotary_dim < x.shape[-1]:
        out[..., rotary_dim:].copy_(x[..., rotary_dim:])
    if interleaved and x.shape[-1] % 2 == 0:
        pairs, turned = (torch.view_as_complex(y[..., :rotary_dim].unflatten(-1, (-1, 2))) for y in (x, out))
        torch.mul(pairs, turn, out=turned)
        return out
    (x1, x2), (y1, y2) = (_halves(y[..., :rotary_dim], interleaved) for y in (x, out))
    torch.mul(x1, turn.real, out=y1).addcmul_(x2, turn.imag, value=-1)
    torch.mul(x1, turn.imag, out=y2).addcmul_(x2, turn.real)
    return out


def _halves(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and second dimensions of all pairs, as views."""
    return (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)


@dataclass(frozen=True)
class RotaryConfig:
    """How an attention layer turns its queries and keys."""

    base: float = 10000.0
    """Wavelengths run from 2π up to 2π·base tokens."""
    rotary_dim: int | None = None
    """Turn only the first `rotary_dim` dimensions of each head (even); null turns all."""
    interleaved: bool = True
    """Pair dimensions (2m, 2m+1) as RoFormer does; false pairs (m, m + rotary_dim/2) as GPT-NeoX and Llama do."""
    trainable: bool = False
    """Learn the frequencies, starting from those that `base` gives."""


class RotaryEmbedding(nn.Module):
    """RoPE: turns pair m of a vector at position t by the angle t·θ_m, θ_m = base^(-2m / rotary_dim).

    Nothing but a trained θ is saved in a checkpoint: fixed frequencies are computed when needed, so none can be
    clobbered on load or rounded by `module.to(torch.bfloat16)`.

    Args:
        dim: size D of the vectors to turn.
        base: the longest wavelength is 2π·base^(1 - 2/rotary_dim) tokens.
        interleaved: pair dimensions (2m, 2m+1) (RoFormer); False pairs (m, m + rotary_dim/2) (GPT-NeoX, Llama).
        trainable: make θ a parameter, float32.
        rotary_dim: turn only the first `rotary_dim` dimensions, an even number ≤ dim; None turns all.

    Raises:
        InputError: an odd or too large `rotary_dim` (or an odd `dim` without one), a base that is not positive.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        *,
        interleaved: bool = True,
        trainable: bool = False,
        rotary_dim: int | None = None,
    ):
        super().__init__()
        name, width = ("dim", dim) if rotary_dim is None else ("rotary_dim", rotary_dim)
        if width % 2 or width < 2:
            raise InputError(f"{name}={width} cannot be split into pairs: RoPE needs a positive even rotary_dim.")
        if width > dim:
            raise InputError(f"rotary_dim={rotary_dim} is larger than dim={dim}: at most all dimensions can turn.")
        if not (math.isfinite(base) and base > 0):
            raise InputError(f"base={base} must be a positive number.")
        self.dim, self.rotary_dim, self.base, self.interleaved = dim, width, float(base), interleaved
        self.trainable = trainable
        if trainable:
            self.theta = nn.Parameter(frequencies(width, base).to(torch.float32))

    @classmethod
    def from_config(cls, dim: int, config: RotaryConfig) -> RotaryEmbedding:
        """The embedding for heads of size `dim` that `config` describes."""
        return cls(
            dim,
            config.base,
            interleaved=config.interleaved,
            trainable=config.trainable,
            rotary_dim=config.rotary_dim,
        )

    def _apply(self, fn, recurse=True):
        """Move with the module, but never let θ fall below float32: in bfloat16 angles are wrong after a few tokens."""

        def keep_precision(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            return changed if changed.dtype.itemsize >= 4 else tensor.to(changed.device)

        return super()._apply(keep_precision, recurse)

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """θ in radians per position: (rotary_dim/2,), float64; differentiable where it is trainable."""
        if self.trainable:
            return self.theta.to(device=device, dtype=torch.float64)
        return frequencies(self.rotary_dim, self.base, device)

    def rotate(self, x: Tensor, offset: int = 0, *, positions: Tensor | None = None) -> Tensor:
        """Turn each x[..., t, :] by its position: `R_t x_t` (eq. 34).

        Args:
            x: (..., T, dim), floating; half precisions are turned in float32 and rounded once.
            offset: the position of the first of the T, the others following it.
            positions: given positions instead, integers of shape (T,), or (B, T) for x of shape (B, H, T, dim) or
                (B, T, dim).

        Returns:
            The shape and dtype of x.

        Raises:
            InputError: another last dimension than `dim`, integer x, positions of another shape or dtype, both an
                offset and positions, or a position beyond ±2^53.
        """
        if x.ndim < 2 or x.shape[-1] != self.dim or not x.is_floating_point():
            raise InputError(
                f"x of shape {tuple(x.shape)} and dtype {x.dtype} cannot be rotated: pass (..., T, {self.dim}) floats."
            )
        if positions is None:
            check_positions("offset", offset, x.shape[-2])
            positions = torch.arange(offset, offset + x.shape[-2], device=x.device)
        else:
            positions = self._check_given(positions, offset, x)
        turn = unit_rotations(positions, self.frequencies(x.device))
        working = torch.promote_types(x.dtype, torch.float32)
        return rotate(x.to(working), turn, self.interleaved).to(x.dtype)

    @staticmethod
    def _check_given(positions: Tensor, offset: int, x: Tensor) -> Tensor:
        if offset != 0:
            raise InputError(f"offset={offset} and positions exclude each other: add the offset to the positions.")
        if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
            raise InputError(f"positions of dtype {positions.dtype} must be integers: floats collide at long range.")
        batched = x.ndim > 2 and positions.shape == (x.shape[0], x.shape[-2])
        if not batched and positions.shape != x.shape[-2:-1]:
            raise InputError(
                f"positions of shape {tuple(positions.shape)} do not fit x of shape {tuple(x.shape)}: "
                f"pass (T,) or (B, T) with T={x.shape[-2]}."
            )
        if positions.numel() and positions.abs().max() > MAX_POSITION:
            raise InputError(f"positions reach {int(positions.abs().max())}, beyond ±2^53 where they are not exact.")
        positions = positions.to(x.device)
        return positions.reshape(x.shape[0], *(1,) * (x.ndim - 3), -1) if batched else positions

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, rotary_dim={self.rotary_dim}, base={self.base:g}, interleaved={self.interleaved}, "
            f"trainable={self.trainable}"
        )


def permute_pairing(weight: Tensor, n_heads: int, *, to_interleaved: bool, rotary_dim: int | None = None) -> Tensor:
    """Reorder a query or key projection so that the other pairing computes the same attention with it.

    RoPE with `interleaved=True` on the reordered projection gives the inner products of `interleaved=False` on the
    given one (with `to_interleaved=True`; the other way round with False): both pair the same outputs.

    Args:
        weight: (n_heads · head_dim, ...), a projection's weight or bias, head by head.
        n_heads: number of heads in the first dimension.
        to_interleaved: from half-split (m, m + rotary_dim/2) to interleaved (2m, 2m+1); False for the way back.
        rotary_dim: how many dimensions of each head turn; None for all.

    Returns:
        A new tensor of the same shape.

    Raises:
        InputError: the first dimension is not a multiple of `n_heads`, or `rotary_dim` is odd or larger than a head.
    """
    if n_heads < 1 or weight.shape[0] % n_heads:
        raise InputError(f"n_heads={n_heads} does not divide the first dimension of weight {tuple(weight.shape)}.")
    head_dim = weight.shape[0] // n_heads
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise InputError(f"rotary_dim={rotary_dim} must be even and at most head_dim={head_dim}.")
    source = torch.arange(head_dim, device=weight.device)
    rotary = source[:rotary_dim]
    pairs = rotary.view(2, -1).mT if to_interleaved else rotary.view(-1, 2).mT
    source[:rotary_dim] = pairs.reshape(-1).clone()
    heads = weight.unflatten(0, (n_heads, head_dim))
    return heads.index_select(1, source).flatten(0, 1)
