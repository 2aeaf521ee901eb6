"""The kernels of one call by their roles: how each was compiled, its time, and what the model says it moves."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.harness.timing import Call
from benchmarks.speed.kernel_model import cost_of
from benchmarks.speed.launches import Recorded
from linrope.ops.triton_kernel import plan as planning

OTHERS = "kernels of PyTorch"


@dataclass
class Profiled:
    """One launch. Registers are those of a thread, spills its 32-bit words in memory instead."""

    role: str
    configuration: str = ""
    registers: int | None = None
    spills: int | None = None
    bytes: int | None = None
    flops: int | None = None
    seconds: float | None = None
    count: int = 1


class Watching:
    """Stands in for the module of kernels: runs them, and remembers each launch."""

    def __init__(self) -> None:
        self.kernels = planning.all_kernels()
        self.seen: list[tuple[Recorded, Profiled]] = []

    def __getattr__(self, name: str) -> Any:
        return planning.Grid(partial(self._run, name, getattr(self.kernels, name)))

    def _run(self, name: str, kernel: Any, grid: tuple[int], *args: Any, **constants: Any) -> None:
        compiled = kernel[grid](*args, **constants)  # None in the interpreter
        recorded = Recorded(name, grid[0], args, constants)
        cost = cost_of(recorded)
        found = Profiled(recorded.role, bytes=cost.bytes, flops=cost.flops)
        found.configuration = str(getattr(kernel, "best_config", ""))
        found.registers, found.spills = (getattr(compiled, field, None) for field in ("n_regs", "n_spills"))
        self.seen.append((recorded, found))


def profile(call: Call, device: str = "cuda") -> list[Profiled]:
    """The launches of one call in their order, then PyTorch's own kernels together."""
    call()  # compiles, and chooses
    watching = Watching()
    activity = getattr(torch.profiler.ProfilerActivity, device.upper())
    with torch.profiler.profile(activities=[activity]) as seen:
        with mock.patch.object(planning, "all_kernels", return_value=watching):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
    of_device = getattr(torch.autograd.DeviceType, device.upper())
    events = [event for event in seen.events() if event.device_type == of_device]
    ran = [(event.name, event.time_range.start, 1e-6 * event.time_range.elapsed_us()) for event in events]
    return with_times(watching.seen, ran if device == "cuda" else [])


def with_times(seen: list[tuple[Recorded, Profiled]], ran: Iterable[tuple[str, float, float]]) -> list[Profiled]:
    """The launches with their seconds, from the name, start and seconds of all that the device ran.

    The device runs the launches of one kernel in their order.
    """
    by_name: dict[str, deque[float]] = defaultdict(deque)
    for name, _, seconds in sorted(ran, key=lambda event: event[1]):
        by_name[name].append(seconds)
    for recorded, found in seen:
        if by_name[recorded.kernel]:
            found.seconds = by_name[recorded.kernel].popleft()
    rest = [seconds for times in by_name.values() for seconds in times]
    others = [Profiled(OTHERS, seconds=sum(rest), count=len(rest))] if rest else []
    return [found for _, found in seen] + others
