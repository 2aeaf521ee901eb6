"""Peak memory of one call: by the allocator of a GPU; on a CPU the growth of the peak resident size of a new process.

The data of that process is limited, so that it gets an error; otherwise the system would kill some process.
"""

from __future__ import annotations

import contextlib
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness.timing import clock
from benchmarks.speed.methods import Inputs, Method, Setting
from linrope.ops.torch_kernel.memory import give_back
from linrope.utils.memory import memory_of

WARM_UP = 128
"""Length of the first call, which makes what a process keeps: threads, code pages, workspaces."""


class OutOfMemory(Exception):
    """There was not enough memory."""


class Failed(Exception):
    """A new process failed."""


@dataclass(frozen=True)
class Peak:
    """Memory and time of one call, the first at its size, which also touches its memory for the first time."""

    extra: int  # peak bytes beyond those before the call was prepared (in decoding: before its state or cache was made)
    process: int  # peak bytes of the whole process; on a GPU, of its allocator
    seconds: float


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, in one of PyTorch's forms."""
    words = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")
    return isinstance(error, (MemoryError, OutOfMemory, torch.OutOfMemoryError)) or any(w in str(error) for w in words)


def describe(error: BaseException) -> str:
    """The exception in one short line."""
    if asked := re.search(r"tried to allocate [^.]*\w(\.\d+ \w+)?", str(error), re.IGNORECASE):
        return asked[0]
    said = str(error) if isinstance(error, (OutOfMemory, Failed)) else f"{type(error).__name__}: {error}"
    return textwrap.shorten(said, 160, placeholder=" …")


def available(device: str = "cpu") -> int:
    """Bytes of memory that a new process can have."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    amounts = []
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        amounts.append(1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")))
    with contextlib.suppress(OSError, ValueError):  # a container's limit; "max" if it has none
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        amounts.append(int((group / "memory.max").read_text()) - used)
    return min(amounts, default=memory_of())


def _status(field: str) -> int | None:
    """A size of this process from Linux's /proc, in bytes; None on other systems."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return 1024 * int(line.split()[1])
    return None


def _highest() -> int:
    """The peak resident size of this process, since `start_peak` if it was called."""
    if (highest := _status("VmHWM")) is not None:
        return highest
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def start_peak(device: str) -> int:
    """Start a new peak if the system can do that, and return the bytes in use."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    give_back()  # freed memory that the C library keeps would hide as much of the next peak
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS") or _highest()
    return _highest()


def peak_of(prepare: Callable[[], Callable[[], object]], device: str) -> Peak:
    """The peak of the call that `prepare` returns, and of its preparation."""
    before = start_peak(device)
    call = prepare()
    seconds = clock(call, device)
    process = torch.cuda.max_memory_allocated() if device == "cuda" else _highest()
    return Peak(max(0, process - before), process, seconds)


def limit_to(nbytes: int | None, device: str) -> None:
    """Let this process take `nbytes` more from now on."""
    if nbytes is None:
        return
    give_back()
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / torch.cuda.mem_get_info()[1]))
    elif (used := _status("VmData")) is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (used + nbytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def measure(method: Method, setting: Setting, limit: int | None = None) -> Peak:
    """The peak of one call in this process, which can take `limit` more bytes from then on."""
    warm_up = replace(setting, length=min(setting.length, WARM_UP))
    method.prepare(Inputs.make(warm_up))()
    limit_to(limit, setting.device)
    return peak_of(partial(method.prepare, Inputs.make(setting)), setting.device)
