"""The parts of a preparation, each written completely or not at all, by one process or by several."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from linrope.data.prepare.config import PrepareConfig
from linrope.data.prepare.parts import record_of, write_part
from linrope.data.prepare.units import Count, Unit, unit_bytes
from linrope.data.tokenizers.base import Tokenizer, tokenizer_from_serialized
from linrope.errors import InputError

PROGRESS_SECONDS = 0.2
Progress = Callable[[int, int | None], Any]
"""Called with the bytes read so far and the bytes in all, None if unknown."""


def write_missing_parts(
    units: list[Unit], parts: list[Path], tokenizer: Tokenizer, config: PrepareConfig, progress: Progress
) -> None:
    """Write the parts of the units that do not exist yet; see `write_part`."""
    missing = [(unit, part) for unit, part in zip(units, parts, strict=True) if not record_of(part).is_file()]
    in_all = sum(map(unit_bytes, units))
    read = in_all - sum(unit_bytes(unit) for unit, _ in missing)
    total = None if config.dataset is not None else in_all
    n_workers = min(config.workers or os.cpu_count() or 1, len(missing))
    progress(read, total)
    if n_workers > 1:
        _in_processes(n_workers, missing, tokenizer, config, lambda n: progress(read + n, total))
        return

    def count(n: int) -> None:
        nonlocal read
        read += n
        progress(read, total)

    for unit, part in missing:
        write_part(unit, part, tokenizer, config, count)


def _in_processes(
    n_workers: int, missing: list[tuple[Unit, Path]], tokenizer: Tokenizer, config: PrepareConfig, progress: Count
) -> None:
    """Write parts in several processes; `progress` is called with the bytes that they have read."""
    # a fork of this process would lack its threads; Windows can only spawn
    context = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
    if sys.platform != "win32":
        context.set_forkserver_preload(["__main__", __name__])  # imported once, then forked for each worker
    read = context.Value("q", 0)
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(n_workers, context, _start_worker, (tokenizer.to_serialized(), config, read))
    try:
        pending = {pool.submit(_write_part_here, *item) for item in missing}
        while pending:
            done, pending = wait(pending, PROGRESS_SECONDS)
            for future in done:
                future.result()
            progress(read.value)
    except BrokenProcessPool as error:
        raise InputError(
            "a worker process was killed, perhaps because memory ran out: lower --workers and run the same command "
            "again; it continues from there."
        ) from error
    finally:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        pool.shutdown(cancel_futures=True)


_worker: dict[str, Any] = {}
"""In a worker: the arguments of `write_part` that are the same for all parts."""


def _start_worker(tokenizer: dict[str, str], config: PrepareConfig, read: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def count(n: int) -> None:
        with read.get_lock():
            read.value += n

    _worker.update(tokenizer=tokenizer_from_serialized(tokenizer), config=config, count=count)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)  # a parent that was killed cannot end its workers


def _write_part_here(unit: Unit, part: Path) -> None:
    write_part(unit, part, **_worker)
