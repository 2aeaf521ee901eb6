"""Jobs, each in a process of its own, several at a time: a fault, a hang or a killed process is the answer of one job.

On a GPU an error of one call may be the answer of every later call of that process; here it ends with its job.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from benchmarks.harness import memory

TIME_IS_OVER = "the time is over"
LONGEST_WAIT = 3600.0
"""Seconds of one wait for answers: the system's own limit is some weeks."""
GRACE = 2.0
"""Seconds that a process has to end after its answer."""


@dataclass(frozen=True)
class Job:
    """`work()` in a new process; all of it can be pickled."""

    name: str
    work: Callable[[], Any]
    seconds: float = 150.0
    """After which the process is ended."""
    environment: dict[str, str] = field(default_factory=dict)
    """Set there before the work begins."""
    threads: int = 1
    """Of PyTorch."""


@dataclass(frozen=True)
class Answer:
    """What a job returned, or why it returned nothing."""

    job: Job
    value: Any = None
    error: str = ""
    out_of_memory: bool = False
    """Whether that is the error: what takes too much is killed by the system."""
    seconds: float = 0.0


@dataclass
class _Running:
    job: Job
    process: BaseProcess
    answers: connection.Connection
    begin: float
    end: float

    def answer(self, now: float) -> Answer | None:
        """The answer, also where there is none any more; None while the job may go on."""
        seconds = now - self.begin
        try:
            if self.answers.poll():
                return Answer(self.job, *self.answers.recv(), seconds)
        except EOFError:
            self.process.join()
        if not self.process.is_alive():
            code = self.process.exitcode
            return Answer(self.job, None, ending(code), code == -signal.SIGKILL, seconds)
        if now >= self.end:
            late = self.end < self.begin + self.job.seconds  # by the deadline of all jobs
            error = TIME_IS_OVER if late else f"no answer in {seconds:.0f} s"
            return Answer(self.job, error=error, seconds=seconds)
        return None

    def stop(self, grace: float = 0.0) -> None:
        """End the process, after `grace` seconds in which it may end by itself and release what it holds."""
        self.process.join(grace)
        self.process.kill()
        self.process.join()
        self.answers.close()


def run_jobs(jobs: Iterable[Job], workers: int, deadline: float) -> Iterator[Answer]:
    """Answers as they arrive. At the deadline (of `time.monotonic`) running jobs are ended, and no more are started."""
    waiting, running = deque(jobs), []
    try:
        while waiting or running:
            now = time.monotonic()
            while waiting and len(running) < workers and now < deadline:
                running.append(_start(waiting.popleft(), now, deadline))
            if not running:
                yield from (Answer(job, error=TIME_IS_OVER) for job in waiting)
                return
            ends = [one.answers for one in running] + [one.process.sentinel for one in running]
            connection.wait(ends, max(0.0, min(LONGEST_WAIT, *(one.end - now for one in running))))
            for one in list(running):
                if (answer := one.answer(time.monotonic())) is not None:
                    running.remove(one)
                    one.stop(grace=0.0 if answer.error else GRACE)
                    yield answer
    finally:
        for one in running:
            one.stop()


def in_new_process(work: Callable, *args) -> Any:
    """`work(*args)` in a new process with as many threads as this one; all of it can be pickled.

    Raises:
        OutOfMemory: it ran out of memory, or the system killed it.
        Failed: it raised another error, or ended without an answer.
    """
    job = Job("", partial(work, *args), seconds=math.inf, threads=torch.get_num_threads())
    (answer,) = run_jobs([job], workers=1, deadline=math.inf)
    if answer.error:
        raise (memory.OutOfMemory if answer.out_of_memory else memory.Failed)(answer.error)
    return answer.value


def ending(exit_code: int) -> str:
    """How a process ended that sent no answer."""
    if exit_code == -signal.SIGKILL:
        return "killed by the system"
    if exit_code < 0:
        return f"the process was ended by {signal.Signals(-exit_code).name}"
    return f"the process ended with status {exit_code}"


def _start(job: Job, now: float, deadline: float) -> _Running:
    context = _new_processes()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(there, job), daemon=True)
    process.start()
    there.close()
    return _Running(job, process, here, now, min(now + job.seconds, deadline))


def _new_processes() -> multiprocessing.context.BaseContext:
    """If possible, processes that fork from one that has imported PyTorch and run nothing: new, and started fast."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # the first call of a custom operator makes PyTorch import its compiler
    context.set_forkserver_preload(["benchmarks.harness.memory", "torch._dynamo"])
    return context


def _work(answers: connection.Connection, job: Job) -> None:
    """Run in the new process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    os.environ.update(job.environment)
    torch.set_num_threads(job.threads)
    try:
        answer = job.work(), "", False
    except Exception as error:
        answer = None, memory.describe(error), memory.is_out_of_memory(error)
    answers.send(answer)
