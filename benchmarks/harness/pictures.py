"""Pictures that a page can show 800 pixels wide: one pair of axes, readable text, a colour for each line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from benchmarks.harness.sweep import Point, extrapolated, series
from linrope.utils.formatting import bytes_text, count_text, scaled

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

Axes: TypeAlias = "matplotlib.axes.Axes"
Figure: TypeAlias = "matplotlib.figure.Figure"
LAW = {-1: "∝ 1/T", 0: "constant", 1: "∝ T", 2: "∝ T²"}
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#000000", "#e69f00", "#7f7f7f", "#8c564b", "#9467bd")
"""Colours that colour-blind readers can tell apart, for the first six at least."""
MARKERS = "osD^vPX*<>"


@dataclass(frozen=True)
class Quantity:
    """A field of `Point` that a picture shows against the length, with the label of its axis."""

    attribute: str
    label: str
    unit: str  # "bytes", "count" or "seconds": the format of the ticks
    growth: dict[str, int]  # by method, the exponent by which it is extrapolated; other methods are not


def new_axes(title: str, height: float = 4.5, width: float = 8) -> Axes:
    """One pair of axes in a figure of its own; sizes in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=12)
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    return axes


def legend_by_end(axes: Axes, **options) -> None:
    """A legend beside the axes, in the order in which the lines end, the highest first."""
    lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    lines.sort(key=lambda line: -line.get_ydata()[-1])
    axes.legend(lines, [line.get_label() for line in lines], loc="center left", bbox_to_anchor=(1, 0.5), **options)


def length_ticks(axes: Axes, lengths: list[int]) -> None:
    """A logarithmic axis of lengths, with at most eight of them as ticks."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ticks = lengths[:: -(-len(lengths) // 8)]
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length:,.0f}"))
    axes.tick_params(axis="x", labelrotation=30 if len(ticks) > 6 else 0)


def against_length(
    title: str,
    points: list[Point],
    quantity: Quantity,
    *,
    length_label: str = "length (tokens)",
    marks: dict[str, float] | None = None,
) -> Figure:
    """A quantity against the length, both logarithmic: a line with marks through measured points, dashes where a budget
    allowed no measurement. `marks`: by label, lengths with a vertical line; not those at the edge."""
    axes = new_axes(title)
    for number, method in enumerate(dict.fromkeys(p.method for p in points)):
        color, growth = COLORS[number % 10], quantity.growth.get(method)
        if curve := series(points, method, quantity.attribute):
            axes.plot(*zip(*curve.items()), label=method, color=color, marker=MARKERS[number % 10], markersize=5)
        if growth is not None and (curve := extrapolated(points, method, quantity.attribute, growth)):
            label = f"{method},\nextrapolated {LAW[growth]}"
            axes.plot(*zip(*curve.items()), label=label, color=color, linestyle=(0, (4, 3)), linewidth=1.2)
    shortest = min((p.length for p in points), default=0)
    for label, length in (marks or {}).items():
        if length <= shortest:
            continue
        axes.axvline(length, color="grey", linestyle=":")
        axes.annotate(label, (length, 0.02), (4, 0), xycoords=("data", "axes fraction"), textcoords="offset points")
    length_ticks(axes, sorted({p.length for p in points}))
    _value_ticks(axes, quantity.unit)
    axes.set_xlabel(length_label)
    axes.set_ylabel(quantity.label)
    legend_by_end(axes)
    return axes.figure


def _value_ticks(axes: Axes, unit: str) -> None:
    """A logarithmic axis of values."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log", base=2 if unit == "bytes" else 10)
    if unit != "bytes":
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=12))
    axes.yaxis.set_minor_formatter(NullFormatter())
    write: Callable[[float], str] = {"bytes": bytes_text, "count": count_text, "seconds": _seconds}[unit]
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))


def _seconds(seconds: float) -> str:
    return scaled(1e6 * seconds, ["µs", "ms", "s"], 1000)
