"""What a longer context buys: bits per byte by position in the row, and of the same text in rows of other lengths."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from linrope.model import LanguageModel
from linrope.training.reading import LengthReading, read_at_lengths
from linrope.training.reports import new_table, write_csv, write_json, write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def read_lengths(
    console: Console, model: LanguageModel, text: Tensor, lengths: list[int], context: int
) -> list[LengthReading]:
    """A text (N + 1,) in rows of each length, with a bar in a terminal."""
    columns = TextColumn("reading rows of each length"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(lengths) * (len(text) - 1))
        return list(read_at_lengths(model.eval(), text, lengths, context, lambda n: bar.advance(task, n)))


def show(console: Console, readings: list[LengthReading], context: int, at_lengths: bool) -> None:
    """The tables: by length where more than the validation's own rows were read, and by position."""
    if at_lengths:
        console.print(_by_length(readings, context))
    console.print(_by_position(readings))


def _by_length(readings: list[LengthReading], context: int) -> Table:
    table = new_table(f"the same text in rows of other lengths (data.context={context:,} is 1×)", "length", "×")
    for column in ("rows", "bits per byte", "against the shortest"):
        table.add_column(column, justify="right")
    shortest = readings[0].by_position.bits_per_byte
    for reading in readings:
        bits = reading.by_position.bits_per_byte
        change = f"{100 * (bits / shortest - 1):+.1f} %"
        table.add_row(f"{reading.length:,}", f"{reading.multiple:g}×", f"{reading.rows:,}", f"{bits:.4f}", change)
    return table


def _by_position(readings: list[LengthReading]) -> Table:
    lengths = [f"{reading.length:,}" for reading in readings]
    table = new_table("bits per byte by position in the row, rows of", "position", *lengths)
    columns = [{(b.first, b.last): b.bits_per_byte for b in reading.by_position.buckets()} for reading in readings]
    for first, last in sorted(set().union(*columns)):
        cells = (f"{column[first, last]:.3f}" if (first, last) in column else "" for column in columns)
        table.add_row(f"{first:,} … {last:,}", *cells)
    return table


def write(folder: Path, readings: list[LengthReading], details: dict[str, Any], title: str) -> list[Path]:
    """`lengths.csv` with a row for each length, `positions.csv` with one for each bucket, `lengths.json`, `.png`."""
    by_length = [
        {
            "length": reading.length,
            "multiple": reading.multiple,
            "rows": reading.rows,
            "tokens": int(reading.by_position.totals[2]),
            "bits_per_byte": reading.by_position.bits_per_byte,
        }
        for reading in readings
    ]
    by_position = [
        {"length": reading.length, **vars(bucket)} for reading in readings for bucket in reading.by_position.buckets()
    ]
    contents = {**details, "lengths": by_length, "positions": by_position}
    return [
        write_csv(folder / "lengths.csv", by_length),
        write_csv(folder / "positions.csv", by_position),
        write_json(folder / "lengths.json", contents),
        *write_picture(folder / "lengths.png", lambda: figure_of(readings, title)),
    ]


def figure_of(readings: list[LengthReading], title: str) -> Figure:
    """Bits per byte against the rows' length, where there are several, and against the position."""
    from matplotlib.figure import Figure

    several = len(readings) > 1
    figure = Figure(figsize=(5 + 4 * several, 4), layout="constrained")
    *left, right = figure.subplots(1, 1 + several, squeeze=False, sharey=True)[0]
    for axes in left:
        lengths = [reading.length for reading in readings]
        axes.plot(lengths, [reading.by_position.bits_per_byte for reading in readings], marker="o", color="black")
        _dress(axes, "length of the rows (tokens)", lengths)
        axes.set_xticks(lengths, [f"{reading.length:,}\n{reading.multiple:g}×" for reading in readings], fontsize=7)
        axes.set_ylabel("bits per byte, whole rows")
    for reading in readings:
        buckets = reading.by_position.buckets()
        middles = [(bucket.first * bucket.last) ** 0.5 for bucket in buckets]
        bits = [bucket.bits_per_byte for bucket in buckets]
        right.plot(middles, bits, marker=".", label=f"{reading.length:,} ({reading.rows})", linewidth=1.2)
    _dress(right, "position in the row (tokens)", [])
    right.set_ylabel("bits per byte, by position")
    right.legend(title="rows of (how many)", fontsize="small")
    figure.suptitle(title, fontsize="medium")
    return figure


def _dress(axes: Axes, label: str, ticks: Iterable[int]) -> None:
    axes.set_xscale("log", base=2)
    if not ticks:
        from matplotlib.ticker import FuncFormatter

        axes.xaxis.set_major_formatter(FuncFormatter(lambda position, _: f"{position:,.0f}"))
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)
