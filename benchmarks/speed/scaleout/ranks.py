"""Functions on several gloo processes of this machine, one thread each."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, start_processes

Report = Callable[[], None]
"""Called by a rank each time that a part of its work is done."""
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
"""How processes start: from one that has imported everything, where the system can."""
TIMEOUT = timedelta(minutes=10)
"""A collective that waits longer is an error."""


def on_ranks(size: int, work: Callable[..., Any], *args: Any, tick: Callable[[], None] = lambda: None) -> list[Any]:
    """`work(report, *args)` on each of `size` processes; all of it can be pickled. Returns what each returned.

    The processes are connected by torch.distributed. `tick` is called here when rank 0 reports.

    Raises:
        torch.multiprocessing.ProcessRaisedException: the error of one process. The others are ended.
    """
    if METHOD == "forkserver":
        multiprocessing.set_forkserver_preload([__name__, "torch._dynamo", "linrope.distributed.segments"])
    reports = multiprocessing.get_context(METHOD).SimpleQueue()
    with TemporaryDirectory() as folder:
        context = start_processes(
            _run, (size, folder, reports, work, args), nprocs=size, join=False, start_method=METHOD
        )
        try:
            _wait(context, reports, tick)
        finally:  # Ctrl-C is for this process, which ends the others
            for process in context.processes:
                process.kill()
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(size)]


def _wait(context: ProcessContext, reports: Any, tick: Callable[[], None]) -> None:
    is_done = False
    while not is_done:
        is_done = context.join(timeout=0.1)
        while not reports.empty():
            reports.get()
            tick()


def _run(rank: int, size: int, folder: str, reports: Any, work: Callable[..., Any], args: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=TIMEOUT)
    report = (lambda: reports.put(None)) if rank == 0 else (lambda: None)
    result = work(report, *args)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(result))
    dist.barrier()  # a rank that ends early would break the others' connections
    dist.destroy_process_group()
