"""How far each head of a trained model sees: its mean decay on text, head by head.

    python -m benchmarks.reach --model benchmarks/results/cpu/ablation/recipe/runs/recipe-seed0.model

A head with a forget gate multiplies what it remembers by e^log_decay at every token, a number it learns from the token.
Its reach is -1 / mean log_decay: the tokens over which a weight falls to 1/e. Beside it the tenth and the ninetieth
percentile of -1 / log_decay over single tokens: where a head clears its memory, and where it keeps it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import report
from linrope import LanguageModel
from linrope.data import VOCAB_SIZE, find_sources, split_corpus
from linrope.errors import InputError
from linrope.watching import Seen, watched


@dataclass
class Reach:
    """One head, layers and heads counted from 1; all in tokens."""

    layer: int
    head: int
    tokens: float
    low: float
    high: float


@torch.no_grad()
def measure(model: LanguageModel, rows: torch.Tensor) -> list[Reach]:
    """Of every head of every layer that forgets, on rows of text (B, T)."""
    found: list[Reach] = []

    def watch(seen: Seen) -> None:
        if (log_decay := seen.options["log_decay"]) is None:
            return
        for head, decays in enumerate(log_decay.double().transpose(0, 1).flatten(1)):  # (H, B · T)
            low, high = torch.quantile(-1 / decays, torch.tensor([0.1, 0.9], dtype=torch.float64)).tolist()
            found.append(Reach(seen.layer + 1, head + 1, -1 / decays.mean().item(), low, high))

    with watched(model, watch):
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
    axes.set_ylabel("reach (tokens); bars: single tokens, 10 to 90 %")
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
    try:
        options.trained = LanguageModel.from_pretrained(options.model)
    except InputError as error:
        parser.error(f"--model: {error}")
    config = options.trained.config
    if not config.forget_gate or "linear" not in config.attention_kinds or config.vocab_size < VOCAB_SIZE:
        parser.error(f"--model {options.model}: it needs linear layers with a forget gate, and to read bytes")
    report.make_folder(parser, options.output)
    return options


def main(args: list[str] | None = None) -> int:
    options = parse(args)
    console = Console()
    report.say_if_without_pictures(console)
    corpus = split_corpus(find_sources(None), [0.95, 0.05, 0.0])["val"]  # as benchmarks/grids have it
    heads = measure(options.trained, corpus.tokens(0, options.rows * options.context).view(options.rows, -1))
    title = f"How far each head sees: {options.model.stem}"
    table = report.new_table(title, "tokens over which a weight falls to 1/e", text=[], numbers=["layer", "head"])
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
