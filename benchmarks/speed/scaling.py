"""Time and memory of linear attention against softmax attention, both with RoPE, as the length grows.

    python -m benchmarks.scaling --lengths 512 2048 8192

Every length is run by all methods in turn, round after round in one process, so that a slow moment of the machine
falls on all; the first round is warm-up. What is shown is the median of the rounds, and the ratio of medians. Peak
memory comes from a process of its own for each point. A point that is predicted, from the length before it, to exceed
the time or the memory budget is not run: a picture has dashes there, and the table says so.

Ctrl-C keeps what has been measured, and writes it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from benchmarks.harness import memory, report
from benchmarks.harness.pictures import Panel, draw
from benchmarks.harness.sweep import (
    INTERRUPTED,
    MEASURED,
    SINCE,
    Budget,
    Largest,
    Point,
    crossover,
    largest_length,
    series,
)
from benchmarks.harness.timing import Alternation, gemm_rate
from benchmarks.speed.methods import DTYPES, MODES, Inputs, Method, Setting, catalogue

BASELINE = "softmax-rope"


@dataclass
class Results:
    """All that a run has found so far."""

    points: list[Point] = field(default_factory=list)
    largest: dict[str, Largest] = field(default_factory=dict)
    gemm_rate: float | None = None
    interrupted: bool = False

    def crossovers(self) -> dict[str, float]:
        """Of every linear-rope, the length from which on it is faster than softmax-rope."""
        methods = dict.fromkeys(p.method for p in self.points)
        against = series(self.points, BASELINE, "seconds")
        linear = [name for name in methods if name.split("[")[0] == "linear-rope"]
        found = {name: crossover(series(self.points, name, "seconds"), against) for name in linear}
        return {name: length for name, length in found.items() if length is not None}


# --- measuring -------------------------------------------------------------------------------------------------------


class Run:
    """One run of the benchmark: measures into `results`, which an interruption leaves as they are."""

    def __init__(self, options: argparse.Namespace, console: Console):
        self.options, self.results, self.console = options, Results(), console
        self.methods = options.methods
        self.budget = Budget(options.budget, options.memory or memory.available(options.device))

    def setting(self, length: int) -> Setting:
        o = self.options
        return Setting(length, o.batch, o.heads, o.head_dim, None, o.dtype, o.device, o.mode)

    def measure(self) -> None:
        """Everything that was asked for, or as much of it as there was patience for."""
        lengths = self.options.lengths
        calls = self.options.repeats + 2  # memory, warm-up and the rounds
        try:
            with report.progress_bar(self.console) as bar:
                task = bar.add_task("matrix product", total=len(lengths) * len(self.methods) * calls)
                self.results.gemm_rate = gemm_rate(DTYPES[self.options.dtype], self.options.device)
                for number, length in enumerate(lengths, 1):
                    self.measure_length(length, bar, task)
                    bar.update(task, completed=number * len(self.methods) * calls)
                if self.options.memory:
                    self.search(bar)
        except KeyboardInterrupt:
            self.results.interrupted = True

    def measure_length(self, length: int, bar: Progress, task: TaskID) -> None:
        """All methods at one length: memory first, which tells who cannot do it, then time in turn."""
        setting = self.setting(length)
        points = {name: self.first_look(method, setting) for name, method in self.methods.items()}
        running = {name: point for name, point in points.items() if point.status == INTERRUPTED}

        def tick(name: str, what: str = "") -> None:
            bar.update(task, description=f"{length:,} tokens: {name}{what}", advance=1)

        for name, point in running.items():
            tick(name, ", memory")
            measure_memory(self.methods[name], setting, self.budget.memory, point)
        fitting = [name for name, point in running.items() if point.status == INTERRUPTED]
        if not fitting:
            return
        inputs = Inputs.make(setting)
        alternation = Alternation({n: self.methods[n].prepare(inputs) for n in fitting}, self.options.device)
        try:
            alternation.run(self.options.repeats, tick)
        finally:
            self.record(alternation, running, setting)

    def first_look(self, method: Method, setting: Setting) -> Point:
        """The method's point at this length, refused, or interrupted until it is measured."""
        earlier = [p for p in self.results.points if p.method == method.name]
        growth = method.time_growth(setting.mode), method.memory_growth(setting.mode)
        status, detail = self.budget.refusal(earlier, setting.length, self.options.repeats + 1, growth)
        point = Point(method.name, setting.length, setting.batch, status or INTERRUPTED, detail)
        self.results.points.append(point)
        return point

    def record(self, alternation: Alternation, points: dict[str, Point], setting: Setting) -> None:
        """Enter what the rounds gave, however many there were."""
        for name, sample in alternation.samples.items():
            point = points[name]
            point.record(sample, setting.new_tokens)
            point.flops = alternation.flops.get(name) or None
            if point.flops:
                point.gemm_share = point.flops / sample.median / self.results.gemm_rate
        for name, error in alternation.failures.items():
            points[name].record_failure(error)

    def search(self, bar: Progress) -> None:
        """The largest length of each method within the memory given, in processes of their own."""
        task = bar.add_task("largest length", total=len(self.methods))
        for name, method in self.methods.items():

            def fits(length: int, method: Method = method) -> float | None:
                bar.update(task, description=f"largest length: {method.name} at {length:,}")
                try:
                    return memory.in_new_process(
                        memory.measure, method, self.setting(length), self.options.memory
                    ).seconds
                except memory.OutOfMemory:
                    return None

            try:
                self.results.largest[name] = largest_length(
                    fits, self.options.lengths[0], method.time_growth(self.options.mode), self.options.budget
                )
            except memory.Failed as error:
                self.results.largest[name] = Largest(0, f"failed: {error}")
            bar.advance(task)


def measure_memory(method: Method, setting: Setting, limit: int | None, point: Point) -> None:
    """Enter the peak memory of one call: in a process of its own on a CPU, in this one on a GPU."""
    try:
        if setting.device == "cuda":
            peak = memory.measure(method, setting, limit)
        else:
            peak = memory.in_new_process(memory.measure, method, setting, limit)
        point.memory_bytes = peak.extra
    except Exception as error:
        point.record_failure(error)


# --- showing ---------------------------------------------------------------------------------------------------------


def title_of(options: argparse.Namespace) -> str:
    setting = f"batch {options.batch}, {options.heads} heads of {options.head_dim}, {options.dtype}"
    return f"{options.mode}, {setting}\n{report.device_name(options.device)}"


def table_of(results: Results, options: argparse.Namespace) -> Table:
    """A section for each length, a row for each method."""
    decoding = options.mode == "decode"
    what, beyond = ("one token", "past and peak") if decoding else ("one call", "peak beyond the inputs")
    table = report.new_table(
        title_of(options),
        f"ms: median of {what}; ±: interquartile range\n"
        f"memory: {beyond}\nGEMM: share of the measured rate of a large matrix product",
        text=["method"],
        numbers=["ms", "±", "tokens/s", "memory", "FLOP", "GEMM"],
    )
    for length in sorted({p.length for p in results.points}):
        row = [p for p in results.points if p.length == length]
        table.add_row(f"[bold]{length:,} tokens[/bold]")
        for point in row:
            table.add_row(*cells(point))
        if ratio := ratio_cells(row):
            table.add_row(*ratio)
        table.add_section()
    return table


def cells(point: Point) -> list[str]:
    """One method at one length; what is not known is left empty."""
    known = point.memory_bytes is not None
    bytes_cell = report.bytes_text(point.memory_bytes) if known else ""
    name = point.method.replace("[", "\\[")
    if point.status != MEASURED:
        return [name, f"[yellow]{point.status}[/yellow]", "", "", bytes_cell]
    share = f"{point.gemm_share:.0%}" if point.gemm_share else ""
    return [
        name,
        report.seconds_text(point.seconds),
        f"{point.spread:.0%}",
        f"{point.tokens_per_second:,.0f}",
        bytes_cell,
        report.count_text(point.flops) if point.flops else "",
        share,
    ]


def ratio_cells(points: list[Point]) -> list[str]:
    """How many times faster linear-rope is than softmax-rope at one length."""
    seconds = {p.method: p.seconds for p in points if p.status == MEASURED}
    linear = min((s for name, s in seconds.items() if name.split("[")[0] == "linear-rope"), default=None)
    if linear is None or BASELINE not in seconds:
        return []
    return ["[italic]softmax / linear[/italic]", f"[italic]{seconds[BASELINE] / linear:.1f}×[/italic]"]


def remarks(results: Results, options: argparse.Namespace) -> list[str]:
    """What the table does not say."""
    lines = [f"{name}: {method.absent}" for name, method in options.left_out.items()]
    for point in results.points:
        if point.detail and not point.detail.startswith(SINCE):
            lines.append(f"{point.method} at {point.length:,}: {point.status}, {point.detail}")
    first = min(options.lengths)
    for name, length in results.crossovers().items():
        where = f"at every length from {first:,}" if length == first else f"from {length:,.0f} tokens"
        lines.append(f"{name} is faster than {BASELINE} {where} on")
    for name, largest in results.largest.items():
        bound = "at least " if largest.limited_by == "time budget" else ""
        lines.append(
            f"{name}: {bound}{largest.length:,} tokens in {report.bytes_text(options.memory)} ({largest.limited_by})"
        )
    return lines


def picture_of(results: Results, options: argparse.Namespace, path: Path) -> None:
    """Throughput and peak memory over length, the crossovers marked."""
    time = {name: -method.time_growth(options.mode) for name, method in options.methods.items()}
    if options.mode != "decode":
        time = {name: 1 + growth for name, growth in time.items()}  # a call has more tokens the longer it is
    space = {name: method.memory_growth(options.mode) for name, method in options.methods.items()}
    memory_label = "memory, with the past" if options.mode == "decode" else "peak memory, beyond the inputs"
    draw(
        path,
        title_of(options),
        results.points,
        [
            Panel("tokens_per_second", "tokens/s", "tokens per second", "count", time),
            Panel("memory_bytes", "memory", memory_label, "bytes", space),
        ],
        length_label="past (tokens)" if options.mode == "decode" else "length (tokens)",
        faster_than=BASELINE,
        marks=results.crossovers(),
    )


# --- the command -----------------------------------------------------------------------------------------------------


def parse(args: list[str] | None) -> argparse.Namespace:
    """The options, checked before anything runs; `methods` and `left_out` become dictionaries of Methods."""
    parser = argparse.ArgumentParser("benchmarks.scaling", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[512 * 2**i for i in range(6)], help="tokens (default: 512 to 16384)")
    add("--methods", nargs="+", help="some of those that a run without this option lists")
    add("--mode", choices=MODES, default="forward+backward")
    add("--batch", type=int, default=1)
    add("--heads", type=int, default=8)
    add("--head_dim", type=int, default=64)
    add("--dtype", choices=DTYPES, default="float32")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--repeats", type=int, default=7, help="rounds that count; one more is warm-up")
    add("--budget", type=float, default=60.0, help="seconds for the rounds of one point (default: 60)")
    add(
        "--memory",
        type=report.parse_bytes,
        help="memory for one point, such as 4GiB, and search the largest length in it (default: what is free)",
    )
    add("--output", type=Path, default=Path("results"), help="folder for CSV, JSON and PNG (default: results)")
    options = parser.parse_args(args)
    report.check_positive(parser, options, "lengths", "batch", "heads", "head_dim", "repeats", "budget")
    report.check_even(parser, options, "head_dim")
    report.check_device(parser, options.device)
    options.lengths = sorted(set(options.lengths))
    choose_methods(parser, options)
    report.make_folder(parser, options.output)
    return options


def choose_methods(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Replace the names by their methods, those that cannot run here apart; "linear-rope" names all its backends."""
    known = catalogue(options.device, options.dtype)
    if options.methods:
        families = {name.split("[")[0] for name in known}
        report.check_names(parser, "--methods", options.methods, dict.fromkeys((*known, *families)))
        known = {n: m for n, m in known.items() if n in options.methods or n.split("[")[0] in options.methods}
    if options.mode == "decode":
        no_form = "no decoding of its own"
        known = {n: m if m.decoding or m.absent else replace(m, absent=no_form) for n, m in known.items()}
    options.left_out = {name: method for name, method in known.items() if method.absent}
    options.methods = {name: method for name, method in known.items() if not method.absent}


def main(args: list[str] | None = None) -> int:
    options = parse(args)
    console = Console()
    report.say_if_without_pictures(console)
    run = Run(options, console)
    run.measure()
    results = run.results
    report.show(console, table_of(results, options), remarks(results, options))
    settings = {k: v for k, v in vars(options).items() if k not in ("methods", "left_out", "output")}
    details = {
        **report.surroundings(options.device, "scaling", args),
        "settings": {**settings, "methods": list(options.methods)},
        "absent": {name: method.absent for name, method in options.left_out.items()},
        "gemm_flops_per_second": results.gemm_rate,
        "crossover": results.crossovers(),
        "largest_length": {name: asdict(largest) for name, largest in results.largest.items()},
        "interrupted": results.interrupted,
    }
    stem = f"scaling-{options.mode.replace('+', '-')}-{options.dtype}"
    return report.finish(
        console, options.output, stem, results.points, details, lambda path: picture_of(results, options, path)
    )


if __name__ == "__main__":
    sys.exit(main())
