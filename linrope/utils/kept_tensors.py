"""Small constant tensors that are kept from call to call, such as frequencies and tables of angles.

Nothing is kept, and nothing that was kept is used, while a graph is traced or captured, or a transform of `torch.func`
is under way: a traced tensor has no values, a captured one has them only when the graph is replayed, and that of a
transform is of no use after it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.func import debug_unwrap

MOST_TENSORS, MOST_BYTES = 64, 64 * 2**20
"""How many are kept, the latest used ones, and how many bytes of all of them."""
LARGE = 4 * 2**20
"""Bytes of one that is kept if its maker does not say otherwise."""
_kept: dict[Hashable, Tensor] = {}
"""Without a lock, since a call in a signal handler may interrupt another one: each step is one operation of the dict,
and what is lost between two is made again."""


def keep(key: Hashable, device: torch.device | str | None, make: Callable[[], Tensor], largest: int = LARGE) -> Tensor:
    """The tensor of `key` on the device, made once. Nobody may write to it.

    Args:
        key: everything that its values and dtype depend on.
        make: makes it on the device; called outside of inference mode, without gradients.
        largest: bytes up to which it is kept.
    """
    probe = torch.empty(0, device=device)
    device = probe.device
    if not _is_usual(probe, device):
        return make()
    stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else None
    whole = key, device, stream
    if (found := _kept.pop(whole, None)) is not None:
        _kept[whole] = found  # the last to go
        return found
    with torch.inference_mode(False), torch.no_grad():
        made = make()
    if made.nbytes <= largest:
        _kept[whole] = made
        _drop_oldest()
    return made


def _drop_oldest() -> None:
    total = 0
    for number, (key, kept) in enumerate(list(_kept.items())[::-1]):
        total += kept.nbytes
        if number >= MOST_TENSORS or total > MOST_BYTES:
            _kept.pop(key, None)


def key_of(tensor: Tensor) -> Hashable | None:
    """The key of a tensor that is kept; None for any other one."""
    latest_first = list(_kept.items())[::-1]
    address = tensor.data_ptr()
    for (key, _, _), kept in latest_first:
        if kept is tensor or (kept.data_ptr() == address != 0 and kept.shape == tensor.shape):
            return key
    return None


def may_keep(device: torch.device) -> bool:
    """Whether tensors made now have values, at once and for good."""
    return _is_usual(torch.empty(0), device)


def _is_usual(made: Tensor, device: torch.device) -> bool:
    """Whether tensors of the device have values at once and for good, by one that was just made, wherever it lies."""
    if torch.compiler.is_compiling() or type(made) is not Tensor or debug_unwrap(made) is not made:
        return False  # the last: torch.func.grad and its like wrap each tensor, for as long as they last
    return not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
