"""The report of `gpu_check`, one page of Markdown: a verdict on each goal, then what was checked and measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.timing import milliseconds_text
from benchmarks.speed.gpu_correctness import FAIL, FAILED, FITS_NOTHING, NOT_RUN, PASS, SAME, TWICE, Outcome
from benchmarks.speed.gpu_sizes import GOALS, LENGTHS, SHAPES, Size, short
from benchmarks.speed.gpu_timing import EXTRAPOLATED, MEASURED, WRONG, Timing
from benchmarks.speed.methods import FLA, LINEAR, SOFTMAX

SLOW = "slow"
TIMES_FASTER = {SOFTMAX: dict(zip(LENGTHS, (2, 40, 300))), FLA: dict.fromkeys(LENGTHS, 3)}
OVER_LIMIT = 2.8
MOST = 15
"""Lines of one kind on the page."""
WITH_KERNELS = [GOALS[1], SHAPES[0]]
"""Sizes whose kernels are on the page; the JSON file has those of all."""
TENSORS = 8
"""Read or written once: q, k, v, o and their gradients."""


@dataclass(frozen=True)
class Row:
    """One goal: pass, wrong, slow or not run, and why."""

    goal: str
    bound: str
    verdict: str
    measured: str = ""
    why: str = ""


def is_wrong(outcome: Outcome) -> bool:
    return outcome.result.startswith((FAIL, FAILED))


def all_rows(outcomes: list[Outcome], timings: list[Timing]) -> list[Row]:
    """The verdict on each goal."""
    return [correctness(outcomes), *speed(timings)]


def correctness(outcomes: list[Outcome]) -> Row:
    """That all checks pass, without those that have no memory or time here."""
    wrong = [one.name for one in outcomes if is_wrong(one)]
    passed = sum(one.result == PASS for one in outcomes)
    not_run = sum(one.result.startswith(NOT_RUN) for one in outcomes)
    verdict = WRONG if wrong else PASS if passed else NOT_RUN
    measured = f"{passed} pass, {len(wrong)} wrong, {not_run} not run"
    return Row("outputs and gradients agree with the definition", "all checks", verdict, measured)


def speed(timings: list[Timing]) -> Iterator[Row]:
    """How many times faster than the peers at the sizes of the goals, and how near to the limit of memory."""
    for size in GOALS:
        for peer, bounds in TIMES_FASTER.items():
            yield _times_faster(timings, peer, size, bounds[size.length])
    for size in (*GOALS[1:], *SHAPES):
        ours, problem = _ours(timings, size)
        goal, bound = f"linear / copy of its tensors, {size}", f"≤ {OVER_LIMIT:g}"
        if problem:
            yield Row(goal, bound, *problem)
            continue
        over = ours.seconds * ours.copy_rate / (TENSORS * size.tensor)
        yield Row(goal, bound, PASS if over <= OVER_LIMIT else SLOW, f"{over:.2f}")


def _times_faster(timings: list[Timing], peer: str, size: Size, bound: float) -> Row:
    ours, problem = _ours(timings, size)
    goal, at_least = f"{peer} / linear, {size}", f"≥ {bound:g}"
    if problem:
        return Row(goal, at_least, *problem)
    theirs = _find(timings, peer, size)
    if theirs is None or theirs.seconds is None:
        return Row(goal, at_least, NOT_RUN, why="not measured" if theirs is None else f"{peer}: {theirs.detail}")
    ratio = theirs.seconds / ours.seconds
    why = EXTRAPOLATED if theirs.status == EXTRAPOLATED else ""
    if ours.graphed_seconds and theirs.graphed_seconds:
        why = f"{theirs.graphed_seconds / ours.graphed_seconds:.2f} as CUDA graphs"
    return Row(goal, at_least, PASS if ratio >= bound else SLOW, f"{ratio:.2f}", why)


def _find(timings: list[Timing], method: str, size: Size) -> Timing | None:
    return next((one for one in timings if (one.method, one.size) == (method, size)), None)


def _ours(timings: list[Timing], size: Size) -> tuple[Timing | None, tuple[str, str, str] | None]:
    """Our timing, or the verdict where there is none: a kernel that fails is wrong."""
    ours = _find(timings, LINEAR, size)
    if ours is None:
        return None, (NOT_RUN, "", "not measured")
    if ours.status != MEASURED:
        return ours, (NOT_RUN if ours.status == NOT_RUN else WRONG, "", ours.detail)
    return ours, None


def page(about: dict[str, Any], outcomes: list[Outcome], timings: list[Timing], notes: Iterable[str] = ()) -> str:
    """The whole report."""
    parts = [
        f"# gpu_check: {about['machine']['device']}",
        ", ".join(f"{name} {version}" for name, version in about["versions"].items()) + f"; commit {about['commit']}",
        _table(
            ("goal", "bound", "measured", "verdict", ""),
            ((row.goal, row.bound, row.measured, f"**{row.verdict}**", row.why) for row in all_rows(outcomes, timings)),
        ),
        "\n".join(notes),
        *_of_checks(outcomes),
        *_of_timings(timings),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _of_checks(outcomes: list[Outcome]) -> Iterator[str]:
    """Those that are wrong, those not run, and what the configurations have in common."""
    wrong = [one for one in outcomes if is_wrong(one)]
    if wrong:
        rows = ((one.name, one.result, _error_text(one), one.without_mma_v3) for one in wrong[:MOST])
        yield "## Wrong\n\n" + _table(("check", "result", "error (allowed)", "with DISABLE_MMA_V3=1"), rows)
    not_run = [one for one in outcomes if one.result.startswith(NOT_RUN)]
    if not_run:
        yield "Checks not run:\n\n" + "\n".join(f"- {one.name}: {one.result}" for one in not_run[:MOST])
    if len(wrong) > MOST or len(not_run) > MOST:
        yield "More of them are in gpu_check.json."
    if fits_nothing := sum(one.result == FITS_NOTHING for one in outcomes):
        yield f"Configurations that fit none of the kernels of their size, which autotuning leaves out: {fits_nothing}."
    by_name = {one.name: one for one in outcomes}
    if (same := by_name.get(SAME)) is not None and same.worst is not None:
        text = "equal to the bit" if same.worst == 0 else f"at most {same.worst:.1e} apart ({same.tensor})"
        yield f"The results of all configurations are {text}."
    if (twice := by_name.get(TWICE)) is not None and not twice.result.startswith(NOT_RUN):
        text = "is the same to the bit" if twice.result == PASS else "DIFFERS"
        yield f"With one configuration, the same call {text} each time."


def _error_text(one: Outcome) -> str:
    return "" if one.worst is None else f"{one.tensor} {one.worst:.1e} ({one.tolerance:.1e})"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else milliseconds_text(seconds)


def _of_timings(timings: list[Timing]) -> Iterator[str]:
    if not timings:
        return
    rows = (
        (
            one.method, str(one.size), *map(_milliseconds, (one.seconds, one.host_seconds, one.graphed_seconds)),
            "" if one.extra_memory is None else f"{one.extra_memory:.0%}", one.status, one.detail,
        )
        for one in timings
    )  # fmt: skip
    yield "## Times\n\nForward and backward, or one token.\n\n" + _table(
        ("form", "size", "ms", "of the host", "as a CUDA graph", "extra memory", "", ""), rows
    )
    for one in timings:
        if one.kernels and one.size in WITH_KERNELS:
            yield f"## Kernels, {one.size}\n\n" + _table(KERNEL_COLUMNS, map(_kernel_cells, one.kernels))


KERNEL_COLUMNS = ("kernel", "configuration", "registers", "spills", "µs", "MB", "GB/s", "GFLOP", "TFLOP/s")


def _kernel_cells(kernel: dict[str, Any]) -> tuple[str, ...]:
    """Bytes and FLOPs are those of the model; rates are these over the time."""
    seconds, nbytes, flops = kernel["seconds"], kernel["bytes"], kernel["flops"]

    def text(value: float | None, scale: float = 1.0) -> str:
        return "" if value is None else f"{value / scale:,.4g}"

    def rate(amount: float | None, scale: float) -> str:
        return text(amount / seconds, scale) if amount and seconds else ""

    role = kernel["role"] + (f" × {kernel['count']}" if kernel["count"] > 1 else "")
    compiled = short(kernel["configuration"]), text(kernel["registers"]), text(kernel["spills"])
    return (
        role,
        *compiled,
        text(seconds, 1e-6),
        text(nbytes, 1e6),
        rate(nbytes, 1e9),
        text(flops, 1e9),
        rate(flops, 1e12),
    )


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
