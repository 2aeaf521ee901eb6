"""The effect of the kernel's block sizes on its time: one constant changed at a time, forward and backward.

Batch 1, 8 heads of 64, float32. Shown are the median and its ratio to that of the current constants.
"""

from __future__ import annotations

import sys
from unittest import mock

from rich.table import Table

from benchmarks.harness.runner import AddOption, Benchmark
from benchmarks.harness.timing import Alternation, Call
from benchmarks.speed.methods import Inputs, Setting, call_of, linear
from linrope.ops.torch_kernel import plan
from linrope.ops.torch_kernel.memory import Pool

CHANGES = ("CHUNK", "BLOCK_ELEMENTS", "BLOCK_TOKENS", "SUM_CHUNK")
"""The constants of `plan` that are changed."""


def calls(inputs: Inputs) -> dict[tuple[str, int], Call]:
    """Each constant as it stands, halved and doubled; each setting has workspace of its own."""
    call = call_of(linear, inputs)

    def with_change(name: str, value: int) -> Call:
        pool = Pool(inputs.q.device)

        def run() -> None:
            workspace = mock.patch.object(Pool.of_thread, "pool", pool, create=True)
            with workspace, mock.patch.object(plan, name, value):
                call()

        return run

    standing = {name: getattr(plan, name) for name in CHANGES}
    settings = [(name, value * factor // 2) for name, value in standing.items() for factor in (2, 1, 4)]
    return {(name, value): with_change(name, value) for name, value in settings}


class BlockSizes(Benchmark):
    name = "block_sizes"
    output = ""

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        add("--length", type=int, default=4096, help="tokens (default: 4096)")
        add("--repeats", type=int, default=7, help="rounds that count, after one for warm-up (default: 7)")

    def measure(self) -> None:
        work = calls(Inputs.make(Setting(self.options.length)))
        tick = self.progress("calls", (self.options.repeats + 1) * len(work))
        alternation = Alternation(work, count=False)
        try:
            alternation.run(self.options.repeats, lambda _: tick(advance=1))
        finally:
            self.points = list(alternation.samples.items())
        for error in alternation.failures.values():
            raise error

    def table(self) -> Table:
        table = Table("constant", "value", "ms", "×", title=f"{self.options.length:,} tokens, forward+backward")
        found = dict(self.points)
        for (name, value), sample in self.points:
            standing = found[name, getattr(plan, name)].median  # it is the first of its constant
            table.add_row(name, f"{value:,}", f"{1e3 * sample.median:.1f}", f"{sample.median / standing:.2f}")
        return table


if __name__ == "__main__":
    sys.exit(BlockSizes.main())
