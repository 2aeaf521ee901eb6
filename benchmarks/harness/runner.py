"""The runner of all benchmarks: options, progress bar, timing in turn, Ctrl-C, tables, files, exit status.

A script derives a class from `Benchmark` with its own options, measurements, table and pictures.
"""

from __future__ import annotations

import argparse
import inspect
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from benchmarks.harness.machine import device_name, surroundings
from benchmarks.harness.options import check_numbers
from benchmarks.harness.pictures import Figure
from benchmarks.harness.sweep import Point
from benchmarks.harness.timing import Alternation, Call
from linrope.errors import InputError
from linrope.evaluation.reports import can_draw, make_folder, print_written, write_csv, write_json, write_picture
from linrope.utils.busy_cores import why_slow
from linrope.utils.memory import keep_freed_memory
from linrope.utils.terminal import progress_bar

AddOption: TypeAlias = Callable[..., Any]
"""`ArgumentParser.add_argument`."""


class Benchmark:
    """One run of a benchmark.

    Attributes:
        name: the command is `python -m benchmarks.NAME`.
        point: the dataclass of one result, a row of the CSV.
        from_zero: options that may be 0; the numbers of the others must be above it.
        output: the default of --output; "" for a benchmark that has no such option, or its own.
        key: the entry of the JSON file that holds the points.
        options: the parsed options.
        points: the results so far. Ctrl-C keeps them.
        args: those of the command; None: sys.argv.
        device: the name of the processor or GPU.
        interrupted: whether Ctrl-C ended the run.
        failure: the error that ended it, with its points kept.
    """

    name: ClassVar[str]
    point: ClassVar[type] = Point
    from_zero: ClassVar[tuple[str, ...]] = ()
    output: ClassVar[str] = "results"
    key: ClassVar[str] = "points"

    def __init__(self, options: argparse.Namespace, device: str = "", points: Iterable[Any] = ()):
        self.options, self.points, self.interrupted, self.failure = options, list(points), False, ""
        self.device = device or device_name(getattr(options, "device", "cpu"))
        self.args: list[str] | None = None
        self.console = Console()
        self.bar: Progress | None = None

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        """Add the script's options."""

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        """Raise InputError, or call `parser.error`, for options that cannot be used. The output folder comes later."""

    def measure(self) -> None:
        """Measure, and add each result to `points` as soon as it is known."""
        raise NotImplementedError

    def table(self) -> RenderableType:
        raise NotImplementedError

    def remarks(self) -> list[str]:
        """Lines below the table: by default, why points were not measured."""
        points = (p for p in self.points if isinstance(p, Point) and p.detail)
        return [f"{p.method} at {p.length:,}: {p.status}, {p.detail}" for p in points]

    def details(self) -> dict[str, Any]:
        """Further entries of the JSON file."""
        return {}

    def figures(self) -> dict[str, Figure]:
        """The pictures by the ending of their names: "" for NAME.png, "-memory" for NAME-memory.png. They depend on the
        points, the options and the device's name alone, so that --redraw can make them from the JSON file."""
        return {}

    def status(self) -> int:
        """The exit status of a run that was not interrupted."""
        return 0

    @property
    def stem(self) -> str:
        """The name of the files, without ending."""
        return self.name

    @classmethod
    def parser(cls) -> argparse.ArgumentParser:
        description = inspect.getdoc(sys.modules[cls.__module__]).splitlines()[0]
        parser = argparse.ArgumentParser(f"benchmarks.{cls.name}", description=description)
        cls.add_options(parser.add_argument)
        if cls.output:
            default = Path(cls.output)
            parser.add_argument("--output", type=Path, default=default, help=f"folder for results (default: {default})")
        if cls.figures is not Benchmark.figures:
            text = "draw the pictures of a JSON file again"
            parser.add_argument("--redraw", action=_Redraw, benchmark=cls, metavar="JSON", help=text)
        return parser

    @classmethod
    def parse(cls, args: list[str] | None = None) -> argparse.Namespace:
        """The options, checked; the output folder exists."""
        parser = cls.parser()
        options = parser.parse_args(args)
        options.settings = [name for name in vars(options) if name != "output"]  # `check` adds more
        check_numbers(parser, options, cls.from_zero)
        if getattr(options, "device", "cpu") == "cuda" and not torch.cuda.is_available():
            parser.error("--device cuda: PyTorch finds no CUDA device here; use cpu")
        try:
            cls.check(parser, options)
            if getattr(options, "output", None):
                make_folder("--output", options.output)
        except InputError as error:
            parser.error(str(error))
        return options

    @classmethod
    def main(cls, args: list[str] | None = None) -> int:
        """Run the command. Returns the exit status: 130 after Ctrl-C."""
        if args is None:  # the process is this command alone: it keeps freed memory, as `linrope fit` does
            keep_freed_memory()
        run = cls(cls.parse(args))
        run.args = args
        if getattr(run.options, "device", "cpu") == "cpu" and (why := why_slow()):
            run.console.print(f"The times will not be those of an idle machine: {why}", markup=False, highlight=False)
        try:
            run.measure()
        except (KeyboardInterrupt, SystemExit) as error:
            # Lightning makes exit code 1 of a Ctrl-C in training
            if not isinstance(error if isinstance(error, KeyboardInterrupt) else error.__context__, KeyboardInterrupt):
                raise
            run.interrupted = True
        except InputError as error:  # what only the work itself finds
            if not run.points:
                cls.parser().error(str(error))
            run.failure = f"error: {error}"
        finally:
            if run.bar is not None:
                run.bar.stop()
        return run.finish()

    def progress(self, description: str, total: int) -> Callable[..., None]:
        """Show a progress bar. Returns `tick(description=…, advance=…, completed=…)`."""
        if self.bar is None:
            self.bar = progress_bar(self.console, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self.bar.start()
        return partial(self.bar.update, self.bar.add_task(description, total=total))

    def time_in_turn(
        self,
        calls: Mapping[Any, Call],
        points: Mapping[Any, Point],
        tokens: int,
        tick: Callable[..., None] = lambda **shown: None,
        description: str = "",
        count: bool = True,
    ) -> None:
        """Time calls of `tokens` tokens for --repeats rounds; each result goes to the point of the same key.

        Ctrl-C keeps the rounds so far. The progress bar shows the description with the key for `{}`. `count`: count the
        FLOPs too.
        """
        alternation = Alternation(calls, self.options.device, count)
        try:
            alternation.run(self.options.repeats, lambda key: tick(description=description.format(key), advance=1))
        finally:
            for key, sample in alternation.samples.items():
                points[key].record(sample, tokens, alternation.flops.get(key))
            for key, error in alternation.failures.items():
                points[key].record_failure(error)

    def finish(self) -> int:
        """Show the results, write the files, and return the exit status."""
        self.show()
        folder = getattr(self.options, "output", None)
        if folder and (written := self.write(folder, self.contents())):
            print_written(self.console, written)
        if self.interrupted:
            self.console.print(f"interrupted: {self.kept}", highlight=False)
        if self.failure:
            self.console.print(self.failure, markup=False, highlight=False)
            return 1
        return 130 if self.interrupted else self.status()

    def contents(self) -> dict[str, Any]:
        """What the JSON file says beside the points: the surroundings, the options as plain values, the details."""
        settings = {name: getattr(self.options, name) for name in self.options.settings}
        plain = json.loads(json.dumps(settings, default=str))
        return self.surroundings | {"settings": plain} | self.details() | {"interrupted": self.interrupted}

    @cached_property
    def surroundings(self) -> dict[str, Any]:
        """Command, machine, versions and commit."""
        return surroundings(getattr(self.options, "device", "cpu"), self.name, self.args)

    def show(self) -> None:
        print_table(self.console, self.table(), self.remarks())

    @property
    def kept(self) -> str:
        """The message after Ctrl-C."""
        return "the results so far are kept" if self.points else "there were no results yet"

    def write(self, folder: Path, details: dict[str, Any]) -> list[Path]:
        """`stem`.csv with a row for each point, `stem`.json with the points and the details, and the pictures."""
        rows = [asdict(point) for point in self.points]
        table = write_csv(folder / f"{self.stem}.csv", rows, [f.name for f in fields(self.point)])
        return [table, write_json(folder / f"{self.stem}.json", {**details, self.key: rows}), *self.draw(folder)]

    def draw(self, folder: Path) -> list[Path]:
        """Write the pictures; without points, or without matplotlib, there are none."""
        figures = self.figures() if self.points and can_draw() else {}
        files = {folder / f"{self.stem}{ending}.png": figure for ending, figure in figures.items()}
        return [written for file in files for written in write_picture(file, partial(files.get, file))]

    @classmethod
    def redraw(cls, file: Path) -> list[Path]:
        """Draw the pictures again from a JSON file that the benchmark wrote."""
        contents = json.loads(file.read_text())
        points = [cls.point(**point) for point in contents[cls.key]]
        return cls(cls.options_of(contents), contents["machine"]["device"], points).draw(file.parent)

    @classmethod
    def options_of(cls, contents: dict[str, Any]) -> argparse.Namespace:
        """The options of the command that wrote a JSON file."""
        return cls.parser().parse_args(shlex.split(contents["command"])[3:])


def print_table(console: Console, table: RenderableType, remarks: Iterable[str]) -> None:
    """Print a table and the lines below it."""
    console.print(table)
    for line in remarks:
        console.print(line, markup=False, highlight=False)


class _Redraw(argparse.Action):
    """`--redraw JSON`: draws and exits, as --help does; no other option is needed."""

    def __init__(self, *args: Any, benchmark: type[Benchmark], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.benchmark = benchmark

    def __call__(self, parser: argparse.ArgumentParser, options: argparse.Namespace, file: str, *args: Any) -> None:
        try:
            written = self.benchmark.redraw(Path(file))
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"--redraw {file}: cannot be read as a result of {self.benchmark.name}: {error!r}")
        print_written(Console(), written)
        parser.exit()
