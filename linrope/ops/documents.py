"""Packed rows: `segment_ids` are integers, and each run of equal ones in a row is one document."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from linrope.errors import InputError
from linrope.ops.checks import check_tensor


def check_segment_ids(segment_ids: Tensor, batch: int, length: int, device: torch.device) -> None:
    """Raise InputError unless segment_ids are integers of shape (batch, length) on that device."""
    check_tensor("segment_ids", segment_ids, "integers", "(B, T)", (batch, length), device)


def number_documents(segment_ids: Tensor) -> Tensor:
    """(B, T) ids, T > 0 -> (B, T) int64: the number of document boundaries (changes of id) up to each token."""
    boundaries = segment_ids[:, 1:] != segment_ids[:, :-1]
    return F.pad(boundaries.cumsum(dim=1), (1, 0))


def document_positions(
    shape: tuple[int, int], segment_ids: Tensor | None, offset: int, document_start: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The position of each token within its own document.

    Args:
        shape: (B, T).
        segment_ids: (B, T) integers, or None if no document ends in these tokens.
        offset: the position of the first token in its row.
        document_start: (B,) int64, the position at which each row's open document began; None if all began at 0.

    Returns:
        (B, T) int64 positions, or None if they are those of the row; and the `document_start` after the last token.

    Raises:
        InputError: a document_start of another batch.
    """
    batch, length = shape
    if document_start is not None and document_start.shape != (batch,):
        raise InputError(f"state.document_start is {tuple(document_start.shape)}, this call needs ({batch},).")
    if length == 0 or (document_start is None and segment_ids is None):
        return None, document_start
    device = (document_start if segment_ids is None else segment_ids).device
    position = torch.arange(offset, offset + length, device=device)
    starts = torch.zeros_like(position[:1, None]) if document_start is None else document_start[:, None]
    if segment_ids is not None:
        is_first = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))
        starts = torch.where(is_first, position, starts).cummax(dim=1).values
    return position - starts, starts[:, -1].clone()
