"""The CUDA backend in one run of ten minutes: correctness, speed, and a profile of its kernels, on one page.

Each check, and each form of attention at each size, has a process of its own. The page is written after each step, so
that a run that is cut off loses only its last one. The exit status is 1 if something is wrong or slow, and 2 without a
GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.harness.machine import device_name
from benchmarks.harness.processes import TIME_IS_OVER, Job, run_jobs
from benchmarks.harness.runner import AddOption, Benchmark
from benchmarks.speed import gpu_correctness, gpu_report, gpu_sizes
from benchmarks.speed.gpu_correctness import FAILED, NOT_RUN, PASS, Check, Outcome
from benchmarks.speed.gpu_report import SLOW, is_wrong
from benchmarks.speed.gpu_sizes import Size
from benchmarks.speed.gpu_timing import (
    EAGER,
    EXTRAPOLATED,
    GRAPHED,
    LONGEST_CALL,
    WRONG,
    Timing,
    predicted,
    time_form,
    time_step,
)
from benchmarks.speed.methods import FLA, LINEAR, SOFTMAX
from linrope.evaluation.reports import write_json
from linrope.ops.triton_kernel.plan import interpreted
from linrope.ops.triton_kernel.self_check import ptxas_version
from linrope.utils.files import whole_file
from linrope.utils.terminal import new_table

SHARE_OF_CHECKS = 0.5
"""Of the time, what the checks may take at most."""
AT_ONCE = 14
"""Checks that run at the same time, if there are as many cores: most of their time is compilation."""
ENVIRONMENT = {"LINROPE_SELF_CHECK": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Of all processes: the checks are made here."""
WITHOUT_MMA_V3 = {"DISABLE_MMA_V3": "1"}
STYLE = {PASS: "green", WRONG: "bold red", SLOW: "bold red", NOT_RUN: "yellow"}


class GpuCheck(Benchmark):
    """The results so far: `checks`, `timings` and `notes`; each is written before the next is measured."""

    name = "gpu_check"
    output = ""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.console = Console(width=max(120, self.console.width))
        self.checks: list[Outcome] = []
        self.timings: list[Timing] = []
        self.notes: list[str] = []
        self.begin = time.monotonic()
        self.environment = dict(ENVIRONMENT)

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        text = "time for all of it; what does not fit is not run (default: 600)"
        add("--seconds", type=float, default=600.0, help=text)
        add("--quick", action="store_true", help="a tenth of the checks, and two sizes")
        text = "folder for the page and the JSON file (default: benchmarks/results/ and the GPU's name)"
        add("--output", type=Path, help=text)

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        if not torch.cuda.is_available():
            parser.error("it needs CUDA, and PyTorch sees no such device here: run it where there is an NVIDIA GPU")
        if importlib.util.find_spec("triton") is None:
            parser.error("it needs Triton, which is not installed: pip install triton")
        if interpreted():
            parser.error("TRITON_INTERPRET=1 is set, which runs no kernel on the GPU: unset it")
        options.device = "cuda"
        if options.output is None:
            name = re.sub(r"[^a-z0-9]+", "-", device_name("cuda").lower()).strip("-")
            options.output = Path(__file__).parents[1] / "results" / name

    def measure(self) -> None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:  # nothing that was compiled before
            self.environment |= {"TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
            work = gpu_correctness.checks(self.options.quick)
            self.check_all(work)
            self.check_again(work)
            self.time_all()

    @property
    def left(self) -> float:
        return self.options.seconds - (time.monotonic() - self.begin)

    def say(self, text: str) -> None:
        line = f"[{time.monotonic() - self.begin:6.1f} s] {text}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    # --- checks ------------------------------------------------------------------------------------------------------

    def outcomes_of(self, work: list[Check], seconds: float, **environment: str) -> Iterator[Outcome]:
        """The outcome of each check when it arrives; a process that dies is one."""
        workers = max(1, min(AT_ONCE, (os.cpu_count() or 2) - 2))
        everywhere = self.environment | environment
        jobs = [Job(one[0], partial(gpu_correctness.check, *one), environment=everywhere) for one in work]
        for answer in run_jobs(jobs, workers, time.monotonic() + seconds):
            unable = answer.error == TIME_IS_OVER or answer.out_of_memory
            result = f"{NOT_RUN if unable else FAILED}: {answer.error}"
            yield answer.value or Outcome(answer.job.name, result, seconds=answer.seconds)

    def check_all(self, work: list[Check]) -> None:
        for number, outcome in enumerate(self.outcomes_of(work, SHARE_OF_CHECKS * self.left), 1):
            error = "" if outcome.worst is None else f", {outcome.tensor} off by {outcome.worst:.1e}"
            self.say(
                f"check {number} of {len(work)}: {outcome.name}: {outcome.result}{error} ({outcome.seconds:.0f} s)"
            )
            self.checks.append(outcome)
            self.save()

    def check_again(self, work: list[Check]) -> None:
        """Those that are wrong, without WGMMA: does the compiler's use of it make the difference?"""
        wrong = {one.name for one in self.checks if is_wrong(one)}
        if not wrong:
            return
        self.notes.append(f"{len(wrong)} checks are wrong; they ran again with DISABLE_MMA_V3=1")
        again = [one for one in work if one[0] in wrong]
        cache = str(Path(self.environment["TRITON_CACHE_DIR"]) / "without_mma_v3")
        for outcome in self.outcomes_of(again, self.left / 2, TRITON_CACHE_DIR=cache, **WITHOUT_MMA_V3):
            self.say(f"again with DISABLE_MMA_V3=1: {outcome.name}: {outcome.result}")
            known = [replace(one, without_mma_v3=outcome.result) for one in self.checks if one.name == outcome.name]
            self.checks = [one for one in self.checks if one.name != outcome.name] + known
            self.save()

    # --- times -------------------------------------------------------------------------------------------------------

    def time_all(self) -> None:
        """One process after the other, alone on the GPU."""
        for method, size in plan(self.options.quick):
            timing = self.time_one(method, size)
            self.say(str(timing))
            self.timings.append(timing)
            self.save()

    def time_one(self, method: str, size: Size) -> Timing:
        quadratic = method == SOFTMAX
        expected = predicted(self.timings, method, size, quadratic)
        if expected is not None and expected > LONGEST_CALL:
            detail = "by the square of the length" if quadratic else "by the length"
            return Timing(method, size, EXTRAPOLATED, detail, expected)
        if method in (EAGER, GRAPHED):
            work = partial(time_step, size, method == GRAPHED)
        else:
            work = partial(time_form, method, size)
        job = Job(f"{method}, {size}", work, environment=self.environment)
        (answer,) = run_jobs([job], 1, time.monotonic() + max(0.0, self.left))
        if answer.value is not None:
            return answer.value
        unable = answer.error == TIME_IS_OVER or answer.out_of_memory
        return Timing(method, size, NOT_RUN if unable else FAILED, answer.error)

    # --- results -----------------------------------------------------------------------------------------------------

    @cached_property
    def surroundings(self) -> dict[str, Any]:
        about = super().surroundings
        major = torch.cuda.get_device_capability()[0] if self.options.device == "cuda" else 0
        about["versions"] |= {"CUDA": torch.version.cuda, "ptxas": ptxas_version(major)}
        return about

    def save(self) -> None:
        self.write(self.options.output, self.contents())

    def details(self) -> dict[str, Any]:
        rows = gpu_report.all_rows(self.checks, self.timings)
        found = {"checks": self.checks, "timings": self.timings, "goals": rows}
        plain = {name: [asdict(one) for one in values] for name, values in found.items()}
        return {"seconds": time.monotonic() - self.begin, "notes": self.notes, **plain}

    def write(self, folder: Path, details: dict[str, Any]) -> list[Path]:
        text = gpu_report.page(details, self.checks, self.timings, self.notes)
        with whole_file(folder / "gpu_check.md") as file:
            file.write(text.encode())
        return [folder / "gpu_check.md", write_json(folder / "gpu_check.json", details)]

    def table(self) -> Table:
        table = new_table(self.device, "bound", "measured", text=["goal"])
        table.columns[0].no_wrap = True  # a verdict with its reason may take lines
        table.add_column("verdict", overflow="fold")
        for row in gpu_report.all_rows(self.checks, self.timings):
            verdict = Text(row.verdict + (f": {row.why}" if row.why else ""), STYLE[row.verdict])
            table.add_row(row.goal, row.bound, row.measured, verdict)
        return table

    def remarks(self) -> list[str]:
        return [*self.notes, "with a report of a problem or of a speed, send gpu_check.md and gpu_check.json"]

    def status(self) -> int:
        verdicts = {row.verdict for row in gpu_report.all_rows(self.checks, self.timings)}
        wrong = any(one.status in (WRONG, FAILED) for one in self.timings if one.method not in (SOFTMAX, FLA))
        return 1 if wrong or verdicts & {WRONG, SLOW} else 0


def plan(quick: bool = False) -> list[tuple[str, Size]]:
    """What is timed, in its order: the sizes of the goals, the other shapes, decoding, then what says less. Last the
    peer whose kernels take minutes to compile."""
    every = gpu_sizes.sizes(quick)
    goals = [(method, size) for method in (LINEAR, SOFTMAX) for size in every if size in gpu_sizes.GOALS]
    shapes = [(LINEAR, size) for size in every if size in gpu_sizes.SHAPES]
    steps = [(method, Size(gpu_sizes.LONG)) for method in (EAGER, GRAPHED)]
    other = [(FLA, size) for size in every if size in gpu_sizes.GOALS]
    variants = [(LINEAR, size) for size in every if size in gpu_sizes.VARIANTS]
    return goals + shapes + steps + variants + other


if __name__ == "__main__":
    sys.exit(GpuCheck.main())
