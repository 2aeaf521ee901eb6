"""`linrope prepare`: tokenize text once, and print what the folder holds."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn
from rich.table import Table

from linrope.cli.parser import parse_command
from linrope.data.prepare.config import PrepareConfig
from linrope.data.prepare.manifest import Manifest, document_sizes
from linrope.data.prepare.preparation import prepare
from linrope.utils.printable import printable
from linrope.utils.terminal import progress_bar

BAR = 40
"""Characters of the histogram's longest bar."""


def run(args: Sequence[str]) -> None:
    """Run `linrope prepare` with the command line `args`."""
    config = parse_command("prepare", PrepareConfig, args, "--path FILE|FOLDER|GLOB --output FOLDER [options]")
    console = Console(highlight=False)
    try:
        with progress_bar(console, BarColumn(), DownloadColumn(), TimeRemainingColumn()) as bar:
            task = bar.add_task("reading", total=None)
            manifest = prepare(config, lambda done, total: bar.update(task, completed=done, total=total))
    except KeyboardInterrupt:
        console.print("stopped: run the same command again to continue.")
        raise
    console.print(_summary(manifest))
    console.print(_histogram(document_sizes(config.output)))
    vocab = "" if manifest.tokenizer == "bytes" else f" --model.vocab_size {manifest.vocab_size}"
    path = printable(shlex.quote(config.output))
    console.print(f"\ntrain on it with --data.path {path}{vocab}", markup=False, soft_wrap=True)


def _summary(manifest: Manifest) -> Table:
    skipped = {
        "files (binary, empty or unreadable)": manifest.n_skipped_files,
        "bad lines": manifest.n_skipped_lines,
        "documents without a token": manifest.n_empty,
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (
        ("corpus", manifest.origin),
        ("tokenizer", f"{manifest.tokenizer}, {manifest.vocab_size:,} tokens"),
        ("documents", f"{manifest.n_documents:,}"),
        ("tokens", f"{manifest.n_tokens:,}, plus a separator after each document"),
        ("bytes per token", f"{manifest.n_bytes / manifest.n_tokens:.3f} ({manifest.n_bytes:,} bytes of text)"),
        *(("skipped", f"{n:,} {what}") for what, n in skipped.items() if n),
    ):
        table.add_row(name, escape(printable(value)))
    return table


def _histogram(sizes: np.ndarray) -> Table:
    """The number of documents with 1, 2 … 3, 4 … 7, 8 … 15, … tokens."""
    powers = np.frexp(sizes)[1] - 1  # floor(log2(size))
    counts = np.bincount(powers)
    table = Table.grid(padding=(0, 2))
    for justify in ("right", "right", "left"):
        table.add_column(justify=justify)
    table.add_row("tokens", "documents", "")
    for power in range(powers.min(), len(counts)):
        lowest, highest = 2**power, 2 ** (power + 1) - 1
        bar = "█" * -(-BAR * int(counts[power]) // int(counts.max()))
        table.add_row(f"{lowest:,}" if power == 0 else f"{lowest:,} … {highest:,}", f"{counts[power]:,}", bar)
    return table
