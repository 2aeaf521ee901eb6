"""The results of a grid of `benchmarks.family`: means and intervals over seeds, differences, tables, pictures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.experiments.ablation_report import Interval
from benchmarks.harness.pictures import COLORS, Figure, legend_by_end, new_axes
from linrope.errors import InputError
from linrope.utils.formatting import duration_text
from linrope.utils.terminal import new_table

SPEEDS = "speeds.json"
"""Seconds of an optimizer step by variant, beside the runs' folder."""
LINES = 6
"""Lines in a picture, at most."""
Run = dict[str, Any]
"""The result of a run, as `benchmarks.family_run` writes it."""
Runs = Mapping[str, Mapping[int, Run]]
"""The finished runs of each variant, by seed."""


@dataclass
class Row:
    """The loss, or one score, of a variant.

    Differences are from the reference, seed by seed: of the loss as a share of the reference's mean, of scores as they
    are. `at_equal_seconds` is the loss when the fastest variant ends. `share_of_steps` is the steps until a run has the
    last loss of the reference, as a share of the reference's; NaN if one never has.
    """

    variant: str
    metric: str
    seeds: int
    parameters: int
    mean: float
    interval: float
    difference: float
    difference_interval: float
    seconds: float
    """Of training, at the speed that was measured with nothing else running; NaN if it was not."""
    at_equal_seconds: float = math.nan
    interval_at_equal_seconds: float = math.nan
    difference_at_equal_seconds: float = math.nan
    difference_interval_at_equal_seconds: float = math.nan
    share_of_steps: float = math.nan


def by_variant(results: list[Run], variants: list[str]) -> Runs:
    """In the grid's order; variants without a finished run are left out."""
    found = {name: {run["seed"]: run for run in results if run["variant"] == name} for name in variants}
    return {name: dict(sorted(own.items())) for name, own in found.items() if own}


def rows_of(runs: Runs, speeds: Mapping[str, float], reference: str, metric: str, scores: list[str]) -> list[Row]:
    """The losses of all variants, the lowest mean first, then each score in the same order. `speeds` are seconds of a
    step."""
    n_steps = {name: _end(next(iter(own.values())))["step"] for name, own in runs.items()}
    seconds = {name: n * speeds.get(name, math.nan) for name, n in n_steps.items()}
    losses = {name: {seed: _end(run)[metric] for seed, run in own.items()} for name, own in runs.items()}
    order = sorted(runs, key=lambda name: Interval.of(losses[name].values()).mean)
    rows = [_row(name, metric, runs, losses, seconds, reference, as_share=True) for name in order]
    if rows:
        fastest = min((value for value in seconds.values() if value == value), default=math.nan)
        _add_times(rows, runs, losses, reference, metric, {name: fastest / speeds.get(name, math.nan) for name in runs})
    for score in scores:
        values = {name: {seed: run["test"][score] for seed, run in own.items()} for name, own in runs.items()}
        rows += [_row(name, score, runs, values, seconds, reference, as_share=False) for name in order]
    return rows


def has_metrics(run: Run, metric: str, scores: list[str]) -> bool:
    """Whether a finished run has the grid's metric and scores."""
    return metric in _end(run) and all(score in run["test"] for score in scores)


def require_metrics(run: Run, metric: str, scores: list[str]) -> None:
    """Raise InputError unless a finished run has the grid's metric and scores."""
    if has_metrics(run, metric, scores):
        return
    name, validated = f"{run['variant']}, seed {run['seed']}", sorted(_end(run).keys() - {"step"})
    if metric not in validated:
        raise InputError(f"metric={metric!r} is not in the validation of {name}: choose one of {', '.join(validated)}.")
    missing = ", ".join(score for score in scores if score not in run["test"])
    how = f"choose of {', '.join(sorted(run['test']))}" if run["test"] else "it was made without, so remove it"
    raise InputError(f"scores: {missing} is not in the test of {name}: {how}.")


def _end(run: Run) -> dict[str, float]:
    return run["curve"][-1]


def _row(
    name: str,
    metric: str,
    runs: Runs,
    values: Mapping[str, Mapping[int, float]],
    seconds: Mapping[str, float],
    reference: str,
    as_share: bool,
) -> Row:
    own, mean = runs[name], Interval.of(values[name].values())
    difference = difference_of(values[name], values.get(reference, {}), as_share)
    parameters = next(iter(own.values()))["parameters"]
    rest = difference.mean, difference.half, seconds[name]
    return Row(name, metric, len(own), parameters, mean.mean, mean.half, *rest)


def difference_of(own: Mapping[int, float], reference: Mapping[int, float], as_share: bool) -> Interval:
    """Seed by seed, of the seeds that both have; a share is one of the reference's mean over these."""
    both = [seed for seed in own if seed in reference]
    scale = statistics.fmean(reference[seed] for seed in both) if as_share and both else 1.0
    return Interval.of((own[seed] - reference[seed]) / scale for seed in both)


def _add_times(
    rows: list[Row], runs: Runs, losses: Any, reference: str, metric: str, ends: Mapping[str, float]
) -> None:
    """Fill in what depends on the curves: at equal time each variant has made the steps of `ends`."""
    at_end = {name: {s: loss_at(run, metric, ends[name]) for s, run in own.items()} for name, own in runs.items()}
    for row in rows:
        there = Interval.of(at_end[row.variant].values())
        row.at_equal_seconds, row.interval_at_equal_seconds = there.mean, there.half
        difference = difference_of(at_end[row.variant], at_end.get(reference, {}), as_share=True)
        row.difference_at_equal_seconds, row.difference_interval_at_equal_seconds = difference.mean, difference.half
        own, other = runs[row.variant], runs.get(reference, {})
        shares = [
            steps_to(run, metric, losses[reference][seed]) / _end(other[seed])["step"]
            for seed, run in own.items()
            if seed in other
        ]
        row.share_of_steps = statistics.fmean(shares) if shares else math.nan


def loss_at(run: Run, metric: str, step: float) -> float:
    """The loss of a run at a step, between two validations; NaN before the first."""
    curve = run["curve"]
    return float(np.interp(step, [row["step"] for row in curve], [row[metric] for row in curve], left=math.nan))


def steps_to(run: Run, metric: str, loss: float) -> float:
    """The step at which a run first has a loss, between two validations; NaN if it never has."""
    before = None
    for row in run["curve"]:
        if row[metric] <= loss:
            if before is None:
                return row["step"]
            share = (before[metric] - loss) / (before[metric] - row[metric])
            return before["step"] + share * (row["step"] - before["step"])
        before = row
    return math.nan


def table_of(rows: list[Row], title: str, label: str, reference: str) -> Table:
    """The last loss of each variant, and beside it the scores."""
    scores = list(dict.fromkeys(row.metric for row in rows if row.metric != rows[0].metric))
    table = new_table(title, "seeds", label, f"against\n{reference}", *scores, text=["variant"])
    found = {(row.variant, row.metric): row for row in rows}
    for row in _losses(rows):
        of_scores = [found[row.variant, score] for score in scores]
        table.add_row(
            row.variant,
            str(row.seeds),
            with_interval(row.mean, row.interval),
            with_interval(row.difference, row.difference_interval, share=True),
            *(with_interval(one.mean, one.interval, digits=1) for one in of_scores),
        )
    return table


def table_at_equal_time(rows: list[Row], title: str, label: str, reference: str) -> Table | None:
    """The loss of each variant when the fastest one ends; None without speeds."""
    if all(math.isnan(row.seconds) for row in rows):
        return None
    table = new_table(title, "training", f"{label},\nat equal time", f"against\n{reference}", text=["variant"])
    for row in sorted(_losses(rows), key=lambda row: row.at_equal_seconds):
        table.add_row(
            row.variant,
            duration_text(row.seconds),
            with_interval(row.at_equal_seconds, row.interval_at_equal_seconds),
            with_interval(row.difference_at_equal_seconds, row.difference_interval_at_equal_seconds, share=True),
        )
    return table


def _losses(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.metric == rows[0].metric]


def with_interval(mean: float, half: float, share: bool = False, digits: int = 3) -> str:
    """`1.234 ± 0.005`, or in percent with a sign; empty for NaN."""
    if math.isnan(mean):
        return ""
    text, own = (f"{mean:+.1%}", f"{half:.1%}") if share else (f"{mean:.{digits}f}", f"{half:.{digits}f}")
    return text if math.isnan(half) else f"{text} ± {own}"


def figure_of(runs: Runs, title: str, metric: str, label: str) -> Figure:
    """The loss against steps: the mean over seeds, and a band from the lowest to the highest."""
    axes = new_axes(title)
    for (name, own), color in zip(runs.items(), COLORS, strict=False):
        curves = [run["curve"] for run in own.values()]
        length = min(map(len, curves))
        steps = [row["step"] for row in curves[0][:length]]
        losses = np.array([[row[metric] for row in curve[:length]] for curve in curves])
        axes.plot(steps, losses.mean(0), label=name, color=color, marker="o", markersize=3)
        axes.fill_between(steps, losses.min(0), losses.max(0), color=color, alpha=0.2, linewidth=0)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel(label)
    axes.set_xlim(left=0)
    legend_by_end(axes)
    return axes.figure
