"""Report of `linrope validate`: bits per byte by position in the row, and of the same text in rows of other lengths."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from linrope.evaluation.reports import write_csv, write_json, write_picture
from linrope.evaluation.row_lengths import LengthReading
from linrope.utils.terminal import new_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def show(console: Console, readings: list[LengthReading], context: int, at_lengths: bool) -> None:
    """Print the tables: by length if there are several (`at_lengths`), and by position."""
    if not readings[0].by_position.buckets():
        console.print("the tokens' byte counts are unknown: set data.tokenizer to see bits per byte by position")
        return
    if at_lengths:
        console.print(_by_length(readings, context))
    console.print(_by_position(readings))


def _by_length(readings: list[LengthReading], context: int) -> Table:
    """The last column compares tokens that are in the later half of both rows, where no row has just begun: it shows
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
    """Write `lengths.csv` (a row a length), `positions.csv` (a row a bucket), both in `lengths.json`, and the pictures
    `positions.png` and, for several lengths, `lengths.png`."""
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
    if len(readings) == 1:
        (folder / "lengths.png").unlink(missing_ok=True)  # of an earlier measurement
    contents = {**details, "lengths": by_length, "positions": by_position}
    return [
        write_csv(folder / "lengths.csv", by_length),
        write_csv(folder / "positions.csv", by_position),
        write_json(folder / "lengths.json", contents),
        *(write_picture(folder / "lengths.png", lambda: lengths_figure(by_length, title)) if len(readings) > 1 else []),
        *write_picture(folder / "positions.png", lambda: positions_figure(by_position, title)),
    ]


def lengths_figure(by_length: list[dict[str, Any]], title: str) -> Figure:
    """Bits per byte of the same text by the length of its rows, from the rows of `lengths.csv`."""
    figure, axes = _figure(f"{title}\nbits per byte of the same text, by the length of its rows")
    lengths = [row["length"] for row in by_length]
    axes.plot(lengths, [row["bits_per_byte"] for row in by_length], marker="o")
    axes.set_xticks(lengths, [f"{row['length']:,}\n{row['multiple']:g}×" for row in by_length])
    axes.set_xlabel("length of the rows (tokens, and multiples of data.context)")
    axes.set_ylabel("bits per byte")
    low, high = axes.get_ylim()
    if high - low < 0.1:  # a flat line looks flat
        axes.set_ylim((low + high) / 2 - 0.05, (low + high) / 2 + 0.05)
    return figure


MOST_LINES = 6
"""Lines of a picture; of more lengths the longest are drawn."""


def positions_figure(by_position: list[dict[str, Any]], title: str) -> Figure:
    """Bits per byte by position in the row, from the rows of `positions.csv`.

    For several lengths: the difference to the same tokens in the shortest rows, one line for each longer length.
    """
    shortest, *longer = sorted({row["length"] for row in by_position})
    said = f"change against rows of {shortest:,}" if longer else f"rows of {shortest:,}"
    figure, axes = _figure(f"{title}\nbits per byte by position, {said}")
    for length in longer[-MOST_LINES:] or [shortest]:
        buckets = [row for row in by_position if row["length"] == length]
        middles = [(bucket["first"] * bucket["last"]) ** 0.5 for bucket in buckets]
        base = [bucket["in_rows_of_the_shortest"] if longer else 0 for bucket in buckets]
        values = [bucket["bits_per_byte"] - start for bucket, start in zip(buckets, base, strict=True)]
        axes.plot(middles, values, marker=".", label=f"{length:,}")
    if longer:
        axes.axhline(0, color="black", linewidth=0.8)
        axes.legend(title="rows of")
    axes.xaxis.set_major_formatter(lambda position, _: f"{position:,.0f}")
    axes.set_xlabel("position in the row (tokens)")
    axes.set_ylabel("change in bits per byte" if longer else "bits per byte")
    return figure


def _figure(title: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    return figure, axes
