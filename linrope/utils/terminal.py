"""Tables and progress bars for the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table


def new_table(title: str, *numbers: str, text: Iterable[str] = (), caption: str | None = None) -> Table:
    """An empty table, as wide as its title where that fits a terminal.

    Args:
        title: the title, without markup.
        numbers: names of the right-aligned columns; their cells are never folded.
        text: names of the left-aligned columns, which come first; long cells are folded.
        caption: text below the table.
    """
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, show_edge=False, title_justify="left", padding=(0, 1, 0, 0))
    table.caption, table.caption_justify, table.min_width = caption, "left", min(78, len(title))
    for column in text:
        table.add_column(column, overflow="fold")
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def progress_bar(console: Console, *columns: ProgressColumn) -> Progress:
    """A progress bar that disappears when it is done; outside of a terminal it shows nothing.

    `columns` follow the task's description; by default a bar and the remaining time.
    """
    columns = columns or (BarColumn(), TimeRemainingColumn())
    description = TextColumn("{task.description}")
    return Progress(description, *columns, console=console, transient=True, disable=not console.is_terminal)
