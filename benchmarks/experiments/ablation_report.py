"""The results of a grid: means and intervals over seeds, differences, stability, and tables of them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from benchmarks.experiments.grid import BLOCK, TOLERANCE, Grid, Settings
from benchmarks.experiments.results_folder import Speed
from linrope.utils.terminal import new_table

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t at 97.5 % for 1, 2, … degrees of freedom; 1.96 where the table ends is at most 9 % too small."""
SPIKE, SPIKE_WINDOW = 1.25, 5
CASE = "accuracy/"
METRIC = {"text": ("bpb", "bits per byte", -1), "mqar": ("accuracy", "accuracy", 1)}
"""By task: the metric, its label, and whether more (1) or less (-1) is better. Differences in bits per byte are shares
of the reference's value; differences in accuracy, which may be 0, are absolute."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and half the width of its 95 % interval (Student's t); NaN for a single seed. A NaN among the
    values makes both NaN."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Interval:
        values = list(values)
        if not values or any(map(math.isnan, values)):
            return cls(math.nan, math.nan)
        if len(values) == 1:
            return cls(values[0], math.nan)
        t = T_95[len(values) - 2] if len(values) - 2 < len(T_95) else 1.96
        half = t * statistics.stdev(values) / math.sqrt(len(values))
        return cls(statistics.fmean(values), half)


@dataclass
class Row:
    """One variant: a row of the CSV.

    `difference` is from the reference, seed by seed; in bits per byte, as a share of the reference's mean. Runs of one
    seed have the same order of data if their rows have the same length, and the same first weights if their modules are
    the same. `verdict` says whether its interval excludes 0. `…_at_equal_seconds` are the same at equal wall-clock.
    `first_eighth` and `last_eighth` are bits per token there, in rows of the training length. `spikes` counts
    hundredths of runs, see `spikes`. `state_bytes` is at 1,024 tokens.
    """

    variant: str
    seeds: int
    diverged: int
    parameters: int
    tokens: int
    mean: float
    interval: float
    difference: float
    difference_interval: float
    verdict: str
    at_equal_seconds: float
    interval_at_equal_seconds: float
    difference_at_equal_seconds: float
    difference_interval_at_equal_seconds: float
    verdict_at_equal_seconds: str
    tokens_per_second: float
    first_eighth: float
    last_eighth: float
    grad_norm_median: float
    grad_norm_peak: float
    spikes: int
    smallest_denominator: float | None
    state_bytes: int


def by_variant(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for run in results:
        found[run["variant"]].append(run)
    return dict(found)


def ended(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs that did not diverge."""
    return [run for run in runs if run["diverged"] is None]


def rows_of(results: list[dict[str, Any]], grid: Grid, speeds: dict[str, Speed]) -> list[Row]:
    """A row for each variant with a finished run, best mean first; variants without a mean come last."""
    metric, _, better = METRIC[grid.task]
    found = by_variant(results)
    runs = {name: found[name] for name in grid.variants if name in found}
    good = {name: ended(own) for name, own in runs.items()}
    speed = {name: speeds[name].tokens_per_second if name in speeds else math.nan for name in runs}
    # the fastest variant's time; the others are compared at that time
    times = (own[0]["tokens"] / speed[name] for name, own in good.items() if own and name in speeds)
    seconds = min(times, default=math.nan)
    at_end = {name: {r["seed"]: r["final"][metric] for r in own} for name, own in good.items()}
    tokens = {name: seconds * speed[name] for name in good}
    in_time = {name: {r["seed"]: at_tokens(r, metric, tokens[name]) for r in own} for name, own in good.items()}
    rows = [
        _row(own, [*compared(at_end, name, grid), *compared(in_time, name, grid), speed[name]], metric)
        for name, own in runs.items()
    ]
    return sorted(rows, key=lambda row: (math.isnan(row.mean), -better * row.mean))


def compared(values: dict[str, dict[int, float]], name: str, grid: Grid) -> tuple[float, float, float, float, str]:
    """Five columns of a row, from every variant's values by seed: `mean` to `verdict`. The reference is not compared
    with itself."""
    metric, _, better = METRIC[grid.task]
    own, reference = values[name], {} if name == grid.reference else values.get(grid.reference, {})
    both = [seed for seed in own if seed in reference]
    base = 1.0 if metric == "accuracy" else _mean(reference[seed] for seed in both)
    total, gap = Interval.of(own.values()), Interval.of((own[seed] - reference[seed]) / base for seed in both)
    return total.mean, total.half, gap.mean, gap.half, verdict(gap, better)


def _row(runs: list[dict[str, Any]], measured: list[Any], metric: str) -> Row:
    """`measured` are the columns from `mean` to `tokens_per_second`."""
    good = ended(runs)
    positions = [parts for r in good if (parts := eighths(r))]
    training = [r["training"] for r in runs]
    denominators = [r["smallest_denominator"] for r in good if r.get("smallest_denominator") is not None]
    return Row(
        runs[0]["variant"],
        len(runs),
        len(runs) - len(good),
        runs[0]["parameters"],
        (good or runs)[0]["tokens"],
        *measured,
        first_eighth=_mean(parts[0] for parts in positions),
        last_eighth=_mean(parts[-1] for parts in positions),
        grad_norm_median=statistics.median(t["grad_norm_median"] for t in training),
        grad_norm_peak=max(t["grad_norm_peak"] for t in training),
        spikes=sum(len(spikes(r["training"]["losses"], r["steps"])) for r in runs) if metric == "bpb" else 0,
        smallest_denominator=min(denominators, default=None),
        state_bytes=runs[0]["state_bytes"],
    )


def spikes(losses: list[float], steps: int) -> list[int]:
    """The hundredths of a run of `steps` whose mean loss exceeds `SPIKE` times the median of the `SPIKE_WINDOW` before.
    (Single steps say nothing, since a batch of two rows may be hard: a run with `losses` of single steps has none. Nor
    do recall tasks, which mix batches of several types.)"""
    found = range(SPIKE_WINDOW, len(losses)) if steps > len(losses) else ()
    return [i for i in found if losses[i] > SPIKE * statistics.median(losses[i - SPIKE_WINDOW : i])]


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return statistics.fmean(values) if values else math.nan


def verdict(gap: Interval, better: int) -> str:
    """Whether the difference's interval excludes 0, and on which side."""
    if math.isnan(gap.mean):
        return ""
    if math.isnan(gap.half):
        return "one seed"
    if abs(gap.mean) <= gap.half:
        return "within noise"
    return "better" if gap.mean * better > 0 else "worse"


def at_tokens(run: dict[str, Any], metric: str, tokens: float) -> float:
    """The metric after a number of tokens: the final one, minus the curve's gain since then (the curve reads a part of
    the text only); NaN before its first point. The learning rate has not decayed to its end there, so that a run of
    this length would be a little better."""
    curve = [(p["tokens"], p[metric]) for p in run["curve"] if metric in p]
    if math.isnan(tokens) or not curve:
        return math.nan
    tokens = min(tokens, curve[-1][0])
    for (t0, y0), (t1, y1) in itertools.pairwise(curve):
        if t0 <= tokens <= t1:
            share = math.log(tokens / t0) / math.log(t1 / t0)
            return run["final"][metric] + y0 + share * (y1 - y0) - curve[-1][1]
    return run["final"][metric] if tokens == curve[-1][0] else math.nan


def tokens_to(run: dict[str, Any], metric: str, value: float) -> float:
    """The tokens after which the metric reaches `value`, between two points of its curve as `at_tokens` has it; NaN if
    it does not, or reached it before the first point."""
    better = METRIC[run["settings"]["task"]][2]
    points = [(p["tokens"], better * (at_tokens(run, metric, p["tokens"]) - value)) for p in run["curve"]]
    for (t0, y0), (t1, y1) in itertools.pairwise(points):
        if y0 < 0 <= y1:
            return t0 * (t1 / t0) ** (y0 / (y0 - y1))
    return math.nan


def caught_up(results: list[dict[str, Any]], grid: Grid) -> dict[str, dict[str, Any]]:
    """By variant of the grid's `catch_up`: the share of its tokens after which it has what the other has at the end,
    seed by seed, in the middle of its learning rate schedule."""
    metric, found = METRIC[grid.task][0], by_variant(ended(results))
    shares = {}
    for name, other in grid.catch_up.items():
        goals = {run["seed"]: run["final"][metric] for run in found.get(other, [])}
        runs = [run for run in found.get(name, []) if run["seed"] in goals]
        if runs:
            share = Interval.of(tokens_to(run, metric, goals[run["seed"]]) / run["tokens"] for run in runs)
            shares[name] = {"other": other, **asdict(share)}
    return shares


def by_eighth(results: list[dict[str, Any]]) -> dict[str, list[float]]:
    """By variant: bits per token in each eighth of rows of the training length, the mean over seeds."""
    found = {name: [e for r in runs if (e := eighths(r))] for name, runs in by_variant(ended(results)).items()}
    return {name: [_mean(one) for one in zip(*of_runs, strict=True)] for name, of_runs in found.items() if of_runs}


def by_case(results: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """By variant and case of a recall task, such as 256x16 (length x pairs): accuracy over seeds."""
    found = {}
    for name, runs in by_variant(ended(results)).items():
        if cases := [key for key in runs[0]["final"] if key.startswith(CASE)]:
            found[name] = {c.removeprefix(CASE): asdict(Interval.of(r["final"][c] for r in runs)) for c in cases}
    return found


def in_a_line(run: dict[str, Any]) -> str:
    metric, label, _ = METRIC[run["settings"]["task"]]
    return f"diverged, {run['diverged']}" if run["diverged"] else f"{run['final'][metric]:.3f} {label}"


def eighths(run: dict[str, Any]) -> list[float] | None:
    """Bits per token in each eighth of rows of the training length; None if they were not evaluated."""
    if not run.get("evaluation"):  # recall tasks read no text
        return None
    return run["evaluation"].get(str(Settings(**run["settings"]).option("context")), {}).get("eighths")


def by_context(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By variant and context: bits per byte over seeds.

    `late` compares the last half of the rows with the same tokens in rows of other lengths: positions 8k–16k of a row
    of 16k are 1k–2k of rows of 2k. The text is the same, and only the context before it differs.
    """
    found = {}
    for name, runs in by_variant([r for r in results if r.get("evaluation")]).items():
        texts = [r["evaluation"] for r in runs]
        contexts = sorted({int(context) for text in texts for context in text})
        found[name] = {
            str(context): {
                **asdict(Interval.of(text[str(context)]["bpb"] for text in texts)),
                "late": {
                    str(short): asdict(Interval.of(late_change(text, context, short) for text in texts))
                    for short in contexts
                    if short < context
                },
            }
            for context in contexts
        }
    return found


def late_change(evaluation: dict[str, Any], context: int, short: int) -> float:
    """Relative change of bits per token from rows of `short` to rows of `context`, over the tokens in the last half of
    both."""
    if short < 2 * BLOCK:
        return math.nan  # half a row is shorter than a block
    starts = range(0, BLOCK * len(evaluation[str(context)]["blocks"]), BLOCK)
    late = [i for i, start in enumerate(starts) if all(start % rows >= rows / 2 for rows in (context, short))]
    long_bits, short_bits = ([evaluation[str(rows)]["blocks"][i] for i in late] for rows in (context, short))
    return _mean(long_bits) / _mean(short_bits) - 1


def table_of(rows: list[Row], grid: Grid) -> Table:
    """A row for each variant, best first."""
    metric, label, _ = METRIC[grid.task]
    length = f"{grid.tokens:,} tokens" if grid.tokens else f"{grid.minutes:g} minutes"
    table = new_table(
        f"{grid.title}\n{label} after {length}",
        *(metric, "±", "vs", "±", "", "1st", "8th", "peak", "runs"),
        text=["variant"],
        caption=f"±: 95 % interval over seeds. vs: difference from {grid.reference}, seed by seed\n"
        "+ better, - worse, ~ within noise, ? one seed\n1st, 8th: bits per token in that eighth of a row\n"
        "peak: largest gradient norm after the warm-up, of all seeds",
    )
    for row in rows:
        table.add_row(
            row.variant,
            *_cells(row.mean, row.interval, row.difference, row.difference_interval, row.verdict),
            _or_blank("{:.3f}", row.first_eighth),
            _or_blank("{:.3f}", row.last_eighth),
            f"{row.grad_norm_peak:.2g}",
            f"{row.seeds}" + (f" [red]{row.diverged} diverged[/red]" if row.diverged else ""),
        )
    return table


def table_at_equal_seconds(rows: list[Row], grid: Grid) -> Table | None:
    """The same rows at equal wall-clock; None if no speed is known, or the runs have equal time anyway."""
    known = [row for row in rows if not math.isnan(row.at_equal_seconds)]
    if grid.minutes or not known:
        return None
    metric, label, better = METRIC[grid.task]
    caption = "after the time of the fastest variant; slower ones are\nread from their curve, in mid-schedule"
    columns = metric, "±", "vs", "±", "", "tok/s"
    table = new_table(f"{grid.title}\n{label} at equal wall-clock", *columns, text=["variant"], caption=caption)
    for row in sorted(known, key=lambda row: -better * row.at_equal_seconds):
        total = row.at_equal_seconds, row.interval_at_equal_seconds
        gap = row.difference_at_equal_seconds, row.difference_interval_at_equal_seconds, row.verdict_at_equal_seconds
        table.add_row(row.variant, *_cells(*total, *gap), f"{row.tokens_per_second:,.0f}")
    return table


def _cells(mean: float, half: float, gap: float, gap_half: float, verdict: str) -> list[str]:
    """A mean and a difference, as cells of a table."""
    marks = {"better": "[green]+[/green]", "worse": "[red]-[/red]", "within noise": "~", "one seed": "?"}
    forms = {"{:.3f}": half, "{:+.1%}": gap, "{:.1%}": gap_half}
    return [f"{mean:.3f}", *(_or_blank(form, value) for form, value in forms.items()), marks.get(verdict, "")]


def _or_blank(form: str, value: float) -> str:
    return "" if math.isnan(value) else form.format(value)


def remarks(rows: list[Row], results: list[dict[str, Any]], grid: Grid) -> list[str]:
    """Lines below the table: runs that diverged, spikes, unequal sizes."""
    said = [f"{r['variant']}, seed {r['seed']}: diverged, {r['diverged']}" for r in results if r["diverged"]]
    said += [f"{row.variant}: the loss spiked, in {row.spikes} hundredths of a run" for row in rows if row.spikes]
    for name, share in caught_up(results, grid).items():
        if not math.isnan(share["mean"]):
            half = "" if math.isnan(share["half"]) else f" ± {share['half']:.0%}"
            said.append(f"{name} reaches the end of {share['other']} after {share['mean']:.0%}{half} of its tokens")
    for name, runs in by_variant(ended(results)).items():
        if len(steps := {r["steps"] for r in runs}) > 1:
            said.append(f"{name}: its runs have {' and '.join(map(str, sorted(steps)))} steps, different numbers")
    read = [row.tokens for row in rows if row.diverged < row.seeds]
    if read and grid.tokens is not None and max(read) > (1 + TOLERANCE) * min(read):
        said.append(f"steps of unequal sizes: runs read {min(read):,} to {max(read):,} tokens")
    sizes = [row.parameters for row in rows]
    if max(sizes) > (1 + TOLERANCE) * min(sizes):
        said.append(f"models differ in size: {min(sizes):,} to {max(sizes):,} parameters")
    for name, what in (("text", "texts"), ("device", "devices"), ("torch", "versions of PyTorch")):
        if len(found := {r[name] for r in results if r.get(name)}) > 1:
            said.append(f"the runs were made on different {what}: {', '.join(sorted(found))}")
    return said


def remarks_on_speeds(speeds: dict[str, Speed], without: list[str]) -> list[str]:
    """How well speeds are known: variants without one, the widest spread over rounds, and different machines."""
    said = []
    if without:
        said.append(f"not in this table, without a speed or a validation that early: {', '.join(without)}")
    if spreads := {name: speed.spread for name, speed in speeds.items() if speed.spread is not None}:
        name = max(spreads, key=spreads.__getitem__)
        said.append(f"tok/s are medians: half of the rounds lie within {spreads[name]:.0%} of each other ({name})")
    machines = sorted({speed.machine for speed in speeds.values() if speed.machine is not None})
    if len(machines) > 1:
        said.append(f"tok/s were measured on different machines, so this table is an estimate: {', '.join(machines)}")
    return said
