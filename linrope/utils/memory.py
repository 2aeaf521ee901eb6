"""How much memory a process may have, and whether it keeps what it has freed."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, of glibc's malloc.h."""
LARGEST_KEPT = 32 * 2**20
"""Larger allocations go to the system and back one by one: the largest threshold that glibc accepts."""
KEPT = 2**30
"""Bytes of free memory at the end of the heap that the process keeps."""


def keep_freed_memory() -> bool:
    """Let this process keep up to 1 GiB of freed memory; False where that is not possible or the user has decided.

    By default glibc returns freed activations to the system, and the next training step takes them again, with a page
    fault for every 4 KiB. It is for programs, not for libraries: it holds for the whole process and cannot be undone.
    Memory still goes back when `malloc_trim` is called.

    Nothing changes unless the C library is glibc, and where the environment configures an allocator (MALLOC_…,
    GLIBC_TUNABLES with glibc.malloc…) or replaces it (LD_PRELOAD).
    """
    environment = os.environ
    decided = any(name.startswith("MALLOC_") for name in environment) or "LD_PRELOAD" in environment
    if sys.platform != "linux" or decided or "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT) and library.mallopt(M_TRIM_THRESHOLD, KEPT))


CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files of Linux with the bytes that a container may take, of both versions of its control groups."""


def memory_of(device: torch.device | None = None) -> int:
    """Bytes of a device's memory, used or not; of the CPU's (None) at most what this container may take. Without bound
    where the system does not say."""
    if device is not None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    amounts = []
    if hasattr(os, "sysconf"):  # not on Windows
        amounts.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for file in CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # "max" without a limit
            amounts.append(int(Path(file).read_text()))
    return min(amounts, default=sys.maxsize)
