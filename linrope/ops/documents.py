"""Packed rows: documents numbered from `segment_ids`, their boundaries, and positions within them."""

from __future__ import annotations

import torch
from torch import Tensor

from linrope.errors import InputError


def check_segment_ids(segment_ids: Tensor, batch: int, length: int, device: torch.device) -> None:
    """Raise InputError unless segment_ids are integers of shape (batch, length) on that device."""
    got = segment_ids if not isinstance(segment_ids, Tensor) else f"{tuple(segment_ids.shape)} {segment_ids.dtype}"
    if not isinstance(segment_ids, Tensor) or segment_ids.shape != (batch, length):
        raise InputError(f"segment_ids is {got}: pass integers of shape (B, T) = {(batch, length)}.")
    if segment_ids.is_floating_point() or segment_ids.is_complex() or segment_ids.dtype == torch.bool:
        raise InputError(f"segment_ids is {got}: pass integers, one number for each document of a row.")
    if segment_ids.device != device:
        raise InputError(f"segment_ids is on {segment_ids.device}, the inputs on {device}: bring them together.")


def number_documents(segment_ids: Tensor) -> Tensor:
    """(B, T) ids, T > 0 -> (B, T) int64: how many boundaries, changes of id, lie up to each token of its row."""
    boundaries = segment_ids[:, 1:] != segment_ids[:, :-1]
    return torch.nn.functional.pad(boundaries.cumsum(dim=1), (1, 0))
