"""What a sweep over lengths finds, and what can be said of lengths that were not run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from benchmarks.harness.memory import describe, is_out_of_memory
from benchmarks.harness.timing import Sample
from linrope.utils.formatting import bytes_text

MEASURED, OVER_BUDGET, OUT_OF_MEMORY = "measured", "over budget", "out of memory"
FAILED, INTERRUPTED = "failed", "interrupted"
SINCE = "as since"
"""How the detail of a point begins whose method was over budget at a shorter length already."""


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

    def record(self, sample: Sample, tokens: int) -> None:
        """Enter the times of a call that works through that many tokens."""
        self.status, self.detail = MEASURED, ""
        self.seconds, (self.seconds_q1, self.seconds_q3) = sample.median, sample.quartiles
        self.rounds, self.tokens_per_second = len(sample.rounds), tokens / sample.median

    def record_failure(self, error: Exception) -> None:
        """Enter that it ran out of memory, or failed: the run goes on without it."""
        self.status = OUT_OF_MEMORY if is_out_of_memory(error) else FAILED
        self.detail = describe(error)

    @property
    def spread(self) -> float:
        """Interquartile range as a share of the median."""
        return (self.seconds_q3 - self.seconds_q1) / self.seconds


def series(points: Iterable[Point], method: str, attribute: str) -> dict[int, float]:
    """What was measured of one method, by length in rising order."""
    found = {p.length: getattr(p, attribute) for p in points if p.method == method and p.status == MEASURED}
    return {length: found[length] for length in sorted(found) if found[length]}


def extrapolated(points: Iterable[Point], method: str, attribute: str, growth: float) -> dict[int, float]:
    """From the last point measured on to the lengths that did not fit a budget: ∝ lengthᵍʳᵒʷᵗʰ. Empty if all did."""
    points = list(points)
    measured = series(points, method, attribute)
    unfit = {p.length for p in points if p.method == method and p.status in (OVER_BUDGET, OUT_OF_MEMORY)}
    last = max(measured, default=None)
    beyond = sorted(length for length in unfit if last is not None and length > last)
    if not beyond:
        return {}
    return {length: measured[last] * (length / last) ** growth for length in (last, *beyond)}


def crossover(linear: Mapping[int, float], softmax: Mapping[int, float]) -> float | None:
    """The length from which on `linear` is faster, interpolated between lengths in log space.

    Args:
        linear, softmax: seconds by length.

    Returns:
        The shortest common length where linear is faster there already; None where it never is for good.
    """
    lengths = sorted(linear.keys() & softmax.keys())
    gain = [math.log(softmax[length] / linear[length]) for length in lengths]
    faster_from = next((i for i in range(len(lengths)) if all(g > 0 for g in gain[i:])), None)
    if faster_from is None or faster_from == 0:
        return None if faster_from is None else float(lengths[0])
    before, after = gain[faster_from - 1], gain[faster_from]
    low, high = (math.log(lengths[i]) for i in (faster_from - 1, faster_from))
    return math.exp(low + (high - low) * before / (before - after))


@dataclass(frozen=True)
class Budget:
    """What one point may cost: seconds for its rounds, bytes beyond the bare process (None: any)."""

    seconds: float
    memory: int | None

    def refusal(self, earlier: list[Point], length: int, rounds: int, growth: tuple[int, int]) -> tuple[str, str]:
        """Status and detail where the method's shorter points tell that this one will not fit, else ("", "").

        Args:
            earlier: the method's points so far, by rising length.
            growth: exponents of its time and memory.
        """
        if not earlier:
            return "", ""
        last = earlier[-1]
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


@dataclass(frozen=True)
class Largest:
    """The longest sequence that a method could do, and what kept it from a longer one."""

    length: int
    limited_by: str


def largest_length(fits: Callable[[int], float | None], start: int, growth: int, seconds: float) -> Largest:
    """Double until it no longer fits, then bisect to 6 %.

    Args:
        fits: the seconds that a length took, or None where it ran out of memory.
        start: the first length to try.
        growth: the time grows as lengthᵍʳᵒʷᵗʰ.
        seconds: no length is tried that is predicted to take longer.
    """
    low, high, took = 0, None, 0.0
    while length := _next_length(low, high, start):
        if low and took * (length / low) ** growth > seconds:
            return Largest(low, "time budget")
        outcome = fits(length)
        if outcome is None:
            high = length
        else:
            low, took = length, outcome
    return Largest(low, "memory")


def _next_length(low: int, high: int | None, start: int, step: int = 64) -> int:
    """What to try where `low` fits and `high` does not; 0 where they are close enough."""
    if high is None:
        return 2 * low or start
    if high <= 1.06 * low:
        return 0
    middle = math.isqrt(low * high) if low else high // 2
    rounded = middle // step * step
    return rounded if rounded > low else middle if middle > low else 0
