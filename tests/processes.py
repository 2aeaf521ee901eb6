"""The command line in processes of its own. They are forked from the tests, so that a start takes milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from lightning.pytorch.utilities import rank_zero_only

from linrope.cli.main import main

CONTEXT = multiprocessing.get_context("fork")


class Run:
    """`linrope ARGS` in one process, or in one for each of `ranks` devices, as a cluster's launcher starts them.

    What the test has patched is patched there too.

    Args:
        args: the command line.
        folder: for what the processes print.
        ranks: number of processes.
        more: arguments of single ranks, after the others.
    """

    def __init__(
        self, args: list[str], folder: Path, ranks: int = 1, more: Mapping[int, list[str]] = MappingProxyType({})
    ) -> None:
        self._folder = folder
        self._stdout = folder / "stdout"
        self._stdout.unlink(missing_ok=True)
        os.mkfifo(self._stdout)
        (folder / "stderr").write_text("")
        environment = {"OMP_NUM_THREADS": "1"}
        if ranks > 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
        self._processes = [
            CONTEXT.Process(
                target=_run, args=([*args, *more.get(rank, [])], folder, environment, rank if ranks > 1 else None)
            )
            for rank in range(ranks)
        ]
        for process in self._processes:
            process.start()
        self._out = open(self._stdout)  # noqa: SIM115 (until `wait`)
        self._lines: list[str] = []

    def wait_for_steps(self, n: int) -> None:
        """Returns when it has printed `n` progress lines."""
        while n > 0:
            line = self._out.readline()
            assert line, (self._folder / "stderr").read_text()
            self._lines.append(line)
            n -= re.match(r"step \d+/\d+ ", line) is not None

    def send(self, signum: int, to_group: bool = False, rank: int = 0) -> None:
        """Sends a signal to the process of a rank, or to its loader's workers too."""
        (os.killpg if to_group else os.kill)(self._processes[rank].pid, signum)

    @property
    def codes(self) -> list[int | None]:
        """The exit codes of all processes, by rank; None of one that runs."""
        return [process.exitcode for process in self._processes]

    def wait(self) -> tuple[int, str, str]:
        """The exit code (-N for signal N) of the first process, and what all have printed: stdout, stderr."""
        with self._out:
            out = "".join(self._lines) + self._out.read()
        for process in self._processes:
            process.join(timeout=60)
            if process.is_alive():
                os.killpg(process.pid, signal.SIGKILL)
                raise AssertionError(f"rank {self._processes.index(process)} has not ended: {out}")
        return self._processes[0].exitcode, out, (self._folder / "stderr").read_text()


def _run(args: list[str], folder: Path, environment: dict[str, str], rank: int | None) -> None:
    os.setsid()
    os.environ.update(environment)
    # as `python -m linrope.cli.main`: so Lightning starts the other ranks, where no launcher has
    sys.modules["__main__"], sys.argv = sys.modules[main.__module__], ["linrope", *args]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist's workers ignore it
    if rank is not None:
        os.environ["LOCAL_RANK"] = str(rank)
        rank_zero_only.rank = rank  # Lightning took it from the environment when it was imported
    torch.set_num_threads(1)
    for number, name, flags in ((1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY | os.O_APPEND)):
        descriptor = os.open(folder / name, flags)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115 (the process's own)
    sys.exit(main(args))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
