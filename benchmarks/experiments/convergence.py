"""Convergence of training with RoPE, with absolute positions and without: curves of the runs of placement.yaml.

    python -m benchmarks.convergence --runs results/ablation/placement

As in figure 3 of RoFormer, for softmax and linear attention. A point is the mean training loss of a twentieth of the
run.
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

from rich.table import Table

from benchmarks.experiments.grid import read_grid
from benchmarks.harness.pictures import COLORS, Figure
from benchmarks.harness.runner import AddOption, Benchmark
from linrope.utils.formatting import count_text
from linrope.utils.terminal import new_table

GRID = Path(__file__).parents[1] / "grids" / "placement.yaml"
POSITIONS = "RoPE", "sinusoids", "none"
PANELS = {
    "softmax": ("softmax", "softmax.sinusoidal", "softmax.none"),
    "linear": ("numerator", "sinusoidal", "none"),
    "linear, with convolution and gate": ("gate+numerator", "gate+sinusoidal", "gate+none"),
}
"""By attention, the variants of GRID in the order of POSITIONS."""
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
    """(tokens, bits per byte) of a run; its recorded means cover equal numbers of steps, the last one the rest."""
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


def curves(runs: list[dict[str, Any]]) -> list[Loss]:
    """The curves of the finished runs, one after the other. A run that diverged has no curve to average."""
    by_variant = defaultdict(list)
    for run in runs:
        if run["diverged"] is None:
            by_variant[run["variant"]].append(curve_of(run))
    found = []
    for attention, variants in PANELS.items():
        for positions, variant in zip(POSITIONS, variants):
            for points in zip(*by_variant[variant]):
                tokens, bits = zip(*points)
                mean = statistics.fmean(bits)
                found.append(Loss(attention, positions, len(bits), tokens[0], mean, min(bits), max(bits)))
    return found


def by_curve(losses: list[Loss]) -> dict[tuple[str, str], list[Loss]]:
    found = defaultdict(list)
    for loss in losses:
        found[loss.attention, loss.positions].append(loss)
    return found


class Convergence(Benchmark):
    name = "convergence"
    point = Loss
    output = ""

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        add("--runs", type=Path, required=True, help="the results folder of benchmarks/grids/placement.yaml")
        add("--output", type=Path, help="folder for CSV, JSON and PNG (default: that of --runs)")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        """`found` is added: the curves."""
        options.output = options.output or options.runs
        runs = [json.loads(file.read_text()) for file in sorted(options.runs.glob("runs/*.json"))]
        titles = {run.get("measured", {}).get("title") if isinstance(run, dict) else None for run in runs}
        for other in titles - {read_grid(GRID).title}:
            parser.error(f"--runs {options.runs}: holds results of {other!r}, which has other variants")
        options.found = curves(runs)
        if not options.found:
            parser.error(f"--runs {options.runs}: holds no finished run of the variants of {GRID.name}")

    def measure(self) -> None:
        self.points = self.options.found

    def table(self) -> Table:
        caption, text = "bits per byte in training, means over seeds", ["attention", "positions"]
        columns = "a quarter", "half", "the end", "seeds"
        table = new_table("Convergence by positions", *columns, text=text, caption=caption)
        for (attention, positions), line in by_curve(self.points).items():
            marks = (line[max(0, len(line) * share // 4 - 1)].mean for share in (1, 2, 4))
            table.add_row(attention, positions, *(f"{bits:.3f}" for bits in marks), str(line[0].seeds))
        return table

    def figures(self) -> dict[str, Figure]:
        """A panel for each attention, a line for each type of positions, and between its seeds a band."""
        from matplotlib.figure import Figure

        lines = by_curve(self.points)
        panels = dict.fromkeys(attention for attention, _ in lines)
        figure = Figure(figsize=(9, 4), layout="constrained")
        for axes, attention in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels):
            for positions, color in zip(POSITIONS, COLORS):
                line = lines.get((attention, positions), [])
                tokens = [loss.tokens for loss in line]
                axes.plot(tokens, [loss.mean for loss in line], color=color, label=positions)
                axes.fill_between(tokens, [x.low for x in line], [x.high for x in line], color=color, alpha=0.2)
            axes.set_title(attention, fontsize=11)
            axes.set_xlabel("training tokens")
            axes.xaxis.set_major_formatter(lambda tokens, _: count_text(tokens))
            axes.grid(alpha=0.3)
        figure.axes[0].set_ylabel("bits per byte in training")
        figure.axes[-1].legend()
        ends = {curve: line[-1].mean for curve, line in lines.items()}
        both = [attention for attention in PANELS if {(attention, "RoPE"), (attention, "none")} <= ends.keys()]
        gains = [f"{attention} {ends[attention, 'RoPE'] - ends[attention, 'none']:+.2f}" for attention in both]
        figure.suptitle(f"RoPE against no positions at the end, bits per byte:\n{'; '.join(gains)}", fontsize=12)
        return {"": figure}


if __name__ == "__main__":
    sys.exit(Convergence.main())
