"""What a benchmark leaves behind: its machine and versions, numbers as text, CSV, JSON, and a picture."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import linrope
from linrope import LanguageModel
from linrope.data.tokenizers.base import tokenizer_from_serialized
from linrope.data.tokenizers.bytes import VOCAB_SIZE, ByteTokenizer
from linrope.errors import InputError, suggest
from linrope.utils import formatting as units
from linrope.utils.files import require_writable
from linrope.utils.formatting import bytes_text as bytes_text
from linrope.utils.formatting import count_text as count_text
from linrope.utils.formatting import scaled as scaled

# --- options ---------------------------------------------------------------------------------------------------------


def parse_bytes(text: str) -> int:
    """ "4GiB", "500 MB" or plain bytes, as an argparse type."""
    try:
        return units.parse_bytes(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def check_positive(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """End with an error unless each of these options, or every number of it, is above 0."""
    for name in names:
        value = getattr(options, name)
        for number in value if isinstance(value, list) else [value]:
            if number <= 0:
                parser.error(f"--{name} {number}: must be above 0")


def check_even(parser: argparse.ArgumentParser, options: argparse.Namespace, name: str) -> None:
    """End with an error unless that size can be split into RoPE's pairs."""
    if getattr(options, name) % 2:
        parser.error(f"--{name} {getattr(options, name)}: RoPE turns pairs, so it must be even")


def check_names(parser: argparse.ArgumentParser, option: str, names: Iterable[str], known: Iterable[str]) -> None:
    """End with an error unless every name is known."""
    known = list(known)
    for name in names:
        if name not in known:
            parser.error(f"{option} {name}: unknown.{suggest(name, known)} There are {', '.join(known)}")


def check_device(parser: argparse.ArgumentParser, device: str) -> None:
    """End with an error unless PyTorch can use the device."""
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no CUDA device here; use cpu")


def read_byte_model(parser: argparse.ArgumentParser, path: Path) -> LanguageModel:
    """The trained model of `--model path`, or end with an error where there is none, or none that reads bytes."""
    try:
        model = LanguageModel.from_pretrained(path)
    except InputError as error:
        parser.error(f"--model: {error}")
    if model.config.vocab_size < VOCAB_SIZE or not isinstance(
        tokenizer_from_serialized(model.tokenizer), ByteTokenizer
    ):
        parser.error(f"--model {path}: it needs to read bytes, with a vocabulary of {VOCAB_SIZE} or more")
    return model


def make_folder(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Make the output folder, or end with an error where nothing can be written there."""
    try:
        require_writable(folder, "--output")
    except InputError as error:
        parser.error(str(error))
    folder.mkdir(parents=True, exist_ok=True)


# --- where it ran ----------------------------------------------------------------------------------------------------


def device_name(device: str) -> str:
    """The processor's or the GPU's own name."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def surroundings(device: str, command: str, args: list[str] | None) -> dict[str, Any]:
    """All that a reader needs to judge or repeat a run: machine, versions, commit, command."""
    return {
        "command": shlex.join(["python", "-m", f"benchmarks.{command}", *(sys.argv[1:] if args is None else args)]),
        "machine": {
            "device": device_name(device),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "linrope": linrope.__version__},
        "commit": commit(),
    }


def commit() -> str | None:
    """The checkout's commit, with "+" where files differ from it; None outside a checkout."""

    def git(*args: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


# --- numbers as text -------------------------------------------------------------------------------------------------


def seconds_text(seconds: float) -> str:
    """Milliseconds, so that a column of times lines up."""
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.{3 if milliseconds < 1 else 2 if milliseconds < 10 else 1}f}"


# --- while it runs, and after ----------------------------------------------------------------------------------------


def progress_bar(console: Console) -> Progress:
    """A bar that says what is being measured; it leaves nothing behind."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def new_table(title: str, caption: str, text: Iterable[str], numbers: Iterable[str]) -> Table:
    """An empty table that fits 80 columns: text on the left, folded where it must be, numbers on the right."""
    table = Table(title=escape(title), caption=caption, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.caption_justify = "left"
    for name in text:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def say_if_without_pictures(console: Console) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        console.print("matplotlib is not installed: no picture (pip install 'linrope\\[bench]')", highlight=False)


def show(console: Console, table: Table, remarks: Iterable[str]) -> None:
    """The table, and below it what it does not say."""
    console.print(table)
    for line in remarks:
        console.print(line, markup=False, highlight=False)


def finish(
    console: Console,
    folder: Path,
    stem: str,
    points: list,
    details: dict[str, Any],
    draw: Callable[[Path], None] | None = None,
) -> int:
    """Write the results, say where, and give the exit status: 130 where `details["interrupted"]`."""
    written = write(folder, stem, points, details, draw)
    console.print("wrote", *map(str, written), soft_wrap=True, highlight=False)
    if details["interrupted"]:
        console.print("interrupted: what was measured until then is kept")
    return 130 if details["interrupted"] else 0


def write(
    folder: Path, stem: str, points: list, details: dict[str, Any], draw: Callable[[Path], None] | None = None
) -> list[Path]:
    """`stem`.csv with a row for each point, `stem`.json with them and the details, `stem`.png where it can be drawn."""
    rows = [asdict(point) for point in points]
    written = [folder / f"{stem}.csv", folder / f"{stem}.json"]
    with written[0].open("w", newline="") as file:
        table = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["method", "length"])
        table.writeheader()
        table.writerows(rows)
    contents = _finite({**details, "points": rows})
    written[1].write_text(json.dumps(contents, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    if draw and rows and importlib.util.find_spec("matplotlib"):
        written.append(folder / f"{stem}.png")
        draw(written[-1])
    return written


def _finite(value: Any) -> Any:
    """The same with None for numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
