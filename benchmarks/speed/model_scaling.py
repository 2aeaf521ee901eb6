"""Training throughput of whole models with linear, softmax and hybrid attention, as the length grows.

A step is forward, backward and AdamW, over the same number of tokens at every length: longer rows are fewer.
In the hybrid every second layer has softmax attention. All models run in turn, round after round in one process.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from rich.table import Table

from benchmarks.harness.options import check_heads, check_names
from benchmarks.harness.pictures import Figure, Quantity, against_length
from benchmarks.harness.runner import AddOption, Benchmark
from benchmarks.harness.sweep import INTERRUPTED, MEASURED, Point, crossovers, series
from benchmarks.harness.training_step import training_step
from linrope import LanguageModelConfig
from linrope.utils.terminal import new_table

KINDS = ("linear", "softmax", "hybrid")


def layers_of(kind: str, n_layers: int) -> list[str]:
    """The attention of each layer; a hybrid alternates, linear first."""
    pattern = ("linear", "softmax") if kind == "hybrid" else (kind,)
    return [pattern[i % len(pattern)] for i in range(n_layers)]


class ModelScaling(Benchmark):
    name = "model_scaling"

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        lengths = [256 * 2**i for i in range(6)]
        add("--lengths", type=int, nargs="+", default=lengths, help="tokens in a row (default: 256 to 8192)")
        add("--tokens", type=int, default=8192, help="tokens in a step, at every length (default: 8192)")
        add("--attention", nargs="+", default=list(KINDS), help=f"some of {', '.join(KINDS)}")
        add("--layers", type=int, default=4)
        add("--d_model", type=int, default=256)
        add("--heads", type=int, default=4)
        add("--device", choices=["cpu", "cuda"], default="cpu")
        add("--repeats", type=int, default=5, help="rounds that count, after one for warm-up (default: 5)")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        """`config` is added: that of the linear model."""
        check_names(parser, "--attention", options.attention, KINDS)
        options.attention = list(dict.fromkeys(options.attention))
        options.lengths = sorted(set(options.lengths))
        for length in options.lengths:
            if options.tokens % length:
                parser.error(f"--lengths {length}: does not divide --tokens {options.tokens}, the tokens of every step")
        check_heads(parser, options)
        options.config = LanguageModelConfig(d_model=options.d_model, n_layers=options.layers, n_heads=options.heads)

    def measure(self) -> None:
        options = self.options
        rounds = (options.repeats + 1) * len(options.attention)
        tick = self.progress("training", len(options.lengths) * rounds)
        for length in options.lengths:
            points = {kind: Point(kind, length, options.tokens // length, INTERRUPTED) for kind in options.attention}
            self.points += points.values()
            steps = {}
            for kind in points:
                config = replace(options.config, attention=layers_of(kind, options.layers))
                steps[kind] = training_step(config, options.tokens // length, length, options.device)
            self.time_in_turn(steps, points, options.tokens, tick, f"{length:,} tokens: {{}}")

    def details(self) -> dict[str, Any]:
        return {"model": self.options.config.to_dict(), "crossover": self.crossovers()}

    def crossovers(self) -> dict[str, float]:
        return crossovers(self.points, ("linear", "hybrid"), "softmax")

    def model_name(self) -> str:
        o = self.options
        return f"{o.layers} layers, d_model {o.d_model}, {o.heads} heads, {o.tokens:,} tokens a step"

    def table(self) -> Table:
        options = self.options
        ratios = [kind for kind in options.attention if kind != "softmax" and "softmax" in options.attention]
        table = new_table(
            f"{self.model_name()}\n{self.device}",
            *("length", "rows", *options.attention, *(f"{kind} ×" for kind in ratios)),
            caption="tokens per second in training (median) ± interquartile range\n×: times those of the softmax model",
        )
        for length in sorted({p.length for p in self.points}):
            row = {p.method: p for p in self.points if p.length == length}
            speed = {kind: p.tokens_per_second for kind, p in row.items() if p.status == MEASURED}
            shown = [cell(p) for p in row.values()]
            faster = [f"{speed[k] / speed['softmax']:.2f}×" if {k, "softmax"} <= speed.keys() else "" for k in ratios]
            table.add_row(f"{length:,}", f"{options.tokens // length:,}", *shown, *faster)
        return table

    def figures(self) -> dict[str, Figure]:
        quantity = Quantity("tokens_per_second", "tokens per second in training", "count", {})
        speed = {kind: series(self.points, kind, "tokens_per_second") for kind in ("linear", "softmax")}
        title = f"Training speed: {self.model_name()}"
        if common := speed["linear"].keys() & speed["softmax"].keys():
            ratio = speed["linear"][max(common)] / speed["softmax"][max(common)]
            title = f"At {max(common):,} tokens the linear model trains {ratio:.1f} times as fast as the softmax model"
        marks = {f"{kind}\nfaster": length for kind, length in self.crossovers().items()}
        return {"": against_length(title, self.points, quantity, marks=marks)}


def cell(point: Point) -> str:
    if point.status != MEASURED:
        return f"[yellow]{point.status}[/yellow]"
    return f"{point.tokens_per_second:,.0f} ±{point.spread:3.0%}"


if __name__ == "__main__":
    sys.exit(ModelScaling.main())
