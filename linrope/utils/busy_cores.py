"""Whether the threads of PyTorch wait for a core that another program holds."""

from __future__ import annotations

import statistics
import time

import torch

OF_EACH_THREAD = 2**15
"""Elements below which PyTorch gives an operation to fewer threads."""
TRIES = 9
LONG = 1e-3
"""Seconds. A small operation takes microseconds on idle cores, and the other program's time slice of some milliseconds
where its threads wait for one another."""


def why_slow() -> str | None:
    """A warning if a small operation by all threads takes longer than `LONG`; else None, after some 0.1 ms."""
    threads = torch.get_num_threads()
    if threads == 1 or (seconds := seconds_of_small_operation(threads)) < LONG:
        return None
    return (
        f"the smallest operation of PyTorch's {threads} threads takes {1000 * seconds:.0f} ms, for another program "
        "runs on their cores, and each thread waits for the slowest: end that program, or set GOMP_SPINCOUNT=2000 "
        f"(Linux), OMP_WAIT_POLICY=passive or OMP_NUM_THREADS={threads // 2} in the environment."
    )


def seconds_of_small_operation(threads: int) -> float:
    """The median of a few tries."""
    x, times = torch.zeros(threads * OF_EACH_THREAD), []
    for _ in range(TRIES):
        began = time.perf_counter()
        x.add_(1)
        times.append(time.perf_counter() - began)
    return statistics.median(times)
