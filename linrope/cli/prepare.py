"""`linrope prepare`: tokenizes text once, behind a progress bar, and says what came of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from linrope.cli.parser import PlainParser
from linrope.data.prepare.preparation import Manifest, PrepareConfig, document_sizes
from linrope.data.prepare.preparation import prepare as prepare_corpus

BAR = 40
"""Characters of the longest bar of the histogram."""


def run_prepare(args: Sequence[str], description: str) -> None:
    """Runs `linrope prepare` with the command line `args`."""
    usage = "linrope prepare --path FILE|FOLDER|GLOB --output FOLDER [options]"
    parser = PlainParser(prog="linrope prepare", usage=usage, description=description, allow_abbrev=False)
    parser.add_class_arguments(PrepareConfig)
    flag = next(action for action in parser._actions if action.dest == "skip_bad_lines")
    flag.nargs, flag.const = "?", True  # its name alone will do
    config = PrepareConfig(**vars(parser.parse_args(args)))
    console = Console(highlight=False)
    columns = TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=None)
            manifest = prepare_corpus(config, lambda done, total: bar.update(task, completed=done, total=total))
    except KeyboardInterrupt:
        console.print("stopped: the same line goes on from here.")
        raise
    console.print(_summary(manifest))
    console.print(_histogram(document_sizes(config.output)))
    vocab = "" if manifest.tokenizer == "bytes" else f" --model.vocab_size {manifest.vocab_size}"
    console.print(f"\ntrain on it with --data.path {config.output}{vocab}", markup=False, soft_wrap=True)


def _summary(manifest: Manifest) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(manifest):
        table.add_row(name, escape(value))
    return table


def _rows(manifest: Manifest) -> list[tuple[str, str]]:
    left_out = {
        "files (binary, empty or unreadable)": manifest.n_skipped_files,
        "bad lines": manifest.n_skipped_lines,
        "documents without a token": manifest.n_empty,
    }
    return [
        ("corpus", manifest.origin),
        ("tokenizer", f"{manifest.tokenizer}, {manifest.vocab_size:,} tokens"),
        ("documents", f"{manifest.n_documents:,}"),
        ("tokens", f"{manifest.n_tokens:,}, and a separator after each document"),
        ("bytes per token", f"{manifest.n_bytes / manifest.n_tokens:.3f} ({manifest.n_bytes:,} bytes of text)"),
        *(("left out", f"{n:,} {what}") for what, n in left_out.items() if n),
    ]


def _histogram(sizes: np.ndarray) -> Table:
    """How many documents have 1, 2 … 3, 4 … 7, 8 … 15, … tokens."""
    powers = np.frexp(sizes)[1] - 1  # of the largest power of two that is no more
    counts = np.bincount(powers)
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    table.add_row("tokens", "documents", "")
    for power in range(powers.min(), len(counts)):
        lowest, highest = 2**power, 2 ** (power + 1) - 1
        bar = "█" * -(-BAR * int(counts[power]) // int(counts.max()))
        table.add_row(f"{lowest:,}" if power == 0 else f"{lowest:,} … {highest:,}", f"{counts[power]:,}", bar)
    return table


def prepare(args: Sequence[str]) -> None:
    """Tokenize text once, into a folder to train from."""
    run_prepare(args, prepare.__doc__)
