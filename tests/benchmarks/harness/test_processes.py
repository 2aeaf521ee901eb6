"""Jobs in processes of their own, and what becomes of those that answer nothing."""

import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from benchmarks.harness.processes import TIME_IS_OVER, Job, run_jobs


def answers(jobs: list[Job], workers: int = 4, seconds: float = 60.0) -> dict:
    return {one.job.name: one for one in run_jobs(jobs, workers, time.monotonic() + seconds)}


def fails() -> None:
    raise ValueError("no such size")


def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def opens_a_semaphore() -> str:
    global opened
    opened = multiprocessing.get_context("spawn").Semaphore()
    return opened._semlock.name


@pytest.mark.exhaustive
def test_what_a_job_holds_is_released_after_its_answer():
    found = answers([Job("holds", opens_a_semaphore)])["holds"]
    assert found.value.startswith("/mp-")
    assert not Path("/dev/shm", f"sem.{found.value[1:]}").exists()


@pytest.mark.exhaustive
def test_each_job_has_a_process_of_its_own_and_every_ending_is_an_answer():
    begin = time.monotonic()
    jobs = [
        Job("value", partial(os.getenv, "OF_THE_JOB"), environment={"OF_THE_JOB": "1"}),
        Job("no environment", partial(os.getenv, "OF_THE_JOB")),
        Job("error", fails),
        Job("status", partial(os._exit, 3)),
        Job("fault", kills_itself),
        Job("hang", partial(time.sleep, 600), seconds=2.0),
    ]
    found = answers(jobs)
    assert found["value"].value == "1"
    assert found["no environment"].value is None
    assert {name: one.error for name, one in found.items()} == {
        "value": "", "no environment": "", "error": "ValueError: no such size",
        "status": "the process ended with status 3", "fault": "the process was ended by SIGSEGV",
        "hang": "no answer in 2 s",
    }  # fmt: skip
    assert time.monotonic() - begin < 50


@pytest.mark.exhaustive
def test_after_the_deadline_nothing_is_started_and_running_jobs_end():
    jobs = [Job("runs", partial(time.sleep, 600)), Job("waits", partial(time.sleep, 600))]
    found = answers(jobs, workers=1, seconds=0.5)
    assert found["runs"].error == TIME_IS_OVER
    assert found["waits"].error == TIME_IS_OVER
