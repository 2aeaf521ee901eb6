"""Time of a training step on 8 to 1,024 GPUs for rows of 1M to 1B tokens, from rates and latencies: not measured.

All GPUs share one row. The model is in model.py, the volumes and the papers are in volumes.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from rich.table import Table

from benchmarks.harness.pictures import COLORS, Axes, Figure, legend_by_end, new_axes
from benchmarks.harness.runner import AddOption
from benchmarks.speed.scaleout import model
from benchmarks.speed.scaleout.model import LASP2, LINROPE, RING, ULYSSES, Machine, Step, Transformer
from benchmarks.speed.scaleout.part import Part
from linrope.utils.formatting import bytes_text, scaled
from linrope.utils.terminal import new_table

METHODS = (LINROPE, LASP2, RING, ULYSSES)
GPU_MEMORY = 80e9
TICKS = {0.001: "1 ms", 0.01: "10 ms", 0.1: "100 ms", 1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h"}
TICKS |= {86400: "1 day", 864000: "10 days", 8.64e6: "100 days", 8.64e7: "1,000 days"}
"""Times on an axis."""


class Modelled(Part):
    """`python -m benchmarks.scaleout modelled`."""

    part = "modelled"
    point = Step

    @classmethod
    def add_part_options(cls, add: AddOption) -> None:
        gpus, tokens = [2**n for n in range(3, 11)], [2**n for n in range(20, 31)]
        add("--gpus", type=int, nargs="+", default=gpus, help="default: 8 to 1024")
        add("--tokens", type=int, nargs="+", default=tokens, help="tokens of the row (default: 1048576 to 1073741824)")
        add("--layers", type=int, default=24)
        add("--d_model", type=int, default=2048)
        add("--heads", type=int, default=16)
        add("--vocab", type=int, default=50_304)
        add("--chunk", type=int, default=128, help="tokens of a chunk of linear attention (default: 128)")
        add("--peak", type=float, default=model.PEAK, help="FLOP/s of a GPU (default: 989.4e12, H100 SXM, bfloat16)")
        add("--utilisation", type=float, default=model.UTILISATION, help="share of it that is reached (default: 0.4)")
        add("--node", type=int, default=model.NODE, help="GPUs that NVLink connects (default: 8)")
        add("--nvlink", type=float, default=model.NVLINK, help="bytes/s of a GPU, one direction (default: 450e9)")
        add("--network", type=float, default=model.NETWORK, help="bytes/s of a GPU, one direction (default: 50e9)")
        add("--start", type=float, default=model.START, help="seconds to start a collective (default: 8.4e-6)")
        add("--nvlink_step", type=float, default=model.NVLINK_STEP, help="seconds of a step (default: 3.4e-6)")
        add("--network_step", type=float, default=model.NETWORK_STEP, help="seconds of a step (default: 9.6e-6)")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        options.gpus, options.tokens = sorted(set(options.gpus)), sorted(set(options.tokens))
        if options.d_model % options.heads:
            parser.error(f"--heads {options.heads}: does not divide --d_model {options.d_model}")
        if options.gpus[0] < 2:
            parser.error(f"--gpus {options.gpus[0]}: one GPU sends nothing; pass 2 or more")
        for gpus in options.gpus:
            if gpus > options.node and gpus % options.node:
                parser.error(f"--gpus {gpus}: must be whole nodes of {options.node}")
        if options.utilisation > 1:
            parser.error(f"--utilisation {options.utilisation}: must be at most 1")

    def transformer(self) -> Transformer:
        o = self.options
        return Transformer(o.layers, o.d_model, o.heads, o.vocab, o.chunk)

    def measure(self) -> None:
        o, transformer = self.options, self.transformer()
        names = ("peak", "utilisation", "node", "nvlink", "network", "start", "nvlink_step", "network_step")
        machine = Machine(**{name: getattr(o, name) for name in names})
        for gpus in o.gpus:
            for tokens in o.tokens:
                for method in METHODS:
                    if model.is_possible(method, transformer, gpus):
                        self.points.append(model.step(method, transformer, machine, gpus, tokens))

    def details(self) -> dict[str, Any]:
        return {"kind": "modelled, not measured", "parameters": self.transformer().parameters}

    def at(self, method: str, gpus: int, tokens: int) -> Step | None:
        found = (p for p in self.points if (p.method, p.gpus, p.tokens) == (method, gpus, tokens))
        return next(found, None)

    def table(self) -> Table:
        o, size = self.options, self.transformer().parameters
        table = new_table(
            f"Modelled, not measured: a step of a {size / 1e9:.1f}B-parameter model on one row",
            *("GPUs", "tokens", *METHODS),
            caption="from all communication hidden to none; Ulysses needs a head for each GPU",
        )
        for gpus in some(o.gpus):
            for tokens in some(o.tokens):
                found = [self.at(method, gpus, tokens) for method in METHODS]
                cells = ("" if p is None else span_text(p.seconds_low, p.seconds_high) for p in found)
                table.add_row(f"{gpus:,}", tokens_text(tokens), *cells)
        return table

    def remarks(self) -> list[str]:
        o = self.options
        if self.interrupted:
            return []
        sent = [self.at(method, o.gpus[-1], o.tokens[-1]).bytes_sent for method in (LINROPE, RING)]
        lines = [
            f"at {tokens_text(o.tokens[-1])} tokens each of {o.gpus[-1]:,} GPUs sends {bytes_text(sent[0])} in a step "
            f"with linrope, {bytes_text(sent[1])} with ring attention"
        ]
        inputs = o.tokens[-1] / o.gpus[-1] * o.layers * o.d_model * 2
        if inputs > GPU_MEMORY:
            lines.append(
                f"memory is not modelled: at {tokens_text(o.tokens[-1])} tokens the inputs of the blocks alone take "
                f"{bytes_text(inputs)} of each of {o.gpus[-1]:,} GPUs, so that such rows need segments or offloading"
            )
        return lines

    def figures(self) -> dict[str, Figure]:
        return {"": against_tokens(self), "-gpus": against_gpus(self)}


def some(values: list[int]) -> list[int]:
    """The first, the middle and the last."""
    return sorted({values[0], values[len(values) // 2], values[-1]})


def tokens_text(tokens: float) -> str:
    """1M for 2²⁰, 1B for 2³⁰, as rows of such lengths are called."""
    return scaled(tokens, ["", "k", "M", "B"], 1024).replace(" ", "")


def span_text(low: float, high: float) -> str:
    """Both times in the unit of the longer one, or one if two digits do not tell them apart."""
    unit, name = unit_of(high)
    texts = [f"{x / unit:,.{0 if x >= 99.5 * unit else 1 if x >= 9.95 * unit else 2}f}" for x in (low, high)]
    return f"{texts[1]} {name}" if high < 1.01 * low else f"{texts[0]} – {texts[1]} {name}"


def time_text(seconds: float) -> str:
    return span_text(seconds, seconds)


def unit_of(seconds: float) -> tuple[float, str]:
    """The largest unit that is not above a time."""
    units = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
    return next((one for one in units if seconds >= one[0]), (1e-3, "ms"))


def curve(axes: Axes, points: Iterable[Step], x: str, label: str, color: str, style: str = "-") -> None:
    """A line at the upper bound and a band down to the lower one."""
    points = list(points)
    at = [getattr(p, x) for p in points]
    axes.plot(at, [p.seconds_high for p in points], color=color, linestyle=style, label=label)
    axes.fill_between(at, [p.seconds_low for p in points], [p.seconds_high for p in points], color=color, alpha=0.2)


def time_axes(title: str, ticks: list[int], text: Any) -> Axes:
    """Axes with powers of two below and times at the left, both logarithmic."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes = new_axes(title)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axes.yaxis.set_major_locator(FixedLocator(list(TICKS)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: TICKS[value]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("time of a step\n(line: nothing overlapped, band: all)")
    return axes


def against_tokens(run: Modelled) -> Figure:
    """Time against the tokens: linear attention and ring attention on few, some and many GPUs."""
    gpus, tokens = some(sorted({p.gpus for p in run.points})), sorted({p.tokens for p in run.points})
    linear, softmax = (run.at(method, gpus[-1], tokens[-1]) for method in (LINROPE, RING))
    title = (
        f"Modelled: a step on {tokens_text(tokens[-1])} tokens and {gpus[-1]:,} GPUs takes\n"
        f"{time_text(linear.seconds_high)} with linear attention, {time_text(softmax.seconds_high)} with ring attention"
    )
    axes = time_axes(title, tokens[::2], tokens_text)
    colors = iter(COLORS)
    for method, name, style in ((RING, "ring attention", "--"), (LINROPE, "linrope, LASP-2", "-")):
        for count in gpus:
            points = [p for p in run.points if (p.method, p.gpus) == (method, count)]
            curve(axes, points, "tokens", f"{name}, {count:,} GPUs", next(colors), style)
    axes.set_xlabel("tokens in the row")
    legend_by_end(axes)
    return axes.figure


def against_gpus(run: Modelled) -> Figure:
    """Time of the shortest row against the number of GPUs."""
    gpus, tokens = sorted({p.gpus for p in run.points}), min(p.tokens for p in run.points)
    best = min((run.at(LINROPE, n, tokens) for n in gpus), key=lambda p: p.seconds_high)
    gains = "gains nothing from more than" if best.gpus < gpus[-1] else "gains from each of"
    title = f"Modelled: with linear attention a row of {tokens_text(tokens)} tokens\n{gains} {best.gpus:,} GPUs"
    axes = time_axes(title, gpus, lambda n: f"{n:,.0f}")
    names = {LINROPE: "linrope, LASP-2", RING: "ring attention", ULYSSES: "Ulysses (one head\nfor each GPU)"}
    for (method, name), color in zip(names.items(), COLORS):
        points = [p for p in run.points if (p.method, p.tokens) == (method, tokens)]
        if points:
            curve(axes, points, "gpus", name, color)
    axes.set_xlabel("GPUs that share the row")
    legend_by_end(axes)
    return axes.figure
