"""What the report of a grid computes from its runs."""

import math
from types import SimpleNamespace
from typing import ClassVar

import pytest

from benchmarks.experiments import ablation_report
from benchmarks.experiments.ablation_pictures import frontier
from benchmarks.experiments.ablation_report import Interval, verdict
from benchmarks.experiments.results_folder import Speed


def test_intervals_and_verdicts():
    found = Interval.of([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.303 / math.sqrt(3))  # Student's t for two degrees; deviation 1
    assert math.isnan(Interval.of([1.0]).half)
    assert math.isnan(Interval.of([1.0, math.nan]).mean)  # not 1.0, as if the other had never been
    assert verdict(Interval(-0.1, 0.05), better=-1) == "better"
    assert verdict(Interval(-0.1, 0.05), better=1) == "worse"
    assert verdict(Interval(0.1, 0.2), better=-1) == "within noise"
    assert verdict(Interval(0.1, math.nan), better=-1) == "one seed"


def run_of(variant: str, seed: int, bpb: float, **more) -> dict:
    training = {"grad_norm_median": 1.0, "grad_norm_peak": 2.0 + seed, "losses": [1.0]}
    settings = {"task": "text", "model": {}, "data": {"context": 8}, "optimizer": {}}
    sizes = {"parameters": 10, "tokens": 1000, "steps": 10, "state_bytes": 1}
    curve = [{"tokens": 100, "bpb": 4.0}, {"tokens": 1000, "bpb": 3.0}]
    run = {"variant": variant, "seed": seed, "final": {"bpb": bpb}, "diverged": None, **sizes}
    return {**run, "curve": curve, "training": training, "settings": settings, **more}


class TwoVariants:
    task, reference, variants, tokens = "text", "a", {"a": {}, "b": {}}, 1000
    catch_up: ClassVar[dict[str, str]] = {}


def rows_by_variant(results, **speeds):
    speeds = {name: Speed(speed) for name, speed in speeds.items()}
    return {row.variant: row for row in ablation_report.rows_of(results, TwoVariants, speeds)}


def test_differences_are_taken_seed_by_seed_at_equal_tokens_and_at_equal_seconds():
    """Seeds that differ by 1 from each other but by 0.1 ± 0.01 between variants: b is clearly better. But b, half as
    fast, has seen 500 tokens when a ends: of each seed it lacks the same part of the curve."""
    results = [run_of("a", seed, 2.0 + seed) for seed in range(3)]
    results += [run_of("b", seed, 1.9 + seed + gap) for seed, gap in enumerate((-0.01, 0.0, 0.01))]
    rows = rows_by_variant(results, a=10.0, b=5.0)
    assert list(rows) == ["b", "a"]
    a, b = rows["a"], rows["b"]
    half = pytest.approx(4.303 * 0.01 / math.sqrt(3) / 3.0)
    assert (b.difference, b.difference_interval, b.verdict) == (pytest.approx(-0.1 / 3.0), half, "better")
    lacked = 1 - math.log(5) / math.log(10)
    assert b.at_equal_seconds == pytest.approx(2.9 + lacked)
    assert b.difference_at_equal_seconds == pytest.approx((lacked - 0.1) / 3.0)
    assert (b.difference_interval_at_equal_seconds, b.verdict_at_equal_seconds) == (half, "worse")
    assert (a.verdict, a.at_equal_seconds, a.interval_at_equal_seconds) == ("", 3.0, a.interval)
    assert b.grad_norm_peak == 4.0


def test_equal_seconds_before_the_first_validation_or_with_a_diverged_run_are_not_guessed():
    results = [run_of("a", 0, 2.5), run_of("b", 0, 2.4)]
    assert math.isnan(rows_by_variant(results, a=10.0, b=0.5)["b"].at_equal_seconds)
    early = run_of("b", 1, math.nan, diverged="loss is nan at step 3", tokens=110)
    a = rows_by_variant([results[0], early, results[1]], a=10.0, b=9.0)["a"]
    assert (a.at_equal_seconds, a.tokens) == (2.5, 1000)
    a = rows_by_variant([results[0], DIVERGED])["a"]  # counted, and not averaged
    assert (a.seeds, a.diverged, a.mean) == (2, 1, 2.5)


def test_a_variant_catches_up_between_two_points_of_its_curve():
    """The final value, 2.0, shifts the curve, 4.0 after 100 and 3.0 after 1,000 tokens, by -1.0: 2.75 is a quarter of
    the way in log tokens."""
    grid = TwoVariants()
    grid.catch_up = {"a": "b"}
    share = ablation_report.caught_up([run_of("a", 0, 2.0), run_of("b", 0, 2.75), run_of("a", 1, 2.0)], grid)
    assert share["a"]["other"] == "b"
    assert share["a"]["mean"] == pytest.approx(10**0.25 / 10)
    never = ablation_report.caught_up([run_of("a", 0, 2.0), run_of("b", 0, 1.9)], grid)
    assert math.isnan(never["a"]["mean"])


def test_losses_by_position_are_means_over_seeds():
    parts = [[3.0, 2.0], [2.0, 1.0]]
    texts = [{"8": {"bpb": 2.0, "eighths": bits}} for bits in parts]
    results = [run_of("a", seed, 2.0, evaluation=text) for seed, text in enumerate(texts)]
    assert ablation_report.by_eighth(results) == {"a": [2.5, 1.5]}
    (row,) = ablation_report.rows_of(results, TwoVariants, {})
    assert (row.first_eighth, row.last_eighth) == (2.5, 1.5)


DIVERGED = run_of("a", 1, math.nan, diverged="loss is nan at step 3")


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (DIVERGED, ["a, seed 1: diverged, loss is nan at step 3"]),
        (run_of("a", 1, 2.0, steps=8), ["a: its runs have 8 and 10 steps, different numbers"]),
        (run_of("b", 0, 2.1), []),
        (run_of("b", 0, 2.1, tokens=1010), []),
        (run_of("b", 0, 2.1, tokens=800), ["steps of unequal sizes: runs read 800 to 1,000 tokens"]),
    ],
)
def test_remarks_name_what_makes_runs_unequal(other, expected):
    results = [run_of("a", 0, 2.0), other]
    assert ablation_report.remarks(ablation_report.rows_of(results, TwoVariants, {}), results, TwoVariants) == expected


def test_late_tokens_are_compared_on_the_same_text():
    """Of the last half of 2048 tokens, blocks 4-7, blocks 5 and 7 are in the last half of rows of 512 too."""
    blocks = {"2048": [0.0, 0.0, 0.0, 0.0, 9.0, 2.0, 9.0, 4.0], "512": [0.0, 0.0, 0.0, 0.0, 1.0, 4.0, 1.0, 4.0]}
    evaluation = {length: {"bpb": 1.0, "blocks": bits} for length, bits in blocks.items()}
    late = ablation_report.by_context([run_of("a", 0, 2.0, evaluation=evaluation)])["a"]["2048"]["late"]["512"]
    assert late["mean"] == pytest.approx(6 / 8 - 1)


def test_spikes():
    losses = [1.0] * 100
    losses[3] = losses[70] = 1.3  # the first is before a window is full
    losses[80] = 1.2
    assert ablation_report.spikes(losses, 500) == [70]
    assert ablation_report.spikes(losses, 100) == []  # single steps


def test_the_line_of_accuracy_against_state_goes_through_the_best_of_all_smaller_states():
    sizes = {"small": (0.5, 2**10), "worse": (0.4, 2**12), "good": (0.8, 2**14), "softmax": (0.9, 2**20)}
    rows = [
        SimpleNamespace(variant=name, mean=mean, interval=0.1, state_bytes=size) for name, (mean, size) in sizes.items()
    ]
    grid = SimpleNamespace(title="Recall", reference="softmax")
    axes = frontier(rows, grid).axes[0]
    assert axes.get_lines()[0].get_xydata().tolist() == [[2**10, 0.5], [2**14, 0.8], [2**20, 0.9]]
    assert axes.figure.get_suptitle() == "Recall:\ngood, 16 KiB of state, reaches 0.80"
    assert [text.get_text() for text in axes.texts] == list(sizes)
