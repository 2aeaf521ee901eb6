"""The CUDA backend in one run: correctness, speed, memory, and a profile of its kernels.

Results are written after each step, so that a run that is cut off loses only its last one. The exit status is 1 if a
check or a goal is missed, or a check gave no answer in time, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import memory, timing
from benchmarks.harness.machine import device_name
from benchmarks.harness.runner import AddOption, Benchmark
from benchmarks.harness.sweep import Point
from benchmarks.harness.timing import Call, Several, clock, milliseconds_text
from benchmarks.speed import goals, gpu_correctness
from benchmarks.speed.goals import PASS, Goal, Measured, Row, Skipped
from benchmarks.speed.gpu_correctness import FAILED, Outcome
from benchmarks.speed.methods import FLA, LINEAR, SOFTMAX, Inputs, Setting, gpu_forms
from linrope.evaluation.reports import write_json
from linrope.ops.triton_kernel.launch import interpreted
from linrope.utils.files import whole_file

LENGTHS, LONG = (4096, 65_536, 524_288), 65_536
SHAPES = ((16, 64), (16, 128), (64, 64), (64, 128))
"""(B·H, D = E)."""
ROUNDS = 7
TURN = 0.02
"""Seconds of short calls in a row that are timed as one call."""
LONGEST_CALL = 15.0
"""Seconds: a call that would take longer is extrapolated; one of more than a tenth of them is made once."""
FORWARD, BOTH, COPY = "forward", "forward+backward", "copy"
EXTRAPOLATED, ABSENT = "extrapolated", "absent"
SHARE_OF_CHECKS, FOR_THE_PROFILE = 0.5, 30.0
"""Of the time, what the checks may take at most; seconds that the measurements leave to the profile."""
TIMES_FASTER = {SOFTMAX: dict(zip(LENGTHS, (2, 40, 300))), FLA: dict.fromkeys(LENGTHS, 3)}
OVER_LIMIT = {FORWARD: 2.0, BOTH: 2.5}
TENSORS = {FORWARD: 4, BOTH: 8}
"""Read or written once: q, k, v and o; with the gradients of all four."""
EXTRA_MEMORY = 0.15


def size_text(size: Setting) -> str:
    return f"B·H={size.heads}, D={size.head_dim}, T={size.length:,}"


@dataclass
class FormPoint(Point):
    """One form of attention in one setting."""

    setting: Setting | None = None
    memory_share: float | None = None

    @classmethod
    def of(cls, method: str, setting: Setting, **known: Any) -> FormPoint:
        return cls(method, setting.length, setting.batch, setting=setting, **known)

    def __str__(self) -> str:
        known = "" if self.seconds is None else f", {milliseconds_text(self.seconds)} ms"
        remark = f" ({self.detail})" if self.detail else ""
        return f"{self.method}, {self.setting.mode}, {size_text(self.setting)}: {self.status}{known}{remark}"


def predicted(points: list[FormPoint], point: FormPoint, quadratic: bool) -> float | None:
    """Seconds of one call by the form's last point at a shorter length; None without one."""
    for p in reversed(points):
        same = p.method == point.method and replace(p.setting, length=point.length) == point.setting
        if same and p.seconds is not None and p.length < point.length:
            return p.seconds * (point.length / p.length) ** (1 + quadratic)
    return None


def profile(call: Call, device: str = "cuda") -> str:
    """A line for each kernel of one call: how often it ran, and its total microseconds; then their sum."""
    call()
    with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, device.upper())]) as seen:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    of_device = getattr(torch.autograd.DeviceType, device.upper())
    spent = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
    kernels = [(getattr(event, spent), event) for event in seen.key_averages() if event.device_type == of_device]
    lines = [f"{event.count:>6} {spent:>12,.1f}  {event.key}" for spent, event in sorted(kernels, key=lambda k: -k[0])]
    total = sum(spent for spent, _ in kernels)
    return "\n".join([f"{'calls':>6} {'µs':>12}  kernel", *lines, f"{'':>6} {total:>12,.1f}  all"])


def point_of(points: list[FormPoint], method: str, setting: Setting) -> FormPoint:
    """The point of a form, with its seconds. Skipped if there is none; RuntimeError if our own call failed."""
    point = next((p for p in points if (p.method, p.setting) == (method, setting)), None)
    if point is None:
        raise Skipped("not measured")
    if point.seconds is None:
        raise (RuntimeError if method == LINEAR else Skipped)(f"{method}: {point.status} {point.detail}")
    return point


def all_goals(points: list[FormPoint], sizes: list[Setting]) -> list[Goal]:
    """The goals at each size, computed from the measured points."""
    found = []

    def times_faster(peer: str, size: Setting) -> Measured:
        return Measured(point_of(points, peer, size).seconds / point_of(points, LINEAR, size).seconds)

    for size in sizes:
        for peer, bounds in TIMES_FASTER.items():
            guessed = any((p.method, p.status, p.setting) == (peer, EXTRAPOLATED, size) for p in points)
            name = f"{peer} / linear, {size_text(size)}" + ", extrapolated" * guessed
            what, measure = "seconds of one forward and backward", partial(times_faster, peer, size)
            found.append(Goal(name, what, measure, at_least=bounds[size.length]))
        if size.length == LONG:
            found += limit_goals(points, size)
    return found


def limit_goals(points: list[FormPoint], size: Setting) -> list[Goal]:
    """Time near the limit of memory bandwidth, and little more memory than the tensors need."""

    def over_limit(mode: str) -> Measured:
        rate = 8 * timing.COPY_ELEMENTS / point_of(points, COPY, replace(size, mode=COPY)).seconds  # read and written
        tensor = 2 * size.length * size.heads * size.head_dim  # bytes of bfloat16
        return Measured(point_of(points, LINEAR, replace(size, mode=mode)).seconds * rate / (TENSORS[mode] * tensor))

    def extra_memory() -> Measured:
        return Measured(point_of(points, LINEAR, size).memory_share)

    what = "seconds / those of reading and writing each tensor once at the rate of a copy"
    extra = "peak beyond inputs, outputs and gradients / these"
    return [
        *(
            Goal(f"{mode} / limit of memory, {size_text(size)}", what, partial(over_limit, mode), at_most=bound)
            for mode, bound in OVER_LIMIT.items()
        ),
        Goal(f"extra memory, {size_text(size)}", extra, extra_memory, at_most=EXTRA_MEMORY),
    ]


class GpuCheck(Benchmark):
    """The results so far (`checks`, `points`, `goals`, `notes`); each is written before the next is measured."""

    name = "gpu_check"
    output = ""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.console = Console(width=max(120, self.console.width))
        self.checks: list[Outcome] = []
        self.goals: list[Row] = []
        self.notes: list[str] = []
        self.begin = time.monotonic()

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        text = "time for all of it; what does not fit is skipped (default: 520)"
        add("--seconds", type=float, default=520.0, help=text)
        add("--quick", action="store_true", help="a tenth of the checks, two lengths and two sizes")
        text = "folder for JSON and the profile (default: benchmarks/results/ and the GPU's name)"
        add("--output", type=Path, help=text)

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        if not torch.cuda.is_available():
            parser.error("it needs CUDA, and PyTorch sees no such device here: run it where there is an NVIDIA GPU")
        if importlib.util.find_spec("triton") is None:
            parser.error("it needs Triton, which is not installed: pip install triton")
        if interpreted():
            parser.error("TRITON_INTERPRET=1 is set, which runs no kernel on the GPU: unset it")
        options.device, options.repeats = "cuda", ROUNDS
        if options.output is None:
            name = re.sub(r"[^a-z0-9]+", "-", device_name("cuda").lower()).strip("-")
            options.output = Path(__file__).parents[1] / "results" / name

    def measure(self) -> None:
        shapes, lengths = (SHAPES[::3], LENGTHS[:2]) if self.options.quick else (SHAPES, LENGTHS)
        kind = {"dtype": "bfloat16", "device": "cuda"}
        self.sizes = [Setting(length, heads=rows, head_dim=dim, **kind) for length in lengths for rows, dim in shapes]
        try:
            work = gpu_correctness.checks(self.options.quick)
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
                self.check_all(work, gpu_correctness.in_processes(work, SHARE_OF_CHECKS * self.left, cache))
            self.measure_all()
            self.profile_all(self.sizes[:1] + [size for size in self.sizes if size.length == LONG][:2])
        finally:
            self.judge()

    @property
    def left(self) -> float:
        return self.options.seconds - (time.monotonic() - self.begin)

    def say(self, text: str) -> None:
        line = f"[{time.monotonic() - self.begin:6.1f} s] {text}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print the text, and write it with the results."""
        self.notes.append(text)
        self.say(text)
        self.save()

    def save(self) -> None:
        self.write(self.options.output, self.contents())

    def details(self) -> dict[str, Any]:
        found = {k: [asdict(one) for one in getattr(self, k)] for k in ("checks", "points", "goals")}
        return {"seconds": time.monotonic() - self.begin, "notes": self.notes, **found}

    def write(self, folder: Path, details: dict[str, Any]) -> list[Path]:
        return [write_json(folder / "gpu_check.json", details)]

    def check_all(self, work: list[tuple], outcomes: Iterator[Outcome]) -> None:
        """Record each outcome when it arrives, then the missing ones."""
        for number, outcome in enumerate(outcomes, 1):
            error = "" if outcome.worst is None else f", {outcome.tensor} off by {outcome.worst:.1e}"
            found = f"{outcome.name}: {outcome.result}{error} ({outcome.seconds:.0f} s)"
            self.say(f"check {number} of {len(work)}: {found}")
            self.checks.append(outcome)
            self.save()
        missing = {name for name, *_ in work} - {outcome.name for outcome in self.checks}
        self.checks += [Outcome(name, f"{FAILED}: no answer in its time") for name, *_ in work if name in missing]
        if missing:
            part = f"{len(missing)} of {len(work)} checks gave no answer in {SHARE_OF_CHECKS:.0%} of the time"
            self.note(f"{part}: give more --seconds")

    def measure_all(self) -> None:
        """Measure size by size while there is time."""
        slowest = 0.0
        for number, size in enumerate(self.sizes):
            if self.left < FOR_THE_PROFILE + slowest:
                self.note(f"not measured, the time is over: {'; '.join(map(size_text, self.sizes[number:]))}")
                return
            begin = time.monotonic()
            try:
                torch.cuda.empty_cache()
                points = self.points_of(size)
            except Exception as error:
                points = [FormPoint.of(LINEAR, size)]
                points[0].record_failure(error)
            for point in points:
                self.say(str(point))
            self.points += points
            self.save()
            slowest = max(slowest, time.monotonic() - begin) if number else 0.0  # the first one compiles

    def points_of(self, size: Setting) -> list[FormPoint]:
        """All forms at one size in turn, forward and backward; at length LONG also the forward, memory, and a copy."""
        inputs = Inputs.make(size)
        calls, points = {}, {}
        for name, form in gpu_forms().items():
            for mode in (FORWARD, BOTH) if (name, size.length) == (LINEAR, LONG) else (BOTH,):
                setting = replace(size, mode=mode)
                point = points[name, mode] = FormPoint.of(name, setting, detail=form.absent)
                if form.absent:
                    point.status = ABSENT
                    continue
                prepare = partial(form.prepare, replace(inputs, setting=setting))
                if ready := self.prepared(point, prepare(), form.quadratic):
                    calls[name, mode] = ready
                    if (name, mode) == (LINEAR, BOTH):  # o, ∂q, ∂k, ∂v are among what the call adds
                        extra = memory.peak_of(prepare, size.device).extra - 4 * inputs.q.nbytes
                        point.memory_share = extra / (8 * inputs.q.nbytes)
        if size.length == LONG:
            points[COPY, COPY] = FormPoint.of(COPY, replace(size, mode=COPY))
            calls[COPY, COPY] = Several(timing.copy(size.device)[0], 10)
        self.time_in_turn(calls, points, size.new_tokens, count=False)
        return list(points.values())

    def prepared(self, point: FormPoint, call: Call, quadratic: bool) -> Several | None:
        """The call, compiled and warm, repeated so that it can be timed well; None if its point is complete."""
        expected = predicted(self.points, point, quadratic)
        if expected is not None and expected > min(LONGEST_CALL, self.left - FOR_THE_PROFILE):
            point.status, point.seconds = EXTRAPOLATED, expected
            point.detail = "by the square of the length" if quadratic else "by the length"
            return None
        try:
            if expected is None or expected < LONGEST_CALL / 10:
                call()
            seconds = clock(call, self.options.device)
        except Exception as error:  # such as out of memory: the run continues without it
            point.record_failure(error)
            return None
        if seconds < LONGEST_CALL / 10:
            return Several(call, max(1, min(50, round(TURN / seconds))))
        point.seconds = point.seconds_q1 = point.seconds_q3 = seconds
        point.detail = "one call"
        return None

    def profile_all(self, sizes: list[Setting]) -> None:
        """One forward and backward at each size, to profile.txt."""
        texts = []
        for size in sizes:
            name = size_text(size)
            if self.left < FOR_THE_PROFILE / 3:
                self.note(f"profile of {name}: skipped, the time is over")
                continue
            try:
                table = profile(gpu_forms()[LINEAR].prepare(Inputs.make(size)))
            except Exception as error:
                self.note(f"profile of {name}: {FAILED}: {memory.describe(error)}")
                continue
            texts.append(f"forward+backward, bfloat16, {name}\n\n{table}\n")
            with whole_file(self.options.output / "profile.txt") as file:
                file.write("\n".join(texts).encode())
            self.say(f"profile of {name}: written")

    def judge(self) -> None:
        self.goals = [goals.run(goal) for goal in all_goals(self.points, self.sizes)]
        self.wrong = [check.name for check in self.checks if check.result != PASS]
        self.missed = [row.name for row in goals.missed_of(self.goals)]
        passed = len(self.checks) - len(self.wrong)
        met = sum(row.result == PASS for row in self.goals)
        not_passed, missed = f"; not: {self.wrong}" * bool(self.wrong), f"; missed: {self.missed}" * bool(self.missed)
        self.notes.append(f"{passed} of {len(self.checks)} checks passed{not_passed}")
        self.notes.append(f"{met} of {len(self.goals)} goals met{missed}")

    def table(self) -> Table:
        return goals.table_of(self.goals, self.device)

    def remarks(self) -> list[str]:
        return self.notes[-2:]

    def status(self) -> int:
        return 1 if self.wrong or self.missed else 0


if __name__ == "__main__":
    sys.exit(GpuCheck.main())
