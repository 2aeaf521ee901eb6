"""Results of a sweep over lengths, budgets, and extrapolation to lengths that were not run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from benchmarks.harness.memory import describe, is_out_of_memory
from benchmarks.harness.timing import Sample, milliseconds_text
from linrope.utils.formatting import bytes_text

MEASURED, OVER_BUDGET, OUT_OF_MEMORY = "measured", "over budget", "out of memory"
FAILED, INTERRUPTED = "failed", "interrupted"
SINCE = "as since"
"""The start of a point's detail if its method was over budget at a shorter length."""


@dataclass
class Point:
    """One method at one length: a row of the CSV. Times are seconds of one call (in decoding: of one token)."""

    method: str
    length: int
    batch: int
    status: str = MEASURED
    detail: str = ""
    seconds: float | None = None
    seconds_q1: float | None = None
    seconds_q3: float | None = None
    rounds: int = 0
    tokens_per_second: float | None = None
    memory_bytes: int | None = None
    flops: int | None = None
    gemm_share: float | None = None

    def record(self, sample: Sample, tokens: int, flops: int | None = None) -> None:
        """Enter the times of a call that processes `tokens` tokens, and the FLOPs if any were counted."""
        self.status, self.detail = MEASURED, ""
        self.seconds, (self.seconds_q1, self.seconds_q3) = sample.median, sample.quartiles
        self.rounds, self.tokens_per_second, self.flops = len(sample.rounds), tokens / sample.median, flops or None

    def record_failure(self, error: Exception) -> None:
        """Enter that it ran out of memory, or failed; the run continues."""
        self.status = OUT_OF_MEMORY if is_out_of_memory(error) else FAILED
        self.detail = describe(error)

    @property
    def spread(self) -> float:
        """Interquartile range as a share of the median."""
        return (self.seconds_q3 - self.seconds_q1) / self.seconds

    def cells(self) -> list[str]:
        """Milliseconds, spread, tokens per second and memory, for a table; unknown ones are empty."""
        memory = "" if self.memory_bytes is None else bytes_text(self.memory_bytes)
        if self.status != MEASURED:
            return [f"[yellow]{self.status}[/yellow]", "", "", memory]
        return [milliseconds_text(self.seconds), f"{self.spread:.0%}", f"{self.tokens_per_second:,.0f}", memory]


def series(points: Iterable[Point], method: str, attribute: str) -> dict[int, float]:
    """The measured values of one method by length, shortest first."""
    found = {p.length: getattr(p, attribute) for p in points if p.method == method and p.status == MEASURED}
    return {length: found[length] for length in sorted(found) if found[length]}


def extrapolated(points: Iterable[Point], method: str, attribute: str, growth: float) -> dict[int, float]:
    """Values ∝ lengthᵍʳᵒʷᵗʰ from the last measured point to the lengths over a budget; empty if there are none."""
    points = list(points)
    measured = series(points, method, attribute)
    unfit = {p.length for p in points if p.method == method and p.status in (OVER_BUDGET, OUT_OF_MEMORY)}
    last = max(measured, default=None)
    beyond = sorted(length for length in unfit if last is not None and length > last)
    if not beyond:
        return {}
    return {length: measured[last] * (length / last) ** growth for length in (last, *beyond)}


def crossover(linear: Mapping[int, float], softmax: Mapping[int, float]) -> float | None:
    """The length from which on `linear` is faster, interpolated in log space; both are seconds by length.

    The shortest common length if linear is faster there already; None if it is slower at the longest.
    """
    lengths = sorted(linear.keys() & softmax.keys())
    gain = [math.log(softmax[length] / linear[length]) for length in lengths]
    first = next((i for i in range(len(lengths)) if all(g > 0 for g in gain[i:])), None)
    if not first:
        return None if first is None else float(lengths[0])
    low, high = math.log(lengths[first - 1]), math.log(lengths[first])
    return math.exp(low + (high - low) * gain[first - 1] / (gain[first - 1] - gain[first]))


def crossovers(points: Iterable[Point], methods: Iterable[str], baseline: str) -> dict[str, float]:
    """By method, the length from which on it is faster than the baseline; without those that never are."""
    points = list(points)
    against = series(points, baseline, "seconds")
    found = {method: crossover(series(points, method, "seconds"), against) for method in methods}
    return {method: length for method, length in found.items() if length is not None}


@dataclass(frozen=True)
class Budget:
    """Limits of one point: seconds for its rounds, bytes beyond the bare process (None: no limit)."""

    seconds: float
    memory: int | None

    def refusal(self, earlier: list[Point], length: int, rounds: int, growth: tuple[int, int]) -> tuple[str, str]:
        """Status and detail if the method's shorter points, by rising length, predict that this one does not fit, else
        ("", ""). `growth`: exponents of its time and memory."""
        last = earlier[-1] if earlier else Point("", 0, 0)
        if last.status in (OVER_BUDGET, OUT_OF_MEMORY):
            return OVER_BUDGET, last.detail if last.detail.startswith(SINCE) else f"{SINCE} {last.length:,}"
        if last.seconds is None:
            return "", ""
        ratio = length / last.length
        seconds = rounds * last.seconds * ratio ** growth[0]
        if seconds > self.seconds:
            return OVER_BUDGET, f"predicted {seconds:,.3g} s of {self.seconds:,.3g} s"
        nbytes = (last.memory_bytes or 0) * ratio ** growth[1]
        if self.memory is not None and nbytes > self.memory:
            return OVER_BUDGET, f"predicted {bytes_text(nbytes)} of {bytes_text(self.memory)}"
        return "", ""

    def new_point(
        self, points: list[Point], method: str, length: int, batch: int, rounds: int, growth: tuple[int, int]
    ) -> Point:
        """The method's next point, appended to `points`: over budget, or interrupted until it is measured."""
        earlier = [p for p in points if p.method == method]
        status, detail = self.refusal(earlier, length, rounds, growth)
        points.append(Point(method, length, batch, status or INTERRUPTED, detail))
        return points[-1]


@dataclass(frozen=True)
class Largest:
    """The longest sequence that a method can process, and what limits it."""

    length: int
    limited_by: str


def largest_length(fits: Callable[[int], float | None], start: int, growth: int, seconds: float) -> Largest:
    """Double the length until it does not fit, then bisect to 6 %. `fits`: the seconds that a length takes, or None if
    it runs out of memory; `growth`: the exponent of this time. Lengths that are predicted to take longer than `seconds`
    are not tried."""
    low, high, took = 0, None, 0.0
    while high is None or high > 1.06 * low:
        if high is None:
            length = 2 * low or start
        else:
            middle = math.isqrt(low * high) if low else high // 2
            rounded = middle // 64 * 64
            length = rounded if rounded > low else middle
        if length == low:
            break
        if low and took * (length / low) ** growth > seconds:
            return Largest(low, "time budget")
        outcome = fits(length)
        if outcome is None:
            high = length
        else:
            low, took = length, outcome
    return Largest(low, "memory")
