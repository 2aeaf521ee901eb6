"""The goals for speed and memory of linear attention: each is measured, and passes or fails.

Unless a goal says otherwise: forward and backward, batch 1, 8 heads of 64, float32, all threads, and the ratio of
medians of calls that run in turn in one process. The exit status is 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text
from torch import Tensor

from benchmarks.harness import memory
from benchmarks.harness.options import check_names
from benchmarks.harness.runner import Benchmark
from benchmarks.harness.timing import Call, Sample, Several, alternate, copy, gemm
from benchmarks.speed import decode
from benchmarks.speed.methods import Inputs, Method, Setting, call_of, linear, softmax, whole_sequence
from linrope.utils.terminal import new_table

FLOAT32 = 4
PACKED_DOCUMENT = 300
"""Mean length of the documents in a packed row."""

PASS, FAIL, FAILED, SKIPPED, RUNNING = "pass", "FAIL", "failed", "skipped", "…"
STYLE = {PASS: "green", FAIL: "bold red", FAILED: "bold red", SKIPPED: "yellow"}


class Skipped(Exception):
    """This machine cannot measure the goal."""


@dataclass(frozen=True)
class Measured:
    """A ratio, and its quartiles over the rounds if there were several."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def ratio(cls, above: Sample, below: Sample, scale: float = 1.0) -> Measured:
        """The ratio of medians, times `scale`; its quartiles are those of the rounds' ratios."""
        rounds = Sample(tuple(a / b for a, b in zip(above.rounds, below.rounds)))
        low, high = rounds.quartiles
        return cls(scale * above.median / below.median, scale * low, scale * high)


@dataclass(frozen=True)
class Goal:
    """One goal: what is measured, and its bound."""

    name: str
    what: str
    measure: Callable[[], Measured]
    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float) -> bool:
        return value >= self.at_least if self.at_least is not None else value <= self.at_most

    @property
    def bound(self) -> str:
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"


@dataclass
class Row:
    """The result of a goal: a row of the CSV."""

    name: str
    what: str
    goal: str
    result: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None


# --- what is measured ------------------------------------------------------------------------------------------------


def attention(length: int, *, decay: bool = False, **options) -> Call:
    """Forward and backward of linear_attention on new inputs; sizes go to the setting, other options to the call."""
    sizes = {name: options.pop(name) for name in tuple(options) if name in Setting.__dataclass_fields__}
    return call_of(partial(linear, decay=decay, **options), Inputs.make(Setting(length, **sizes)))


def time_ratio(above: Call, below: Call, rounds: int, scale: float = 1.0) -> Measured:
    """Time of one call over that of another, times `scale`."""
    samples = alternate({"above": above, "below": below}, rounds).samples
    return Measured.ratio(samples["above"], samples["below"], scale)


def over_linear(form: Callable[[Inputs], Tensor], length: int, rounds: int) -> Measured:
    """Time of another form over that of linear_attention, on the same tensors."""
    inputs = Inputs.make(Setting(length))
    return time_ratio(call_of(form, inputs), call_of(linear, inputs), rounds)


def time_over(case: dict, plain: dict, length: int = 4096, rounds: int = 7) -> Measured:
    """Time of a case over that of a plain one."""
    return time_ratio(attention(length, **case), attention(length, **plain), rounds)


def per_token(long: int, short: int, rounds: int = 3, several: int = 8) -> Measured:
    """Time per token of a long sequence over that of a short one, which runs several times in a row."""
    return time_ratio(attention(long), Several(attention(short), several), rounds, short / long)


def over_roofline(length: int, rounds: int = 7) -> Measured:
    """Time over the time for its FLOPs or its bytes, whichever is longer, at rates measured in turn."""
    inputs = Inputs.make(Setting(length))
    (product, product_flops), (large_copy, copied) = gemm(torch.float32), copy()
    found = alternate({"linear": call_of(linear, inputs), "gemm": product, "copy": large_copy}, rounds)
    flops = counted(found.flops["linear"])
    touched = 12 * inputs.q.nbytes  # forward: q, k, v, o; backward: q, k, v, o, ∂o, ∂q, ∂k, ∂v
    rates = product_flops / found.samples["gemm"].median, copied / found.samples["copy"].median
    least = max(flops / rates[0], touched / rates[1])
    low, high = found.samples["linear"].quartiles
    return Measured(found.samples["linear"].median / least, low / least, high / least)


def per_flop(case: Callable[[], dict], length: int = 4096, plain_length: int = 4096, rounds: int = 7) -> Measured:
    """Time per FLOP of a case over that of the plain call."""
    found = alternate({"case": attention(length, **case()), "plain": attention(plain_length)}, rounds)
    scale = counted(found.flops["plain"]) / counted(found.flops["case"])
    return Measured.ratio(found.samples["case"], found.samples["plain"], scale)


def counted(flops: int) -> int:
    """The count; an error if nothing was counted."""
    if not flops:
        raise RuntimeError("no FLOPs were counted in linear_attention: its operator needs a registered formula")
    return flops


def key_mask(length: int, kept: float = 0.7) -> Tensor:
    """(1, T) booleans, that share of them True."""
    return torch.rand(1, length, generator=torch.Generator().manual_seed(0)) < kept


def packed_documents(length: int) -> Tensor:
    """(1, T) segment ids; a document ends after each token with the same probability."""
    ends = torch.rand(1, length, generator=torch.Generator().manual_seed(0)) < 1 / PACKED_DOCUMENT
    return ends.cumsum(dim=1)


def extra_memory(length: int, heads: int = 8, **options) -> Measured:
    """Peak memory of a new process beyond q, k, v, o and their gradients, as a share of these eight."""
    setting = Setting(length, heads=heads)
    tensor = setting.new_tokens * heads * setting.head_dim * FLOAT32
    peak = memory.in_new_process(memory.measure, Method("linear", partial(linear, **options)), setting)
    return Measured((peak.extra - 4 * tensor) / (8 * tensor))  # q, k, v and ∂o exist before the call


def process_memory(length: int, heads: int = 4, needs_gib: float = 10) -> Measured:
    """Peak memory of a whole new process, in GiB."""
    free = memory.available() / 2**30
    if free < needs_gib:
        raise Skipped(f"{free:.1f} GiB are free, it needs {needs_gib:g}")
    peak = memory.in_new_process(memory.measure, Method("linear", linear), Setting(length, heads=heads))
    return Measured(peak.process / 2**30)


def flat_decoding(batch: int) -> Measured:
    """Time of one token after a long context over that after a short one."""
    short, long = decode.flatness(batch)
    return Measured.ratio(long, short)


# --- the goals -------------------------------------------------------------------------------------------------------


def all_goals() -> list[Goal]:
    """Every goal, in the order in which they run."""
    return softmax_goals() + length_goals() + memory_goals() + per_flop_goals() + option_goals()


def softmax_goals() -> list[Goal]:
    """Faster than fused softmax attention, and more so for longer rows; fewer rounds if a call takes seconds."""
    goals = []
    for length, rounds, bound in ((512, 15, 2), (1024, 15, 3), (4096, 7, 10), (16_384, 3, 40)):
        measure = partial(over_linear, softmax, length, rounds)
        goals.append(Goal(f"softmax-{length}", f"RoPE + fused softmax / linear, T={length:,}", measure, at_least=bound))
    return goals


def length_goals() -> list[Goal]:
    """Near the machine's limit, at any length, and faster in bfloat16."""
    whole, roofline = partial(over_linear, whole_sequence, 16_384, 5), partial(over_roofline, 16_384)
    long = partial(per_token, 262_144, 8192)
    goals = [
        Goal("whole-sequence-16384", "whole-sequence form under autograd / linear, T=16,384", whole, at_least=3.5),
        Goal("roofline-16384", "time / max(FLOPs, bytes) at measured rates, T=16,384", roofline, at_most=1.8),
        Goal("linear-262144", "time per token, T=262,144 / T=8,192", long, at_most=1.15),
    ]
    for length in (4096, 16_384):
        measure = partial(time_over, {"dtype": "float32"}, {"dtype": "bfloat16"}, length)
        goals.append(Goal(f"bf16-{length}", f"float32 / bfloat16, T={length:,}", measure, at_least=1.5))
    return goals


def memory_goals() -> list[Goal]:
    """Little more than the inputs, the outputs and their gradients."""
    eight = "peak beyond q, k, v, o and gradients / these, T=65,536"
    million = partial(process_memory, 1_048_576)
    return [
        Goal("memory-65536", eight, partial(extra_memory, 65_536), at_most=0.10),
        Goal("decay-memory-65536", f"{eight}, with log_decay", partial(extra_memory, 65_536, decay=True), at_most=0.10),
        Goal("memory-1048576", "GiB, whole process, 4 heads, T=1,048,576", million, at_most=9),
    ]


def per_flop_goals() -> list[Goal]:
    """Other shapes and options are nearly as efficient as the plain call."""
    documents = f"documents of {PACKED_DOCUMENT} tokens"
    cases = {
        "head-128": ("4 heads of 128", lambda: {"heads": 4, "head_dim": 128}, 4096),
        "head-256": ("2 heads of 256", lambda: {"heads": 2, "head_dim": 256}, 4096),
        "many-short": ("batch 64, T=256", lambda: {"batch": 64}, 256),
        "value-dim-128": ("values of 128", lambda: {"value_dim": 128}, 4096),
        "value-dim-32": ("values of 32", lambda: {"value_dim": 32}, 4096),
        "noncausal": ("causal=False", lambda: {"causal": False}, 4096),
        "masked": ("key_mask, 70 % kept", lambda: {"key_mask": key_mask(4096)}, 4096),
        "packed": (documents, lambda: {"segment_ids": packed_documents(4096)}, 4096),
    }
    return [
        Goal(name, f"time per FLOP / plain: {what}", partial(per_flop, case, length), at_most=1.5)
        for name, (what, case, length) in cases.items()
    ]


def option_goals() -> list[Goal]:
    """The forget gate's decay, the other feature maps, and decoding."""
    decay = partial(time_over, {"decay": True}, {})
    goals = [Goal("decay-4096", "with log_decay / without, T=4,096", decay, at_most=1.4)]
    for phi in ("relu", "exp", "identity", "softmax"):
        # the identity is not positive, so its sums cannot be a denominator
        common = {"normalize": "none"} if phi == "identity" else {}
        measure = partial(time_over, {"feature_map": phi, **common}, common)
        goals.append(Goal(f"phi-{phi}", f"φ = {phi} / elu1, T=4,096", measure, at_most=1.25))
    for batch in (1, 64):
        what = f"one token at 1,000,000 / at 1,000, batch {batch}"
        goals.append(Goal(f"decode-flat-batch{batch}", what, partial(flat_decoding, batch), at_most=1.05))
    return goals


# --- running and showing them ----------------------------------------------------------------------------------------


def run(goal: Goal, row: Row) -> None:
    """Measure a goal and enter its result."""
    try:
        measured = goal.measure()
    except Skipped as reason:
        row.result = f"{SKIPPED}: {reason}"
    except Exception as error:
        row.result = f"{FAILED}: {memory.describe(error)}"
    else:
        row.value, row.low, row.high = measured.value, measured.low, measured.high
        row.result = PASS if goal.met(measured.value) else FAIL


def missed_of(rows: list[Row]) -> list[Row]:
    """Those whose goal was missed, or whose measurement failed."""
    return [row for row in rows if row.result.startswith((FAIL, FAILED))]


def measured_text(row: Row) -> tuple[str, str]:
    """The value, and its quartiles."""
    if row.value is None:
        return "", ""
    return f"{row.value:.3g}", "" if row.low is None else f"{row.low:.3g} – {row.high:.3g}"


def table_of(rows: list[Row], title: str) -> Table:
    """A row for each goal; the one that is being measured has a spinner."""
    caption = "quartiles: of the ratio, over the rounds"
    table = new_table(title, "measured", "quartiles", "bound", text=["goal"], caption=caption)
    table.add_column("result", overflow="fold")
    for row in rows:
        running = Spinner("dots") if row.result == RUNNING else None
        result = running or Text(row.result, STYLE.get(row.result.split(":")[0], ""))
        table.add_row(row.name, *measured_text(row), row.goal, result)
    return table


def list_of(goals: list[Goal]) -> Table:
    table = new_table("goals", "bound", text=["goal"])
    table.add_column("what is measured", overflow="fold")
    for goal in goals:
        table.add_row(goal.name, goal.bound, goal.what)
    return table


class Goals(Benchmark):
    name = "goals"
    point = Row
    output = ""

    @classmethod
    def add_options(cls, add: Callable[..., Any]) -> None:
        add("--only", nargs="+", metavar="NAME", help="measure these goals alone")
        add("--list", action="store_true", help="list the goals, and measure nothing")
        add("--output", type=Path, help="folder for CSV and JSON (default: no files)")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        """`goals` is added: those chosen."""
        options.goals = all_goals()
        if options.only:
            check_names(parser, "--only", options.only, [goal.name for goal in options.goals])
            options.goals = [goal for goal in options.goals if goal.name in options.only]
        if options.list:
            Console().print(list_of(options.goals))
            parser.exit()

    @property
    def title(self) -> str:
        return f"{self.device}, {torch.get_num_threads()} threads"

    def measure(self) -> None:
        """One goal after the other; a terminal shows as many rows of the table as it has lines for."""
        room = max(3, self.console.height - 6)
        with Live(console=self.console, transient=True) as live:
            for goal in self.options.goals:
                row = Row(goal.name, goal.what, goal.bound, RUNNING)
                live.update(table_of([*self.points, row][-room:], self.title))
                run(goal, row)
                self.points.append(row)
                if not self.console.is_terminal:
                    cells = row.name, *measured_text(row)[:1], row.goal, row.result
                    self.console.print(*cells, highlight=False, markup=False)

    def table(self) -> Table:
        return table_of(self.points, self.title)

    def remarks(self) -> list[str]:
        missed = ", ".join(row.name for row in missed_of(self.points))
        met = sum(row.result == PASS for row in self.points)
        return [f"{met} of {len(self.options.goals)} goals met" + f"; missed: {missed}" * bool(missed)]

    def status(self) -> int:
        return 1 if missed_of(self.points) else 0


if __name__ == "__main__":
    sys.exit(Goals.main())
