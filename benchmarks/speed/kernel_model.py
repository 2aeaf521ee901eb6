"""Bytes and FLOPs of each kernel of the CUDA backend, counted from its grid and its tiles, without a GPU.

Bytes are those that the programs of a launch read and write, each tile once; small tables that all programs share are
counted once a launch. FLOPs are those of the matrix products, whole tiles, for chunks as the first configuration has
them.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from torch import Tensor

from benchmarks.harness.runner import AddOption, Benchmark
from benchmarks.speed.gpu_correctness import Case
from benchmarks.speed.launches import Recorded, launches_of
from linrope.ops.triton_kernel.plan import CHUNK, cdiv
from linrope.utils.terminal import new_table

ITEM = 2
"""Bytes of a bfloat16."""


@dataclass(frozen=True)
class Cost:
    """What a launch reads, writes and multiplies."""

    read: int = 0
    written: int = 0
    flops: int = 0

    @property
    def bytes(self) -> int:
        return self.read + self.written

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.read + other.read, self.written + other.written, self.flops + other.flops)


@dataclass(frozen=True)
class Shape:
    """The sizes of a launch that marches through stretches: B·H rows of T tokens."""

    rows: int
    tokens: int
    stretches: int
    columns: int  # programs that split the values of one stretch
    features: int
    values: int
    tile: tuple[int, int, int]  # tokens, features and values of a program's products
    item: int = ITEM  # bytes of a number of q, k and v

    @classmethod
    def of(cls, launch: Recorded, x: Tensor) -> Shape:
        known = launch.constants
        columns = cdiv(known["E"], known["BLOCK_E"])
        tile = CHUNK, 2 * known["P"] * known["TILES"], known["BLOCK_E"]
        rows, tokens = x.shape[0] * x.shape[1], x.shape[2]
        stretches = launch.programs // (rows * columns)
        return cls(rows, tokens, stretches, columns, known["D"], known["E"], tile, x.element_size())

    @property
    def programs(self) -> int:
        return self.rows * self.stretches * self.columns

    @property
    def state(self) -> int:
        """Bytes of all states that are read or written once, with their sums."""
        return 4 * self.rows * self.stretches * self.features * (self.values + self.columns)

    def read(self, *, features: int = 0, values: int = 0, numbers: int = 0) -> int:
        """Bytes of reading so many tensors of features, of values, and of float32 numbers a token. Each program that
        has some of the values reads all features and numbers."""
        a_token = (
            self.item * (features * self.features * self.columns + values * self.values) + 4 * numbers * self.columns
        )
        return self.rows * self.tokens * a_token

    def flops(self, *, states: int = 0, features: int = 0, values: int = 0) -> int:
        """FLOPs of so many products of a chunk with a state, and of pairs within the chunk over features or values."""
        chunk, wide, deep = self.tile
        products = states * chunk * wide * deep + features * chunk**2 * wide + values * chunk**2 * deep
        return 2 * self.rows * self.columns * cdiv(self.tokens, chunk) * products


def cost_of(launch: Recorded) -> Cost:
    """The cost of one launch."""
    return COSTS[launch.kernel](launch)


def _stretch_sums(launch: Recorded) -> Cost:
    shape, known = Shape.of(launch, launch.args[0]), launch.constants
    numbers = 2 if known["LATER"] and known["PLAIN"] else 0
    read = shape.read(features=1, values=1, numbers=numbers + known["DECAY"])
    return Cost(read, shape.state, shape.flops(states=1))


def _scan(launch: Recorded) -> Cost:
    state, *others = launch.args[:5]
    first, last = others[:2], others[2:]
    slots = state.nbytes
    return Cost(slots * (state.shape[1] - 1) // state.shape[1] + _nbytes(first), slots + _nbytes(last))


def _attend(launch: Recorded) -> Cost:
    shape, known = Shape.of(launch, launch.args[0]), launch.constants
    causal, plain = known["CAUSAL"], known["PLAIN"]
    read = shape.read(features=1 + causal, values=causal, numbers=known["DECAY"]) + shape.state
    written = shape.read(values=1) + plain * 4 * shape.rows * shape.tokens
    of_features = causal * (1 + plain) + plain * (1 + causal)  # pairs; the sums of features are read, and grow
    return Cost(read, written, shape.flops(states=1 + causal, features=of_features, values=causal))


def _query_gradients(launch: Recorded) -> Cost:
    shape, known = Shape.of(launch, launch.args[0]), launch.constants
    causal, plain = known["CAUSAL"], known["PLAIN"]
    read = shape.read(features=1 + causal, values=1 + causal + plain, numbers=plain + known["DECAY"]) + shape.state
    written = _gradient(shape, known) + plain * 4 * shape.rows * shape.tokens
    of_features = causal * (1 + plain) + plain * (1 + causal)
    return Cost(read, written, shape.flops(states=1 + causal, features=of_features, values=causal))


def _key_gradients(launch: Recorded) -> Cost:
    shape, known = Shape.of(launch, launch.args[1]), launch.constants
    causal, plain = known["CAUSAL"], known["PLAIN"]
    numbers = 2 * plain * causal + known["DECAY"]
    read = shape.read(features=1 + causal, values=1 + causal, numbers=numbers) + shape.state
    written = _gradient(shape, known) + shape.read(values=1)
    of_features = causal * (2 + plain) + known["SUMS"] + causal * plain
    return Cost(read, written, shape.flops(states=2 + causal, features=of_features, values=2 * causal))


def _gradient(shape: Shape, known: dict[str, Any]) -> int:
    """Bytes of writing ∂q or ∂k, or its parts in float32."""
    return shape.rows * shape.tokens * shape.features * (4 * shape.columns if known["PARTIAL"] else shape.item)


def _all_of(reads: slice, writes: slice):
    """A kernel that reads and writes whole tensors."""
    return lambda launch: Cost(_nbytes(launch.args[reads]), _nbytes(launch.args[writes]))


def _nbytes(tensors: Iterable[Any]) -> int:
    return sum(x.nbytes for x in tensors if isinstance(x, Tensor))


COSTS = {
    "stretch_sums": _stretch_sums,
    "scan": _scan,
    "attend": _attend,
    "query_gradients": _query_gradients,
    "key_gradients": _key_gradients,
    "write_angles": _all_of(slice(0, 1), slice(1, 2)),
    "finish_features": _all_of(slice(0, 2), slice(2, 3)),
    "finish_log_decay": lambda launch: Cost(_nbytes((*launch.args[:2], *launch.args[3:5])), launch.args[2].nbytes),
    "decode": lambda launch: Cost(_nbytes((*launch.args[:3], *launch.args[4:6])), _nbytes(launch.args[3:8:2])),
}


@dataclass(frozen=True)
class Model:
    """One call, forward and backward: its launches and what they cost."""

    case: Case
    forward: list[tuple[str, Cost]]
    both: list[tuple[str, Cost]]

    @classmethod
    def of(cls, case: Case) -> Model:
        forward, both = (
            [(launch.role, cost_of(launch)) for launch in launches_of(case, "meta", backward)]
            for backward in (False, True)
        )
        return cls(case, forward, both)

    def traffic(self, backward: bool) -> float:
        """Bytes over those of reading or writing each tensor once: q, k, v and o; with gradients twice as many."""
        case, costs = self.case, self.both if backward else self.forward
        a_token = ITEM * 2 * (case.dim + case.width) * (2 if backward else 1)
        return sum(cost.bytes for _, cost in costs) / (a_token * case.batch * case.heads * case.length)

    @property
    def flops(self) -> float:
        """Of the forward, a token and head."""
        case = self.case
        return sum(cost.flops for _, cost in self.forward) / (case.batch * case.heads * case.length)

    @property
    def by_role(self) -> dict[str, Cost]:
        """Forward and backward."""
        found: dict[str, Cost] = defaultdict(Cost)
        for role, cost in self.both:
            found[role] += cost
        return dict(found)


class KernelModel(Benchmark):
    name = "kernel_model"
    output = ""

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        add("--length", type=int, default=65_536, help="tokens of a row (default: %(default)s)")
        add("--heads", type=int, default=16, help="rows times heads (default: %(default)s)")
        add("--dims", type=int, nargs="+", default=[64, 128], help="sizes of a head (default: 64 128)")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        if max(options.dims) > 256:
            parser.error("--dims: the kernels take heads of at most 256")

    def measure(self) -> None:
        sizes = {"batch": 1, "heads": self.options.heads, "length": self.options.length}
        self.points.extend(Model.of(Case(dim=dim, width=dim, **sizes)) for dim in self.options.dims)

    def table(self) -> Table:
        table = new_table("modelled kernels", "read MB", "written MB", "MFLOPs", text=["D", "kernel"])
        for model in self.points:
            for role, cost in model.by_role.items():
                numbers = (f"{one / 1e6:,.1f}" for one in (cost.read, cost.written, cost.flops))
                table.add_row(str(model.case.dim), role, *numbers)
        return table

    def remarks(self) -> list[str]:
        return [
            f"D={model.case.dim}: traffic over each tensor once: forward {model.traffic(False):.3f}, with backward "
            f"{model.traffic(True):.3f}; forward {model.flops / 1e3:.1f}k FLOPs a token and head; "
            f"{len(model.both)} launches"
            for model in self.points
        ]


if __name__ == "__main__":
    sys.exit(KernelModel.main())
