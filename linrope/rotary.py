"""Rotary position embedding (RoFormer, arXiv 2104.09864, section 3.2) with angles that stay exact at any position.

A pair `(x1, x2)` of a vector at position `t` is the complex number `x1 + i·x2`, and rotating it is a multiplication by
`exp(i·t·θ_m)` (eq. 34). Angles are float64; only the finished rotation is rounded to the dtype of the vectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor, nn

from linrope.errors import InputError, require_choice
from linrope.utils import kept_tensors
from linrope.utils.filling import fill
from linrope.utils.options import check_keys, check_types, require_whole
from linrope.utils.values import extremes

MAX_POSITION = 2**53
"""The largest position that float64 represents exactly."""
Base = float | Sequence[float | None]
"""One base for all heads, or one for each; None for a head without rotation."""
Placement = Literal["numerator", "both", "before_map", "signed"]
"""Where linear attention applies the rotation: see `RotaryConfig`."""
BY_PARTS = {"yarn": (1.0, 32.0), "llama3": (1.0, 4.0)}
"""α and β of rules that scale by parts, in full rotations within the original context. Pairs below α are slowed by the
whole factor, pairs above β are unchanged."""
SCALING_RULES = ("linear", "ntk", *BY_PARTS)


def frequencies(rotary_dim: int, base: Base | None, device: torch.device | None = None) -> Tensor:
    """θ_m = base^(-2m / rotary_dim) for m = 0 … rotary_dim/2 - 1, float64, in radians per position (eq. 15).

    Returns:
        (R/2,), or (H, R/2) if `base` has one number for each head; θ = 0 for a base of None.
    """
    if isinstance(base, Sequence):
        return torch.stack([frequencies(rotary_dim, one, device) for one in base])
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    return torch.zeros_like(exponents) if base is None else base**-exponents


def check_positions(name: str, first: int, count: int) -> None:
    """Raise InputError unless the positions `first … first + count` are integers that float64 represents exactly."""
    if not isinstance(first, (Integral, torch.SymInt)):  # SymInt: a symbolic length while a graph is traced
        raise InputError(f"{name}={first!r} must be an int: float positions are not exact at long range.")
    last = first if isinstance(count, torch.SymInt) else first + count  # an exported graph would get a largest length
    if not -MAX_POSITION <= first <= last <= MAX_POSITION:
        raise InputError(
            f"{name}={first} with {count} tokens after it is beyond ±2^53, where positions are not exact: "
            "start from a smaller position (only differences of positions matter)."
        )


def unit_rotations(positions: Tensor, theta: Tensor) -> Tensor:
    """exp(i·t·θ) to full float64 accuracy for every |t| ≤ 2^53, differentiable in θ.

    A rounded product t·θ is wrong by up to t·θ·2^-53 (1e-7 radians at position 10⁹). The rounding error is therefore
    computed too (Dekker's product, from two halves of each factor), and applied as a second, small rotation.

    Args:
        positions: (...) integers.
        theta: frequencies in radians per position, (R/2,), or (H, R/2) for each head.

    Returns:
        (..., R/2) complex128. With θ for each head: (H, T, R/2) for positions (T,), (B, H, T, R/2) for (B, 1, T), and
        (H, 1, R/2) for a single position; each broadcasts to vectors (B, H, T, D).
    """
    t = positions.to(torch.float64).unsqueeze(-1)
    theta = theta.to(torch.float64)
    if theta.ndim > 1:
        theta = theta.unsqueeze(-2)
    angle = t * theta
    with torch.no_grad():
        t_low = t.fmod(2**26)
        t_high = t - t_low
        scaled = theta * (2**27 + 1)
        theta_high = scaled - (scaled - theta)
        theta_low = theta - theta_high
        error = (t_high * theta_high - angle) + t_high * theta_low + t_low * theta_high + t_low * theta_low
        correction = torch.complex(error.cos(), error.sin())
    return torch.complex(angle.cos(), angle.sin()) * correction


def as_pairs(x: Tensor, rotary_dim: int, interleaved: bool) -> Tensor:
    """The first `rotary_dim` of the last dimension as complex numbers: (..., D) -> (..., rotary_dim/2)."""
    x = x[..., :rotary_dim]
    if interleaved:
        pairs = x.unflatten(-1, (-1, 2)).contiguous()
        if not _are_complex(pairs):
            pairs = pairs.clone(memory_format=torch.contiguous_format)
        return torch.view_as_complex(pairs)
    return torch.complex(*(half.contiguous() for half in x.chunk(2, dim=-1)))


def _are_complex(pairs: Tensor) -> bool:
    """Whether pairs (..., 2) lie in memory as complex numbers do; a contiguous view may begin at any float."""
    return pairs.stride(-1) == 1 and not any(n % 2 for n in (pairs.storage_offset(), *pairs.stride()[:-1]))


def rotate(x: Tensor, rotation: Tensor | None, interleaved: bool, out: Tensor | None = None) -> Tensor:
    """Multiply the pairs of x by `rotation` (eq. 34); dimensions beyond the rotary ones stay as they are.

    Args:
        x: (..., D), float32 or float64.
        rotation: complex, (R/2,) or any shape that broadcasts to (..., R/2); None returns x.
        interleaved: pair dimensions (2m, 2m+1), as RoFormer does; False pairs (m, m + R/2), as GPT-NeoX and Llama do.
        out: (..., D) of x's dtype to write to, not x itself and not differentiable; None for a new tensor.

    Returns:
        (..., D) in x's dtype.
    """
    if rotation is None:
        return x
    rotary_dim = 2 * rotation.shape[-1]
    if out is not None:
        return _rotate_into(x, rotation, rotary_dim, interleaved, out)
    rotate_pairs = _rotate_real if torch.compiler.is_compiling() else _rotate_complex
    rotated = rotate_pairs(x[..., :rotary_dim], rotation, interleaved)
    return rotated if rotary_dim == x.shape[-1] else torch.cat((rotated, x[..., rotary_dim:]), dim=-1)


def _rotate_complex(x: Tensor, rotation: Tensor, interleaved: bool) -> Tensor:
    """All pairs of x (..., R), by one complex product."""
    pairs = as_pairs(x, x.shape[-1], interleaved)
    pairs = pairs * rotation.to(pairs.dtype)
    return torch.view_as_real(pairs).flatten(-2) if interleaved else torch.cat((pairs.real, pairs.imag), dim=-1)


def _rotate_real(x: Tensor, rotation: Tensor, interleaved: bool) -> Tensor:
    """The same in real numbers: compilers fuse no complex ones, and PyTorch 2.10's fails on gradients of one token."""
    (x1, x2), cos, sin = _halves(x, interleaved), rotation.real.to(x.dtype), rotation.imag.to(x.dtype)
    halves = x1 * cos - x2 * sin, x1 * sin + x2 * cos
    return torch.stack(halves, dim=-1).flatten(-2) if interleaved else torch.cat(halves, dim=-1)


def _rotate_into(x: Tensor, rotation: Tensor, rotary_dim: int, interleaved: bool, out: Tensor) -> Tensor:
    """One complex product if the pairs have the memory layout of complex numbers, else four real products."""
    if rotary_dim < x.shape[-1]:
        out[..., rotary_dim:].copy_(x[..., rotary_dim:])
    if interleaved:
        pairs, rotated = (y[..., :rotary_dim].unflatten(-1, (-1, 2)) for y in (x, out))
        if _are_complex(pairs) and _are_complex(rotated):
            torch.mul(torch.view_as_complex(pairs), rotation, out=torch.view_as_complex(rotated))
            return out
    (x1, x2), (y1, y2) = (_halves(y[..., :rotary_dim], interleaved) for y in (x, out))
    torch.mul(x1, rotation.real, out=y1).addcmul_(x2, rotation.imag, value=-1)
    torch.mul(x1, rotation.imag, out=y2).addcmul_(x2, rotation.real)
    return out


def _halves(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second dimensions of all pairs, as views."""
    return (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)


@dataclass(frozen=True)
class RotaryScaling:
    """Changes the frequencies for a context longer than the one of training."""

    rule: str
    """Which frequencies become lower: linear (all alike: position interpolation), ntk (low ones more: a larger base),
    yarn (those with less than one full rotation in the original context; those with over 32 stay) or llama3 (the same,
    those with over 4 stay: Llama 3.1 to 3.3)."""
    factor: float
    """Ratio of the new context to the original one, at least 1."""
    original_context: int | None = None
    """Context of training, in tokens; yarn and llama3 need it, the other rules ignore it."""

    def check(self, rotary_dim: int) -> None:
        """Raise InputError unless the rule fits `rotary_dim` dimensions."""
        # not in __post_init__: a parser that tries each type of `RotaryScaling | None` would hide the message
        require_choice("scaling.rule", self.rule, SCALING_RULES)
        if not (isinstance(self.factor, Real) and 1 <= self.factor < math.inf):
            raise InputError(f"scaling.factor={self.factor!r} must be a finite number, at least 1.")
        context = self.original_context
        if context is None and self.rule in BY_PARTS:
            raise InputError(
                f"scaling.original_context=None, and rule={self.rule!r} needs it: set it to the tokens in a row."
            )
        if context is not None and not (isinstance(context, int) and context >= 1):
            raise InputError(f"scaling.original_context={context!r} must be a whole number of tokens, at least 1.")
        if self.rule == "ntk" and rotary_dim < 4:
            raise InputError(
                f"scaling.rule='ntk' needs more than rotary_dim={rotary_dim}: its only θ is 1 with any base."
            )

    def apply(self, theta: Tensor) -> Tensor:
        """The frequencies θ (..., R/2) after scaling.

        "linear" is θ / factor (position interpolation, arXiv 2306.15595). "ntk" is the θ of base · factor^(R/(R-2)):
        the first θ stays, the last is divided by the factor (arXiv 2309.00071, section 3.1). "yarn" and "llama3"
        interpolate between θ / factor and θ as the rotations in the original context, original_context · θ / 2π, go
        from α to β (NTK by parts, section 3.2).
        """
        if self.rule == "ntk":
            # (factor^(R/(R-2)))^(-2m/R) = factor^(-2m/(R-2)), and 2m runs from 0 to R - 2
            return theta * self.factor ** -torch.linspace(0, 1, theta.shape[-1], dtype=theta.dtype, device=theta.device)
        if self.rule == "linear":
            return theta / self.factor
        alpha, beta = BY_PARTS[self.rule]
        rotations = self.original_context * theta / (2 * math.pi)
        kept = ((rotations - alpha) / (beta - alpha)).clamp(0, 1)
        return kept * theta + (1 - kept) * theta / self.factor


@dataclass(frozen=True)
class RotaryConfig:
    """How an attention layer rotates its queries and keys.

    `placement` says where linear attention applies the rotation R. Softmax attention has neither a feature map φ nor a
    denominator of its own: it rotates queries and keys, and ignores the placement.

    | placement    | numerator sums       | denominator sums | what it is                                              |
    |--------------|----------------------|------------------|---------------------------------------------------------|
    | "numerator"  | R φ(q), R φ(k)       | φ(q), φ(k)       | RoFormer (arXiv 2104.09864, eq. 19)                     |
    | "both"       | R φ(q), R φ(k)       | R φ(q), R φ(k)   | weights add up to 1; denominators may come close to 0   |
    | "before_map" | φ(R q), φ(R k)       | φ(R q), φ(R k)   | positive weights, not a function of the distance alone  |
    | "signed"     | R q, R k and φ(rest) | φ(rest)          | rotated dimensions skip φ: products of either sign      |

    "rest" are the dimensions of a head beyond the first `rotary_dim`. With `normalize="none"` there is no denominator.
    """

    base: float | list[float | None] = 10000.0
    """Wavelengths go from 2π up to 2π·base tokens; a list has one base for each head, null for no rotation."""
    rotary_dim: int | None = None
    """Rotate only the first `rotary_dim` dimensions of each head (even); null: all, or half if signed."""
    interleaved: bool = True
    """Pair dimensions (2m, 2m+1) as RoFormer does; false pairs (m, m + rotary_dim/2) as GPT-NeoX and Llama do."""
    trainable: bool = False
    """Train the frequencies; `base` and `scaling` give their initial values."""
    placement: Placement = "numerator"
    """Where linear attention applies the rotation; softmax ignores it. numerator: to the features in the numerator;
    both: also in the denominator; before_map: before the feature map; signed: rotated dimensions skip feature map and
    denominator."""
    scaling: RotaryScaling | None = None
    """Lower frequencies for contexts longer than that of training: rule (linear, ntk, yarn or llama3), factor and, for
    yarn and llama3, original_context; null for none."""

    @property
    def signed(self) -> bool:
        """Whether the rotated dimensions of linear attention skip the feature map and the denominator."""
        return self.placement == "signed"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RotaryConfig:
        """The inverse of `dataclasses.asdict`, including the nested scaling.

        Raises:
            InputError: an unknown key (the message has the nearest known one), or a missing one of the scaling.
        """
        check_keys(values, cls)
        scaling = values.get("scaling")
        if scaling is not None and not isinstance(scaling, RotaryScaling):
            check_keys(scaling, RotaryScaling)
            values = {**values, "scaling": RotaryScaling(**scaling)}
        return cls(**values)


def check_config(rope: RotaryConfig | None) -> None:
    """Raise InputError unless `rope` is None or a RotaryConfig (no RotaryEmbedding) of values of the right types."""
    if rope is None:
        return
    if not isinstance(rope, RotaryConfig):
        raise InputError(f"rope is a {type(rope).__name__}: pass a linrope.RotaryConfig, or None for no positions.")
    check_types(rope, section="rope.")


def half_of(dim: int) -> int:
    """Half of the dimensions, rounded down to whole pairs."""
    return dim // 4 * 2


class RotaryEmbedding(nn.Module):
    """RoPE: rotates pair m of a vector at position t by the angle t·θ_m, θ_m = base^(-2m / rotary_dim).

    A checkpoint holds trained θ only. Fixed frequencies are computed when they are needed, so that loading cannot
    overwrite them and `module.to(torch.bfloat16)` cannot round them.

    Args:
        dim: size D of the vectors.
        base: as in `RotaryConfig`. With a list θ is (H, R/2). None in it is θ = 0 (with `trainable`: at the start).
        interleaved, scaling: as in `RotaryConfig`.
        trainable: make θ a float32 parameter.
        rotary_dim: rotate only the first `rotary_dim` dimensions, an even number ≤ dim. None rotates all, or with
            `signed` half of them, rounded down to an even number.
        signed: in linear attention, the rotated dimensions skip φ and the denominator: see `linear_attention`.

    Raises:
        InputError: an odd or too large `rotary_dim` (or an odd `dim` without one), a base that is not positive, an
            empty list of bases, an `interleaved` that is not a bool, or a scaling that does not fit.
    """

    def __init__(
        self,
        dim: int,
        base: Base = 10000.0,
        *,
        interleaved: bool = True,
        trainable: bool = False,
        rotary_dim: int | None = None,
        scaling: RotaryScaling | None = None,
        signed: bool = False,
    ):
        super().__init__()
        if not isinstance(interleaved, bool):
            raise InputError(
                f"interleaved={interleaved!r} must be True, for pairs of dimensions (2m, 2m+1), or False, for "
                "(m, m + rotary_dim/2)."
            )
        require_whole("dim", dim)
        if rotary_dim is not None:
            require_whole("rotary_dim", rotary_dim)
        whole = half_of(dim) if signed else dim
        name, width = ("dim", whole) if rotary_dim is None else ("rotary_dim", rotary_dim)
        if width % 2 or width < 2:
            raise InputError(f"{name}={width} cannot be split into pairs: RoPE needs a positive even rotary_dim.")
        if width > dim:
            raise InputError(f"rotary_dim={rotary_dim} is larger than dim={dim}: at most all dimensions rotate.")
        if scaling is not None:
            if not isinstance(scaling, RotaryScaling):
                raise InputError(f"scaling={scaling!r} must be a linrope.RotaryScaling, or None for no scaling.")
            scaling.check(width)
        self.dim, self.rotary_dim, self.base, self.interleaved = dim, width, _checked_base(base), interleaved
        self.trainable, self.scaling, self.signed = trainable, scaling, signed
        if trainable:
            self.theta = nn.Parameter(self._initial_frequencies().to(torch.float32))

    def reset_parameters(self) -> None:
        """Trained θ become those of `base` and `scaling` again."""
        if self.trainable:
            fill(self.theta, self._initial_frequencies(self.theta.device))

    @classmethod
    def from_config(cls, dim: int, config: RotaryConfig) -> RotaryEmbedding:
        """The embedding that `config` describes, for heads of size `dim`."""
        names = ("interleaved", "trainable", "rotary_dim", "scaling", "signed")
        return cls(dim, config.base, **{name: getattr(config, name) for name in names})

    @property
    def signed_dim(self) -> int:
        """Number of first dimensions that skip the feature map and the denominator of linear attention."""
        return self.rotary_dim if self.signed else 0

    @property
    def logit_scale(self) -> float:
        """Factor on the rotated queries and on the rotated keys of softmax attention; its square multiplies the logits.

        YaRN's √(1/t) = 0.1 · ln(factor) + 1 (arXiv 2309.00071), and 1.0 without "yarn" scaling. Linear attention
        ignores it.
        """
        if self.scaling is None or self.scaling.rule != "yarn":
            return 1.0
        return 0.1 * math.log(self.scaling.factor) + 1

    def _apply(self, fn, recurse=True):
        """Move and cast, but keep θ at float32 at least: bfloat16 angles are wrong after a few tokens."""

        def keep_precision(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            return changed if changed.dtype.itemsize >= 4 else tensor.to(changed.device)

        return super()._apply(keep_precision, recurse)

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """θ in radians per position, float64: (rotary_dim/2,), or (H, rotary_dim/2) if `base` has one for each head.

        Differentiable if θ is trainable; otherwise do not write to it, since all calls share it.
        """
        if self.trainable:
            return self.theta.to(device=device, dtype=torch.float64)
        key = "frequencies", self.rotary_dim, self.base, self.scaling
        return kept_tensors.keep(key, device, lambda: self._initial_frequencies(device))

    def _initial_frequencies(self, device: torch.device | None = None) -> Tensor:
        theta = frequencies(self.rotary_dim, self.base, device)
        return theta if self.scaling is None else self.scaling.apply(theta)

    def check_heads(self, heads: int) -> None:
        """Raise InputError if `base` is a list of another length than `heads`."""
        if isinstance(self.base, tuple) and len(self.base) != heads:
            raise InputError(
                f"rope.base has {len(self.base)} entries, the tensors to rotate have {heads} heads: "
                "give one base for each head, or a single number for all."
            )

    def rotate(self, x: Tensor, offset: int = 0, *, positions: Tensor | None = None) -> Tensor:
        """Rotate each x[..., t, :] by its position: `R_t x_t` (eq. 34).

        Args:
            x: floats (..., T, dim), or (..., H, T, dim) if `base` has one for each head. Half precisions are rotated in
                float32 and rounded once.
            offset: position of the first token; the others follow it.
            positions: the positions themselves, instead of an offset: integers (T,), or (B, T) for x of shape
                (B, H, T, dim) or (B, T, dim).

        Returns:
            The shape and dtype of x.

        Raises:
            InputError: a last dimension other than `dim`, a number of heads other than that of the bases, integer x,
                positions of the wrong shape or dtype, both an offset and positions, or a position beyond ±2^53.
        """
        if not isinstance(x, Tensor):
            raise InputError(f"x is a {type(x).__name__}: pass a tensor (..., T, {self.dim}) of floats.")
        if x.ndim < 2 or x.shape[-1] != self.dim or not x.is_floating_point():
            raise InputError(
                f"x of shape {tuple(x.shape)} and dtype {x.dtype} cannot be rotated: pass (..., T, {self.dim}) floats."
            )
        self.check_heads(x.shape[-3] if x.ndim > 2 else 0)
        if positions is None:
            check_positions("offset", offset, x.shape[-2])
            positions = torch.arange(offset, offset + x.shape[-2], dtype=torch.int64, device=x.device)
        else:
            positions = self._check_given(positions, offset, x)
        rotation = unit_rotations(positions, self.frequencies(x.device))
        working = torch.promote_types(x.dtype, torch.float32)
        return rotate(x.to(working), rotation, self.interleaved).to(x.dtype)

    @staticmethod
    def _check_given(positions: Tensor, offset: int, x: Tensor) -> Tensor:
        if offset != 0:
            raise InputError(f"offset={offset} and positions exclude each other: add the offset to the positions.")
        if not isinstance(positions, Tensor):
            raise InputError(f"positions is a {type(positions).__name__}: pass a tensor of integers, (T,) or (B, T).")
        if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
            raise InputError(f"positions of dtype {positions.dtype} must be integers: floats are not exact far out.")
        batched = x.ndim > 2 and positions.shape == (x.shape[0], x.shape[-2])
        if not batched and positions.shape != x.shape[-2:-1]:
            raise InputError(
                f"positions of shape {tuple(positions.shape)} do not fit x of shape {tuple(x.shape)}: "
                f"pass (T,) or (B, T) with T={x.shape[-2]}."
            )
        for end in extremes(positions) or ():
            if not -MAX_POSITION <= end <= MAX_POSITION:
                raise InputError(f"positions reach {end}, beyond ±2^53 where they are not exact: use smaller ones")
        positions = positions.to(x.device)
        return positions.reshape(x.shape[0], *(1,) * (x.ndim - 3), x.shape[-2]) if batched else positions

    def extra_repr(self) -> str:
        names = ("dim", "rotary_dim", "base", "interleaved", "trainable", "scaling", "signed")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


def _checked_base(base: Base) -> float | tuple[float | None, ...]:
    """The base as one Python float, or a tuple with one for each head."""
    per_head = isinstance(base, (list, tuple))
    numbers = [one for one in base if one is not None] if per_head else [base]
    fit = all(isinstance(one, Real) and math.isfinite(one) and one > 0 for one in numbers)
    if not fit or (per_head and not base):
        raise InputError(f"base={base} must be a positive number, or a list with one, or None, for each head.")
    return tuple(None if one is None else float(one) for one in base) if per_head else float(base)


def permute_pairing(weight: Tensor, n_heads: int, *, to_interleaved: bool, rotary_dim: int | None = None) -> Tensor:
    """Reorder a query or key projection for the other pairing of dimensions, with the same attention.

    RoPE with `interleaved=to_interleaved` on the new projection gives the inner products of the other pairing on the
    old one.

    Args:
        weight: (n_heads · head_dim, ...), weight or bias of a projection, one head after another.
        n_heads: number of heads in the first dimension.
        to_interleaved: from half-split (m, m + rotary_dim/2) to interleaved (2m, 2m+1); False for the inverse.
        rotary_dim: number of rotated dimensions in each head; None for all.

    Returns a new tensor of the same shape.

    Raises:
        InputError: the first dimension is not a multiple of `n_heads`, or `rotary_dim` is odd or larger than a head.
    """
    if not isinstance(weight, Tensor) or not weight.ndim:
        raise InputError(f"weight={weight!r:.60} must be a tensor of shape (n_heads · head_dim, ...).")
    require_whole("n_heads", n_heads)
    if weight.shape[0] % n_heads:
        raise InputError(f"n_heads={n_heads} does not divide the first dimension of weight {tuple(weight.shape)}.")
    head_dim = weight.shape[0] // n_heads
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    if not isinstance(rotary_dim, Integral) or rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise InputError(f"rotary_dim={rotary_dim!r} must be an even whole number, at most head_dim={head_dim}.")
    source = torch.arange(head_dim, device=weight.device)
    rotary = source[:rotary_dim]
    pairs = rotary.view(2, -1).mT if to_interleaved else rotary.view(-1, 2).mT
    source[:rotary_dim] = pairs.reshape(-1).clone()
    heads = weight.unflatten(0, (n_heads, head_dim))
    return heads.index_select(1, source).flatten(0, 1)
