"""Checks of arguments that several modules of the operator share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import debug_unwrap

from linrope.errors import InputError
from linrope.rotary import RotaryEmbedding

TYPES = {
    "floats": lambda dtype: dtype.is_floating_point,
    "booleans": lambda dtype: dtype == torch.bool,
    "integers": lambda dtype: not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool),
}


def check_tensor(name: str, x: Tensor, types: str, axes: str, shape: Sequence[int], device: torch.device) -> None:
    """Raise InputError unless x has those types (a key of `TYPES`), shape (its `axes` by name) and device."""
    if not isinstance(x, Tensor) or x.shape != shape or not TYPES[types](x.dtype):
        got = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x)
        raise InputError(f"{name} is {got}: pass {types} of shape {axes} = {tuple(shape)}.")
    if x.device != device:
        raise InputError(f"{name} is on {x.device}, the inputs are on {device}: use one device.")


def check_eps(eps: float) -> None:
    """Raise InputError unless ε of a denominator is a finite number, at least 0."""
    if not (isinstance(eps, (int, float)) and 0 <= eps < math.inf):
        raise InputError(f"eps={eps!r} must be a finite number, at least 0: it keeps the denominator away from 0.")


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether a transform of `torch.func` or a forward-mode derivative is under way on one of the tensors."""
    there = (x for x in tensors if x is not None)
    return any(debug_unwrap(x) is not x or forward_ad.unpack_dual(x).tangent is not None for x in there)


def check_rope(rope: RotaryEmbedding | None, heads: int, features: int) -> None:
    """Raise InputError unless rope is None or fits that many heads and features."""
    if rope is None:
        return
    if not isinstance(rope, RotaryEmbedding):
        raise InputError(f"rope is a {type(rope).__name__}: pass a linrope.RotaryEmbedding or None.")
    if rope.dim != features:
        raise InputError(f"rope has dim={rope.dim}, the features of q and k have {features}: make them equal.")
    rope.check_heads(heads)
