"""Memory on the CPU: large results on large pages, and workspace that outlives the call.

A tensor fetched anew from the system costs a page fault for every 4 KiB first written, in long sequences a quarter of
the kernel's time. Pages of 2 MiB cut that to a few hundredths; Linux gives them to whoever asks, where it is not set
to "never".
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
import threading
from collections.abc import Callable

import torch
from torch import Tensor

HUGE_PAGE = 2 * 2**20


SLAB = 16 * HUGE_PAGE
"""Workspace is fetched in pieces of this size; of what is not written to, nothing is taken."""


def empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, on large pages where that is possible and pays."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if tensor.nbytes >= 2 * HUGE_PAGE and tensor.device.type == "cpu" and _madvise is not None:
        _madvise(*_whole_pages(tensor.data_ptr(), tensor.nbytes), _MADV_HUGEPAGE)  # a hint: failing changes nothing
    return tensor


def _whole_pages(start: int, size: int) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    """The part of a region that consists of whole large pages."""
    first = -(-start // HUGE_PAGE) * HUGE_PAGE
    return ctypes.c_void_p(first), ctypes.c_size_t((start + size) // HUGE_PAGE * HUGE_PAGE - first)


_MADV_HUGEPAGE = 14


_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


class Pool:
    """Memory by name, cut to the shape of each block that uses it, and kept from call to call.

    Some tens of MiB for each thread that calls, whatever the length: fetching and returning them would cost a short
    call a quarter of its time. What blocks and rotations are built of is kept beside it.
    """

    of_thread = threading.local()

    def __init__(self, device: torch.device):
        self.device = device
        self.flat: dict[tuple[str, torch.dtype], Tensor] = {}
        self.made: dict[str, dict[tuple, object]] = {}
        self.slab = torch.empty(0, dtype=torch.uint8, device=device)

    @classmethod
    def on(cls, device: torch.device) -> Pool:
        """This thread's pool; a fresh one where memory is not the CPU's, whose allocator keeps its own."""
        if device.type != "cpu":
            return cls(device)
        if not hasattr(cls.of_thread, "pool"):
            cls.of_thread.pool = cls(device)
        return cls.of_thread.pool

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape)
        flat = self.flat.get((name, dtype))
        if flat is None or flat.shape[0] < size:
            self.made.clear()  # some of it stands on the smaller piece
            with torch.inference_mode(False):  # or a later call outside of inference could not write to it
                flat = self.flat[name, dtype] = self.fetch(size * dtype.itemsize).view(dtype)
        return flat[:size].view(shape)

    def keep(self, kind: str, key: tuple, make: Callable[[], object], most: int) -> object:
        """What `make` made for that key, now or in an earlier call; of a kind so many at most, the oldest go."""
        made = self.made.setdefault(kind, {})
        if key not in made:
            if len(made) >= most:
                made.pop(next(iter(made)))
            with torch.inference_mode(False):
                made[key] = make()
        return made[key]

    def fetch(self, size: int) -> Tensor:
        """So many bytes, a multiple of 64 from the start of a slab."""
        padded = -(-size // 64) * 64
        if self.slab.shape[0] < padded:
            self.slab = empty((max(padded, SLAB),), dtype=torch.uint8, device=self.device)
        taken, self.slab = self.slab[:size], self.slab[padded:]
        return taken


def give_back() -> None:
    """Return freed memory to the system, where the C library can: between small tensors that live long it keeps what
    large ones have left, and hundreds of segments of a sequence would leave gigabytes of that."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
