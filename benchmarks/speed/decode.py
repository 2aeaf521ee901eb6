"""Time and memory of one generated token, by the number of tokens before it.

    python -m benchmarks.decode --contexts 1000 1000000

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
from benchmarks.harness.pictures import Quantity, against_length
from benchmarks.harness.runner import Benchmark
from benchmarks.harness.sweep import INTERRUPTED, MEASURED, OVER_BUDGET, Point
from benchmarks.harness.timing import Alternation, Sample, Several, alternate, clock, milliseconds_text
from benchmarks.speed.methods import DTYPES, Inputs, LinearDecoding, Setting, SoftmaxDecoding
from linrope.utils.formatting import bytes_text
from linrope.utils.terminal import new_table

LINEAR, SOFTMAX = "linear-rope", "softmax-rope"
SLOWEST_SAMPLE = 1.0
"""Seconds: if `steps` tokens of softmax attention take longer, its samples have fewer tokens."""


def name_of(method: str, batch: int) -> str:
    return f"{method}, batch {batch}"


def measure_batch(batch: int, options: argparse.Namespace, limit: int, points: list[Point], tick: Callable) -> None:
    """Both methods at all contexts with one batch size; results are added to `points`."""
    settings = {
        context: Setting(
            context, batch, options.heads, options.head_dim, None, options.dtype, options.device, mode="decode"
        )
        for context in options.contexts
    }
    samplers, found = {}, {}
    for kind in (LINEAR, SOFTMAX):
        for context, (sampler, point) in steps_of(kind, settings, options.steps, limit).items():
            points.append(point)
            if sampler:
                samplers[kind, context], found[kind, context] = sampler, point
    alternation = Alternation(samplers, options.device, count=False)
    try:
        alternation.run(
            options.repeats, lambda key: tick(description=f"batch {batch}: {key[0]} at {key[1]:,}", advance=1)
        )
    finally:
        for key, sample in alternation.samples.items():
            per_token = Sample(tuple(seconds / samplers[key].count for seconds in sample.rounds))
            found[key].record(per_token, batch)
    for key, error in alternation.failures.items():
        found[key].record_failure(error)


def steps_of(
    kind: str, settings: dict[int, Setting], count: int, limit: int
) -> dict[int, tuple[Several | None, Point]]:
    """A sample at each context; None if its tensors cannot be made, for the reason in the point."""
    try:
        return linear_steps(settings, count) if kind == LINEAR else softmax_steps(settings, count, limit)
    except Exception as error:  # such as out of memory: earlier results are kept
        found = {}
        for context, setting in settings.items():
            found[context] = None, (point := Point(name_of(kind, setting.batch), context, setting.batch))
            point.record_failure(error)
        return found


def linear_steps(settings: dict[int, Setting], count: int) -> dict[int, tuple[Several, Point]]:
    """A sample at each context, from states that differ only in their positions."""
    found = {}
    for context, setting in settings.items():
        step = LinearDecoding(Inputs.make(setting))
        point = Point(name_of(LINEAR, setting.batch), context, setting.batch, INTERRUPTED, memory_bytes=step.nbytes)
        found[context] = Several(step, count), point
    return found


def softmax_steps(settings: dict[int, Setting], count: int, limit: int) -> dict[int, tuple[Several | None, Point]]:
    """A sample at each context that fits `limit` bytes, all in the one cache of the longest of them."""
    inputs = {context: Inputs.make(setting) for context, setting in settings.items()}
    nbytes = {context: 2 * x.q.nbytes * (context + 1) for context, x in inputs.items()}
    fitting = [context for context in settings if nbytes[context] <= limit]
    cache = None
    if fitting:
        q = inputs[fitting[-1]].q
        cache = torch.randn(2, *q.shape[:2], fitting[-1] + 1, q.shape[-1], dtype=q.dtype, device=q.device)
    found = {}
    for context, setting in settings.items():
        point = Point(
            name_of(SOFTMAX, setting.batch), context, setting.batch, INTERRUPTED, memory_bytes=nbytes[context]
        )
        sampler = None
        if context in fitting:
            step = SoftmaxDecoding(inputs[context], cache)
            step()
            sampler = Several(step, max(1, min(count, int(SLOWEST_SAMPLE / clock(step, setting.device)))))
        else:
            point.status = OVER_BUDGET
            point.detail = f"the cache takes {bytes_text(nbytes[context])} of {bytes_text(limit)}"
        found[context] = sampler, point
    return found


def flatness(
    batch: int, contexts: tuple[int, int] = (1000, 1_000_000), *, steps: int = 200, rounds: int = 15
) -> tuple[Sample, Sample]:
    """Linear attention after a short and a long past, in turn."""
    settings = {context: Setting(context, batch, mode="decode") for context in contexts}
    samplers = {context: sampler for context, (sampler, _) in linear_steps(settings, steps).items()}
    samples = alternate(samplers, rounds, count=False).samples
    return samples[contexts[0]], samples[contexts[1]]


# --- the command -----------------------------------------------------------------------------------------------------


class Decode(Benchmark):
    name = "decode"
    positive = ("contexts", "batch", "heads", "head_dim", "steps", "repeats")

    @classmethod
    def add_options(cls, add: Callable[..., Any]) -> None:
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
            measure_batch(batch, options, self.limit, self.points, tick)
            tick(completed=number * total // len(options.batch))

    def details(self) -> dict[str, Any]:
        return {"memory_budget": self.limit}

    def table(self) -> Table:
        """A section for each method and batch size, a row for each context."""
        setting = f"{self.options.heads} heads of {self.options.head_dim}, {self.options.dtype}"
        table = new_table(
            f"one token, {setting}\n{self.device}",
            *("context", "ms", "±", "tokens/s", "memory"),
            text=["method"],
            caption="ms: median of one token (all rows); ±: interquartile range\nmemory: of the state or of the cache",
        )
        for name, points in self.by_method().items():
            for point in points:
                table.add_row(name, f"{point.length:,}", *cells(point))
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

    def figures(self) -> dict[str, Callable]:
        """Time of a token, and memory of the past; the size of a cache is known without making it."""
        exponents = {name: int(name.startswith(SOFTMAX)) for name in self.by_method()}
        time = Quantity("seconds", "time per token, all rows", "seconds", exponents)
        space = Quantity("memory_bytes", "memory of the state or the cache", "bytes", exponents)
        draw = partial(against_length, points=self.points, length_label="tokens before the one generated")
        found = {name.split(", batch ")[0]: ratio for name, (_, _, ratio) in reversed(self.growth().items())}
        ratios = ", ".join(
            f"{name} {ratio:,.{2 if ratio < 10 else 0}f}×" for name, ratio in reversed(found.items())
        )  # the first batch size
        return {
            "": partial(draw, f"Time of a token, longest context over shortest: {ratios}", quantity=time),
            "-memory": partial(draw, "Linear attention's memory does not grow with the context", quantity=space),
        }


def cells(point: Point) -> list[str]:
    memory_text = "" if point.memory_bytes is None else bytes_text(point.memory_bytes)
    if point.status != MEASURED:
        return [f"[yellow]{point.status}[/yellow]", "", "", memory_text]
    return [milliseconds_text(point.seconds), f"{point.spread:.0%}", f"{point.tokens_per_second:,.0f}", memory_text]


main = Decode.main

if __name__ == "__main__":
    sys.exit(main())
