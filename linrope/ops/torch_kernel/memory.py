"""Memory on the CPU: large results on large pages, and workspace that is kept from call to call.

New memory costs a page fault for every 4 KiB that is first written: a quarter of the kernel's time for long sequences.
Pages of 2 MiB reduce that to a few hundredths. Linux gives them on request, unless they are set to "never".
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

HUGE_PAGE = 2 * 2**20
_MADV_HUGEPAGE = 14
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
SLAB = 16 * HUGE_PAGE
"""Workspace is allocated in units of this size. The system gives no memory for what is not written to."""


def empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, on large pages if that is possible and the tensor is large."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if tensor.nbytes >= 2 * HUGE_PAGE and tensor.device.type == "cpu" and _madvise is not None:
        start = tensor.data_ptr()
        first, last = -(-start // HUGE_PAGE) * HUGE_PAGE, (start + tensor.nbytes) // HUGE_PAGE * HUGE_PAGE
        # a hint: failing changes nothing
        _madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_HUGEPAGE)
    return tensor


class Pool:
    """Buffers by name, in the shape of each block that uses them, kept from call to call.

    Some tens of MiB for each calling thread, at any length: allocating and freeing them would cost a short call a
    quarter of its time. Objects built on the buffers, and rotations, are kept too.
    """

    of_thread = threading.local()

    def __init__(self, device: torch.device):
        self.device = device
        self.flat: dict[tuple[str, torch.dtype], Tensor] = {}
        self.made: dict[str, dict[tuple, object]] = {}
        self.slab = torch.empty(0, dtype=torch.uint8, device=device)

    @classmethod
    def on(cls, device: torch.device) -> Pool:
        """This thread's pool on the CPU; a new one on other devices, whose allocators keep memory themselves."""
        if device.type != "cpu":
            return cls(device)
        if not hasattr(cls.of_thread, "pool"):
            cls.of_thread.pool = cls(device)
        return cls.of_thread.pool

    @classmethod
    @contextlib.contextmanager
    def held(cls) -> Iterator[None]:
        """Within it, this thread's pool belongs to one call. A call that begins meanwhile, in a signal handler, has a
        pool of its own."""
        of_thread = cls.of_thread
        if not getattr(of_thread, "is_held", False):
            of_thread.is_held = True
            try:
                yield
            finally:
                of_thread.is_held = False
            return
        outer = of_thread.__dict__.pop("pool", None)
        try:
            yield
        finally:
            of_thread.__dict__.pop("pool", None)
            if outer is not None:
                of_thread.pool = outer

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape)
        flat = self.flat.get((name, dtype))
        if flat is None or flat.shape[0] < size:
            self.made.clear()  # some of it uses the smaller buffer
            with torch.inference_mode(False):  # or a later call outside of inference could not write to it
                flat = self.flat[name, dtype] = self.allocate(size * dtype.itemsize).view(dtype)
        return flat[:size].view(shape)

    def keep(self, group: str, key: tuple, make: Callable[[], object], most: int) -> object:
        """What `make` returned for that key, now or in an earlier call; the newest `most` of a group are kept."""
        made = self.made.setdefault(group, {})
        if key not in made:
            if len(made) >= most:
                made.pop(next(iter(made)))
            with torch.inference_mode(False):
                made[key] = make()
        return made[key]

    def allocate(self, size: int) -> Tensor:
        """`size` bytes, at a multiple of 64 from the start of a slab."""
        padded = -(-size // 64) * 64
        if self.slab.shape[0] < padded:
            self.slab = empty((max(padded, SLAB),), dtype=torch.uint8, device=self.device)
        taken, self.slab = self.slab[:size], self.slab[padded:]
        return taken


def give_back() -> None:
    """Return freed memory to the system, if the C library can. Long-lived small tensors keep it from doing so itself:
    after hundreds of segments of a sequence it would hold gigabytes."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
