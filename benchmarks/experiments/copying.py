"""How much less a trained model pays for text that it has just read: bits per byte of the first and the second reading.

    python -m benchmarks.copying --model SOFTMAX --model LINEAR --output results

A piece of held-out text stands twice in a row, or with --gap so many tokens apart, in which its text goes on. The
later half of the piece is judged at both readings: the same tokens, the first time after the piece's earlier half, the
second time after the whole piece, whose like token stands `length` tokens (and the gap) back. A model that copies pays
next to nothing then; one that cannot, or that has forgotten by then, pays what it paid before.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console

from benchmarks.experiments.grid import held_out
from benchmarks.harness import report
from linrope import LanguageModel


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


def measure_all(
    models: dict[str, LanguageModel], lengths: list[int], gap: int, n_pieces: int, tick: Callable[[], None]
) -> list[Copying]:
    """Every model on the same pieces, spread over the held-out text; `tick` is called after each length."""
    text = held_out()
    texts = {}
    for length in lengths:
        whole = length + gap
        starts = range(0, len(text) - whole, (len(text) - whole) // n_pieces)[:n_pieces]
        texts[length] = torch.stack([text.tokens(start, start + whole) for start in starts])
    found = []
    for name, model in models.items():
        for length in lengths:
            found.append(Copying(name, length, *measure(model, texts[length], length)))
            tick()
    return found


def draw(path: Path, found: list[Copying], gap: int) -> None:
    """A colour for each model: dashed at the first reading, whole at the second."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(dict.fromkeys(one.model for one in found)):
        own = [one for one in found if one.model == name]
        x, first, again = zip(*((one.length, one.first, one.again) for one in own))
        axes.plot(x, first, color=f"C{number}", linestyle="--", marker="o", markersize=3)
        axes.plot(x, again, color=f"C{number}", marker="o", label=name)
    axes.set_xscale("log", base=2)
    lengths = sorted({one.length for one in found})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    distance = f", and {gap:,} more to its first reading" if gap else ", and distance to its first reading"
    axes.set_xlabel(f"length of the piece{distance} (tokens)")
    axes.set_ylabel("bits per byte")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.suptitle(f"{title(gap)}: first reading dashed, second whole", fontsize="medium")
    figure.savefig(path, dpi=120)


def title(gap: int) -> str:
    return f"Text that was read {gap:,} tokens ago" if gap else "Text that was just read"


def parse(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.copying", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, action="append", required=True, help="a trained model's folder or checkpoint; repeatable")
    add("--lengths", type=int, nargs="+", default=[32, 64, 128, 256, 512], help="tokens of a piece (32 … 512)")
    add("--gap", type=int, default=0, help="tokens of other text between the two readings (default: 0)")
    add("--pieces", type=int, default=64, help="pieces of held-out text of the built-in corpus (default: 64)")
    add("--output", type=Path, default=Path("results"), help="folder for CSV, JSON and PNG (default: results)")
    options = parser.parse_args(args)
    report.check_positive(parser, options, "lengths", "pieces")
    stems = [path.stem for path in options.model]
    names = [path.stem if stems.count(path.stem) == 1 else str(path) for path in options.model]
    options.trained = {name: report.read_byte_model(parser, path) for name, path in zip(names, options.model)}
    available = len(held_out())
    if options.gap < 0:
        parser.error(f"--gap {options.gap}: must be 0 or more")
    for length in options.lengths:
        if length < 4:
            parser.error(f"--lengths {length}: half a piece is judged; give 4 or more")
        if length + options.gap + options.pieces > available:
            with_gap = f" with --gap {options.gap}" if options.gap else ""
            parser.error(
                f"--lengths {length}{with_gap}: {options.pieces} pieces need more than the text's {available} tokens"
            )
    report.make_folder(parser, options.output)
    return options


def main(args: list[str] | None = None) -> int:
    options = parse(args)
    console = Console()
    report.say_if_without_pictures(console)
    with report.progress_bar(console) as bar:
        task = bar.add_task("pieces", total=len(options.trained) * len(options.lengths))
        sizes = options.lengths, options.gap, options.pieces
        found = measure_all(options.trained, *sizes, lambda: bar.advance(task))
    table = report.new_table(
        title(options.gap), "bits per byte of the same text, at both readings", text=["model"],
        numbers=["length", "first", "again", "saved"],
    )  # fmt: skip
    for one in found:
        saved = f"{100 * (1 - one.again / one.first):.0f} %"
        table.add_row(one.model, str(one.length), f"{one.first:.3f}", f"{one.again:.3f}", saved)
    report.show(console, table, [])
    details = {**report.surroundings("cpu", "copying", args), "interrupted": False}
    details["gap"] = options.gap
    return report.finish(
        console, options.output, "copying", found, details, lambda path: draw(path, found, options.gap)
    )


if __name__ == "__main__":
    sys.exit(main())
