"""Memory that a process has freed: whether it keeps it."""

from __future__ import annotations

import ctypes
import os
import sys

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
