"""How far each head of a trained model sees: how long what it wrote lives on text, head by head.

    python -m benchmarks.reach --model results/ablation/recipe/runs/recipe-seed0.model

A head with a forget gate multiplies what it remembers by e^log_decay at every token, a number it learns from the token.
What it wrote at a token lives until that has made 1/e of it: so many tokens. Shown are the median over tokens, and the
tenth and the ninetieth percentile, of the first half of each row; what lives on to the row's end is given the row's
length.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.experiments.grid import held_out
from benchmarks.harness import report
from linrope import LanguageModel
from linrope.profiling.hooks import OperatorCall, operator_hook


@dataclass
class Reach:
    """One head, layers and heads counted from 1; all in tokens."""

    layer: int
    head: int
    tokens: float
    low: float
    high: float


def lifetimes(log_decay: torch.Tensor) -> torch.Tensor:
    """Tokens until decays (..., T) have made 1/e, or less, of what was written: (..., T/2), for the row's first half.
    T where the row ends before."""
    length = log_decay.shape[-1]
    lost = -log_decay.double().cumsum(dim=-1)
    written = torch.arange(length // 2, device=lost.device)
    gone = torch.searchsorted(lost, lost[..., : length // 2] + 1)
    return torch.where(gone < length, gone - written, length)


@torch.no_grad()
def measure(model: LanguageModel, rows: torch.Tensor, tick: Callable[[], None]) -> list[Reach]:
    """Of every head of every layer that forgets, on rows of text (B, T); `tick` is called after each layer."""
    found: list[Reach] = []

    def watch(seen: OperatorCall) -> None:
        if (log_decay := seen.options["log_decay"]) is None:
            return
        for head, lives in enumerate(lifetimes(log_decay).transpose(0, 1).flatten(1)):  # (H, B · T/2)
            low, median, high = torch.quantile(
                lives.double(), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
            ).tolist()
            found.append(Reach(seen.layer + 1, head + 1, median, low, high))
        tick()

    with operator_hook(model, watch):
        model(rows)
    return found


def draw(path: Path, heads: list[Reach], title: str, context: int) -> None:
    """A mark for each head, in the order of their reach within each layer, with lines from low to high."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    ticks = []
    for layer in sorted({head.layer for head in heads}):
        own = sorted((head for head in heads if head.layer == layer), key=lambda head: head.tokens)
        for place, head in enumerate(own):
            x = layer + 0.8 * ((place + 0.5) / len(own) - 0.5)
            axes.plot([x, x], [head.low, head.high], color=f"C{layer - 1}", alpha=0.35, linewidth=5)
            axes.plot(x, head.tokens, marker="o", color=f"C{layer - 1}")
            axes.annotate(
                f"head {head.head}", (x, head.high), (0, 3), textcoords="offset points", ha="center", fontsize=6
            )
        ticks.append(layer)
    axes.axhline(context, color="black", linestyle=":", linewidth=1, label=f"rows of {context:,} tokens")
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"layer {layer}" for layer in ticks])
    axes.set_ylabel("reach (tokens): median, 10 to 90 %")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=120)


def parse(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.reach", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a trained model: a folder of save_pretrained or a checkpoint")
    add("--context", type=int, default=1024, help="tokens of a row (default: 1024)")
    add("--rows", type=int, default=16, help="rows of validation text of the built-in corpus (default: 16)")
    add("--output", type=Path, default=Path("results"), help="folder for CSV, JSON and PNG (default: results)")
    options = parser.parse_args(args)
    report.check_positive(parser, options, "context", "rows")
    if options.context < 2:
        parser.error(f"--context {options.context}: must be 2 or more, for a first half and what follows it")
    options.trained = report.read_byte_model(parser, options.model)
    config = options.trained.config
    if not config.forget_gate or "linear" not in config.attention_types:
        parser.error(f"--model {options.model}: it needs linear layers with a forget gate")
    available = len(held_out())
    if options.rows * options.context > available:
        parser.error(
            f"--rows {options.rows} of --context {options.context}: the text has {available} tokens; give less"
        )
    report.make_folder(parser, options.output)
    return options


def main(args: list[str] | None = None) -> int:
    options = parse(args)
    console = Console()
    report.say_if_without_pictures(console)
    text = held_out().tokens(0, options.rows * options.context)
    with report.progress_bar(console) as bar:
        task = bar.add_task("layers", total=options.trained.config.attention_types.count("linear"))
        heads = measure(options.trained, text.view(options.rows, -1), lambda: bar.advance(task))
    title = f"How far each head sees: {options.model.stem}"
    table = report.new_table(
        title,
        "tokens over which what was written falls to 1/e:\nmedian, 10 and 90 %",
        text=[],
        numbers=["layer", "head"],
    )
    for name in ("reach", "10 %", "90 %"):
        table.add_column(name, justify="right")
    for head in heads:
        cells = (f"{value:,.0f}" if value >= 10 else f"{value:.1f}" for value in (head.tokens, head.low, head.high))
        table.add_row(str(head.layer), str(head.head), *cells)
    report.show(console, table, [])
    details = {**report.surroundings("cpu", "reach", args), "interrupted": False}
    return report.finish(
        console, options.output, "reach", heads, details, lambda path: draw(path, heads, title, options.context)
    )


if __name__ == "__main__":
    sys.exit(main())
