"""What a command writes to files: tables as CSV, results as JSON, pictures as PNG."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from linrope.utils.files import require_writable, whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make_folder(option: str, folder: str | Path) -> Path:
    """The folder, created where missing, before the work starts. InputError, naming the option, if it cannot be."""
    path = Path(folder).expanduser()
    require_writable(path, option)
    path.mkdir(parents=True, exist_ok=True)
    return path


def name_of(checkpoint: str | Path) -> str:
    """A checkpoint's name in titles: `recipe-seed0`, or for a file in a run's `checkpoints` folder, where names repeat
    from run to run, `lm-long/version_0, last`."""
    path = Path(checkpoint)
    return f"{'/'.join(path.parts[-4:-2])}, {path.stem}" if path.parent.name == "checkpoints" else path.stem


def write_csv(path: Path, rows: Sequence[dict[str, Any]], columns: Sequence[str] | None = None) -> Path:
    """Write rows, dictionaries with the same keys, as CSV. Numbers that are not finite become empty cells.

    `columns` are the keys in order; by default those of the first row. The file is replaced as a whole.
    """
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, fieldnames=list(columns or rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(map(finite, rows))
    with whole_file(path) as file:
        file.write(text.getvalue().encode())
    return path


def write_json(path: Path, contents: dict[str, Any]) -> Path:
    """Write plain values as JSON. Numbers that are not finite become null. The file is replaced as a whole."""
    with whole_file(path) as file:
        file.write(f"{json.dumps(finite(contents), indent=2, ensure_ascii=False, allow_nan=False)}\n".encode())
    return path


def write_picture(path: Path, draw: Callable[[], Figure]) -> list[Path]:
    """Write the figure that `draw` returns as PNG: [path]. Without matplotlib `draw` is not called: [], and an earlier
    picture, which is of something else, is removed."""
    if not can_draw():
        path.unlink(missing_ok=True)
        return []
    with whole_file(path) as file:
        draw().savefig(file, dpi=120, format="png")
    return [path]


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def print_written(console: Console, written: Sequence[Path]) -> None:
    """Print the names of the files that were written, and how to install matplotlib if it is missing."""
    console.print("wrote", *map(str, written), soft_wrap=True, highlight=False)
    if not can_draw():
        text = "matplotlib is not installed: no picture (pip install 'linrope[bench]')"
        console.print(text, markup=False, highlight=False)


def finite(value: Any) -> Any:
    """The same value with None for numbers that are not finite, also inside dictionaries, lists and tuples."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
