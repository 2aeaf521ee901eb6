"""What is made of measurements: crossovers, budgets, extrapolation, the largest length; all on made-up numbers."""

import pytest

from benchmarks.harness import sweep
from benchmarks.harness.sweep import Budget, Point, crossover, extrapolated, largest_length, series
from benchmarks.harness.timing import Sample


def point(length: int, seconds: float | None = None, status: str = sweep.MEASURED, memory: int | None = None) -> Point:
    return Point("softmax", length, 1, status, seconds=seconds, memory_bytes=memory)


def test_the_crossover_is_interpolated_in_log_space():
    lengths = (256, 512, 1024, 2048)
    linear = {length: 1e-3 * length for length in lengths}
    softmax = {length: 1e-3 * length**2 / 700 for length in lengths}
    assert crossover(linear, softmax) == pytest.approx(700)


def test_a_crossover_is_for_good():
    assert crossover({1: 1.0, 2: 1.0}, {1: 2.0, 2: 3.0}) == 1  # faster everywhere
    assert crossover({1: 1.0, 2: 1.0}, {1: 0.5, 2: 0.9}) is None  # nowhere
    assert crossover({1: 1.0, 2: 1.0}, {1: 1.5, 2: 0.9}) is None  # at first only
    assert crossover({1: 1.0}, {2: 1.0}) is None  # never measured together
    assert 2 < crossover({1: 1, 2: 1, 4: 1}, {1: 2, 2: 0.5, 4: 2}) < 4


def test_what_did_not_fit_is_extrapolated_from_the_last_point():
    points = [point(1, 9.0), point(2, 10.0), point(4, status=sweep.OVER_BUDGET), point(8, status=sweep.OVER_BUDGET)]
    assert extrapolated(points, "softmax", "seconds", 2) == {2: 10, 4: 40, 8: 160}
    assert series(points, "softmax", "seconds") == {1: 9, 2: 10}
    assert extrapolated([*points[:2], point(4, status=sweep.OUT_OF_MEMORY)], "softmax", "seconds", 1) == {2: 10, 4: 20}
    assert extrapolated([*points[:2], point(4, status=sweep.INTERRUPTED)], "softmax", "seconds", 2) == {}
    assert extrapolated(points[2:], "softmax", "seconds", 2) == {}  # nothing to start from


def test_budgets_refuse_what_the_shorter_length_predicts():
    budget, growth = Budget(seconds=10, memory=2**30), (2, 1)
    assert budget.refusal([], 512, 5, growth) == ("", "")
    assert budget.refusal([point(512, 0.4)], 1024, 5, growth) == ("", "")  # 8 s
    assert budget.refusal([point(512, 0.6)], 1024, 5, growth) == (sweep.OVER_BUDGET, "predicted 12 s of 10 s")
    large = point(512, 0.1, memory=2**29 + 2**28)
    assert budget.refusal([large], 1024, 5, growth) == (sweep.OVER_BUDGET, "predicted 1.5 GiB of 1 GiB")
    assert Budget(10, None).refusal([large], 1024, 5, growth) == ("", "")


def test_a_length_beyond_one_that_did_not_fit_is_not_tried():
    earlier, refusal = [point(512, status=sweep.OUT_OF_MEMORY)], (sweep.OVER_BUDGET, "as since 512")
    for length in (1024, 2048):
        assert Budget(10, None).refusal(earlier, length, 5, (2, 1)) == refusal
        earlier.append(Point("softmax", length, 1, *refusal))


def test_a_point_takes_its_numbers_from_a_sample():
    found = point(8, status=sweep.INTERRUPTED)
    found.record(Sample((1.0, 2.0, 3.0)), tokens=10)
    assert (found.status, found.seconds, found.rounds, found.tokens_per_second) == (sweep.MEASURED, 2.0, 3, 5.0)
    assert found.spread == 0.5


def test_the_largest_length_is_found_to_six_percent():
    tried = []

    def fits(length: int) -> float | None:
        tried.append(length)
        return 0.0 if length <= 10_000 else None

    found = largest_length(fits, start=512, growth=1, seconds=1)
    assert found.limited_by == "memory"
    assert 10_000 / 1.06 <= found.length <= 10_000
    assert len(tried) < 12


@pytest.mark.parametrize("capacity", [0, 1, 5, 100, 511])
def test_the_largest_length_may_be_below_the_first(capacity):
    found = largest_length(lambda length: 0.0 if length <= capacity else None, start=512, growth=1, seconds=1)
    assert capacity / 1.06 - 1 <= found.length <= capacity


def test_the_search_keeps_to_its_time():
    found = largest_length(lambda length: (length / 1000) ** 2, start=500, growth=2, seconds=10)
    assert (found.length, found.limited_by) == (2000, "time budget")  # 4000 would take 16 s
