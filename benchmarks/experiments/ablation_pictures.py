"""Pictures of a grid's results."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.experiments.ablation_report import METRIC, Interval, Row, by_case, by_variant, ended
from benchmarks.experiments.grid import Grid
from benchmarks.harness.pictures import COLORS, Axes, Figure, legend_by_end, new_axes
from linrope.utils.formatting import bytes_text

LINES, FEWEST = 6, 3
"""Lines in a picture, at most; variants in a picture, at least: a table says as much of two."""


def figures_of(rows: list[Row], results: list[dict[str, Any]], grid: Grid) -> dict[str, Figure]:
    """The pictures by the ending of their names, those for which there are results."""
    rows = [row for row in rows if not math.isnan(row.mean)]
    if len(rows) < FEWEST:
        return {}
    runs, found = by_variant(ended(results)), by_case(results)
    lengths = sorted({int(length) for run in ended(results) for length in run.get("evaluation") or {}})
    figures = {"": means(rows, runs, grid)}
    if len(lengths) > 1:
        figures["-lengths"] = change_with_length(rows, runs, grid, lengths[0], lengths[-1])
    if found:
        figures["-cases"] = cases(rows, found, grid)
    if found and len({row.state_bytes for row in rows}) >= FEWEST:
        figures["-state"] = frontier(rows, grid)
    return figures


def means(rows: list[Row], runs: dict[str, list[dict[str, Any]]], grid: Grid) -> Figure:
    """A row for each variant: the mean, its 95 % interval, and each seed."""
    metric, label, _ = METRIC[grid.task]
    best, message = rows[0], f"{rows[0].variant} has the best mean"
    if not math.isnan(best.difference):
        change = f"{best.difference:+.3f}" if metric == "accuracy" else f"{100 * best.difference:+.1f} %"
        message += f", {change} against {grid.reference}"
        message += f" ({best.verdict})" if best.verdict != "better" else ""
    intervals = {row.variant: Interval(row.mean, row.interval) for row in rows}
    axes = dots(f"{grid.title}:\n{message}", intervals, grid)
    for height, row in enumerate(reversed(rows)):
        seeds = [run["final"][metric] for run in runs[row.variant]]
        axes.plot(seeds, [height] * len(seeds), "|", color="black", markersize=7)
    axes.set_xlabel(f"{label}: mean, 95 % interval, each seed")
    return axes.figure


def dots(title: str, intervals: dict[str, Interval], grid: Grid) -> Axes:
    """A row for each variant, the first on top; the reference has another colour."""
    axes = new_axes(title, height=1.3 + 0.26 * len(intervals))
    for height, (name, interval) in enumerate(reversed(intervals.items())):
        half = 0 if math.isnan(interval.half) else interval.half
        color = COLORS[1] if name == grid.reference else COLORS[0]
        axes.errorbar(interval.mean, height, xerr=half, fmt="o", color=color, capsize=3)
    if grid.reference in intervals:
        axes.axvline(intervals[grid.reference].mean, color=COLORS[1], linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(intervals)), list(reversed(intervals)))
    return axes


def change_with_length(
    rows: list[Row], runs: dict[str, list[dict[str, Any]]], grid: Grid, short: int, long: int
) -> Figure:
    """How bits per byte change from the shortest rows to the longest, the lowest on top."""
    changes = {}
    for row in rows:
        bits = [{int(length): text["bpb"] for length, text in run["evaluation"].items()} for run in runs[row.variant]]
        if values := [100 * (by[long] / by[short] - 1) for by in bits if {short, long} <= by.keys()]:
            changes[row.variant] = Interval.of(values)
    changes = dict(sorted(changes.items(), key=lambda change: change[1].mean))
    best = next(iter(changes))
    message = f"rows of {long:,} instead of {short:,} tokens change {best} by {changes[best].mean:+.1f} %"
    axes = dots(f"{grid.title}:\n{message}", changes, grid)
    axes.axvline(0, color="black", linewidth=0.8)
    if max(change.mean for change in changes.values()) > 50:
        axes.set_xscale("symlog", linthresh=10)
    axes.xaxis.set_major_formatter(lambda percent, _: f"{percent:+g}" if percent else "0")
    axes.set_xlabel("change of bits per byte in %, the same text: mean, 95 % interval")
    return axes.figure


def cases(rows: list[Row], found: dict[str, dict[str, dict[str, float]]], grid: Grid) -> Figure:
    """Accuracy of a recall task by the length of a row and its pairs: the best variants and the reference."""
    best = [row for row in rows if row.variant != grid.reference][: LINES - 1]
    shown = [row for row in rows if (row in best or row.variant == grid.reference) and row.variant in found]
    hardest = list(found[shown[0].variant])[-1]
    message = ", ".join(f"{row.variant} {found[row.variant][hardest]['mean']:.2f}" for row in shown[:3])
    axes = new_axes(f"{grid.title}: accuracy in the last case,\n{message}")
    for color, row in zip(COLORS, shown):
        values = [case["mean"] for case in found[row.variant].values()]
        axes.plot(list(found[row.variant]), values, marker=".", color=color, label=row.variant)
    axes.set_xlabel("length of the row × pairs")
    axes.set_ylabel("accuracy, mean over seeds")
    axes.tick_params(axis="x", labelrotation=30)
    legend_by_end(axes)
    return axes.figure


def frontier(rows: list[Row], grid: Grid) -> Figure:
    """Accuracy against the bytes of a row's state, each variant one point; the line is the best of all states that are
    no larger."""
    best, line = -math.inf, []
    for row in sorted(rows, key=lambda row: (row.state_bytes, -row.mean)):
        if row.mean > best:
            best = row.mean
            line.append(row)
    small = line[-2] if len(line) > 1 and line[-1].variant == grid.reference else line[-1]
    axes = new_axes(
        f"{grid.title}:\n{small.variant}, {bytes_text(small.state_bytes)} of state, reaches {small.mean:.2f}"
    )
    axes.step([row.state_bytes for row in line], [row.mean for row in line], where="post", color=COLORS[0], linewidth=1)
    for row in rows:
        half = 0 if math.isnan(row.interval) else row.interval
        color = COLORS[1] if row.variant == grid.reference else COLORS[0]
        axes.errorbar(row.state_bytes, row.mean, yerr=half, fmt="o", color=color, capsize=3)
    for here in _places(rows):
        aside = {"xytext": (-5, 4), "ha": "right"} if _is_crowded(here[-1], rows) else {"xytext": (5, 4)}
        label, at = ", ".join(row.variant for row in here), (here[0].state_bytes, here[0].mean)
        axes.annotate(label, at, textcoords="offset points", fontsize=8, **aside)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda size, _: bytes_text(size))
    axes.set_xlabel("state of a row after 1,024 tokens")
    axes.set_ylabel("accuracy: mean over seeds, 95 % interval")
    return axes.figure


def _places(rows: list[Row]) -> list[list[Row]]:
    """The rows whose points lie on each other, which share a label."""
    places: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: (row.state_bytes, row.mean)):
        before = places[-1][-1] if places else None
        if before is not None and before.state_bytes == row.state_bytes and row.mean - before.mean < 0.015:
            places[-1].append(row)
        else:
            places.append([row])
    return places


def _is_crowded(row: Row, rows: list[Row]) -> bool:
    """Whether a label right of the point would lie over the next point, or leave the picture."""
    after = [other for other in rows if other.state_bytes > row.state_bytes]
    near = [other for other in after if other.state_bytes < 1.6 * row.state_bytes and abs(other.mean - row.mean) < 0.03]
    return bool(near) or not after
