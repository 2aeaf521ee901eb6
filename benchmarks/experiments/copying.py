"""Copying: bits per byte of text that a trained model reads for the first and for the second time.

    python -m benchmarks.copying --model SOFTMAX --model LINEAR --output results

A piece of held-out text stands twice in a row; with --gap, that many tokens of the following text stand between. The
later half of the piece is judged. At the second reading a model that copies needs almost no bits.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table

from benchmarks.experiments.grid import held_out
from benchmarks.harness.options import read_byte_model
from benchmarks.harness.pictures import COLORS, Figure, legend_by_end, length_ticks, new_axes
from benchmarks.harness.runner import AddOption, Benchmark
from linrope import LanguageModel
from linrope.utils.terminal import new_table


@dataclass
class Copying:
    """One model on pieces of one length, in tokens; first and again in bits per byte."""

    model: str
    length: int
    first: float
    again: float


@torch.no_grad()
def measure(model: LanguageModel, texts: torch.Tensor, length: int) -> tuple[float, float]:
    """Bits per token of the later half of the first `length` tokens of texts (B, L), at the first reading and at the
    second, which follows the texts."""
    twice = torch.cat((texts, texts[:, :length]), dim=1)
    logits = model(twice[:, :-1])
    bits = F.cross_entropy(logits.transpose(1, 2).double(), twice[:, 1:], reduction="none") / math.log(2)
    later = slice(length // 2 - 1, length - 1)  # the loss at t is of token t + 1
    return bits[:, later].mean().item(), bits[:, texts.shape[1] :][:, later].mean().item()


class TextReadTwice(Benchmark):
    name = "copying"
    point = Copying
    from_zero = ("gap",)

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        models = "a trained model: a folder of save_pretrained or a checkpoint; repeatable"
        add("--model", type=Path, action="append", required=True, help=models)
        add("--lengths", type=int, nargs="+", default=[32, 64, 128, 256, 512], help="tokens of a piece (32 … 512)")
        add("--gap", type=int, default=0, help="tokens of other text between the two readings (default: 0)")
        add("--pieces", type=int, default=64, help="pieces of held-out text of the built-in corpus (default: 64)")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        """`trained` is added: the models by name."""
        stems = [path.stem for path in options.model]
        names = [path.stem if stems.count(path.stem) == 1 else str(path) for path in options.model]
        longest = max(options.lengths)
        row = f"--lengths {longest}", 2 * longest + options.gap
        options.trained = {name: read_byte_model(parser, path, *row) for name, path in zip(names, options.model)}
        available = len(held_out())
        for length in options.lengths:
            if length < 4:
                parser.error(f"--lengths {length}: must be 4 or more, because half a piece is judged")
            if length + options.gap + options.pieces > available:
                with_gap = f" with --gap {options.gap}" if options.gap else ""
                needed = f"{options.pieces} pieces need more than the text's {available} tokens"
                parser.error(f"--lengths {length}{with_gap}: {needed}")

    def measure(self) -> None:
        """The pieces are spread over the held-out text."""
        options, text = self.options, held_out()
        tick = self.progress("pieces", len(options.trained) * len(options.lengths))
        for name, model in options.trained.items():
            for length in options.lengths:
                size = length + options.gap
                starts = range(0, len(text) - size, (len(text) - size) // options.pieces)[: options.pieces]
                texts = torch.stack([text.tokens(start, start + size) for start in starts])
                self.points.append(Copying(name, length, *measure(model, texts, length)))
                tick(advance=1)

    def details(self) -> dict[str, Any]:
        return {"gap": self.options.gap}

    @property
    def title(self) -> str:
        gap = self.options.gap
        return f"Text that was read {gap:,} tokens ago" if gap else "Text that was just read"

    def table(self) -> Table:
        caption = "bits per byte of the same text, at both readings"
        columns = "length", "first", "again", "saved"
        table = new_table(self.title, *columns, text=["model"], caption=caption)
        for one in self.points:
            saved = f"{100 * (1 - one.again / one.first):.0f} %"
            table.add_row(one.model, str(one.length), f"{one.first:.3f}", f"{one.again:.3f}", saved)
        return table

    def figures(self) -> dict[str, Figure]:
        """A colour for each model: dashed at the first reading, solid at the second."""
        gap = self.options.gap
        best = min(self.points, key=lambda one: one.again / one.first)
        saved = f"{best.model} saves {100 * (1 - best.again / best.first):.0f} % of a piece of {best.length:,}"
        axes = new_axes(f"{self.title}: {saved}\n(first reading dashed, second solid)")
        for number, name in enumerate(dict.fromkeys(one.model for one in self.points)):
            own = [one for one in self.points if one.model == name]
            x, first, again = zip(*((one.length, one.first, one.again) for one in own))
            axes.plot(x, first, color=COLORS[number], linestyle="--", marker="o", markersize=3)
            axes.plot(x, again, color=COLORS[number], marker="o", label=name)
        length_ticks(axes, sorted({one.length for one in self.points}))
        distance = f", and {gap:,} more to its first reading" if gap else ", and distance to its first reading"
        axes.set_xlabel(f"length of the piece{distance} (tokens)")
        axes.set_ylabel("bits per byte")
        axes.set_ylim(bottom=0)
        legend_by_end(axes)
        return {"": axes.figure}


if __name__ == "__main__":
    sys.exit(TextReadTwice.main())
