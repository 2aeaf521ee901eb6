"""What a longer context buys: bits per byte by position in the row, and of the same text in rows of other lengths."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from linrope.evaluation.loss_by_position import LossByPosition
from linrope.evaluation.reports import write_csv, write_json, write_picture
from linrope.evaluation.row_lengths import Excerpt, LengthReading, read_at_lengths
from linrope.models.language_model import LanguageModel
from linrope.utils.terminal import new_table, progress_bar

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def read_lengths(
    console: Console, model: LanguageModel, text: Excerpt, lengths: list[int], context: int
) -> list[LengthReading]:
    """A text in rows of each length, with a bar in a terminal."""
    with progress_bar(console) as bar:
        task = bar.add_task("reading rows of each length", total=len(lengths) * (len(text.tokens) - 1))
        return list(read_at_lengths(model.eval(), text, lengths, context, lambda n: bar.advance(task, n)))


def show(console: Console, readings: list[LengthReading], context: int, at_lengths: bool) -> None:
    """The tables: by length where more than the validation's own rows were read, and by position."""
    if not readings[0].by_position.buckets():
        console.print("how many bytes tokens stand for is unknown: set data.tokenizer to see bits per byte by position")
        return
    if at_lengths:
        console.print(_by_length(readings, context))
    console.print(_by_position(readings))


def _by_length(readings: list[LengthReading], context: int) -> Table:
    """The last column compares tokens in the later half of either row, where none has just begun: what is left there is
    what the past beyond the shortest rows is worth."""
    table = new_table(f"the same text in rows of other lengths (data.context={context:,} is 1×)", "length", "×")
    for column in ("rows", "bits per byte", "against the shortest", "in later halves"):
        table.add_column(column, justify="right")
    shortest = readings[0].by_position.bits_per_byte
    for reading in readings:
        bits = reading.by_position.bits_per_byte
        ratios = bits / shortest, reading.later_half / reading.later_half_of_the_shortest
        changes = (f"{100 * (ratio - 1):+.1f} %" for ratio in ratios)
        table.add_row(f"{reading.length:,}", f"{reading.multiple:g}×", f"{reading.rows:,}", f"{bits:.4f}", *changes)
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
            "later_half": reading.later_half,
            "later_half_of_the_shortest": reading.later_half_of_the_shortest,
        }
        for reading in readings
    ]
    by_position = [
        {"length": reading.length, **vars(bucket), "in_rows_of_the_shortest": same.bits_per_byte}
        for reading in readings
        for bucket, same in zip(reading.by_position.buckets(), reading.shortest.buckets(), strict=True)
    ]
    contents = {**details, "lengths": by_length, "positions": by_position}
    return [
        write_csv(folder / "lengths.csv", by_length),
        write_csv(folder / "positions.csv", by_position),
        write_json(folder / "lengths.json", contents),
        *write_picture(folder / "lengths.png", lambda: figure_of(readings, title)),
    ]


def figure_of(readings: list[LengthReading], title: str) -> Figure:
    """Bits per byte by position in the shortest rows and, where there are others: against the rows' length, and what
    each position of longer rows has less or more than the same text has in the shortest."""
    from matplotlib.figure import Figure

    several = len(readings) > 1
    figure = Figure(figsize=(13 if several else 6, 4), layout="constrained")
    all_axes = figure.subplots(1, 3 if several else 1, squeeze=False)[0]
    shortest = readings[0]
    _curve(all_axes[-1 - several], shortest.by_position, [b.bits_per_byte for b in shortest.by_position.buckets()], "")
    all_axes[-1 - several].set_ylabel(f"bits per byte in rows of {shortest.length:,}, by position")
    if several:
        _draw_lengths(all_axes[0], readings)
        for number, reading in enumerate(readings[1:], start=1):
            pairs = zip(reading.by_position.buckets(), reading.shortest.buckets())
            changes = [bucket.bits_per_byte - same.bits_per_byte for bucket, same in pairs]
            label = f"{reading.length:,} ({reading.rows})"
            _curve(all_axes[2], reading.by_position, changes, label, color=f"C{number}")
        all_axes[2].axhline(0, color="black", linewidth=0.8)
        all_axes[2].set_ylabel(f"change against rows of {shortest.length:,}")
        all_axes[2].legend(title="rows of (how many)", fontsize="small")
    figure.suptitle(title, fontsize="medium")
    return figure


def _draw_lengths(axes: Axes, readings: list[LengthReading]) -> None:
    lengths = [reading.length for reading in readings]
    axes.plot(lengths, [reading.by_position.bits_per_byte for reading in readings], marker="o", color="black")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{reading.length:,}\n{reading.multiple:g}×" for reading in readings], fontsize=7)
    axes.set_xlabel("length of the rows (tokens)")
    axes.set_ylabel("bits per byte, whole rows")
    low, high = axes.get_ylim()
    if high - low < 0.1:  # a flat line is to look flat
        axes.set_ylim((low + high) / 2 - 0.05, (low + high) / 2 + 0.05)
    axes.grid(alpha=0.3)


def _curve(axes: Axes, positions: LossByPosition, values: list[float], label: str, color: str = "C0") -> None:
    """Values of the buckets of positions, at their middles."""
    from matplotlib.ticker import FuncFormatter

    middles = [(bucket.first * bucket.last) ** 0.5 for bucket in positions.buckets()]
    axes.plot(middles, values, marker=".", label=label, linewidth=1.2, color=color)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda position, _: f"{position:,.0f}"))
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("position in the row (tokens)")
    axes.grid(alpha=0.3)
