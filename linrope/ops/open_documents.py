"""Packed rows that see their later tokens too, and whose first and last documents have tokens elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linrope.ops.documents import number_documents
from linrope.ops.linear_attention import linear_attention
from linrope.ops.state import State
from linrope.ops.summarize import summarize
from linrope.rotary import RotaryEmbedding


@dataclass(frozen=True)
class OpenEnds:
    """The tokens elsewhere, in rows of any number of documents here.

    Attributes:
        first: the state of all tokens elsewhere of each row's first document. Its length is the position of the first
            token here.
        last: that of each row's last document; the same where a row has one document. Its length is not read.
    """

    first: State
    last: State


def summarize_first_document(
    k: Tensor,
    v: Tensor,
    rope: RotaryEmbedding | None = None,
    *,
    segment_ids: Tensor,
    key_mask: Tensor | None = None,
    **options: Any,
) -> State:
    """The state of each row's first document; the arguments are those of `summarize`, whose state is the last one's."""
    is_first = number_documents(segment_ids) == 0
    return summarize(k, v, rope, key_mask=is_first if key_mask is None else is_first & key_mask, **options)


def attend_with_open_ends(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: RotaryEmbedding | None = None,
    *,
    segment_ids: Tensor,
    ends: OpenEnds,
    key_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, State]:
    """`linear_attention` without causality, with the tokens elsewhere in the sums of the first and last documents.

    The documents between the two are whole. As there, the host waits for the numbers of their tokens.

    Args:
        q, k, v, rope, segment_ids, key_mask, options: as in `linear_attention`.
        ends: the tokens elsewhere.

    Returns:
        o (B, H, T, E), and the state of the last document with all its tokens.
    """
    documents = number_documents(segment_ids)
    of_first = (documents == 0).sum(dim=1).tolist()
    of_last = (documents == documents[:, -1:]).sum(dim=1).tolist()
    length, outputs, finals = q.shape[2], [], []
    for row, (n_first, n_last) in enumerate(zip(of_first, of_last)):
        first, last = _row(ends.first, row), _row(ends.last, row)
        last = replace(last, length=first.length + length - n_last)
        bounds, of_row = (0, n_first, max(n_first, length - n_last), length), []
        for start, stop, state in zip(bounds, bounds[1:], (first, None, last)):
            if start < stop:  # a row of one document is the first part alone
                at, tokens = slice(row, row + 1), slice(start, stop)
                part = [x[at, :, tokens] for x in (q, k, v)]
                packed = {"segment_ids": segment_ids[at, tokens]}
                packed["key_mask"] = None if key_mask is None else key_mask[at, tokens]
                o, final = linear_attention(*part, rope, **options, **packed, state=state, return_state=True)
                of_row.append(o)
        outputs.append(torch.cat(of_row, dim=2))
        finals.append(final)
    tensors = {name: torch.cat([final.tensors[name] for final in finals]) for name in finals[0].tensors}
    tensors["log_decay"] = tensors["log_decay"].masked_fill(documents[:, -1:] > 0, -math.inf)  # as of a packed row
    return torch.cat(outputs), State(length=finals[0].length, **tensors)


def _row(state: State, row: int) -> State:
    return State(length=state.length, **{name: x[row : row + 1] for name, x in state.tensors.items()})
