"""How attention fades with distance: RoFormer's bound, and what a trained model's numerators really do.

    python -m benchmarks.decay --model results/ablation/placement/runs/conv+numerator-seed0.model

The bound is that of RoFormer (arXiv 2104.09864), section 3.4.3: 1/(d/2) Σ_i |S_i| with S_i the sum of the first i of
exp(i·distance·θ_m), for d = 128. Measured are the weights (R_i φ(q_i))ᵀ(R_j φ(k_j)) of a model's linear layers on
validation text against the distance i - j: their mean, the mean of their absolute values, and the mean of the plain
φ(q_i)ᵀφ(k_j) that the denominator has, each as a share of the plain one at distance 0; with a forget gate, times the
decay too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.experiments.grid import held_out
from benchmarks.harness import report
from linrope import LanguageModel, RotaryEmbedding
from linrope.feature_maps import get_feature_map, skip_first
from linrope.profiling.hooks import OperatorCall, operator_hook
from linrope.rotary import frequencies, unit_rotations

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEAD_DIM = 128
"""The d of RoFormer's figure."""
N_ROWS = 8
"""Rows of validation text over which the weights are averaged, each of four times the longest distance."""


@dataclass
class Weight:
    """One distance: a row of the CSV. `layer` is -1 for the bound."""

    curve: str
    layer: int
    distance: int
    value: float


def bound(distances: Tensor, head_dim: int = HEAD_DIM, base: float = 10000.0) -> Tensor:
    """1/(d/2) Σ_i |S_i| for each distance: (N,) float64. At distance 0 it is (d/2 + 1)/2."""
    turns = unit_rotations(distances, frequencies(head_dim, base))
    return turns.cumsum(dim=-1).abs().mean(dim=-1)


def mean_weights(
    q: Tensor, k: Tensor, rope: RotaryEmbedding | None, log_decay: Tensor | None, longest: int, signed: int = 0
) -> dict[str, Tensor]:
    """Means over rows, heads and queries of the weights of features q and k (B, H, T, D), by distance: (longest + 1,).

    The first `signed` features have no part in the plain weights, which denominators sum. Only queries that see that
    far are used, so that every distance has the same ones.
    """
    turned = (q, k) if rope is None else (rope.rotate(q), rope.rotate(k))
    total = None if log_decay is None else log_decay.double().cumsum(dim=-1)
    names = ["plain", "rotated", "|rotated|"] + ([] if total is None else ["rotated × decay"])
    means = {name: torch.empty(longest + 1, dtype=torch.float64) for name in names}
    queries = slice(longest, None)
    for distance in range(longest + 1):
        keys = slice(longest - distance, q.shape[2] - distance)
        products = ((a[:, :, queries] * b[:, :, keys]).double() for a, b in ((q, k), turned))
        plain, rotated = next(products)[..., signed:].sum(-1), next(products).sum(-1)
        values = {"plain": plain, "rotated": rotated, "|rotated|": rotated.abs()}
        if total is not None:
            values["rotated × decay"] = rotated * (total[..., queries] - total[..., keys]).exp()
        for name, weights in values.items():
            means[name][distance] = weights.mean()
    return {name: mean / means["plain"][0] for name, mean in means.items()}


@torch.no_grad()
def measure(model: LanguageModel, longest: int, tick: Callable[[], None]) -> list[Weight]:
    """The weights of every linear layer on text of the built-in corpus that the grids hold out."""
    text = held_out().tokens(0, N_ROWS * 4 * longest)
    found: list[Weight] = []

    def watch(seen: OperatorCall) -> None:
        rope, log_decay = seen.options["rope"], seen.options["log_decay"]
        signed = 0 if rope is None else rope.signed_dim
        phi = skip_first(get_feature_map(seen.options["feature_map"]), signed).forward
        for curve, means in mean_weights(phi(seen.q), phi(seen.k), rope, log_decay, longest, signed).items():
            found.extend(Weight(curve, seen.layer, distance, value) for distance, value in enumerate(means.tolist()))
        tick()

    with operator_hook(model, watch):
        model(text.view(N_ROWS, -1))
    return found


def draw(path: Path, weights: list[Weight], title: str) -> None:
    """The bound on the left, then each layer's curves."""
    from matplotlib.figure import Figure

    layers = sorted({w.layer for w in weights})
    figure = Figure(figsize=(3.6 * len(layers), 4), layout="constrained")
    for axes, layer in zip(figure.subplots(1, len(layers), squeeze=False)[0], layers):
        own = [w for w in weights if w.layer == layer]
        for curve in dict.fromkeys(w.curve for w in own):
            axes.plot([w.value for w in own if w.curve == curve], label=curve, linewidth=1.2)
        _dress(axes, "bound, d = 128" if layer < 0 else f"layer {layer + 1}, measured", layer)
    if layers[-1] >= 0:
        axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))  # where it covers no curve
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=110)


def _dress(axes: Axes, title: str, layer: int) -> None:
    axes.set_title(title, fontsize="small")
    axes.set_xlabel("distance (tokens)")
    axes.set_ylabel("Σ |S_i| / (d/2)" if layer < 0 else "share of the plain weight at distance 0", fontsize="small")
    if layer >= 0:
        axes.axhline(0, color="black", linewidth=0.5)
    axes.grid(alpha=0.3)


def parse(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.decay", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, help="a trained model with linear layers: a folder of save_pretrained or a checkpoint")
    add("--longest", type=int, default=256, help="longest distance (default: 256)")
    add("--output", type=Path, default=Path("results"), help="folder for CSV, JSON and PNG (default: results)")
    options = parser.parse_args(args)
    report.check_positive(parser, options, "longest")
    options.trained = None
    if options.model:
        options.trained = report.read_byte_model(parser, options.model)
        if "linear" not in options.trained.config.attention_types:
            parser.error(f"--model {options.model}: none of its layers is linear, so it has no numerators to measure")
        available = len(held_out()) // (4 * N_ROWS)
        if options.longest > available:
            parser.error(f"--longest {options.longest}: the text has rows for distances up to {available}; give less")
    report.make_folder(parser, options.output)
    return options


def main(args: list[str] | None = None) -> int:
    options = parse(args)
    console = Console()
    report.say_if_without_pictures(console)
    distances = torch.arange(options.longest + 1)
    weights = [Weight("bound", -1, d, value) for d, value in enumerate(bound(distances).tolist())]
    title = "How attention fades with distance"
    interrupted = False
    if options.trained is not None:
        title += f": {options.trained.config.feature_map}, {options.model.name}"
        with report.progress_bar(console) as bar:
            task = bar.add_task("layers", total=options.trained.config.attention_types.count("linear"))
            try:
                weights += measure(options.trained, options.longest, lambda: bar.advance(task))
            except KeyboardInterrupt:
                interrupted = True
    table = report.new_table(title, "as a share of the plain weight at distance 0", text=["curve"], numbers=["layer"])
    shown = [d for d in (0, 1, 4, 16, 64, 256) if d <= options.longest]
    for distance in shown:
        table.add_column(str(distance), justify="right")
    for curve, layer in dict.fromkeys((w.curve, w.layer) for w in weights):
        values = {w.distance: w.value for w in weights if (w.curve, w.layer) == (curve, layer)}
        table.add_row(curve, "" if layer < 0 else str(layer + 1), *(f"{values[d]:.3f}" for d in shown))
    report.show(console, table, [])
    details = {**report.surroundings("cpu", "decay", args), "interrupted": interrupted}
    return report.finish(console, options.output, "decay", weights, details, lambda path: draw(path, weights, title))


if __name__ == "__main__":
    sys.exit(main())
