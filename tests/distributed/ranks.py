"""Functions on several processes of one machine, connected by gloo. They are forked, so that a start takes little."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from linrope.errors import InputError

CONTEXT = multiprocessing.get_context("fork")


def run_on_ranks(size: int, folder: Path, functions: Mapping[str, Callable[[], Any]]) -> list[dict[str, Any]]:
    """What each function returns on each rank, or its error; they run one after the other in the same processes."""
    processes = [CONTEXT.Process(target=_run, args=(rank, size, folder, functions)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=300)
        if process.is_alive():
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _run(rank: int, size: int, folder: Path, functions: Mapping[str, Callable[[], Any]]) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    results = {}
    for name, function in functions.items():
        try:
            results[name] = function()
        except InputError as error:  # the test says whether it expects it
            results[name] = error
        except Exception:  # later calls would meet other ranks in the middle of this one
            results |= dict.fromkeys(functions.keys() - results.keys(), AssertionError(traceback.format_exc()))
            break
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()
