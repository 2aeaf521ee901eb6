"""Training throughput of whole models with linear, softmax and hybrid attention, as the length grows.

    python -m benchmarks.model_scaling --lengths 512 2048 8192

A step is forward, backward and AdamW, over the same number of tokens at every length: the longer the rows, the fewer.
In the hybrid every second layer has softmax attention. All models run in turn, round after round in one process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from benchmarks.harness import report
from benchmarks.harness.pictures import Panel, draw
from benchmarks.harness.sweep import INTERRUPTED, MEASURED, Point, crossover, series
from benchmarks.harness.timing import Alternation
from linrope import LanguageModel, LanguageModelConfig

KINDS = ("linear", "softmax", "hybrid")


def layers_of(kind: str, n_layers: int) -> list[str]:
    """The attention of each layer; a hybrid alternates, linear first."""
    pattern = ("linear", "softmax") if kind == "hybrid" else (kind,)
    return [pattern[i % len(pattern)] for i in range(n_layers)]


def training_step(config: LanguageModelConfig, length: int, tokens: int, device: str) -> Callable[[], None]:
    """One step of a new model on rows of that length, random ones: their content does not matter to the time."""
    torch.manual_seed(0)
    model = LanguageModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.randint(config.vocab_size, (tokens // length, length + 1), device=device)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(rows[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()

    return step


def measure_length(length: int, options: argparse.Namespace, points: list[Point], tick: Callable[[str], None]) -> None:
    """All kinds of model at one length; what is found is added to `points`."""
    found = {kind: Point(kind, length, options.tokens // length, INTERRUPTED) for kind in options.attention}
    points.extend(found.values())
    configs = {kind: replace(options.config, attention=layers_of(kind, options.layers)) for kind in found}
    steps = {kind: training_step(config, length, options.tokens, options.device) for kind, config in configs.items()}
    alternation = Alternation(steps, options.device)
    try:
        alternation.run(options.repeats, lambda kind: tick(f"{length:,} tokens: {kind}"))
    finally:
        for kind, sample in alternation.samples.items():
            found[kind].record(sample, options.tokens)
            found[kind].flops = alternation.flops.get(kind) or None
        for kind, error in alternation.failures.items():
            found[kind].record_failure(error)


def crossovers(points: list[Point]) -> dict[str, float]:
    """The lengths from which on the linear and the hybrid model are faster than the softmax one."""
    against = series(points, "softmax", "seconds")
    found = {kind: crossover(series(points, kind, "seconds"), against) for kind in ("linear", "hybrid")}
    return {kind: length for kind, length in found.items() if length is not None}


# --- showing ---------------------------------------------------------------------------------------------------------


def title_of(options: argparse.Namespace) -> str:
    model = (
        f"{options.layers} layers, d_model {options.d_model}, {options.heads} heads, {options.tokens:,} tokens a step"
    )
    return f"{model}\n{report.device_name(options.device)}"


def table_of(points: list[Point], options: argparse.Namespace) -> Table:
    """A row for each length; tokens per second, and how many times those of the softmax model they are."""
    ratios = [kind for kind in options.attention if kind != "softmax" and "softmax" in options.attention]
    table = report.new_table(
        title_of(options),
        "tokens per second in training (median) ± interquartile range\n×: times those of the softmax model",
        text=[],
        numbers=["length", "rows", *options.attention, *(f"{kind} ×" for kind in ratios)],
    )
    for length in sorted({p.length for p in points}):
        row = {p.method: p for p in points if p.length == length}
        speed = {kind: p.tokens_per_second for kind, p in row.items() if p.status == MEASURED}
        shown = [cell(p) for p in row.values()]
        faster = [f"{speed[k] / speed['softmax']:.2f}×" if {k, "softmax"} <= speed.keys() else "" for k in ratios]
        table.add_row(f"{length:,}", f"{options.tokens // length:,}", *shown, *faster)
    return table


def cell(point: Point) -> str:
    if point.status != MEASURED:
        return f"[yellow]{point.status}[/yellow]"
    return f"{point.tokens_per_second:,.0f} ±{point.spread:3.0%}"


def picture_of(points: list[Point], options: argparse.Namespace, path: Path) -> None:
    panel = Panel("tokens_per_second", "tokens/s", "tokens per second in training", "count", {})
    draw(path, title_of(options), points, [panel], faster_than="softmax", marks=crossovers(points))


# --- the command -----------------------------------------------------------------------------------------------------


def parse(args: list[str] | None) -> argparse.Namespace:
    """The options, checked before anything runs; `config` is that of the linear model."""
    parser = argparse.ArgumentParser("benchmarks.model_scaling", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[256 * 2**i for i in range(6)], help="tokens (default: 256 to 8192)")
    add("--tokens", type=int, default=8192, help="tokens in a step, at every length (default: 8192)")
    add("--attention", nargs="+", default=list(KINDS), help=f"some of {', '.join(KINDS)}")
    add("--layers", type=int, default=4)
    add("--d_model", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--repeats", type=int, default=5, help="rounds that count; one more is warm-up")
    add("--output", type=Path, default=Path("results"), help="folder for CSV, JSON and PNG (default: results)")
    options = parser.parse_args(args)
    report.check_positive(parser, options, "lengths", "tokens", "layers", "d_model", "heads", "repeats")
    report.check_names(parser, "--attention", options.attention, KINDS)
    options.lengths = sorted(set(options.lengths))
    for length in options.lengths:
        if options.tokens % length:
            parser.error(f"--lengths {length}: does not divide --tokens {options.tokens}, the tokens of every step")
    if options.d_model % (2 * options.heads):
        parser.error(f"--heads {options.heads}: --d_model {options.d_model} must be an even multiple of it, for RoPE")
    report.check_device(parser, options.device)
    options.config = LanguageModelConfig(d_model=options.d_model, n_layers=options.layers, n_heads=options.heads)
    report.make_folder(parser, options.output)
    return options


def main(args: list[str] | None = None) -> int:
    options = parse(args)
    console = Console()
    report.say_if_without_pictures(console)
    points: list[Point] = []
    interrupted = False
    try:
        with report.progress_bar(console) as bar:
            rounds = (options.repeats + 1) * len(options.attention)
            task = bar.add_task("training", total=len(options.lengths) * rounds)
            for length in options.lengths:
                measure_length(length, options, points, lambda what: bar.update(task, description=what, advance=1))
    except KeyboardInterrupt:
        interrupted = True
    left_out = (f"{p.method} at {p.length:,}: {p.status}, {p.detail}" for p in points if p.detail)
    report.show(console, table_of(points, options), left_out)
    details = {
        **report.surroundings(options.device, "model_scaling", args),
        "settings": {k: v for k, v in vars(options).items() if k not in ("output", "config")},
        "model": options.config.to_dict(),
        "crossover": crossovers(points),
        "interrupted": interrupted,
    }
    return report.finish(
        console, options.output, "model_scaling", points, details, lambda path: picture_of(points, options, path)
    )


if __name__ == "__main__":
    sys.exit(main())
