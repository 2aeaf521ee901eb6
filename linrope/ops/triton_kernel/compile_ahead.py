"""The kernels of one call, with each configuration, compiled on all cores at once.

Triton compiles a kernel when it is first launched, one after the other: for a training step a minute of one core.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from linrope.ops.triton_kernel import configurations, kernels
from linrope.ops.triton_kernel.plan import MARCHING, Grid

Job = Callable[[], Any]


def compile_all(jobs: dict[str, list[Job]], device: torch.device) -> None:
    """Run the jobs of a `Recorder`. What does not compile is left to the launch, which raises the error."""

    def run(job: Job) -> None:
        index = -1 if device.index is None else device.index  # a thread begins on the first GPU
        with torch.cuda.device(index), suppress(Exception):  # the compilers' errors have many types
            job()

    # Triton makes a kernel's cache when it is first asked for, without a lock: two threads would each make one
    first, others = [own[0] for own in jobs.values()], [job for own in jobs.values() for job in own[1:]]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # Triton is there for Linux only
        list(pool.map(run, first))
        list(pool.map(run, others))


class Recorder:
    """Stands in for the module of kernels: launches nothing, and keeps for each launch the jobs that compile it."""

    def __init__(self) -> None:
        self.jobs: dict[str, list[Job]] = {}
        """By the kernel's name."""

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(kernels, name)
        return Grid(partial(self._keep, name, kernel.fn if name in MARCHING else kernel))

    def _keep(self, name: str, function: Any, grid: tuple[int], *args: Any, **constants: Any) -> None:
        tried: list[dict[str, Any]] = [{}]
        if name in MARCHING:
            tried = [one.all_kwargs() for one in configurations.fitting(configurations.CONFIGS, constants)]
        jobs = self.jobs.setdefault(name, [])
        jobs += [partial(function.warmup, *args, grid=grid, **constants, **chosen) for chosen in tried]
