"""`linrope compare`: the curves of several runs, in one table and one picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from linrope.cli.parser import parse_command
from linrope.evaluation.reports import make_folder, print_written
from linrope.evaluation.run_comparison import table_of, write
from linrope.evaluation.run_curves import read_runs


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """The runs, and where to write."""

    runs: list[str]
    report: str | None = None
    """Folder for the table and the curves as CSV and, with matplotlib, a picture."""


RUNS = {
    "positional": True,
    "nargs": "+",
    "type": str,
    "metavar": "RUN",
    "help": "Folder of a run: runs/NAME/version_N, or runs/NAME for its newest version; or a metrics.csv.",
}


def run(args: Sequence[str]) -> None:
    """Run `linrope compare` with the command line `args`."""
    config = parse_command("compare", CompareConfig, args, "RUN [RUN ...] [--report FOLDER]", runs=RUNS)
    console = Console(highlight=False)
    folder = None if config.report is None else make_folder("--report", config.report)
    curves, unit = read_runs(config.runs)
    console.print(table_of(curves, unit))
    if folder is None:
        console.print("--report FOLDER draws the curves", markup=False)
    else:
        print_written(console, write(folder, curves, unit))
