"""Peak memory of one call.

On a GPU the allocator keeps count. On a CPU every point is measured in a process of its own: its peak resident size
less what was resident just before the call, when the inputs already existed. There the data a process may hold is
limited, so that running out is an error in it rather than the end of some process that the kernel chooses.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.methods import Inputs, Method, Setting
from linrope.ops.torch_kernel.memory import give_back

WARM_UP = 128
"""Length of the call that comes first, for what a process has once and keeps: threads, code pages, workspaces."""


class OutOfMemory(Exception):
    """There was not memory enough."""


class Failed(Exception):
    """A process of its own ended otherwise than well."""


@dataclass(frozen=True)
class Peak:
    """Memory and time of one call.

    Attributes:
        extra: peak bytes beyond what was there before the call (in decoding: before its past was made).
        process: peak bytes of the whole process; on a GPU, of its allocator.
        seconds: of this one call, the first at this size: memory is touched for the first time.
    """

    extra: int
    process: int
    seconds: float


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, in one of the ways PyTorch says it."""
    words = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")
    return isinstance(error, (MemoryError, OutOfMemory, torch.OutOfMemoryError)) or any(w in str(error) for w in words)


def describe(error: BaseException) -> str:
    """The exception in one short line."""
    if asked := re.search(r"tried to allocate [^.]*\w(\.\d+ \w+)?", str(error), re.IGNORECASE):
        return asked[0]
    said = str(error) if isinstance(error, (OutOfMemory, Failed)) else f"{type(error).__name__}: {error}"
    return textwrap.shorten(said, 160, placeholder=" …")


def available(device: str = "cpu") -> int:
    """Bytes of memory that a new process could have."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    amounts = []
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        amounts.append(1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")))
    with contextlib.suppress(OSError, ValueError):  # a container's own limit; "max" where it has none
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        amounts.append(int((group / "memory.max").read_text()) - used)
    if not amounts:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            amounts.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(amounts, default=sys.maxsize)


# --- one process's own memory ----------------------------------------------------------------------------------------


def _status(field: str) -> int | None:
    """A size from Linux's account of this process, in bytes; None elsewhere."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return 1024 * int(line.split()[1])
    return None


def _highest() -> int:
    """The most that was ever resident in this process, or since `_forget_highest`."""
    if (highest := _status("VmHWM")) is not None:
        return highest
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _forget_highest() -> int:
    """Start a new high-water mark where the system can, and return the bytes that it starts from."""
    give_back()  # what the C library keeps of freed memory would hide as much of what comes
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS") or _highest()
    return _highest()


class HighWater:
    """The most memory in use from the moment this is made."""

    def __init__(self, device: str):
        self.on_gpu = device == "cuda"
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated() if self.on_gpu else _forget_highest()

    def peak_of(self, call: Callable[[], object]) -> Peak:
        """Of one call, and of what came before it since this was made."""
        begin = time.perf_counter()
        kept = call()
        if self.on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        process = torch.cuda.max_memory_allocated() if self.on_gpu else _highest()
        del kept
        return Peak(max(0, process - self.before), process, seconds)


def limit_to(nbytes: int | None, device: str) -> None:
    """Let this process hold that much more from now on."""
    if nbytes is None:
        return
    give_back()
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / torch.cuda.mem_get_info()[1]))
    elif (used := _status("VmData")) is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (used + nbytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def measure(method: Method, setting: Setting, limit: int | None = None) -> Peak:
    """The peak of one call in this process, which can hold `limit` more bytes from then on."""
    warm_up = replace(setting, length=min(setting.length, WARM_UP))
    method.prepare(Inputs.make(warm_up))()
    limit_to(limit, setting.device)
    inputs = Inputs.make(setting)
    call = None if setting.mode == "decode" else method.prepare(inputs)
    water = HighWater(setting.device)
    return water.peak_of(call or method.prepare(inputs))  # what decoding costs is its past, above all


# --- processes of their own ------------------------------------------------------------------------------------------


def in_new_process(work: Callable, *args) -> Any:
    """`work(*args)` in a new process with as many threads as this one; all of it can be pickled.

    Raises:
        OutOfMemory: it ran out of memory, by its own account or by the kernel's.
        Failed: it raised something else, or ended without a word.
    """
    context = _context()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(there, torch.get_num_threads(), work, args), daemon=True)
    process.start()
    there.close()
    try:
        kind, answer = here.recv()
    except EOFError:
        process.join()
        kind, answer = _ending(process.exitcode)
    finally:
        process.kill()  # a reply was its last act; on Ctrl-C it may be far from done
        process.join()
        here.close()
    if kind == "answer":
        return answer
    raise (OutOfMemory if kind == "out of memory" else Failed)(answer)


def _context():
    """Where possible, processes that fork from one in which PyTorch is imported and nothing has run: new, and soon."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # an operator of a library's own has PyTorch import its compiler when it is first called
    context.set_forkserver_preload(["benchmarks.harness.memory", "torch._dynamo"])
    return context


def _answer(connection, threads: int, work: Callable, args: tuple) -> None:
    """What the new process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who ends this process
    torch.set_num_threads(threads)
    try:
        reply = ("answer", work(*args))
    except Exception as error:
        reply = ("out of memory" if is_out_of_memory(error) else "failed", describe(error))
    connection.send(reply)


def _ending(exit_code: int) -> tuple[str, str]:
    """What a process that said nothing has died of."""
    if exit_code == -signal.SIGKILL:
        return "out of memory", "killed by the system"
    if exit_code < 0:
        return "failed", f"process ended by {signal.Signals(-exit_code).name}"
    return "failed", f"process ended with status {exit_code}"
