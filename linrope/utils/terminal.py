"""Tables and progress bars for the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from linrope.utils.formatting import duration_text

LINE_SECONDS = 30.0
"""Time between two lines of progress outside of a terminal."""


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
    """A progress bar that disappears when it is done. Outside of a terminal, where long work would look like a hang: a
    line to the standard error every `LINE_SECONDS`.

    `columns` follow the task's description; by default a bar and the remaining time.
    """
    if not console.is_terminal:
        return _ProgressLines()
    columns = columns or (BarColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *columns, console=console, transient=True)


class _ProgressLines(Progress):
    """A line instead of a bar: the task, its share that is done, and its time so far."""

    def __init__(self) -> None:
        super().__init__(console=Console(stderr=True), auto_refresh=False, disable=True)
        self._printed = time.monotonic()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._print(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._print(task_id)

    def _print(self, task_id: TaskID) -> None:
        now, task = time.monotonic(), next(task for task in self.tasks if task.id == task_id)
        if not task.visible or now - self._printed < LINE_SECONDS:
            return
        self._printed = now
        share = f"{task.percentage:.0f} % after " if task.total else ""
        line = f"{task.description}: {share}{duration_text(task.elapsed or 0)}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
