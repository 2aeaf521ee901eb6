"""Peak memory of a training step against the length: softmax, linear, and linear in segments.

A step is forward, backward and AdamW on one row of random bytes, in a process of its own; the peak is that of the whole
process, PyTorch included. Points that are predicted to exceed --memory or --seconds are drawn as dashes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from rich.table import Table
from torch import Tensor

from benchmarks.harness import memory
from benchmarks.harness.options import check_heads, parse_bytes
from benchmarks.harness.pictures import Figure, Quantity, against_length
from benchmarks.harness.processes import in_new_process
from benchmarks.harness.runner import AddOption, Benchmark
from benchmarks.harness.sweep import INTERRUPTED, MEASURED, Budget, Point, series
from benchmarks.harness.timing import alternate
from benchmarks.harness.training_step import training_step
from linrope import LanguageModel, LanguageModelConfig, RotaryConfig, segmented_loss
from linrope.utils.formatting import bytes_text
from linrope.utils.terminal import new_table

SEGMENTED = "linear in segments"
GROWTH = {"softmax": (2, 1), "linear": (1, 1), SEGMENTED: (1, 0)}
"""By method, the exponents of time and of memory."""
METHODS = tuple(GROWTH)


def config_of(method: str, options: argparse.Namespace) -> LanguageModelConfig:
    """The models have the same sizes; the linear ones are `recipe` of benchmarks/grids/recipe.yaml."""
    sizes = {"d_model": options.d_model, "n_layers": options.layers, "n_heads": options.heads, "short_conv": 4}
    if method == "softmax":
        return LanguageModelConfig(attention="softmax", **sizes)
    return LanguageModelConfig(forget_gate=True, rope=RotaryConfig(placement="signed"), **sizes)


def make_step(method: str, length: int, options: argparse.Namespace) -> Callable[[], None]:
    """One step of a new model on a random row."""

    def loss(model: LanguageModel, inputs: Tensor, targets: Tensor) -> Tensor:
        if method == SEGMENTED:
            return segmented_loss(model, inputs, targets, options.segment_length)[0] / targets.numel()
        return model(inputs, targets=targets) / targets.numel()

    return training_step(config_of(method, options), 1, length, options.device, loss)


def peak_of(method: str, length: int, options: argparse.Namespace) -> memory.Peak:
    """The peak of one step in this process, which may take `--memory` in all. A short step comes first and makes what
    a process keeps."""
    make_step(method, memory.WARM_UP, options)()
    memory.limit_to(options.memory - memory.start_peak(options.device), options.device)
    return memory.peak_of(partial(make_step, method, length, options), options.device)


def measure(point: Point, options: argparse.Namespace) -> None:
    """Enter the peak of one method at one length, or why it was not measured."""
    try:
        peak = in_new_process(peak_of, point.method, point.length, options)
        point.status, point.memory_bytes, point.seconds, point.rounds = MEASURED, peak.process, peak.seconds, 1
        point.tokens_per_second = point.length / peak.seconds
    except (memory.OutOfMemory, memory.Failed) as error:
        point.record_failure(error)


def cost_ratio(options: argparse.Namespace) -> float:
    """Time of a step in segments over that of a step on the whole row, medians of rounds, at `--cost` tokens."""
    steps = {method: make_step(method, options.cost, options) for method in ("linear", SEGMENTED)}
    samples = alternate(steps, options.repeats, options.device, count=False).samples
    return samples[SEGMENTED].median / samples["linear"].median


class BeyondMemory(Benchmark):
    name = "beyond_memory"
    from_zero = ("cost",)

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        lengths = [2**power for power in range(14, 21)]
        add("--lengths", type=int, nargs="+", default=lengths, help="tokens in the row (default: 16384 to 1048576)")
        add("--segment_length", type=int, default=8192, help="tokens in a segment (default: 8192)")
        add("--layers", type=int, default=4)
        add("--d_model", type=int, default=128)
        add("--heads", type=int, default=4)
        add("--device", choices=["cpu", "cuda"], default="cpu")
        add("--memory", type=parse_bytes, help="largest size of the whole process (default: 0.9 of the free memory)")
        add("--seconds", type=float, default=900, help="longest step that is tried (default: 900)")
        add("--cost", type=int, default=32768, help="length at which the time of segments is measured; 0: not measured")
        add("--repeats", type=int, default=3, help="rounds of this timing, after one for warm-up (default: 3)")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        check_heads(parser, options, multiple=4)
        options.lengths = sorted(set(options.lengths))
        options.memory = options.memory or int(0.9 * memory.available(options.device))

    def measure(self) -> None:
        self.ratio = self.cost_failure = None
        options = self.options
        budget = Budget(options.seconds, options.memory)
        tick = self.progress("", len(options.lengths) * len(METHODS) + bool(options.cost))
        for length in options.lengths:
            for method in METHODS:
                tick(description=f"{method} at {length:,}")
                point = budget.new_point(self.points, method, length, 1, 1, GROWTH[method])
                if point.status == INTERRUPTED:
                    measure(point, options)
                tick(advance=1)
        if options.cost:
            tick(description=f"cost at {options.cost:,}")
            try:
                self.ratio = cost_ratio(options)
            except Exception as error:  # the points are kept
                self.cost_failure = f"cost at {options.cost:,}: {memory.describe(error)}"

    def details(self) -> dict[str, Any]:
        return {"cost_ratio": self.ratio, "cost_failure": self.cost_failure}

    def table(self) -> Table:
        options = self.options
        table = new_table(
            f"a training step: {options.layers} layers, d_model {options.d_model}, {options.heads} heads, one row\n"
            f"{self.device}",
            *("length", *(column for method in METHODS for column in (method, "tok/s"))),
            caption="peak memory of the process, tokens per second of one step; "
            f"segments of {options.segment_length:,} tokens",
        )
        for length in options.lengths:
            row = {p.method: p for p in self.points if p.length == length}
            table.add_row(f"{length:,}", *(cell for method in METHODS for cell in cells(row.get(method))))
        return table

    def remarks(self) -> list[str]:
        lines = super().remarks()
        if self.ratio is not None:
            cost = f"takes {self.ratio:.2f} times that of a whole row"
            lines.append(f"at {self.options.cost:,} tokens a step in segments {cost}")
        return lines + [self.cost_failure] * (self.cost_failure is not None)

    def figures(self) -> dict[str, Figure]:
        growth = {method: exponents[1] for method, exponents in GROWTH.items()}
        quantity = Quantity("memory_bytes", "peak memory of the process", "bytes", growth)
        title = "Peak memory of a training step on one row"
        if flat := series(self.points, SEGMENTED, "memory_bytes"):
            title = f"A training step on {max(flat):,} tokens in segments takes {bytes_text(flat[max(flat)])}"
        return {"": against_length(title, self.points, quantity)}


def cells(point: Point | None) -> tuple[str, str]:
    if point is None or point.status != MEASURED:
        return ("" if point is None else f"[yellow]{point.status}[/yellow]"), ""
    return bytes_text(point.memory_bytes), f"{point.tokens_per_second:,.0f}"


if __name__ == "__main__":
    sys.exit(BeyondMemory.main())
