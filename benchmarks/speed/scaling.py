"""Time and memory of linear attention against softmax attention, both with RoPE, as the length grows.

At every length all methods run in turn; peak memory is measured in a process of its own for each point. A point is not
run if the length before it predicts that it exceeds a budget: the picture has dashes there, and the table says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from rich.markup import escape
from rich.table import Table

from benchmarks.harness import memory
from benchmarks.harness.options import check_even, check_names, parse_bytes
from benchmarks.harness.pictures import Figure, Quantity, against_length
from benchmarks.harness.processes import in_new_process
from benchmarks.harness.runner import AddOption, Benchmark
from benchmarks.harness.sweep import INTERRUPTED, SINCE, Budget, Largest, Point, crossovers, largest_length, series
from benchmarks.harness.timing import gemm_rate
from benchmarks.speed.methods import DTYPES, MODES, Inputs, Method, Setting, catalogue
from linrope.utils.formatting import bytes_text, count_text
from linrope.utils.terminal import new_table

LINEAR, BASELINE = "linear-rope", "softmax-rope"


class Scaling(Benchmark):
    name = "scaling"

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.largest: dict[str, Largest] = {}  # by method, in --memory
        self.gemm_rate: float | None = None  # FLOPs per second of a large matrix product

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        lengths = [512 * 2**i for i in range(6)]
        add("--lengths", type=int, nargs="+", default=lengths, help="tokens (default: 512 to 16384)")
        add("--methods", nargs="+", help="names from the table that a run without this option shows")
        add("--mode", choices=MODES, default="forward+backward")
        add("--batch", type=int, default=1)
        add("--heads", type=int, default=8)
        add("--head_dim", type=int, default=64)
        add("--dtype", choices=DTYPES, default="float32")
        add("--device", choices=["cpu", "cuda"], default="cpu")
        add("--repeats", type=int, default=7, help="rounds that count, after one for warm-up (default: 7)")
        add("--budget", type=float, default=60.0, help="seconds for the rounds of one point (default: 60)")
        text = "memory for one point, such as 4GiB; the largest length in it is searched (default: the free memory)"
        add("--memory", type=parse_bytes, help=text)

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        """`chosen` is added: the methods by name; and `absent`: why others cannot run here."""
        check_even(parser, options, "head_dim")
        options.lengths = sorted(set(options.lengths))
        known = catalogue(options.device, options.dtype)
        if options.methods:
            check_names(parser, "--methods", options.methods, dict.fromkeys((*known, *map(family, known))))
            known = {n: m for n, m in known.items() if n in options.methods or family(n) in options.methods}
        if options.mode == "decode":
            reason = "has no decoding step"
            known = {n: m if m.decoding or m.absent else replace(m, absent=reason) for n, m in known.items()}
        options.absent = {name: method.absent for name, method in known.items() if method.absent}
        options.chosen = {name: method for name, method in known.items() if not method.absent}
        options.methods = list(options.chosen)

    @property
    def stem(self) -> str:
        return f"scaling-{self.options.mode.replace('+', '-')}-{self.options.dtype}"

    def setting(self, length: int) -> Setting:
        o = self.options
        return Setting(length, o.batch, o.heads, o.head_dim, None, o.dtype, o.device, o.mode)

    def measure(self) -> None:
        options, methods = self.options, self.options.chosen
        self.budget = Budget(options.budget, options.memory or memory.available(options.device))
        calls = options.repeats + 2  # memory, warm-up and the rounds
        tick = self.progress("matrix product", len(options.lengths) * len(methods) * calls)
        self.gemm_rate = gemm_rate(DTYPES[options.dtype], options.device)
        for number, length in enumerate(options.lengths, 1):
            self.measure_length(length, tick)
            tick(completed=number * len(methods) * calls)
        if options.memory:
            self.search()

    def measure_length(self, length: int, tick: Callable[..., None]) -> None:
        """All methods at one length: memory first, which shows which methods fit, then the times in turn."""
        setting = self.setting(length)
        methods = self.options.chosen
        running = {}
        for name, method in methods.items():
            growth = method.time_growth(setting.mode), method.memory_growth(setting.mode)
            sizes = length, setting.batch, self.options.repeats + 1
            point = self.budget.new_point(self.points, name, *sizes, growth)
            if point.status == INTERRUPTED:
                running[name] = point
        for name, point in running.items():
            tick(description=f"{length:,} tokens: {name}, memory", advance=1)
            measure_memory(methods[name], setting, self.budget.memory, point)
        fitting = [name for name, point in running.items() if point.status == INTERRUPTED]
        if not fitting:
            return
        inputs = Inputs.make(setting)
        try:
            calls = {name: methods[name].prepare(inputs) for name in fitting}
            self.time_in_turn(calls, running, setting.new_tokens, tick, f"{length:,} tokens: {{}}")
        finally:
            for point in running.values():
                if point.flops:
                    point.gemm_share = point.flops / point.seconds / self.gemm_rate

    def search(self) -> None:
        """Find the largest length of each method within the memory, each length in a process of its own."""
        tick = self.progress("largest length", len(self.options.chosen))
        for name, method in self.options.chosen.items():

            def fits(length: int, method: Method = method) -> float | None:
                tick(description=f"largest length: {method.name} at {length:,}")
                setting = self.setting(length)
                try:
                    return in_new_process(memory.measure, method, setting, self.options.memory).seconds
                except memory.OutOfMemory:
                    return None

            try:
                growth = method.time_growth(self.options.mode)
                self.largest[name] = largest_length(fits, self.options.lengths[0], growth, self.options.budget)
            except memory.Failed as error:
                self.largest[name] = Largest(0, f"failed: {error}")
            tick(advance=1)

    def crossovers(self) -> dict[str, float]:
        """For every linear-rope: the length from which on it is faster than softmax-rope."""
        linear = [name for name in dict.fromkeys(p.method for p in self.points) if family(name) == LINEAR]
        return crossovers(self.points, linear, BASELINE)

    def details(self) -> dict[str, Any]:
        return {
            "absent": self.options.absent,
            "gemm_flops_per_second": self.gemm_rate,
            "crossover": self.crossovers(),
            "largest_length": {name: asdict(largest) for name, largest in self.largest.items()},
        }

    def table(self) -> Table:
        options = self.options
        decoding = options.mode == "decode"
        call, beyond = ("one token", "state or cache, and peak") if decoding else ("one call", "peak beyond the inputs")
        table = new_table(
            f"{options.mode}, batch {options.batch}, {options.heads} heads of {options.head_dim}, {options.dtype}\n"
            f"{self.device}",
            *("ms", "±", "tokens/s", "memory", "FLOP", "GEMM"),
            text=["method"],
            caption=f"ms: median of {call}; ±: interquartile range\nmemory: {beyond}\n"
            "GEMM: share of the measured rate of a large matrix product",
        )
        for length in sorted({p.length for p in self.points}):
            row = [p for p in self.points if p.length == length]
            table.add_row(f"[bold]{length:,} tokens[/bold]")
            for point in row:
                flops = count_text(point.flops) if point.flops else ""
                share = f"{point.gemm_share:.0%}" if point.gemm_share else ""
                table.add_row(escape(point.method), *point.cells(), flops, share)
            if ratio := ratio_cells(row):
                table.add_row(*ratio)
            table.add_section()
        return table

    def remarks(self) -> list[str]:
        lines = [f"{name}: {reason}" for name, reason in self.options.absent.items()]
        for point in self.points:
            if point.detail and not point.detail.startswith(SINCE):
                lines.append(f"{point.method} at {point.length:,}: {point.status}, {point.detail}")
        first = min(self.options.lengths)
        for name, length in self.crossovers().items():
            where = f"at every length from {first:,}" if length == first else f"from {length:,.0f} tokens"
            lines.append(f"{name} is faster than {BASELINE} {where} on")
        for name, largest in self.largest.items():
            bound = "at least " if largest.limited_by == "time budget" else ""
            size = bytes_text(self.options.memory)
            lines.append(f"{name}: {bound}{largest.length:,} tokens in {size} ({largest.limited_by})")
        return lines

    def figures(self) -> dict[str, Figure]:
        """Throughput and peak memory against the length; the longest length that both measured stands in the title."""
        mode = self.options.mode
        methods = {family(m.name): m for m in catalogue("cpu", self.options.dtype).values()}
        own = {name: methods[family(name)] for name in dict.fromkeys(p.method for p in self.points)}
        # the tokens in a call grow with the length, except in decoding
        time = {name: (mode != "decode") - method.time_growth(mode) for name, method in own.items()}
        space = {name: method.memory_growth(mode) for name, method in own.items()}
        speed = Quantity("tokens_per_second", "tokens per second", "count", time)
        label = "state or cache, and peak memory" if mode == "decode" else "peak memory beyond the inputs"
        peak = Quantity("memory_bytes", label, "bytes", space)
        marks = {f"{name} is faster": length for name, length in self.crossovers().items()}
        return {
            "": against_length(self.title("tokens_per_second", "throughput"), self.points, speed, marks=marks),
            "-memory": against_length(self.title("memory_bytes", "memory"), self.points, peak),
        }

    def title(self, attribute: str, what: str) -> str:
        """How many times softmax-rope's value the best linear-rope has at the longest common length."""
        softmax = series(self.points, BASELINE, attribute)
        names = {p.method for p in self.points if family(p.method) == LINEAR}
        linear = [series(self.points, name, attribute) for name in names]
        common = softmax.keys() & set().union(*linear)
        if not common:
            return f"{self.options.mode}, {self.options.heads} heads of {self.options.head_dim}"
        longest = max(common)
        ratios = [values[longest] / softmax[longest] for values in linear if longest in values]
        ratio = max(ratios) if attribute == "tokens_per_second" else min(ratios)
        return f"At {longest:,} tokens {LINEAR} has {ratio:.{2 if ratio < 1 else 1}f} times the {what} of {BASELINE}"


def family(method: str) -> str:
    """The name without the backend: "linear-rope" for "linear-rope[chunked]"."""
    return method.split("[")[0]


def measure_memory(method: Method, setting: Setting, limit: int | None, point: Point) -> None:
    """Enter the peak memory of one call: in a process of its own on a CPU, in this one on a GPU."""
    try:
        measure = memory.measure if setting.device == "cuda" else partial(in_new_process, memory.measure)
        point.memory_bytes = measure(method, setting, limit).extra
    except Exception as error:
        point.record_failure(error)


def ratio_cells(points: list[Point]) -> list[str]:
    """How many times faster linear-rope is than softmax-rope at one length."""
    seconds = {p.method: p.seconds for p in points if p.seconds is not None}
    linear = min((s for name, s in seconds.items() if family(name) == LINEAR), default=None)
    if linear is None or BASELINE not in seconds:
        return []
    return ["[italic]softmax / linear[/italic]", f"[italic]{seconds[BASELINE] / linear:.1f}×[/italic]"]


if __name__ == "__main__":
    sys.exit(Scaling.main())
