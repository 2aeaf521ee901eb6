"""Report of `linrope compare`: runs side by side, at equal tokens and at equal time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from linrope.evaluation.reports import finite, write_csv, write_picture
from linrope.evaluation.run_curves import Axis, Point, RunCurves, shared
from linrope.utils.formatting import duration_text
from linrope.utils.terminal import new_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#000000")
"""Colours that colour-blind readers can tell apart. There are as many lines in a picture."""


def rows_of(runs: Sequence[RunCurves]) -> list[dict[str, Any]]:
    """A row for each run; what is unknown is None."""
    tokens, seconds = shared(runs, "tokens"), shared(runs, "seconds")
    return [
        {
            "run": run.name,
            "tokens": run.tokens,
            "seconds": run.seconds,
            "tokens_per_second": run.tokens / run.seconds if run.seconds else None,
            **finite({"train": run.end_of_training, "val": run.last, "best_val": run.best}),
            "at_equal_tokens": _val_at(run, "tokens", tokens),
            "at_equal_seconds": _val_at(run, "seconds", seconds),
        }
        for run in runs
    ]


def _val_at(run: RunCurves, axis: Axis, where: float | None) -> float | None:
    return None if where is None else run.val_at(axis, where)


def table_of(runs: Sequence[RunCurves], unit: str) -> Table:
    """A row for each run, the best first; columns at equal tokens and time where runs differ in them."""
    columns = {"train": "train,\nlast tenth", "val": "val,\nat the end", "best_val": "best val"}
    for name, axis in (("at_equal_tokens", "tokens"), ("at_equal_seconds", "seconds")):
        where = shared(runs, axis)
        if where is not None and any(getattr(run.val[-1], axis) > where for run in runs):
            columns[name] = f"val, at\n{where:,.0f} tok" if axis == "tokens" else f"val, at\n{duration_text(where)}"
    table = new_table(f"runs by {unit}", "tokens", "time", *columns.values(), text=["run"])
    table.columns[0].min_width = min(24, max(len(run.name) for run in runs))
    for row in rows_of(runs):
        cells = ["" if row[name] is None else f"{row[name]:.3f}" for name in columns]
        table.add_row(escape(row["run"]), f"{row['tokens']:,.0f}", duration_text(row["seconds"]), *cells)
    return table


def write(folder: Path, runs: Sequence[RunCurves], unit: str) -> list[Path]:
    """Write `runs.csv` (a row a run), `curves.csv` (a row a point) and, with matplotlib, `curves.png`."""
    points = [
        {"run": run.name, "split": split, **vars(point), "unit": unit}
        for run in runs
        for split, curve in (("train", run.train), ("val", run.val))
        for point in curve
    ]
    return [
        write_csv(folder / "runs.csv", [{**row, "unit": unit} for row in rows_of(runs)]),
        write_csv(folder / "curves.csv", points),
        *write_picture(folder / "curves.png", lambda: figure_of(runs, unit)),
    ]


def figure_of(runs: Sequence[RunCurves], unit: str) -> Figure:
    """Two panels, against tokens and against time: the validation loss of each run, and pale its training loss. Of more
    than six runs the best six."""
    from matplotlib.figure import Figure

    drawn = runs[: len(COLORS)]
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    figure.suptitle(_title(runs, unit), fontsize=12)
    by_tokens, by_time = figure.subplots(1, 2, sharey=True)
    scale, time_unit = _time_unit(max(run.seconds for run in drawn))
    for run, color in zip(drawn, COLORS):
        _draw(by_tokens, run, color, [point.tokens for point in run.train], [point.tokens for point in run.val])
        _draw(by_time, run, color, *([p.seconds / scale for p in curve] for curve in (run.train, run.val)))
    by_tokens.set_xlabel("training tokens")
    by_tokens.xaxis.set_major_formatter(_tokens_text)
    by_time.set_xlabel(f"time without validations ({time_unit})")
    by_tokens.set_ylabel(f"{unit}: validation, pale: training")
    by_tokens.set_ylim(*_limits(drawn))
    by_time.legend()
    for axes in (by_tokens, by_time):
        axes.grid(alpha=0.3)
        axes.set_xlim(left=0)
    return figure


def _draw(axes: Axes, run: RunCurves, color: str, train_at: list[float], val_at: list[float]) -> None:
    label = {"label": run.name}  # of the line that a reader looks for
    marker = "." if len(run.train) == 1 else None  # one point makes no line
    line = {"color": color, "alpha": 0.35, "linewidth": 1, "marker": marker, **({} if run.val else label)}
    axes.plot(train_at, smoothed(run.train), **line)
    if run.val:
        axes.plot(val_at, [point.loss for point in run.val], color=color, marker="o", markersize=4, **label)


def smoothed(curve: Sequence[Point]) -> list[float]:
    """Means of the losses up to each point, over a fiftieth of all points."""
    width, losses = max(1, len(curve) // 50), [point.loss for point in curve]
    windows = (losses[max(0, end - width) : end] for end in range(1, len(losses) + 1))
    return [sum(window) / len(window) for window in windows]


def _title(runs: Sequence[RunCurves], unit: str) -> str:
    best, *others = runs
    if not best.val:
        return f"Training loss of {len(runs)} runs" if others else f"Training loss of {best.name}"
    of_all = "" if len(runs) <= len(COLORS) else f"; the best {len(COLORS)} of {len(runs)} runs"
    end = f"a loss of {best.last:.3f}" if unit == "loss" else f"{best.last:.3f} {unit}"
    return f"{best.name} ends {'lowest, ' if others else ''}at {end}{of_all}"


def _limits(runs: Sequence[RunCurves]) -> tuple[float, float]:
    """The losses to show: all of validation, and those of training after its steep beginning, the first tenth."""
    shown = [point.loss for run in runs for point in run.val]
    for run in runs:
        late = [loss for loss, point in zip(smoothed(run.train), run.train) if point.tokens > run.tokens / 10]
        shown += late or [point.loss for point in run.train]
    margin = 0.05 * (max(shown) - min(shown)) or 0.05
    return min(shown) - margin, max(shown) + margin


def _time_unit(seconds: float) -> tuple[float, str]:
    return next(
        (pair for pair in ((86400, "days"), (3600, "hours"), (60, "minutes")) if seconds >= 2 * pair[0]), (1, "s")
    )


def _tokens_text(tokens: float, _: object) -> str:
    scale, name = next(
        (pair for pair in ((1e9, " billion"), (1e6, " million"), (1e3, " k")) if tokens >= pair[0]), (1, "")
    )
    return f"{tokens / scale:g}{name}"
