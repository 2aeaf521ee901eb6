"""A model's state, one `AttentionState` a layer, as a tree of tensors: to change, to forget by row, to save."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linrope.errors import InputError
from linrope.ops.softmax import KeyValueCache
from linrope.ops.state import State


@dataclass(frozen=True)
class AttentionState:
    """What one attention layer keeps of the past.

    Attributes:
        past: the operator's `State` (linear) or a `KeyValueCache` (softmax).
        conv_tail: (B, short_conv - 1, channels), the short convolution's last inputs; None without one.
        document_start: (B,) int64, the position at which each row's open document began; None where all began at 0.
        angle: (B, H, R/2) float64, angle of the last token with `rope.placement="selective"`, in radians modulo 2π;
            None without it.
    """

    past: State | KeyValueCache
    conv_tail: Tensor | None = None
    document_start: Tensor | None = None
    angle: Tensor | None = None


ModelState = tuple[AttentionState, ...]


_KINDS = {kind.__name__: kind for kind in (AttentionState, State, KeyValueCache)}


def map_state(change: Callable[[str, Tensor], Tensor], state: Any) -> Any:
    """The same state with `change(name, tensor)` in place of each of its tensors."""
    if isinstance(state, tuple):
        return tuple(map_state(change, part) for part in state)
    values = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    for name, value in values.items():
        if isinstance(value, Tensor):
            values[name] = change(name, value)
        elif dataclasses.is_dataclass(value):
            values[name] = map_state(change, value)
    return type(state)(**values)


def tensors_of(state: ModelState | None) -> list[Tensor]:
    """The floating tensors of a state, in a fixed order."""
    found: list[Tensor] = []

    def note(_: str, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            found.append(tensor)
        return tensor

    if state is not None:
        map_state(note, state)
    return found


def detach(state: ModelState | None, differentiable: bool = False) -> ModelState | None:
    """The state cut from its graph, its floating tensors ready to receive gradients where `differentiable`."""
    if state is None:
        return None
    return map_state(lambda _, x: x.detach().requires_grad_(differentiable and x.is_floating_point()), state)


def reset_rows(state: ModelState, ended: Tensor) -> ModelState:
    """The state with no past in the rows where `ended` (B,) is True: their document is over, another begins.

    Positions go on, as they do inside a packed row.
    """

    def emptied(part: AttentionState) -> AttentionState:
        def change(name: str, x: Tensor) -> Tensor:
            gone = ended.view(-1, *(1,) * (x.ndim - 1))
            if name == "log_decay":
                return x.masked_fill(gone, -math.inf)
            return x.masked_fill(gone, False if x.dtype == torch.bool else 0)

        past, length = part.past, part.past.length
        if not isinstance(past, State):  # keys of 0 would still be seen
            seen = past.visible if past.visible is not None else past.k.new_ones(past.k[:, 0, :, 0].shape).bool()
            past = dataclasses.replace(past, visible=seen)
        starts = part.document_start if part.document_start is not None else torch.zeros_like(ended, dtype=torch.int64)
        return AttentionState(
            map_state(change, past),
            None if part.conv_tail is None else change("conv_tail", part.conv_tail),
            torch.where(ended, length, starts),
            None if part.angle is None else change("angle", part.angle),
        )

    return tuple(emptied(part) for part in state)


def state_before(start: int, segment_ids: Tensor | None, state: ModelState | None) -> ModelState | None:
    """What rows that are read piece by piece begin the piece at token `start` with: the state after the piece before,
    or no past in the rows where a document ended there.

    Args:
        segment_ids: (B, T) of the whole rows, each run of equal numbers a document; None for rows of one.
    """
    if state is None or segment_ids is None or start == 0:
        return state
    return reset_rows(state, segment_ids[:, start] != segment_ids[:, start - 1])


def to_serialized(state: ModelState) -> list[dict[str, Any]]:
    """The state as lists, dictionaries, tensors and numbers, which `torch.save` writes and a load with `weights_only`
    reads."""

    def plain(part: Any) -> dict[str, Any]:
        values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
        named = {name: plain(value) if dataclasses.is_dataclass(value) else value for name, value in values.items()}
        return {"kind": type(part).__name__, **named}

    return [plain(part) for part in state]


def from_serialized(values: list[dict[str, Any]], device: torch.device | str | None = None) -> ModelState:
    """The inverse of `to_serialized`, on a device.

    Raises:
        InputError: something else than what `to_serialized` gives.
    """

    def whole(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part if device is None else part.to(device)
        if not isinstance(part, dict):
            return part
        named = {name: whole(value) for name, value in part.items() if name != "kind"}
        return _KINDS[part["kind"]](**named)

    try:
        return tuple(whole(part) for part in values)
    except (KeyError, TypeError) as error:
        raise InputError(f"this is no state of a model as `to_serialized` gives it: {error}.") from error
