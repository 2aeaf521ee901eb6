"""The reach of each head of a trained model: the number of tokens until its forget gate leaves 1/e of what it wrote.

    python -m benchmarks.reach --model results/ablation/recipe/runs/recipe-seed0.model

Shown are the median over tokens and the 10th and 90th percentile, for tokens in the first half of each row. If more
than 1/e is left at the end of the row, the reach is the row's length.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.experiments.grid import held_out
from benchmarks.harness.options import read_byte_model
from benchmarks.harness.pictures import COLORS, Figure, new_axes
from benchmarks.harness.runner import AddOption, Benchmark
from linrope.profiling.hooks import OperatorCall, operator_hook
from linrope.utils.terminal import new_table


@dataclass
class Reach:
    """One head, layers and heads counted from 1; all in tokens."""

    layer: int
    head: int
    tokens: float
    low: float
    high: float


def lifetimes(log_decay: torch.Tensor) -> torch.Tensor:
    """Tokens until decays (..., T) leave 1/e or less of what was written: (..., T/2), for the row's first half; T if
    the row ends before."""
    length = log_decay.shape[-1]
    lost = -log_decay.double().cumsum(dim=-1)
    written = torch.arange(length // 2, device=lost.device)
    gone = torch.searchsorted(lost, lost[..., : length // 2] + 1)
    return torch.where(gone < length, gone - written, length)


class HeadReach(Benchmark):
    name = "reach"
    point = Reach

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        models = "a trained model with forget gates: a folder of save_pretrained or a checkpoint"
        add("--model", type=Path, required=True, help=models)
        add("--context", type=int, default=1024, help="tokens of a row (default: 1024)")
        add("--rows", type=int, default=16, help="rows of validation text of the built-in corpus (default: 16)")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        """`trained` is added: the model."""
        if options.context < 2:
            parser.error(f"--context {options.context}: must be 2 or more, because half of a row is measured")
        options.trained = read_byte_model(parser, options.model, f"--context {options.context}", options.context)
        config = options.trained.config
        if not config.forget_gate or "linear" not in config.attention_types:
            parser.error(f"--model {options.model}: it needs linear layers with a forget gate")
        available = len(held_out())
        if options.rows * options.context > available:
            parser.error(f"--rows {options.rows} of --context {options.context}: the text has {available} tokens")

    @torch.no_grad()
    def measure(self) -> None:
        options = self.options
        text = held_out().tokens(0, options.rows * options.context)
        tick = self.progress("layers", options.trained.config.attention_types.count("linear"))
        levels = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)

        def observe(call: OperatorCall) -> None:
            if (log_decay := call.options["log_decay"]) is None:
                return
            for head, lives in enumerate(lifetimes(log_decay).transpose(0, 1).flatten(1)):  # (H, B · T/2)
                low, median, high = torch.quantile(lives.double(), levels).tolist()
                self.points.append(Reach(call.layer + 1, head + 1, median, low, high))
            tick(advance=1)

        with operator_hook(options.trained, observe):
            options.trained(text.view(options.rows, -1))

    def table(self) -> Table:
        caption = "tokens until 1/e of a written token is left:\nmedian, 10 and 90 %"
        columns = "layer", "head", "reach", "10 %", "90 %"
        table = new_table(f"Reach of each head: {self.options.model.stem}", *columns, caption=caption)
        for head in self.points:
            numbers = head.tokens, head.low, head.high
            cells = (f"{value:,.0f}" if value >= 10 else f"{value:.1f}" for value in numbers)
            table.add_row(str(head.layer), str(head.head), *cells)
        return table

    def figures(self) -> dict[str, Figure]:
        """A mark for each head, in the order of their reach within each layer, with lines from low to high."""
        reach = [head.tokens for head in self.points]
        title = f"Heads of {self.options.model.stem} reach {min(reach):,.0f} to {max(reach):,.0f} tokens back"
        axes, context = new_axes(title), self.options.context
        layers = sorted({head.layer for head in self.points})
        for layer in layers:
            own = sorted((head for head in self.points if head.layer == layer), key=lambda head: head.tokens)
            for place, head in enumerate(own):
                x = layer + 0.8 * ((place + 0.5) / len(own) - 0.5)
                axes.plot([x, x], [head.low, head.high], color=COLORS[0], alpha=0.35, linewidth=5)
                axes.plot(x, head.tokens, marker="o", color=COLORS[0])
                axes.annotate(
                    f"{head.head}", (x, head.high), (0, 3), textcoords="offset points", ha="center", fontsize=9
                )
        axes.axhline(context, color="black", linestyle=":", linewidth=1, label=f"end of the row, {context:,} tokens")
        axes.set_yscale("log")
        axes.set_xticks(layers, [f"layer {layer}" for layer in layers])
        axes.set_xlabel("heads by their numbers")
        axes.set_ylabel("reach (tokens): median, 10 % to 90 %")
        axes.legend()
        return {"": axes.figure}


if __name__ == "__main__":
    sys.exit(HeadReach.main())
