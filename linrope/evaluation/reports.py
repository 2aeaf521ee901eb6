"""What a command leaves behind beside its words: tables as CSV, all of it as JSON with the command, a picture."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Table

from linrope.utils.files import require_writable, whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make_folder(option: str, folder: str) -> Path:
    """The folder, made where missing; called before any work.

    Raises:
        InputError: nothing can be written there.
    """
    path = Path(folder).expanduser()
    require_writable(path, option)
    path.mkdir(parents=True, exist_ok=True)
    return path


def name_of(checkpoint: str | Path) -> str:
    """What a title calls a checkpoint: `recipe-seed0`, or with its run where the file is called as in all others,
    `lm-long/version_0, last`."""
    path = Path(checkpoint)
    if path.parent.name != "checkpoints":
        return path.stem
    return f"{'/'.join(path.parts[-4:-2])}, {path.stem}"


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Rows of the same keys, at least one; numbers that are not finite are left empty."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows({key: _finite(value) for key, value in row.items()} for row in rows)
    with whole_file(path) as file:
        file.write(text.getvalue().encode())
    return path


def write_json(path: Path, contents: dict[str, Any]) -> Path:
    with whole_file(path) as file:
        file.write(f"{json.dumps(contents, indent=1, ensure_ascii=False, allow_nan=False)}\n".encode())
    return path


def write_picture(path: Path, draw: Callable[[], Figure]) -> list[Path]:
    """The picture, where matplotlib is there to draw it."""
    if not can_draw():
        return []
    with whole_file(path) as file:
        draw().savefig(file, dpi=120, format="png")
    return [path]


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


WITHOUT_PICTURES = "matplotlib is not installed: no picture (pip install 'linrope[bench]')"


def new_table(title: str, *columns: str) -> Table:
    """An empty table of numbers, as wide as its title where that fits a terminal."""
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, show_edge=False, title_justify="left", padding=(0, 1, 0, 0))
    table.min_width = min(78, len(title))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _finite(value: Any) -> Any:
    return "" if isinstance(value, float) and not math.isfinite(value) else value
