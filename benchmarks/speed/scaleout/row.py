"""Peak memory of four processes that train on one row of 4,194,304 tokens, in segments that they share.

A step is forward, backward, the sum of the gradients over the processes, and AdamW, with one thread each. The peak is
that of each whole process, PyTorch included. The command fails if one takes more than --memory.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from benchmarks.harness import memory
from benchmarks.harness.options import check_heads, parse_bytes
from benchmarks.harness.runner import AddOption
from benchmarks.speed.scaleout.part import Part
from benchmarks.speed.scaleout.ranks import Report, on_ranks
from linrope import LanguageModel, LanguageModelConfig
from linrope.distributed.group import SequenceGroup
from linrope.distributed.segments import sequence_parallel_segmented_loss, tokens_of_rank
from linrope.utils.formatting import bytes_text
from linrope.utils.terminal import new_table, progress_bar


@dataclass
class Peak:
    """A row of the table: one process. Loss in nats a token, of the whole row."""

    rank: int
    tokens: int
    memory_bytes: int
    seconds: float
    loss: float


def step_of(config: LanguageModelConfig, length: int, segment_length: int, report: Report) -> Callable[[], Tensor]:
    """A training step of this rank on its part of a random row; it returns the loss of the row in nats a token."""
    torch.manual_seed(0)
    group, model = SequenceGroup(), LanguageModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    row = torch.randint(config.vocab_size, (1, length + 1))
    mine = tokens_of_rank(length, segment_length, group)
    tokens, targets = row[:, mine], row[:, mine + 1]
    model.embedding.register_forward_hook(lambda *_: report())  # once in the forward and once in the backward

    def step() -> Tensor:
        loss, _ = sequence_parallel_segmented_loss(model, tokens, targets, segment_length, group=group)
        (loss / length).backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        total = loss.detach() / length
        dist.all_reduce(total)
        return total

    return step


def peak_of_rank(report: Report, config: LanguageModelConfig, length: int, segment_length: int) -> Peak:
    """The peak of this process, after a short step that makes what a process keeps."""
    ranks, losses = dist.get_world_size(), []
    step_of(config, ranks * memory.WARM_UP, memory.WARM_UP, lambda: None)()

    def prepare() -> Callable[[], None]:
        step = step_of(config, length, segment_length, report)
        return lambda: losses.append(step().item())

    peak = memory.peak_of(prepare, "cpu")
    tokens = len(tokens_of_rank(length, segment_length, SequenceGroup()))
    return Peak(dist.get_rank(), tokens, peak.process, peak.seconds, losses[0])


class Row(Part):
    """`python -m benchmarks.scaleout row`."""

    part = "row"
    point = Peak

    @classmethod
    def add_part_options(cls, add: AddOption) -> None:
        add("--processes", type=int, default=4, help="default: 4")
        add("--length", type=int, default=4_194_304, help="tokens of the row (default: 4194304)")
        add("--segment_length", type=int, default=8192, help="tokens of a segment on each process (default: 8192)")
        add("--layers", type=int, default=2)
        add("--d_model", type=int, default=64)
        add("--heads", type=int, default=2)
        add("--memory", type=parse_bytes, default=2**31, help="most that a process may take (default: 2 GiB)")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        """`config` is added."""
        rest = options.length % (options.processes * options.segment_length)
        if 0 < rest < options.processes:
            parser.error(
                f"--length {options.length}: leaves {rest} tokens to the last segment, too few for all processes"
            )
        check_heads(parser, options)
        options.config = LanguageModelConfig(
            d_model=options.d_model, n_layers=options.layers, n_heads=options.heads, short_conv=4, forget_gate=True
        )

    def measure(self) -> None:
        o = self.options
        console = Console(stderr=True)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self.bar = progress_bar(console, *columns)
        self.bar.start()
        segments = 2 * math.ceil(o.length / (o.processes * o.segment_length))
        task = self.bar.add_task("segments, forward and backward", total=segments)
        advance = partial(self.bar.advance, task)
        arguments = (o.config, o.length, o.segment_length)
        self.points += on_ranks(o.processes, peak_of_rank, *arguments, tick=advance)

    def details(self) -> dict[str, Any]:
        return {"model": self.options.config.to_dict()}

    def table(self) -> Table:
        o = self.options
        table = new_table(
            f"Measured: a training step on one row of {o.length:,} tokens, {o.layers} layers, d_model {o.d_model}\n"
            f"{self.device}",
            *("process", "tokens", "peak memory", "seconds", "tokens/s of the row"),
            caption=f"whole processes, PyTorch included; segments of {o.processes} × {o.segment_length:,} tokens",
        )
        for p in self.points:
            rate = f"{o.length / p.seconds:,.0f}"
            table.add_row(f"{p.rank}", f"{p.tokens:,}", bytes_text(p.memory_bytes), f"{p.seconds:,.0f}", rate)
        return table

    def remarks(self) -> list[str]:
        if not self.points:
            return []
        most, limit = max(p.memory_bytes for p in self.points), self.options.memory
        verdict = "within" if most <= limit else "more than"
        uniform = math.log(self.options.config.vocab_size)
        loss = f"loss {self.points[0].loss:.3f} nats a token (a uniform guess: {uniform:.3f})"
        return [f"{verdict} {bytes_text(limit)} a process; {loss}"]

    def status(self) -> int:
        return int(any(p.memory_bytes > self.options.memory for p in self.points))
