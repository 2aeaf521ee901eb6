"""Curves over length on logarithmic axes: points are measured, dashes are not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.sweep import Point, extrapolated, series
from linrope.utils.formatting import bytes_text, count_text, scaled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

LAW = {-1: "∝ 1/T", 0: "constant", 1: "∝ T", 2: "∝ T²"}
MARKERS = "osD^vPX*<>hp"


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        attribute: of `Point`, the quantity that is drawn.
        short: its name in the legend.
        label: its name on the axis.
        unit: "bytes", "count" or "seconds": how ticks are written.
        growth: by method, the exponent that dashes follow; a method that is not in it has none.
    """

    attribute: str
    short: str
    label: str
    unit: str
    growth: dict[str, int]


def draw(path: Path, *args, **kwargs) -> None:
    """Write `figure_of(...)` to a file."""
    figure_of(*args, **kwargs).savefig(path, dpi=150)


def figure_of(
    title: str,
    points: list[Point],
    panels: list[Panel],
    *,
    length_label: str = "length (tokens)",
    faster_than: str = "",
    marks: dict[str, float] | None = None,
) -> Figure:
    """A picture with a panel beside a panel.

    Args:
        marks: by method, the length from which on it is faster than the method `faster_than`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2 * len(panels), 5.6), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    solid, dashed, said = {}, {}, {}
    for axes, panel in zip(all_axes, panels):
        for number, method in enumerate(dict.fromkeys(p.method for p in points)):
            if line := _measured(axes, points, method, panel, number):
                solid[method] = line
            if line := _dashes(axes, points, method, panel, number):
                dashed[method] = line
                said.setdefault(method, []).append(f"{panel.short} {LAW[panel.growth[method]]}")
        _dress(axes, sorted({p.length for p in points}), panel, length_label)
    legend = dict(solid)
    legend |= {f"{name}, extrapolated, not measured: {', '.join(said[name])}": line for name, line in dashed.items()}
    for name, length in (marks or {}).items():
        label = f"{name} is faster than {faster_than} from {length:,.0f} tokens on"
        legend[label] = all_axes[0].axvline(length, color=solid[name].get_color(), linestyle=":")
    if legend:
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=2, fontsize="small")
    return figure


def _measured(axes: Axes, points: list[Point], method: str, panel: Panel, number: int) -> Line2D | None:
    """A line through the points that were measured."""
    curve = series(points, method, panel.attribute)
    style = {"color": f"C{number % 10}", "marker": MARKERS[number % len(MARKERS)], "markersize": 5}
    return axes.plot(*zip(*curve.items()), **style)[0] if curve else None


def _dashes(axes: Axes, points: list[Point], method: str, panel: Panel, number: int) -> Line2D | None:
    """From the last point on, dashes for what did not fit a budget."""
    if method not in panel.growth:
        return None
    curve = extrapolated(points, method, panel.attribute, panel.growth[method])
    style = {"color": f"C{number % 10}", "linestyle": (0, (4, 3)), "linewidth": 1.2}
    return axes.plot(*zip(*curve.items()), **style)[0] if curve else None


def _dress(axes: Axes, lengths: list[int], panel: Panel, length_label: str) -> None:
    """Logarithmic axes whose ticks are numbers that people read."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log", base=2 if panel.unit == "bytes" else 10)
    ticks = lengths[:: -(-len(lengths) // 8)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length:,.0f}"))
    if panel.unit != "bytes":
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=12))
    axes.yaxis.set_minor_formatter(NullFormatter())
    write = {"bytes": bytes_text, "count": count_text, "seconds": _seconds}[panel.unit]
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    axes.tick_params(axis="x", labelrotation=30 if len(ticks) > 5 else 0)
    axes.set_xlabel(length_label)
    axes.set_ylabel(panel.label)
    axes.grid(alpha=0.3)


def _seconds(seconds: float) -> str:
    return scaled(1e6 * seconds, ["µs", "ms", "s"], 1000)
