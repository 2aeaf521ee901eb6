"""The documents of a row, as transformers tells them: attention_mask, position_ids, seq_idx."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from linrope.errors import InputError


def segment_ids_of(
    shape: tuple[int, int],
    n_read: int,
    mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor | None:
    """segment_ids (B, T) of these tokens, in which padding is a document of its own; None for rows of one document.

    Args:
        shape: (B, T), of the tokens that are read now.
        n_read: number of tokens before them, in each row.
        mask: (B, n_read + T), 0 for padding, which may come before or after the text of a row.
        position_ids: (B, T) or (1, T); each document of packed rows starts at 0.
        seq_idx: (B, T) or (1, T), the same number for all tokens of a document.

    Raises:
        InputError: a tensor of the wrong shape, a mask with holes or that hides tokens after the first call,
            position_ids that jump to another position than 0, begin at 0 after other tokens, or leave some out.
    """
    seen = None if mask is None else _seen(mask, shape, n_read)
    changes = [] if seen is None else [seen[:, 1:] != seen[:, :-1]]
    if position_ids is not None:
        changes.append(_starts(position_ids, seen, shape, n_read))
    if seq_idx is not None:
        _check_shape("seq_idx", seq_idx, shape)
        changes.append(seq_idx[:, 1:] != seq_idx[:, :-1])
    if not any(change.any() for change in changes):
        return None
    boundaries = sum(change.long() for change in changes).expand(shape[0], -1)
    return F.pad(boundaries.cumsum(dim=1), (1, 0))


def _seen(mask: Tensor, shape: tuple[int, int], n_read: int) -> Tensor | None:
    """(B, T) bool, False for padding; None without padding."""
    n_rows, n_new = shape
    if mask.shape != (n_rows, n_read + n_new):
        raise InputError(
            f"attention_mask is {tuple(mask.shape)} for input_ids {(n_rows, n_new)} after {n_read} tokens of the "
            f"cache: pass {(n_rows, n_read + n_new)}, the mask of all tokens so far."
        )
    mask = mask.bool()
    if mask[:, max(n_read - 1, 0) :].all():
        return None
    if n_read:
        hidden = "hides tokens after those of the cache" if mask[:, n_read - 1].all() else "ends in padding there"
        raise InputError(
            f"attention_mask {hidden}: a row can only continue after its text. Pad on the left, and pass the padding "
            "together with the first tokens of the rows."
        )
    if (mask.long().diff(dim=1, prepend=torch.zeros_like(mask[:, :1]).long()) > 0).sum(dim=1).max() > 1:
        raise InputError(
            "attention_mask has a hole: the text after it would not see the text before it. Padding may only come "
            "before or after the text of a row."
        )
    return mask


def _starts(position_ids: Tensor, seen: Tensor | None, shape: tuple[int, int], n_read: int) -> Tensor:
    """Whether a document starts at each token but the first: (B, T - 1) or (1, T - 1) bool."""
    _check_shape("position_ids", position_ids, shape)
    starts = position_ids.diff(dim=1) != 1
    if seen is not None:  # padding has no position
        starts = starts & seen[:, 1:] & seen[:, :-1]
    if (starts & (position_ids[:, 1:] != 0)).any():
        raise InputError(
            "position_ids jump to a position other than 0: they must count the tokens of each document from 0."
        )
    first = position_ids[:, :1] if seen is None else position_ids[:, :1].masked_fill(~seen[:, :1], 0)
    if (first > n_read).any():
        raise InputError(
            f"position_ids begin at {first.max()} after {n_read} tokens: a row is read from position 0, and on from "
            "where its cache ends."
        )
    if n_read and (first == 0).any():
        raise InputError(
            f"position_ids begin at 0 after {n_read} tokens of the cache: read a new document without the cache."
        )
    return starts


def _check_shape(name: str, value: Tensor, shape: tuple[int, int]) -> None:
    if value.ndim != 2 or value.shape[1] != shape[1] or value.shape[0] not in (1, shape[0]):
        raise InputError(f"{name} is {tuple(value.shape)} for tokens {tuple(shape)}: pass {tuple(shape)}.")
