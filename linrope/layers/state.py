"""The state of a model, one `AttentionState` for each layer: move it, choose rows, reset rows, serialize."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from linrope.errors import InputError
from linrope.ops.documents import check_segment_ids, document_positions
from linrope.ops.open_documents import OpenEnds
from linrope.ops.softmax import KeyValueCache
from linrope.ops.state import State, detached, moved
from linrope.rotary import RotaryEmbedding
from linrope.utils.values import extremes

if TYPE_CHECKING:
    from typing_extensions import Self  # Python 3.10 lacks it


class _Movable:
    """What the state of a layer and that of a model have in common."""

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The state for a layer or model that was moved by `to` with the same device or dtype.

        Integers and booleans keep their dtype, and sums over the past have float32 at least.
        """

        sums = ("kv", "k_sum", "log_decay", "k_rotated_sum")
        return map_state(lambda name, x: moved(x, args, kwargs, torch.float32 if name in sums else None), self)

    def detach(self, differentiable: bool = False) -> Self:
        """The same values, detached from the graph; with `differentiable` floating-point tensors require gradients.

        Training continues from a state of `torch.inference_mode` after this: it copies what was made there.
        """
        return map_state(lambda _, x: detached(x).requires_grad_(differentiable and x.is_floating_point()), self)

    def select_rows(self, rows: Tensor | Sequence[int]) -> Self:
        """Row i of the result is row `rows[i]`, as beam search and batches that shrink need it.

        Args:
            rows: (N,) integers in 0 … B - 1, in any order and with repetitions, or (B,) booleans.

        Raises:
            InputError: another shape or dtype, or a row that does not exist.
        """
        if not isinstance(rows, Tensor):
            rows = torch.as_tensor(rows, device="cpu")
            rows = rows if rows.numel() else rows.long()  # an empty list has no type
        batch = _batch_of(self)
        is_mask = rows.dtype == torch.bool
        if rows.ndim != 1 or rows.is_floating_point() or rows.is_complex() or (is_mask and len(rows) != batch):
            raise InputError(f"rows is {tuple(rows.shape)} {rows.dtype}: pass (N,) integers, or ({batch},) booleans.")
        if not is_mask and rows.device.type == "cpu" and (ends := extremes(rows)) is not None:
            lowest, highest = ends
            if lowest < 0 or highest >= batch:
                raise InputError(f"rows lie in [{lowest}, {highest}], the state has rows 0 … {batch - 1}.")
        rows = rows.nonzero()[:, 0] if is_mask else rows.long()
        return map_state(lambda _, x: x.index_select(0, rows.to(x.device)), self)  # asserts the range on a GPU


@dataclass(frozen=True)
class AttentionState(_Movable):
    """What one attention layer keeps of the past.

    `torch.save` writes it, and `torch.load(weights_only=True)` reads it where linrope is imported.

    Attributes:
        past: the operator's `State` (linear) or a `KeyValueCache` (softmax).
        conv_tail: (B, short_conv - 1, channels), the last inputs of the short convolution; None without one.
        document_start: (B,) int64, the position at which the open document of each row begins; None if all begin at 0.
    """

    past: State | KeyValueCache
    conv_tail: Tensor | None = None
    document_start: Tensor | None = None

    def reset_rows(self, ended: Tensor | Sequence[bool]) -> AttentionState:
        """The state without a past in the rows where `ended` (B,) is True: a new document begins there.

        `segment_ids` of later tokens do not say whether the document before them goes on. Positions continue, as they
        do inside a packed row.

        Raises:
            InputError: `ended` is not (B,) booleans.
        """
        ended = ended if isinstance(ended, Tensor) else torch.as_tensor(ended, device="cpu")
        batch, past = _batch_of(self), self.past
        if ended.dtype != torch.bool or ended.shape != (batch,):
            raise InputError(f"ended is {tuple(ended.shape)} {ended.dtype}: pass ({batch},) booleans.")
        ended = ended.to((past.kv if isinstance(past, State) else past.k).device)

        def cleared(name: str, x: Tensor) -> Tensor:
            return x.masked_fill(ended.view(-1, *(1,) * (x.ndim - 1)), -math.inf if name == "log_decay" else 0)

        if not isinstance(past, State):  # a key of 0 would still get weight: it must be invisible
            past = dataclasses.replace(past, visible=past.mask)
        start = torch.zeros_like(ended, dtype=torch.int64) if self.document_start is None else self.document_start
        without = map_state(cleared, dataclasses.replace(self, past=past, document_start=None))
        return dataclasses.replace(without, document_start=torch.where(ended, past.length, start))


class RemotePast:
    """The past of a layer in an `AttentionState` where other devices hold earlier tokens (`linrope.distributed`).

    It comes in exchange for what this device's own tokens leave.

    Attributes:
        length: the position of the first token here.
        initial: the layer's state before the row's first token, or None.
    """

    length: int
    initial: AttentionState | None

    def start_exchange(
        self, own: State, rope: RotaryEmbedding | None, causal: bool, first: State | None = None
    ) -> Callable[[], State | OpenEnds]:
        """Send `own`, the state of the tokens here. A call of what is returned waits for the state before them; without
        causality for that of all other tokens. What does not need it is computed in between.

        In packed rows `own` is the state of the last document. Without causality `first` is that of the first one, and
        what is returned are the tokens elsewhere of both.
        """
        raise NotImplementedError

    def exchange_cache(self, k: Tensor, v: Tensor, key_mask: Tensor | None, window: int) -> KeyValueCache:
        """The cache before the tokens here, whose rotated keys and values are k and v."""
        raise NotImplementedError

    def exchange_tail(self, last_inputs: Tensor, n: int) -> Tensor:
        """The `conv_tail` of the n tokens before those here, in exchange for the convolution's last inputs here,
        (B, ≤ n, channels)."""
        raise NotImplementedError


class ModelState(_Movable, tuple[AttentionState, ...]):
    """The state of a model: a tuple with the AttentionState of each layer. Saved and loaded as one of these is."""

    def reset_rows(self, ended: Tensor | Sequence[bool]) -> ModelState:
        """That of each layer, see `AttentionState.reset_rows`."""
        return ModelState(part.reset_rows(ended) for part in self)


_TYPES = {cls.__name__: cls for cls in (AttentionState, State, KeyValueCache)}
torch.serialization.add_safe_globals([*_TYPES.values(), ModelState])


def _batch_of(state: AttentionState | ModelState) -> int:
    """Number of rows."""
    past = (state if isinstance(state, AttentionState) else state[0]).past
    return len(past.kv if isinstance(past, State) else past.k)


def token_positions(
    x: Tensor, state: AttentionState | None, segment_ids: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The position of each token of x (B, T, ...) within its document, and the `document_start` after x.

    Positions are (B, T) int64, or None if they are those of the row. Raises InputError for segment_ids of the wrong
    shape or dtype, or a state of another batch.
    """
    if segment_ids is not None:
        check_segment_ids(segment_ids, *x.shape[:2], x.device)
    offset, start = (0, None) if state is None else (state.past.length, state.document_start)
    return document_positions(x.shape[:2], segment_ids, offset, start)


def map_state(change: Callable[[str, Tensor], Tensor], state: Any) -> Any:
    """The same state with `change(name, tensor)` in place of each tensor."""
    if isinstance(state, tuple):
        return type(state)(map_state(change, part) for part in state)
    changed = {}
    for name, value in vars(state).items():
        if isinstance(value, Tensor):
            changed[name] = change(name, value)
        elif dataclasses.is_dataclass(value):
            changed[name] = map_state(change, value)
    return dataclasses.replace(state, **changed)


def tensors_of(state: ModelState | None) -> list[Tensor]:
    """The floating-point tensors of a state, in a fixed order."""
    found: list[Tensor] = []

    def note(_: str, tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_state(note, state or ())
    return [tensor for tensor in found if tensor.is_floating_point()]


S = TypeVar("S", AttentionState, ModelState, None)


def state_before(start: int, segment_ids: Tensor | None, state: S) -> S:
    """The state with which token `start` of longer rows begins, given the `state` after token `start - 1`.

    Rows whose document ends before `start` are reset. `segment_ids` (B, T) are those of the whole rows, each run of
    equal numbers a document; None for rows of one document.
    """
    if state is None or segment_ids is None or start == 0:
        return state
    return state.reset_rows(segment_ids[:, start] != segment_ids[:, start - 1])


def to_serialized(state: ModelState) -> list[dict[str, Any]]:
    """The state as lists, dictionaries, tensors and numbers, which `torch.load(weights_only=True)` can read."""

    def serialized(part: Any) -> dict[str, Any]:
        values = {name: serialized(x) if dataclasses.is_dataclass(x) else x for name, x in vars(part).items()}
        return {"type": type(part).__name__, **values}

    return [serialized(part) for part in state]


def from_serialized(values: list[dict[str, Any]], device: torch.device | str | None = None) -> ModelState:
    """The inverse of `to_serialized`, on a device. Raises InputError if `values` are something else."""

    def restored(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part if device is None else part.to(device)
        if not isinstance(part, dict):
            return part
        nested = {name: restored(value) for name, value in part.items() if name != "type"}
        return _TYPES[part["type"]](**nested)

    try:
        state = ModelState(restored(part) for part in values)
        if any(not isinstance(part.past, (State, KeyValueCache)) for part in state):
            raise TypeError("each entry must be an AttentionState with its past")
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"not the state of a model, as `to_serialized` returns it: {error}.") from error
    return state
