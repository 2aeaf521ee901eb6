"""Time and memory of one generated token, by the number of tokens before it.

Linear attention decodes from a state, softmax attention from a cache of all keys and values. All contexts run in
turn, round after round in one process, so that their ratios are fair. A cache over the memory budget is not created.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.table import Table

from benchmarks.harness import memory
from benchmarks.harness.options import check_even, parse_bytes
from benchmarks.harness.pictures import Figure, Quantity, against_length
from benchmarks.harness.runner import AddOption, Benchmark
from benchmarks.harness.sweep import INTERRUPTED, MEASURED, OVER_BUDGET, Point
from benchmarks.harness.timing import Several, clock
from benchmarks.speed.methods import DTYPES, Inputs, LinearDecoding, Setting, SoftmaxDecoding
from linrope.utils.formatting import bytes_text
from linrope.utils.terminal import new_table

LINEAR, SOFTMAX = "linear-rope", "softmax-rope"
SLOWEST_SAMPLE = 1.0
"""Seconds: if `steps` tokens of softmax attention take longer, its samples have fewer tokens."""


def linear_steps(settings: dict[int, Setting], count: int) -> dict[int, Several]:
    """A sample of `count` tokens at each context, from states that differ only in their positions."""
    return {context: Several(LinearDecoding(Inputs.make(setting)), count) for context, setting in settings.items()}


def softmax_steps(settings: dict[int, Setting], count: int) -> dict[int, Several]:
    """A sample at each context, the longest last, all in the one cache of the longest."""
    inputs = {context: Inputs.make(setting) for context, setting in settings.items()}
    if not inputs:
        return {}
    longest, q = max(inputs), inputs[max(inputs)].q
    cache = torch.randn(2, *q.shape[:2], longest + 1, q.shape[-1], dtype=q.dtype, device=q.device)
    found = {}
    for context, x in inputs.items():
        step = SoftmaxDecoding(x, cache)
        step()
        found[context] = Several(step, max(1, min(count, int(SLOWEST_SAMPLE / clock(step, x.setting.device)))))
    return found


class Decode(Benchmark):
    name = "decode"

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        contexts = [1000, 10_000, 100_000, 1_000_000]
        add("--contexts", type=int, nargs="+", default=contexts, help="tokens before the one that is generated")
        add("--batch", type=int, nargs="+", default=[1, 64], help="rows that decode together (default: 1 64)")
        add("--heads", type=int, default=8)
        add("--head_dim", type=int, default=64)
        add("--dtype", choices=DTYPES, default="float32")
        add("--device", choices=["cpu", "cuda"], default="cpu")
        add("--steps", type=int, default=200, help="tokens in a sample (default: 200)")
        add("--repeats", type=int, default=7, help="samples that count, after one for warm-up (default: 7)")
        add("--memory", type=parse_bytes, help="largest cache, such as 4GiB (default: 3/4 of the free memory)")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        check_even(parser, options, "head_dim")
        options.contexts, options.batch = sorted(set(options.contexts)), sorted(set(options.batch))

    @property
    def stem(self) -> str:
        return f"decode-{self.options.dtype}"

    def measure(self) -> None:
        options = self.options
        self.limit = options.memory or memory.available(options.device) * 3 // 4
        total = 2 * len(options.batch) * len(options.contexts) * (options.repeats + 1)
        tick = self.progress("decoding", total)
        for number, batch in enumerate(options.batch, 1):
            self.measure_batch(batch, tick)
            tick(completed=number * total // len(options.batch))

    def measure_batch(self, batch: int, tick: Callable[..., None]) -> None:
        """Both methods at all contexts with one batch size."""
        o = self.options
        samplers, points = {}, {}
        for kind, steps_of in {LINEAR: linear_steps, SOFTMAX: softmax_steps}.items():
            settings = {}
            for context in o.contexts:
                point = points[kind, context] = Point(f"{kind}, batch {batch}", context, batch, INTERRUPTED)
                self.points.append(point)
                nbytes = 2 * batch * o.heads * (context + 1) * o.head_dim * DTYPES[o.dtype].itemsize
                if kind == SOFTMAX and nbytes > self.limit:
                    point.status, point.memory_bytes = OVER_BUDGET, nbytes
                    point.detail = f"the cache takes {bytes_text(nbytes)} of {bytes_text(self.limit)}"
                else:
                    settings[context] = Setting(context, batch, o.heads, o.head_dim, None, o.dtype, o.device, "decode")
            try:
                steps = steps_of(settings, o.steps)
            except Exception as error:  # such as out of memory: earlier results are kept
                for context in settings:
                    points[kind, context].record_failure(error)
                continue
            for context, step in steps.items():
                samplers[kind, context] = step
                points[kind, context].memory_bytes = step.call.nbytes
        self.time_in_turn(samplers, points, batch, tick, f"batch {batch}: {{0[0]}} at {{0[1]:,}}", count=False)

    def details(self) -> dict[str, Any]:
        return {"memory_budget": self.limit}

    def table(self) -> Table:
        setting = f"{self.options.heads} heads of {self.options.head_dim}, {self.options.dtype}"
        table = new_table(
            f"one token, {setting}\n{self.device}",
            *("context", "ms", "±", "tokens/s", "memory"),
            text=["method"],
            caption="ms: median of one token (all rows); ±: interquartile range\nmemory: of the state or of the cache",
        )
        for name, points in self.by_method().items():
            for point in points:
                table.add_row(name, f"{point.length:,}", *point.cells())
            table.add_section()
        return table

    def remarks(self) -> list[str]:
        """Points that were not measured, and how the time grows from the first context to the last."""
        return super().remarks() + [
            f"{name}: a token at {last:,} takes {ratio:.3g} times that at {first:,}"
            for name, (first, last, ratio) in self.growth().items()
        ]

    def by_method(self) -> dict[str, list[Point]]:
        names = dict.fromkeys(p.method for p in self.points)
        return {name: [p for p in self.points if p.method == name] for name in names}

    def growth(self) -> dict[str, tuple[int, int, float]]:
        """By method: the first and the last context that were measured, and the ratio of their times."""
        found = {}
        for name, points in self.by_method().items():
            measured = [p for p in points if p.status == MEASURED]
            if len(measured) > 1:
                first, last = measured[0], measured[-1]
                found[name] = first.length, last.length, last.seconds / first.seconds
        return found

    def figures(self) -> dict[str, Figure]:
        """Time of a token, and memory of the past; the size of a cache is known without making it."""
        exponents = {name: int(name.startswith(SOFTMAX)) for name in self.by_method()}
        time = Quantity("seconds", "time per token, all rows", "seconds", exponents)
        space = Quantity("memory_bytes", "memory of the state or the cache", "bytes", exponents)
        draw = partial(against_length, points=self.points, length_label="tokens before the one generated")
        found: dict[str, float] = {}
        for name, (*_, ratio) in self.growth().items():
            found.setdefault(name.split(", batch ")[0], ratio)  # the first batch size
        ratios = ", ".join(f"{name} {ratio:,.{2 if ratio < 10 else 0}f}×" for name, ratio in found.items())
        compared = f", longest context over shortest: {ratios}" if found else ""  # of one context there is no ratio
        return {
            "": draw(f"Time of a token{compared}", quantity=time),
            "-memory": draw("Linear attention's memory does not grow with the context", quantity=space),
        }


if __name__ == "__main__":
    sys.exit(Decode.main())
