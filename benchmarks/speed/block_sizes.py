"""What the kernel's block sizes cost: its constants, one changed at a time, forward and backward.

    python -m benchmarks.block_sizes --length 4096

The settings run in turn in one process, batch 1 and 8 heads of 64 in float32; what is shown is the median, and the
ratio to the constants as they stand.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from rich.console import Console
from rich.table import Table

from benchmarks.harness.report import check_positive
from benchmarks.harness.timing import Call, alternate
from benchmarks.speed.methods import Inputs, Setting, call_of, linear
from linrope.ops.torch_kernel import plan
from linrope.ops.torch_kernel.memory import Pool

CHANGES = ("CHUNK", "BLOCK_ELEMENTS", "BLOCK_TOKENS", "SUM_CHUNK")
"""The constants of `plan` that are changed."""


@contextmanager
def changed(name: str, value: int, pool: Pool) -> Iterator[None]:
    """The kernel with another value of one constant, on workspace of its own."""
    workspace = mock.patch.object(Pool.of_thread, "pool", pool, create=True)
    with workspace, mock.patch.object(plan, name, value):
        yield


def calls(inputs: Inputs) -> dict[tuple[str, int], Call]:
    """Each constant as it stands, halved and doubled."""
    call = call_of(linear, inputs)

    def with_change(name: str, value: int) -> Call:
        pool = Pool(inputs.q.device)

        def run() -> None:
            with changed(name, value, pool):
                call()

        return run

    standing = {name: getattr(plan, name) for name in CHANGES}
    settings = [(name, value * factor // 2) for name, value in standing.items() for factor in (2, 1, 4)]
    return {(name, value): with_change(name, value) for name, value in settings}


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("benchmarks.block_sizes", description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(args)
    check_positive(parser, options, "length", "repeats")
    console = Console()
    with console.status("measuring"):
        samples = alternate(calls(Inputs.make(Setting(options.length))), options.repeats, count=False).samples
    table = Table("constant", "value", "ms", "×", title=f"{options.length:,} tokens, forward+backward")
    for (name, value), sample in samples.items():
        standing = samples[name, getattr(plan, name)].median
        table.add_row(name, f"{value:,}", f"{1e3 * sample.median:.1f}", f"{sample.median / standing:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
