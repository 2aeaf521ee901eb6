"""How attention fades with distance: RoFormer's bound, and the numerators of a trained model.

    python -m benchmarks.decay --model results/ablation/placement/runs/conv+numerator-seed0.model

The bound is that of RoFormer (arXiv 2104.09864), section 3.4.3. Measured are the weights (R_i φ(q_i))ᵀ(R_j φ(k_j)) of a
model's linear layers on validation text against the distance i - j: their mean, that of their absolute values, and that
of the plain φ(q_i)ᵀφ(k_j), each as a share of the plain one at distance 0; with a forget gate, times the decay too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.experiments.grid import held_out
from benchmarks.harness.options import read_byte_model
from benchmarks.harness.pictures import COLORS, Figure
from benchmarks.harness.runner import AddOption, Benchmark
from linrope import RotaryEmbedding
from linrope.feature_maps import get_feature_map, skip_first
from linrope.profiling.hooks import OperatorCall, operator_hook
from linrope.rotary import frequencies, unit_rotations
from linrope.utils.terminal import new_table

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
    """1/(d/2) Σ_i |S_i|, with S_i the sum of the first i of exp(i·distance·θ_m), for each distance: (N,) float64. At
    distance 0 it is (d/2 + 1)/2."""
    rotations = unit_rotations(distances, frequencies(head_dim, base))
    return rotations.cumsum(dim=-1).abs().mean(dim=-1)


def mean_weights(
    q: Tensor, k: Tensor, rope: RotaryEmbedding | None, log_decay: Tensor | None, longest: int, signed: int = 0
) -> dict[str, Tensor]:
    """Means over rows, heads and queries of the weights of features q and k (B, H, T, D), by distance: (longest + 1,).

    The first `signed` features have no part in the plain weights, which denominators sum. Only queries that see that
    far are used, so that every distance has the same ones.
    """
    rotated_qk = (q, k) if rope is None else (rope.rotate(q), rope.rotate(k))
    total = None if log_decay is None else log_decay.double().cumsum(dim=-1)
    means = defaultdict(list)
    queries = slice(longest, None)
    for distance in range(longest + 1):
        keys = slice(longest - distance, q.shape[2] - distance)
        plain, rotated = ((a[:, :, queries] * b[:, :, keys]).double() for a, b in ((q, k), rotated_qk))
        plain, rotated = plain[..., signed:].sum(-1), rotated.sum(-1)
        values = {"plain": plain, "rotated": rotated, "|rotated|": rotated.abs()}
        if total is not None:
            values["rotated × decay"] = rotated * (total[..., queries] - total[..., keys]).exp()
        for name, weights in values.items():
            means[name].append(weights.mean())
    return {name: torch.stack(of_distances) / means["plain"][0] for name, of_distances in means.items()}


class Decay(Benchmark):
    name = "decay"
    point = Weight

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        models = "a trained model with linear layers: a folder of save_pretrained or a checkpoint"
        add("--model", type=Path, help=f"{models} (default: the bound alone)")
        add("--longest", type=int, default=256, help="longest distance (default: 256)")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        """`trained` is added: the model, or None."""
        options.trained = None
        if options.model is None:
            return
        options.trained = read_byte_model(parser, options.model, f"--longest {options.longest}", 4 * options.longest)
        if "linear" not in options.trained.config.attention_types:
            parser.error(f"--model {options.model}: none of its layers is linear, so it has no numerators to measure")
        available = len(held_out()) // (4 * N_ROWS)
        if options.longest > available:
            parser.error(f"--longest {options.longest}: the text allows distances up to {available}")

    @property
    def title(self) -> str:
        model = f": {self.options.model.stem}" if self.options.model else ""
        return f"How attention fades with distance{model}"

    @torch.no_grad()
    def measure(self) -> None:
        """The weights of every linear layer are those on text of the built-in corpus that the grids hold out."""
        model, longest = self.options.trained, self.options.longest
        self.points += [Weight("bound", -1, d, w) for d, w in enumerate(bound(torch.arange(longest + 1)).tolist())]
        if model is None:
            return
        tick = self.progress("layers", model.config.attention_types.count("linear"))

        def observe(call: OperatorCall) -> None:
            rope, log_decay = call.options["rope"], call.options["log_decay"]
            signed = 0 if rope is None else rope.signed_dim
            phi = skip_first(get_feature_map(call.options["feature_map"]), signed).forward
            for curve, means in mean_weights(phi(call.q), phi(call.k), rope, log_decay, longest, signed).items():
                self.points += [Weight(curve, call.layer, d, w) for d, w in enumerate(means.tolist())]
            tick(advance=1)

        with operator_hook(model, observe):
            model(held_out().tokens(0, N_ROWS * 4 * longest).view(N_ROWS, -1))

    def table(self) -> Table:
        shown = [d for d in (0, 1, 4, 16, 64, 256) if d <= self.options.longest]
        caption = "bound: Σ |S_i| / (d/2); measured: as a share of the plain weight at distance 0"
        table = new_table(self.title, "layer", *map(str, shown), text=["curve"], caption=caption)
        for curve, layer in dict.fromkeys((w.curve, w.layer) for w in self.points):
            values = {w.distance: w.value for w in self.points if (w.curve, w.layer) == (curve, layer)}
            table.add_row(curve, "" if layer < 0 else str(layer + 1), *(f"{values[d]:.3f}" for d in shown))
        return table

    @property
    def message(self) -> str:
        """The weight at a distance of 64, or at the longest."""
        at = min(64, self.options.longest)
        left = defaultdict(list)
        for weight in self.points:
            if weight.distance == at and weight.curve in ("|rotated|", "rotated × decay"):
                left[weight.curve].append(weight.value)
        said = ", ".join(f"{curve} {100 * statistics.fmean(values):.0f} %" for curve, values in left.items())
        return f":\nrelative weight at a distance of {at} tokens, mean of the layers: {said}" if said else ""

    def figures(self) -> dict[str, Figure]:
        """A panel for the bound and one for each layer, two in a row."""
        from matplotlib.figure import Figure

        layers = sorted({w.layer for w in self.points})
        colors = dict(zip(dict.fromkeys(w.curve for w in self.points), COLORS))
        n_rows = -(-len(layers) // 2)
        figure = Figure(figsize=(9, 1 + 2.6 * n_rows), layout="constrained")
        panels = figure.subplots(n_rows, min(2, len(layers)), squeeze=False).flat
        for layer, axes in zip(layers, panels):
            for curve, color in colors.items():
                if values := [w.value for w in self.points if (w.layer, w.curve) == (layer, curve)]:
                    axes.plot(values, color=color, label=curve, linewidth=1.2)
            axes.set_title(f"bound, d = {HEAD_DIM}" if layer < 0 else f"layer {layer + 1}, measured", fontsize=10)
            axes.set_xlabel("distance (tokens)")
            axes.set_ylabel("Σ |S_i| / (d/2)" if layer < 0 else "relative weight")
            axes.axhline(0, color="black", linewidth=0.5)
            axes.grid(alpha=0.3)
        for axes in list(panels):
            axes.remove()
        lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
        figure.legend([lines[curve] for curve in colors], list(colors), loc="outside lower center", ncols=len(colors))
        figure.suptitle(f"{self.title}{self.message}")
        return {"": figure}


if __name__ == "__main__":
    sys.exit(Decay.main())
