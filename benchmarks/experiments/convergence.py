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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.experiments.grid import read_grid
from benchmarks.harness import report

GRID = Path(__file__).parents[1] / "grids" / "placement.yaml"
PANELS = {
    "softmax": {"RoPE": "softmax", "sinusoids": "softmax.sinusoidal", "none": "softmax.none"},
    "linear": {"RoPE": "numerator", "sinusoids": "sinusoidal", "none": "none"},
    "linear, with convolution and gate": {
        "RoPE": "gate+numerator",
        "sinusoids": "gate+sinusoidal",
        "none": "gate+none",
    },
}
"""By attention and positions, the variant of GRID."""
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


def curve_of(run: dict[str, Any]) -> list[tuple[int, float]]:
    """(tokens, bits per byte) of a run; each of its recorded means is of as many steps, the last of what was left."""
    losses = run["training"]["losses"]
    steps_each = math.ceil(run["steps"] / len(losses))
    weights = [min(steps_each, run["steps"] - i * steps_each) for i in range(len(losses))]
    curve, points = [], min(POINTS, len(losses))
    for point in range(points):
        own = range(len(losses) * point // points, len(losses) * (point + 1) // points)
        nats = sum(weights[i] * losses[i] for i in own) / sum(weights[i] for i in own)
        steps = own[0] * steps_each + sum(weights[i] for i in own) / 2
        curve.append((round(steps * run["tokens"] / run["steps"]), nats / math.log(2)))
    return curve


def curves(runs: list[dict[str, Any]]) -> dict[str, dict[str, list[Loss]]]:
    """By attention and positions, of those that have finished runs. A run that diverged has no curve to average."""
    by_variant = defaultdict(list)
    for run in runs:
        if run["diverged"] is None:
            by_variant[run["variant"]].append(curve_of(run))
    found = defaultdict(dict)
    for attention, variants in PANELS.items():
        for positions, variant in variants.items():
            if own := by_variant[variant]:
                found[attention][positions] = [mean_of(attention, positions, points) for points in zip(*own)]
    return found


def mean_of(attention: str, positions: str, points: Sequence[tuple[int, float]]) -> Loss:
    """One point of a curve, from that of each seed."""
    bits = [bits for _, bits in points]
    return Loss(attention, positions, len(bits), points[0][0], statistics.fmean(bits), min(bits), max(bits))


def draw(path: Path, found: dict[str, dict[str, list[Loss]]]) -> None:
    """A panel for each attention, a line for each kind of positions, and between its seeds a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * len(found), 4), layout="constrained")
    colors = {positions: f"C{number}" for number, positions in enumerate(PANELS["linear"])}
    for axes, (attention, lines) in zip(figure.subplots(1, len(found), sharey=True, squeeze=False)[0], found.items()):
        for positions, line in lines.items():
            tokens, color = [loss.tokens for loss in line], colors[positions]
            axes.plot(tokens, [loss.mean for loss in line], color=color, label=positions)
            axes.fill_between(tokens, [x.low for x in line], [x.high for x in line], color=color, alpha=0.2)
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
    runs = [json.loads(file.read_text()) for file in sorted(options.runs.glob("runs/*.json"))]
    for other in {run["measured"]["title"] for run in runs} - {read_grid(GRID).title}:
        parser.error(f"--runs {options.runs}: holds results of {other!r}, whose variants mean something else")
    options.found = curves(runs)
    if not options.found:
        parser.error(f"--runs {options.runs}: holds no finished run of {PANELS['linear']['RoPE']!r} or its likes")
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
    lines = [line for attention in options.found.values() for line in attention.values()]
    for line in lines:
        marks = (line[max(0, len(line) * share // 4 - 1)].mean for share in (1, 2, 4))
        table.add_row(line[0].attention, line[0].positions, *(f"{bits:.3f}" for bits in marks), str(line[0].seeds))
    report.show(console, table, [])
    details = {**report.surroundings("cpu", "convergence", args), "interrupted": False}
    losses = [loss for line in lines for loss in line]
    return report.finish(
        console, options.output, "convergence", losses, details, lambda path: draw(path, options.found)
    )


if __name__ == "__main__":
    sys.exit(main())
