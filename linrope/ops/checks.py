"""Checks of arguments that several modules of the operator share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from linrope.errors import InputError
from linrope.rotary import RotaryEmbedding


def check_tensor(
    name: str,
    x: Tensor,
    types: str,
    allowed: Callable[[torch.dtype], bool],
    axes: str,
    shape: Sequence[int],
    device: torch.device,
) -> None:
    """Raise InputError unless x is a tensor of that shape and device, with an allowed dtype.

    Args:
        name, types, axes: for the message, such as "key_mask", "booleans" and "(B, S)".
    """
    if not isinstance(x, Tensor) or x.shape != shape or not allowed(x.dtype):
        got = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x)
        raise InputError(f"{name} is {got}: pass {types} of shape {axes} = {tuple(shape)}.")
    if x.device != device:
        raise InputError(f"{name} is on {x.device}, the inputs are on {device}: use one device.")


def check_rope(rope: RotaryEmbedding | None, heads: int, features: int) -> None:
    """Raise InputError unless rope is None or fits that many heads and features."""
    if rope is None:
        return
    if not isinstance(rope, RotaryEmbedding):
        raise InputError(f"rope is a {type(rope).__name__}: pass a linrope.RotaryEmbedding or None.")
    if rope.dim != features:
        raise InputError(f"rope has dim={rope.dim}, the features of q and k have {features}: make them equal.")
    rope.check_heads(heads)
