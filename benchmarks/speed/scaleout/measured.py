"""Time of a training step on 1, 2 and 4 gloo processes of this machine, one thread each.

Strong scaling: one row of fixed length, which the processes share. Weak scaling: slices of fixed length, so that the
row grows with the processes. One process reads the row as any model does. A step is forward, backward and the sum of
the gradients over the processes. All cases run in turn, round after round; the processes that a case does not use wait.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from benchmarks.harness.options import check_heads
from benchmarks.harness.pictures import COLORS, MARKERS, Figure, legend_by_end, new_axes
from benchmarks.harness.runner import AddOption
from benchmarks.harness.timing import Sample, milliseconds_text
from benchmarks.speed.scaleout.part import Part
from benchmarks.speed.scaleout.ranks import Report, on_ranks
from linrope import LanguageModel, LanguageModelConfig
from linrope.distributed.group import SequenceGroup
from linrope.distributed.sequence import sequence_parallel_loss
from linrope.utils.memory import keep_freed_memory
from linrope.utils.terminal import new_table

STRONG, WEAK = "strong", "weak"


@dataclass(frozen=True)
class Case:
    """A step: how many processes share a row of how many tokens."""

    scaling: str
    processes: int
    tokens: int


@dataclass
class Scaling:
    """A row of the table. Seconds are medians of the rounds; CPU seconds are summed over the processes of the case."""

    scaling: str
    processes: int
    tokens: int
    seconds: float
    seconds_q1: float
    seconds_q3: float
    cpu_seconds: float
    rounds: int
    tokens_per_second: float
    cores: int


def step_of(case: Case, config: LanguageModelConfig, group: SequenceGroup) -> Callable[[], None]:
    """One training step of this rank without the optimizer."""
    torch.manual_seed(0)
    model, row = LanguageModel(config), torch.randint(config.vocab_size, (1, case.tokens + 1))
    tokens, targets = (x.tensor_split(group.size, dim=1)[group.rank] for x in (row[:, :-1], row[:, 1:]))

    def step() -> None:
        model.zero_grad()
        if group.size == 1:
            loss = model(tokens, targets=targets)
        else:
            loss, _ = sequence_parallel_loss(model, tokens, targets, group=group)
        (loss / case.tokens).backward()
        if group.size > 1:
            for weight in model.parameters():
                dist.all_reduce(weight.grad, group=group.process_group)

    return step


def time_rank(
    report: Report, cases: list[Case], config: LanguageModelConfig, rounds: int
) -> list[list[tuple[float, float]]]:
    """(seconds, CPU seconds) of this rank, by case and round without the first; a case without this rank has none.

    Seconds go from a barrier of the case's processes to the next.
    """
    keep_freed_memory()
    groups = {n: dist.new_group(range(n)) for n in sorted({case.processes for case in cases})}
    rank = dist.get_rank()
    mine = {case: SequenceGroup(groups[case.processes]) for case in cases if rank < case.processes}
    steps = {case: step_of(case, config, group) for case, group in mine.items()}
    times: list[list[tuple[float, float]]] = [[] for _ in cases]
    for number in range(rounds + 1):
        for index, case in enumerate(cases):
            if case in mine:
                seconds = clock(steps[case], mine[case])
                times[index] += [seconds] * (number > 0)
            dist.barrier()
            report()
    return times


def clock(step: Callable[[], None], group: SequenceGroup) -> tuple[float, float]:
    """Seconds and CPU seconds of a step that all ranks of a group take."""
    dist.barrier(group.process_group)
    begin, cpu = time.perf_counter(), time.process_time()
    step()
    cpu = time.process_time() - cpu
    dist.barrier(group.process_group)
    return time.perf_counter() - begin, cpu


def result(case: Case, of_ranks: list[list[tuple[float, float]]]) -> Scaling:
    """The medians of a case, from each of its ranks' rounds."""
    sample = Sample(tuple(seconds for seconds, _ in of_ranks[0]))
    cpu = statistics.median(sum(cpu for _, cpu in of_round) for of_round in zip(*of_ranks))
    times = (sample.median, *sample.quartiles, cpu, len(sample.rounds))
    return Scaling(case.scaling, case.processes, case.tokens, *times, case.tokens / sample.median, os.cpu_count())


class Measured(Part):
    """`python -m benchmarks.scaleout measured`."""

    part = "measured"
    point = Scaling

    @classmethod
    def add_part_options(cls, add: AddOption) -> None:
        add("--processes", type=int, nargs="+", default=[1, 2, 4], help="default: 1 2 4")
        add("--length", type=int, default=16384, help="tokens of the row that all share (default: 16384)")
        add("--slice", type=int, default=4096, help="tokens of each process in weak scaling (default: 4096)")
        add("--layers", type=int, default=4)
        add("--d_model", type=int, default=128)
        add("--heads", type=int, default=4)
        add("--repeats", type=int, default=7, help="rounds that count, after one for warm-up (default: 7)")
        add("--quick", action="store_true", help="small sizes, to see that it works")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        """`config` is added."""
        if options.quick:
            options.length, options.slice, options.layers, options.d_model, options.repeats = 256, 64, 1, 32, 1
        options.processes = sorted({1, *options.processes})
        if options.length < options.processes[-1]:
            parser.error(f"--length {options.length}: each of {options.processes[-1]} processes needs a token")
        check_heads(parser, options)
        options.config = LanguageModelConfig(
            d_model=options.d_model, n_layers=options.layers, n_heads=options.heads, short_conv=4, forget_gate=True
        )

    def cases(self) -> list[Case]:
        o = self.options
        strong = [Case(STRONG, n, o.length) for n in o.processes]
        return strong + [Case(WEAK, n, n * o.slice) for n in o.processes]

    def measure(self) -> None:
        o, cases = self.options, self.cases()
        tick = self.progress("training steps", len(cases) * (o.repeats + 1))
        of_ranks = on_ranks(o.processes[-1], time_rank, cases, o.config, o.repeats, tick=partial(tick, advance=1))
        for index, case in enumerate(cases):
            self.points.append(result(case, [times[index] for times in of_ranks[: case.processes]]))

    def details(self) -> dict[str, Any]:
        return {"model": self.options.config.to_dict()}

    def table(self) -> Table:
        o, cores = self.options, os.cpu_count()
        table = new_table(
            f"Measured: a training step, {o.layers} layers, d_model {o.d_model}, gloo, one thread a process\n"
            f"{self.device}",
            *("processes", "tokens", "ms", "spread", "tokens/s", "speed-up", "work"),
            text=("scaling",),
            caption="speed-up: tokens per second against one process. work: CPU time of all\n"
            f"processes for a token, against one process. This machine has {cores} cores: above {cores}\n"
            "processes the speed-up cannot rise, and only the work says something.",
        )
        for p in self.points:
            spread = (p.seconds_q3 - p.seconds_q1) / p.seconds
            numbers = (f"{p.processes}", f"{p.tokens:,}", milliseconds_text(p.seconds), f"{spread:.0%}")
            ratios = (f"{self.speed_up(p):.2f}", f"{self.work(p):.2f}")
            table.add_row(p.scaling, *numbers, f"{p.tokens_per_second:,.0f}", *ratios)
        return table

    def _first(self, point: Scaling) -> Scaling:
        return next(p for p in self.points if p.scaling == point.scaling)

    def speed_up(self, point: Scaling) -> float:
        return point.tokens_per_second / self._first(point).tokens_per_second

    def work(self, point: Scaling) -> float:
        first = self._first(point)
        return point.cpu_seconds / point.tokens / (first.cpu_seconds / first.tokens)

    def figures(self) -> dict[str, Figure]:
        return {"": picture(self)}


def picture(run: Measured) -> Figure:
    """Speed-up against processes, beside the most that the cores allow."""
    cores, counts = run.points[0].cores, sorted({p.processes for p in run.points})
    share = max((p for p in run.points if p.processes <= cores), key=lambda p: (p.processes, p.scaling == STRONG))
    axes = new_axes(
        f"Measured: on {cores} cores {share.processes} processes train {run.speed_up(share):.2f} times as fast as one"
    )
    axes.plot(counts, [min(n, cores) for n in counts], color="grey", linestyle=":", label=f"{cores} cores at best")
    names = {STRONG: "one row of {:,} tokens", WEAK: "{:,} tokens a process"}
    for number, (scaling, label) in enumerate(names.items()):
        points = [p for p in run.points if p.scaling == scaling]
        label = label.format(points[0].tokens)
        speed_up = [run.speed_up(p) for p in points]
        style = {"color": COLORS[number], "marker": MARKERS[number]}
        axes.plot([p.processes for p in points], speed_up, label=f"{scaling} scaling:\n{label}", **style)
    axes.set_xticks(counts)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"gloo processes of one thread (above {cores} they share cores)")
    axes.set_ylabel("tokens per second, one process = 1")
    legend_by_end(axes)
    return axes.figure
