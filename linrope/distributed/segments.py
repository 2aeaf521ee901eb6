"""Sequences longer than the memory of all devices: segment after segment, each shared by the ranks of a group.

A segment is `segment_length` tokens of each rank, in the order of the ranks. Its last rank hands the state on to all of
them for the next segment, in one broadcast; the backward sums its gradient there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrope.distributed.group import SequenceGroup, require_group
from linrope.distributed.sequence import refused, sequence_parallel_loss
from linrope.distributed.slices import SequenceSlice
from linrope.errors import InputError
from linrope.layers.state import ModelState, from_serialized, to_serialized
from linrope.models.language_model import LanguageModel
from linrope.segmented import loss_of_segments, require_segments
from linrope.utils.options import require_whole

SLICED = "inputs", "targets", "n_bytes", "segment_ids"
"""What of a batch has a value for each token."""


def tokens_of_rank(
    length: int, segment_length: int | None, group: SequenceGroup, option: str = "the length of the rows"
) -> Tensor:
    """Which tokens of rows of `length` a rank holds, (T,) indices: its slice of each segment, one after the other.

    Every segment but the last has `segment_length` tokens of each rank. The last is shared out evenly, earlier ranks
    first. None is for rows that are read as one segment.

    Raises:
        InputError: on every rank, a segment length below 1, or a last segment of fewer tokens than ranks. The message
            names the `option` that sets the length.
    """
    require_group(group)
    if segment_length is None:
        segment_length = max(1, -(-length // group.size))
    require_whole("segment_length", segment_length)
    whole, rest = divmod(length, segment_length * group.size)
    if 0 < rest < group.size:
        of_segment = "" if whole == 0 else f" for the last segment, after {whole} of {group.size} × {segment_length}"
        raise InputError(
            f"{option}={length} leaves {rest} tokens{of_segment}, and each of the {group.size} devices that share a "
            "row needs one: change it, or segment_length, or the number of devices."
        )
    first = torch.arange(whole)[:, None] * segment_length * group.size + group.rank * segment_length
    indices = (first + torch.arange(segment_length)).flatten()
    return torch.cat((indices, torch.arange(length - rest, length).tensor_split(group.size)[group.rank]))


def slice_of(batch: dict[str, Any], segment_length: int | None, group: SequenceGroup) -> dict[str, Any]:
    """A rank's part of a batch of rows that a group shares: the tokens that `tokens_of_rank` names.

    Args:
        batch: "inputs", "targets" and, if they exist, "n_bytes" and "segment_ids", each (B, T); others stay.
        segment_length: as in `tokens_of_rank`.
        group: the ranks.

    Returns:
        The batch with "positions", (T of this rank,), and "longest_slice", the tokens of a row on the rank with most.
    """
    length = batch["inputs"].shape[1]
    mine = tokens_of_rank(length, segment_length, group).to(batch["inputs"].device)
    parts = {name: batch[name][:, mine] for name in SLICED if name in batch}
    whole, rest = (0, length) if segment_length is None else divmod(length, segment_length * group.size)
    longest = whole * (segment_length or 0) - (-rest // group.size)
    return {**batch, **parts, "positions": mine, "longest_slice": longest}


def sequence_parallel_token_losses(
    model: LanguageModel,
    tokens: Tensor,
    targets: Tensor,
    segment_length: int | None,
    *,
    group: SequenceGroup,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """The loss of each target of this rank, (B, T) float32 in nats, without gradient; arguments as below, `None` for
    rows that are one segment."""
    one, segments = partial(sequence_parallel_loss, model, group=group, reduction="none"), []

    def read(tokens, targets, segment_ids, previous_ids, state):
        options = {"segment_ids": segment_ids, "previous_ids": previous_ids, "state": state}
        losses, after = one(tokens, targets, **options)
        segments.append(losses)
        return losses.sum(), state_of_last(after, group)

    with torch.no_grad():  # then each segment is computed once, in order
        if segment_length is None:
            return one(tokens, targets, segment_ids=segment_ids)[0]
        _require_same_segments(model, tokens, targets, segment_length, group, segment_ids)
        loss_of_segments(read, model, tokens, targets, segment_length, segment_ids=segment_ids, state=None)
    return torch.cat(segments, dim=1)


def _require_same_segments(
    model: LanguageModel,
    tokens: Tensor,
    targets: Tensor,
    segment_length: int,
    group: SequenceGroup,
    segment_ids: Tensor | None = None,
    state: ModelState | None = None,
) -> None:
    """Raise InputError, on every rank, unless each can read its slices in the same number of segments."""
    require_segments(model, segment_length)
    problem = refused(model, partial(model.check, tokens, state, segment_ids), tokens, targets)
    shape = (1, 1) if problem is not None else tuple(tokens.shape)
    where = SequenceSlice.of(group, shape, next(model.parameters()).device, problem=problem)
    if len({-(-length // segment_length) for length in where.lengths}) > 1:
        raise InputError(
            f"the ranks hold {list(where.lengths)} tokens, which are not as many segments of {segment_length} on each: "
            "give every rank those that tokens_of_rank names."
        )


def sequence_parallel_segmented_loss(
    model: LanguageModel,
    tokens: Tensor,
    targets: Tensor,
    segment_length: int,
    *,
    group: SequenceGroup,
    segment_ids: Tensor | None = None,
    state: ModelState | None = None,
) -> tuple[Tensor, ModelState]:
    """`segmented_loss` of rows whose segments the ranks of a group share.

        mine = tokens_of_rank(tokens.shape[1], 8192, group)
        loss, _ = sequence_parallel_segmented_loss(model, tokens[:, mine], targets[:, mine], 8192, group=group)

    The loss and the gradients that `backward` leaves in the weights are this rank's part, to be summed over the group.
    Memory is that of one segment's slice, the tokens, and one state a segment.

    Args:
        model: as in `segmented_loss`.
        tokens, targets, segment_ids: (B, T), those of `tokens_of_rank`.
        segment_length: tokens of a segment on each rank.
        group: the ranks.
        state: the state before the rows, the same on every rank; it gets no gradient.

    Returns:
        This rank's loss, and the state after the rows, the same on every rank, without gradient.

    Raises:
        InputError: on every rank, as `segmented_loss` and `sequence_parallel_loss`; slices of different numbers of
            segments.
    """
    _require_same_segments(model, tokens, targets, segment_length, group, segment_ids, state)

    def read(tokens, targets, segment_ids, previous_ids, state):
        options = {"segment_ids": segment_ids, "previous_ids": previous_ids, "state": state}
        loss, after = sequence_parallel_loss(model, tokens, targets, group=group, **options)
        return loss, state_of_last(after, group)

    return loss_of_segments(read, model, tokens, targets, segment_length, segment_ids=segment_ids, state=state)


def state_of_last(state: ModelState, group: SequenceGroup) -> ModelState:
    """The last rank's state on every rank: that after the row, if `state` is that after each rank's slice.

    One broadcast of the tensors of each dtype, after one of their shapes. Its backward sums the gradients of all ranks
    on the last one.
    """
    own: dict[torch.dtype, list[Tensor]] = defaultdict(list)

    def noted(x: Tensor) -> _Spec:
        own[x.dtype].append(x.flatten())
        return _Spec(x.dtype, tuple(x.shape))

    specs = group.object_from_last(_changed(to_serialized(state), noted))
    sizes: dict[torch.dtype, list[int]] = defaultdict(list)
    _changed(specs, lambda one: sizes[one.dtype].append(math.prod(one.shape)))
    parts: dict[torch.dtype, Iterator[Tensor]] = {}
    device = next(iter(own.values()))[0].device
    for dtype in sorted(sizes, key=str):  # in one order on all ranks
        n = sum(sizes[dtype])
        mine = torch.cat(own[dtype]) if own[dtype] else torch.empty(0, dtype=dtype, device=device)
        flat = group.from_last(mine, n) if n else mine[:0]
        parts[dtype] = iter(flat.split(sizes[dtype]))
    return from_serialized(_changed(specs, lambda one: next(parts[one.dtype]).view(one.shape)))


class _Spec(NamedTuple):
    """What a tensor is, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Lists and dictionaries of a serialized state with `change(x)` in place of each tensor or `_Spec`, in order."""
    if isinstance(value, list):
        return [_changed(one, change) for one in value]
    if isinstance(value, dict):
        return {name: _changed(one, change) for name, one in value.items()}
    return change(value) if isinstance(value, (Tensor, _Spec)) else value
