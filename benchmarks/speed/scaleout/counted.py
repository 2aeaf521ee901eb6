"""Bytes that ranks send in one layer and direction, counted, beside the formula.

Every operation of torch.distributed that a layer calls is intercepted on gloo processes, with T tokens a rank and with
16·T. A count that differs from the formula, or between the two lengths, is an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness.options import check_heads
from benchmarks.harness.runner import AddOption
from benchmarks.speed.scaleout.part import Part
from benchmarks.speed.scaleout.ranks import Report, on_ranks
from benchmarks.speed.scaleout.volumes import INT64, state_bytes, tail_bytes, window_bytes
from linrope import LinearAttention, SoftmaxAttention
from linrope.distributed.group import SequenceGroup
from linrope.distributed.slices import SequenceSlice
from linrope.errors import InputError
from linrope.utils.terminal import new_table

GROWTH = 16
"""The longer slices are this many times as long."""
TAPS, WINDOW = 4, 9
GATHER, SCATTER, EXCHANGE = "all-gather", "reduce-scatter", "all-to-all"
SENT = {"allgather_": (GATHER, 1), "reduce_scatter_": (SCATTER, 0), "alltoall_base_": (EXCHANGE, 1)}
SENT |= {"_allgather_base_": (GATHER, 1), "_reduce_scatter_base_": (SCATTER, 0)}
"""Operations of c10d: their names here, and the argument that holds what a rank sends (in a reduce-scatter to each)."""
Message = tuple[str, int]
"""A collective and the bytes that a rank gives to it."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer: B rows of `width` channels, H heads."""

    rows: int
    heads: int
    width: int

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class Volume:
    """A message of a layer: who gets it, the formula in symbols, and its value."""

    part: str
    formula: str
    nbytes: Callable[[Sizes], int]
    collectives: tuple[str, str] = (GATHER, SCATTER)

    def message(self, sizes: Sizes, direction: str, rank: int, ranks: int) -> Message:
        """What a rank sends. Tails and windows go to the next rank, and their gradients to the one before."""
        forward = direction == "forward"
        sends = self.collectives[0] == GATHER or (rank < ranks - 1 if forward else rank > 0)
        return self.collectives[not forward], self.nbytes(sizes) if sends else 0


STATE = Volume("state", "B·H·(D·E + D + 1)·4", lambda s: state_bytes(s.rows, s.heads, s.head_dim, s.head_dim))
TAIL = Volume(
    "tail",
    "B·(taps - 1)·3·d·4",
    lambda s: tail_bytes(s.rows, 3 * s.width, TAPS),
    (EXCHANGE, EXCHANGE),
)
KEYS = Volume(
    "window",
    "B·(window - 1)·H·(D + E)·4",
    lambda s: window_bytes(s.rows, s.heads, s.head_dim, s.head_dim, WINDOW),
    (EXCHANGE, EXCHANGE),
)
LAYERS: dict[str, tuple[Callable[[Sizes], nn.Module], tuple[Volume, ...]]] = {
    "linear": (lambda s: LinearAttention(s.width, s.heads, forget_gate=True), (STATE,)),
    "linear, convolution": (lambda s: LinearAttention(s.width, s.heads, short_conv=TAPS), (STATE, TAIL)),
    "softmax, window": (lambda s: SoftmaxAttention(s.width, s.heads, window=WINDOW), (KEYS,)),
}
HEADER = ("all-gather", 5 * INT64)
"""Once in a forward, before the first layer: five numbers of each slice."""


class Sent(TorchDispatchMode):
    """Notes each operation of torch.distributed that is called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if operator.namespace == "c10d":
            name = operator.__name__.partition(".")[0]
            if name not in SENT:
                raise RuntimeError(f"{operator} is counted nowhere: add it to SENT.")
            collective, place = SENT[name]
            given = [args[place]] if isinstance(args[place], Tensor) else args[place]
            self.messages.append((collective, sum(x.nbytes for x in given)))
        return operator(*args, **kwargs or {})


@dataclass
class Count:
    """A row of the table: what a rank sends in one layer and direction. Bytes are those of the rank that sends most."""

    layer: str
    direction: str
    part: str
    collective: str
    formula: str
    formula_bytes: int
    bytes_at_length: int
    bytes_at_16_times: int


def traffic(report: Report, sizes: Sizes, length: int) -> dict[tuple[str, str], list[Message]]:
    """By layer and direction, the messages of this rank, in order."""
    group, found = SequenceGroup(), {}
    for name, (make, _) in LAYERS.items():
        torch.manual_seed(0)
        layer, x = make(sizes), torch.randn(sizes.rows, length, sizes.width, requires_grad=True)
        with Sent() as slices:
            where = SequenceSlice.of(group, tuple(x.shape[:2]), x.device)
        with Sent() as forward:
            y = layer(x, where.state_before())
        with Sent() as backward:
            y.sum().backward()
        found |= {(name, "slices"): slices.messages, (name, "forward"): forward.messages}
        found[name, "backward"] = backward.messages
        report()
    return found


def counts(sizes: Sizes, short: list[dict], long: list[dict]) -> list[Count]:
    """The table, from what `traffic` returned on each rank at T and at 16·T.

    Raises:
        InputError: a rank sent something else than the formulas say.
    """
    rows = []
    for of_ranks in (short, long):
        for rank, found in enumerate(of_ranks):
            check(found, sizes, rank, len(of_ranks))
    for name, (_, volumes) in LAYERS.items():
        for direction in ("forward", "backward"):
            for volume in volumes:
                expected = [volume.message(sizes, direction, rank, len(short)) for rank in range(len(short))]
                most = max(range(len(short)), key=lambda rank, expected=expected: expected[rank][1])
                seen = [_counted(of_ranks[most][name, direction], expected[most]) for of_ranks in (short, long)]
                collective, nbytes = expected[most]
                rows.append(Count(name, direction, volume.part, collective, volume.formula, nbytes, *seen))
    return rows


def _counted(messages: list[Message], expected: Message) -> int:
    """The bytes of the message that is this one: the nearest of its collective."""
    collective, nbytes = expected
    return min((n for name, n in messages if name == collective), key=lambda n: abs(n - nbytes))


def check(found: dict[tuple[str, str], list[Message]], sizes: Sizes, rank: int, ranks: int) -> None:
    """Raise InputError unless a rank's messages are exactly those of the formulas, for each layer and direction."""
    for name, (_, volumes) in LAYERS.items():
        expected = {"slices": [HEADER]}
        for direction in ("forward", "backward"):
            expected[direction] = [volume.message(sizes, direction, rank, ranks) for volume in volumes]
        for direction, messages in expected.items():
            if sorted(found[name, direction]) != sorted(messages):
                raise InputError(
                    f"{name}, {direction}: rank {rank} of {ranks} sent {found[name, direction]}, the formulas say "
                    f"{messages}: correct the formulas here and in docs/scale-out.md, or the layer."
                )


def pairs(points: list[Count]) -> list[tuple[Count, Count]]:
    """The rows of both directions of each message."""
    forward, backward = ([p for p in points if p.direction == one] for one in ("forward", "backward"))
    return list(zip(forward, backward))


class Counted(Part):
    """`python -m benchmarks.scaleout counted`."""

    part = "counted"
    point = Count

    @classmethod
    def add_part_options(cls, add: AddOption) -> None:
        add("--processes", type=int, default=4, help="gloo processes (default: 4)")
        add("--length", type=int, default=64, help=f"tokens of a slice; {GROWTH} times as many too (default: 64)")
        add("--rows", type=int, default=2)
        add("--d_model", type=int, default=96)
        add("--heads", type=int, default=3)

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        if options.processes < 2:
            parser.error(f"--processes {options.processes}: one process sends nothing; pass 2 or more")
        if options.length < WINDOW:
            parser.error(f"--length {options.length}: must be the window of {WINDOW} tokens at least")
        check_heads(parser, options)

    def sizes(self) -> Sizes:
        return Sizes(self.options.rows, self.options.heads, self.options.d_model)

    def measure(self) -> None:
        lengths = (self.options.length, GROWTH * self.options.length)
        tick = self.progress("counting", len(lengths) * len(LAYERS))
        advance = partial(tick, advance=1)
        found = [on_ranks(self.options.processes, traffic, self.sizes(), n, tick=advance) for n in lengths]
        self.points += counts(self.sizes(), *found)

    def table(self) -> Table:
        o, sizes = self.options, self.sizes()
        table = new_table(
            f"Counted: bytes of a rank in one layer, B = {o.rows}, d = {o.d_model}, H = {o.heads}, D = E = "
            f"{sizes.head_dim},\n{TAPS} taps, window {WINDOW}, float32; {o.processes} processes",
            *("formula", "bytes", "forward", "backward"),
            text=("layer", "what"),
            caption=f"the same with {o.length:,} and {GROWTH * o.length:,} tokens a rank\n"
            "state: all-gather and reduce-scatter; tail, window: to one neighbour",
        )
        for forward, backward in pairs(self.points):
            seen = (forward.formula_bytes, forward.bytes_at_16_times, backward.bytes_at_16_times)
            table.add_row(forward.layer, forward.part, forward.formula, *(f"{n:,}" for n in seen))
        return table

    def remarks(self) -> list[str]:
        return [f"besides {HEADER[1]} bytes of each rank once in a forward, for the lengths of the slices"]
