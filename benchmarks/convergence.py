"""How training converges with RoPE, with absolute positions and with none: curves of the runs of placement.yaml.

    python -m benchmarks.ablation --grid benchmarks/grids/placement.yaml
    python -m benchmarks.convergence --runs results/ablation/placement

RoFormer's third figure shows this for softmax attention and for the Performer. Here are softmax, linear attention with
RoPE in the numerator, and that with a short convolution and a forget gate, each against sinusoids that are added to the
embeddings and against no positions. A point is the mean training loss of a twentieth of the run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import report

PANELS = {"softmax": "softmax{}", "linear": "{}", "linear, with convolution and gate": "gate+{}"}
POSITIONS = {"RoPE": ("", "numerator"), "sinusoids": (".sinusoidal", "sinusoidal"), "none": (".none", "none")}
POINTS = 20


@dataclass
class Loss:
    """Bits per byte in training around a number of tokens: the mean over seeds, the lowest and the highest of them."""

    attention: str
    positions: str
    seeds: int
    tokens: int
    mean: float
    low: float
    high: float


def variant_of(attention: str, positions: str) -> str:
    """The name in placement.yaml."""
    beside_softmax, alone = POSITIONS[positions]
    return PANELS[attention].format(beside_softmax if attention == "softmax" else alone)


def curve_of(run: dict[str, Any]) -> list[tuple[int, float]]:
    """(tokens, bits per byte) of a run; each of its recorded means is of as many steps, the last of what was left."""
    losses = run["training"]["losses"]
    steps_each = math.ceil(run["steps"] / len(losses))
    weights = [min(steps_each, run["steps"] - i * steps_each) for i in range(len(losses))]
    curve = []
    for point in range(min(POINTS, len(losses))):
        own = range(len(losses) * point // POINTS, len(losses) * (point + 1) // POINTS)
        nats = sum(weights[i] * losses[i] for i in own) / sum(weights[i] for i in own)
        steps = own[0] * steps_each + sum(weights[i] for i in own) / 2
        curve.append((round(steps * run["tokens"] / run["steps"]), nats / math.log(2)))
    return curve


def curves(runs: list[dict[str, Any]]) -> list[Loss]:
    """Of every attention and kind of positions that has finished runs."""
    by_variant = defaultdict(list)
    for run in runs:
        by_variant[run["variant"]].append(curve_of(run))
    found = []
    for attention in PANELS:
        for positions in POSITIONS:
            own = by_variant[variant_of(attention, positions)]
            for points in zip(*own):
                bits = [bits for _, bits in points]
                mean = statistics.fmean(bits)
                found.append(Loss(attention, positions, len(own), points[0][0], mean, min(bits), max(bits)))
    return found


def draw(path: Path, losses: list[Loss]) -> None:
    """A panel for each attention, a line for each kind of positions, and between its seeds a band."""
    from matplotlib.figure import Figure

    shown = [attention for attention in PANELS if any(loss.attention == attention for loss in losses)]
    figure = Figure(figsize=(4.4 * len(shown), 4), layout="constrained")
    for axes, attention in zip(figure.subplots(1, len(shown), sharey=True, squeeze=False)[0], shown):
        for number, positions in enumerate(POSITIONS):
            own = [loss for loss in losses if (loss.attention, loss.positions) == (attention, positions)]
            tokens = [loss.tokens for loss in own]
            axes.plot(tokens, [loss.mean for loss in own], color=f"C{number}", label=positions)
            axes.fill_between(tokens, [x.low for x in own], [x.high for x in own], color=f"C{number}", alpha=0.2)
        axes.set_title(attention, fontsize="medium")
        axes.set_xlabel("training tokens")
        axes.xaxis.set_major_formatter(lambda tokens, _: report.count_text(tokens))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("bits per byte in training")
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)


def parse(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.convergence", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--runs", type=Path, required=True, help="the folder of results of benchmarks/grids/placement.yaml")
    add("--output", type=Path, help="folder for CSV, JSON and PNG (default: that of --runs)")
    options = parser.parse_args(args)
    options.output = options.output or options.runs
    options.losses = curves([json.loads(file.read_text()) for file in sorted(options.runs.glob("runs/*.json"))])
    if not options.losses:
        parser.error(f"--runs {options.runs}: holds no finished run of {variant_of('linear', 'RoPE')!r} or its likes")
    report.make_folder(parser, options.output)
    return options


def main(args: list[str] | None = None) -> int:
    options = parse(args)
    console = Console()
    report.say_if_without_pictures(console)
    table = report.new_table(
        "Convergence by positions",
        "bits per byte in training, means over seeds",
        text=["attention", "positions"],
        numbers=["a quarter", "half", "the end", "seeds"],
    )
    for attention in PANELS:
        for positions in POSITIONS:
            own = [loss for loss in options.losses if (loss.attention, loss.positions) == (attention, positions)]
            if own:
                marks = (own[max(0, len(own) * share // 4 - 1)].mean for share in (1, 2, 4))
                table.add_row(attention, positions, *(f"{bits:.3f}" for bits in marks), str(own[0].seeds))
    report.show(console, table, [])
    details = {**report.surroundings("cpu", "convergence", args), "interrupted": False}
    return report.finish(
        console, options.output, "convergence", options.losses, details, lambda path: draw(path, options.losses)
    )


if __name__ == "__main__":
    sys.exit(main())
