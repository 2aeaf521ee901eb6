"""The goals for speed and memory of linear attention: each is measured, and passes or fails.

Unless a goal says otherwise: forward and backward, batch 1, 8 heads of 64, float32, all threads, and the ratio of
medians of calls that run in turn in one process. The exit status is 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from benchmarks.harness import memory
from benchmarks.harness.options import check_names
from benchmarks.harness.processes import in_new_process
from benchmarks.harness.runner import AddOption, Benchmark
from benchmarks.harness.timing import Call, Sample, Several, alternate, copy, gemm
from benchmarks.harness.training_step import training_step
from benchmarks.speed.decode import linear_steps
from benchmarks.speed.empty_operator import empty_operator
from benchmarks.speed.gpu_correctness import FAIL, FAILED, PASS
from benchmarks.speed.methods import Inputs, Method, Setting, call_of, linear, softmax, whole_sequence
from linrope import LanguageModelConfig, RotaryEmbedding, State
from linrope.ops.call import check_call
from linrope.ops.cpu_kernel import library
from linrope.utils.machine import has_fast_bfloat16
from linrope.utils.terminal import new_table

PACKED_DOCUMENT = 300
"""Mean length of the documents in a packed row."""
SKIPPED = "skipped"
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
        """The ratio of medians, times `scale`. The quartiles are those of the rounds' own ratios: where the two sides
        vary together they are narrow, and the ratio of medians may lie outside."""
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
    result: str
    value: float | None = None
    low: float | None = None
    high: float | None = None


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


def per_token(long: int, short: int, rounds: int = 5) -> Measured:
    """Time of one long row over that of short rows with as many tokens, which take as much memory."""
    return time_ratio(attention(long), attention(short, batch=long // short), rounds)


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


def over_chunked(length: int, rounds: int) -> Measured:
    """Time of the backend "chunked" over that of "cpu", on the same tensors."""
    require_cpu_kernel()
    return over_linear(partial(linear, backend="chunked"), length, rounds)


def softmax_over_avx2(length: int, rounds: int) -> Measured:
    """Time of RoPE + fused softmax over that of linear_attention with the library for AVX2."""
    require_cpu_kernel()
    if "v3" not in library.supported():
        raise Skipped("the processor has no AVX2")
    inputs = Inputs.make(Setting(length))
    forward_backward = call_of(linear, inputs)

    def with_avx2() -> object:
        with library.used("v3"):
            return forward_backward()

    return time_ratio(call_of(softmax, inputs), with_avx2, rounds)


def require_cpu_kernel() -> None:
    if reason := library.why_none():
        raise Skipped(f"there is no compiled kernel: {reason}")


def threads_of_one_head(length: int, rounds: int) -> Measured:
    """Time of one head with one thread over that with two."""
    if (threads := torch.get_num_threads()) < 2:
        raise Skipped("there is one thread")
    call = attention(length, heads=1)

    def with_threads(count: int) -> Callable[[], None]:
        def run() -> None:
            torch.set_num_threads(count)
            try:
                call()
            finally:
                torch.set_num_threads(threads)

        return run

    return time_ratio(with_threads(1), with_threads(2), rounds)


def one_token_overhead(rounds: int = 15, count: int = 200) -> Measured:
    """Microseconds of the operator for one token, of 8 heads of 64, beyond those of an operator that does nothing but
    allocate the same results."""
    q, k, v = torch.randn(3, 1, 8, 1, 64).unbind()
    state = State(torch.randn(1, 8, 64, 64), torch.rand(1, 8, 64), 1000)
    call = check_call(q, k, v, RotaryEmbedding(64), state=state, eps=1e-6)
    args = state.kv, state.k_sum, call.position, *call.operator_args
    calls = {
        "token": partial(torch.ops.linrope.one_token, *args, "cpu" if library.why_none() is None else "chunked"),
        "empty": partial(empty_operator, state.kv, state.k_sum, q, k, v),
    }
    with torch.no_grad():
        samples = alternate({name: Several(f, count) for name, f in calls.items()}, rounds, count=False).samples
    return Measured(1e6 * (samples["token"].median - samples["empty"].median))


def softmax_step_over_linear(rounds: int) -> Measured:
    """Time of a training step of the model of `configs/softmax-baseline.yaml` over one of `configs/quickstart.yaml`,
    with AdamW."""
    sizes = {"rows": 2, "length": 1024, "device": "cpu", "bfloat16": has_fast_bfloat16()}
    common = LanguageModelConfig(short_conv=4)
    return time_ratio(
        training_step(replace(common, attention="softmax"), **sizes),
        training_step(replace(common, forget_gate=True), **sizes),
        rounds,
    )


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
    tensor = setting.new_tokens * heads * setting.head_dim * 4  # bytes of float32
    peak = in_new_process(memory.measure, Method("linear", partial(linear, **options)), setting)
    return Measured((peak.extra - 4 * tensor) / (8 * tensor))  # q, k, v and ∂o exist before the call


def process_memory(length: int, heads: int = 4, needs_gib: float = 10) -> Measured:
    """Peak memory of a whole new process, in GiB."""
    free = memory.available() / 2**30
    if free < needs_gib:
        raise Skipped(f"{free:.1f} GiB are free, it needs {needs_gib:g}")
    peak = in_new_process(memory.measure, Method("linear", linear), Setting(length, heads=heads))
    return Measured(peak.process / 2**30)


def flat_decoding(batch: int, short: int = 1000, long: int = 1_000_000, steps: int = 200, rounds: int = 15) -> Measured:
    """Time of one token after a long context over that after a short one."""
    settings = {context: Setting(context, batch, mode="decode") for context in (short, long)}
    samples = alternate(linear_steps(settings, steps), rounds, count=False).samples
    return Measured.ratio(samples[long], samples[short])


def all_goals() -> list[Goal]:
    """Every goal, in the order in which they run."""
    goals = []

    def at_least(bound: float, name: str, what: str, measure: Callable[..., Measured], *args: Any) -> None:
        goals.append(Goal(name, what, partial(measure, *args), at_least=bound))

    def at_most(bound: float, name: str, what: str, measure: Callable[..., Measured], *args: Any, **options) -> None:
        goals.append(Goal(name, what, partial(measure, *args, **options), at_most=bound))

    for length, rounds, bound in ((512, 15, 6), (1024, 15, 9), (4096, 7, 25), (16_384, 3, 80)):
        what = f"RoPE + fused softmax / linear, T={length:,}"
        at_least(bound, f"softmax-{length}", what, over_linear, softmax, length, rounds)
    for length, rounds, bound in ((4096, 7, 13), (16_384, 3, 40)):
        what = f"the same with the library for AVX2, T={length:,}"
        at_least(bound, f"softmax-avx2-{length}", what, softmax_over_avx2, length, rounds)
    for length, rounds, bound in ((512, 15, 3), (4096, 9, 2.8), (16_384, 7, 2.8)):
        at_least(bound, f"chunked-{length}", f"chunked / cpu, T={length:,}", over_chunked, length, rounds)

    what = "whole-sequence form under autograd / linear, T=16,384"
    at_least(3.5, "whole-sequence-16384", what, over_linear, whole_sequence, 16_384, 5)
    at_most(1.1, "roofline-16384", "time / max(FLOPs at torch.mm's rate, bytes), T=16,384", over_roofline, 16_384)
    at_most(1.1, "linear-262144", "T=262,144 / 32 rows of 8,192", per_token, 262_144, 8192)
    at_least(1.7, "threads-one-head", "one head, one thread / two, T=16,384", threads_of_one_head, 16_384, 7)
    for length in (4096, 16_384):
        dtypes = {"dtype": "float32"}, {"dtype": "bfloat16"}
        at_least(1.5, f"bf16-{length}", f"float32 / bfloat16, T={length:,}", time_over, *dtypes, length, 15)

    eight = "peak beyond q, k, v, o and gradients / these, T=65,536"
    at_most(0.05, "memory-65536", eight, extra_memory, 65_536)
    at_most(0.10, "decay-memory-65536", f"{eight}, with log_decay", extra_memory, 65_536, decay=True)
    at_most(9, "memory-1048576", "GiB, whole process, 4 heads, T=1,048,576", process_memory, 1_048_576)

    documents = f"documents of {PACKED_DOCUMENT} tokens"
    for name, what, case, length in (
        ("head-32", "16 heads of 32", lambda: {"heads": 16, "head_dim": 32}, 4096),
        ("head-128", "4 heads of 128", lambda: {"heads": 4, "head_dim": 128}, 4096),
        ("head-256", "2 heads of 256", lambda: {"heads": 2, "head_dim": 256}, 4096),
        ("many-short", "batch 64, T=256", lambda: {"batch": 64}, 256),
        ("value-dim-128", "values of 128", lambda: {"value_dim": 128}, 4096),
        ("value-dim-32", "values of 32", lambda: {"value_dim": 32}, 4096),
        ("noncausal", "causal=False", lambda: {"causal": False}, 4096),
        ("masked", "key_mask, 70 % kept", lambda: {"key_mask": key_mask(4096)}, 4096),
        ("packed", documents, lambda: {"segment_ids": packed_documents(4096)}, 4096),
    ):
        at_most(1.4, name, f"time per FLOP / plain: {what}", per_flop, case, length)

    at_most(1.25, "decay-4096", "with log_decay / without, T=4,096", time_over, {"decay": True}, {})
    for phi in ("relu", "exp", "identity", "softmax"):
        # the identity is not positive, so its sums cannot be a denominator
        common = {"normalize": "none"} if phi == "identity" else {}
        at_most(1.25, f"phi-{phi}", f"φ = {phi} / elu1, T=4,096", time_over, {"feature_map": phi, **common}, common)
    what = "µs, the operator for one token beyond an empty one"
    at_most(25, "token-overhead", what, one_token_overhead)
    for batch in (1, 64):
        what = f"one token at 1,000,000 / at 1,000, batch {batch}"
        at_most(1.05, f"decode-flat-batch{batch}", what, flat_decoding, batch)
    what = "a step of softmax-baseline.yaml / of quickstart.yaml"
    at_least(2, "softmax-step", what, softmax_step_over_linear, 15)
    return goals


def run(goal: Goal) -> Row:
    """Measure a goal; a failure is a result."""
    row = partial(Row, goal.name, goal.what, goal.bound)
    try:
        found = goal.measure()
    except Skipped as reason:
        return row(f"{SKIPPED}: {reason}")
    except Exception as error:
        return row(f"{FAILED}: {memory.describe(error)}")
    return row(PASS if goal.met(found.value) else FAIL, found.value, found.low, found.high)


def missed_of(rows: list[Row]) -> list[Row]:
    """Those whose goal was missed, or whose measurement failed."""
    return [row for row in rows if row.result.startswith((FAIL, FAILED))]


def measured_text(row: Row) -> tuple[str, str]:
    if row.value is None:
        return "", ""
    return f"{row.value:.3g}", "" if row.low is None else f"{row.low:.3g} – {row.high:.3g}"


def table_of(rows: list[Row], title: str) -> Table:
    caption = "quartiles: of the ratios of single rounds"
    table = new_table(title, "measured", "quartiles", "bound", text=["goal"], caption=caption)
    table.add_column("result", overflow="fold")
    for row in rows:
        result = Text(row.result, STYLE.get(row.result.split(":")[0], ""))
        table.add_row(row.name, *measured_text(row), row.goal, result)
    return table


class Goals(Benchmark):
    name = "goals"
    point = Row
    output = ""

    @classmethod
    def add_options(cls, add: AddOption) -> None:
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
            table = new_table("goals", "bound", text=["goal"])
            table.add_column("what is measured", overflow="fold")
            for goal in options.goals:
                table.add_row(goal.name, goal.bound, goal.what)
            Console().print(table)
            parser.exit()

    def measure(self) -> None:
        """One goal after the other; each result is a line, and the table comes at the end."""
        tick = self.progress("", len(self.options.goals))
        for goal in self.options.goals:
            tick(description=goal.name)
            row = run(goal)
            self.points.append(row)
            self.console.print(row.name, measured_text(row)[0], row.goal, row.result, highlight=False, markup=False)
            tick(advance=1)

    def table(self) -> Table:
        return table_of(self.points, f"{self.device}, {torch.get_num_threads()} threads")

    def remarks(self) -> list[str]:
        missed = ", ".join(row.name for row in missed_of(self.points))
        met = sum(row.result == PASS for row in self.points)
        return [f"{met} of {len(self.options.goals)} goals met" + f"; missed: {missed}" * bool(missed)]

    def status(self) -> int:
        return 1 if missed_of(self.points) else 0


if __name__ == "__main__":
    sys.exit(Goals.main())
