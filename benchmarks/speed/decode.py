"""Time and memory of one generated token, after a past of growing length.

    python -m benchmarks.decode --contexts 1000 1000000

Linear attention decodes from a state, softmax attention from a cache of all keys and values. All contexts run in
turn, round after round in one process, so that their ratios are fair. A cache over the memory budget is not made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import memory, report
from benchmarks.harness.pictures import Panel, draw
from benchmarks.harness.sweep import INTERRUPTED, MEASURED, OVER_BUDGET, Point
from benchmarks.harness.timing import Alternation, Sample, Several, alternate, clock
from benchmarks.speed.methods import DTYPES, Inputs, LinearDecoding, Setting, SoftmaxDecoding

LINEAR, SOFTMAX = "linear-rope", "softmax-rope"
SLOWEST_SAMPLE = 1.0
"""Seconds: where `steps` tokens of softmax attention take longer, a sample of it has fewer."""


def name_of(method: str, batch: int) -> str:
    return f"{method}, batch {batch}"


def measure_batch(batch: int, options: argparse.Namespace, limit: int, points: list[Point], tick: Callable) -> None:
    """Both methods at all contexts with one batch size; what is found is added to `points`."""
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
        alternation.run(options.repeats, lambda key: tick(f"batch {batch}: {key[0]} at {key[1]:,}"))
    finally:
        for key, sample in alternation.samples.items():
            per_token = Sample(tuple(seconds / samplers[key].count for seconds in sample.rounds))
            found[key].record(per_token, batch)
    for key, error in alternation.failures.items():
        found[key].record_failure(error)


def steps_of(
    kind: str, settings: dict[int, Setting], count: int, limit: int
) -> dict[int, tuple[Several | None, Point]]:
    """A sample at each context; none where its tensors cannot be made, which the point then says."""
    try:
        return linear_steps(settings, count) if kind == LINEAR else softmax_steps(settings, count, limit)
    except Exception as error:  # out of memory, for one: what was measured before is kept
        found = {}
        for context, setting in settings.items():
            found[context] = None, (point := Point(name_of(kind, setting.batch), context, setting.batch))
            point.record_failure(error)
        return found


def linear_steps(settings: dict[int, Setting], count: int) -> dict[int, tuple[Several, Point]]:
    """A sample at each context, from states that differ in their positions alone."""
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
            point.detail = f"the cache takes {report.bytes_text(nbytes[context])} of {report.bytes_text(limit)}"
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


# --- showing ---------------------------------------------------------------------------------------------------------


def title_of(options: argparse.Namespace) -> str:
    setting = f"{options.heads} heads of {options.head_dim}, {options.dtype}"
    return f"one token, {setting}\n{report.device_name(options.device)}"


def table_of(points: list[Point], options: argparse.Namespace) -> Table:
    """A section for each method and batch size, a row for each context."""
    table = report.new_table(
        title_of(options),
        "ms: median of one token (all rows); ±: interquartile range\npast: bytes of the state, or of the cache",
        text=["method"],
        numbers=["context", "ms", "±", "tokens/s", "past"],
    )
    for name in dict.fromkeys(p.method for p in points):
        for point in (p for p in points if p.method == name):
            table.add_row(name, f"{point.length:,}", *cells(point))
        table.add_section()
    return table


def cells(point: Point) -> list[str]:
    past = "" if point.memory_bytes is None else report.bytes_text(point.memory_bytes)
    if point.status != MEASURED:
        return [f"[yellow]{point.status}[/yellow]", "", "", past]
    return [report.seconds_text(point.seconds), f"{point.spread:.0%}", f"{point.tokens_per_second:,.0f}", past]


def remarks(points: list[Point]) -> list[str]:
    """What the table does not say: points left out, and how the time grew from first to last."""
    lines = [f"{p.method} at {p.length:,}: {p.status}, {p.detail}" for p in points if p.detail]
    for name in dict.fromkeys(p.method for p in points):
        measured = [p for p in points if p.method == name and p.status == MEASURED]
        if len(measured) > 1:
            first, last = measured[0], measured[-1]
            ratio = last.seconds / first.seconds
            lines.append(f"{name}: a token at {last.length:,} takes {ratio:.3g} times that at {first.length:,}")
    return lines


def picture_of(points: list[Point], options: argparse.Namespace, path: Path) -> None:
    """Time of a token and memory of the past, over context; a cache's size is known without making it."""
    growth = {name: int(name.startswith(SOFTMAX)) for name in dict.fromkeys(p.method for p in points)}
    draw(
        path,
        title_of(options),
        points,
        [
            Panel("seconds", "time", "time per token (all rows)", "seconds", growth),
            Panel("memory_bytes", "memory", "memory of the past (state or cache)", "bytes", growth),
        ],
        length_label="past (tokens)",
    )


# --- the command -----------------------------------------------------------------------------------------------------


def parse(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.decode", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--contexts", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000], help="tokens in the past")
    add("--batch", type=int, nargs="+", default=[1, 64], help="rows that decode together (default: 1 64)")
    add("--heads", type=int, default=8)
    add("--head_dim", type=int, default=64)
    add("--dtype", choices=DTYPES, default="float32")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--steps", type=int, default=200, help="tokens in a sample (default: 200)")
    add("--repeats", type=int, default=7, help="samples that count; one more is warm-up")
    add("--memory", type=report.parse_bytes, help="largest cache, such as 4GiB (default: 3/4 of what is free)")
    add("--output", type=Path, default=Path("results"), help="folder for CSV, JSON and PNG (default: results)")
    options = parser.parse_args(args)
    report.check_positive(parser, options, "contexts", "batch", "heads", "head_dim", "steps", "repeats")
    report.check_even(parser, options, "head_dim")
    report.check_device(parser, options.device)
    options.contexts, options.batch = sorted(set(options.contexts)), sorted(set(options.batch))
    report.make_folder(parser, options.output)
    return options


def main(args: list[str] | None = None) -> int:
    options = parse(args)
    console = Console()
    report.say_if_without_pictures(console)
    limit = options.memory or memory.available(options.device) * 3 // 4
    points: list[Point] = []
    interrupted = False
    try:
        with report.progress_bar(console) as bar:
            total = 2 * len(options.batch) * len(options.contexts) * (options.repeats + 1)
            task = bar.add_task("decoding", total=total)
            for number, batch in enumerate(options.batch, 1):
                measure_batch(batch, options, limit, points, lambda what: bar.update(task, description=what, advance=1))
                bar.update(task, completed=number * total // len(options.batch))
    except KeyboardInterrupt:
        interrupted = True
    report.show(console, table_of(points, options), remarks(points))
    details = {
        **report.surroundings(options.device, "decode", args),
        "settings": {k: v for k, v in vars(options).items() if k != "output"},
        "memory_budget": limit,
        "interrupted": interrupted,
    }
    stem = f"decode-{options.dtype}"
    return report.finish(console, options.output, stem, points, details, lambda path: picture_of(points, options, path))


if __name__ == "__main__":
    sys.exit(main())
