"""What a grid of runs shows: means and intervals over seeds, differences, stability, tables and pictures."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks import report
from benchmarks.grid import BLOCK, TOLERANCE, Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t at 97.5 % for 1, 2, … degrees of freedom."""
SPIKE, SPIKE_WINDOW = 1.25, 5
METRIC = {"text": ("bpb", "bits per byte", -1), "mqar": ("accuracy", "accuracy", 1)}
"""By task: the metric, how it is called, and whether more (1) or less (-1) of it is better. Differences in bits per
byte are shares of the reference's, in accuracy (which may be 0) they are what they are."""


def t_95(degrees: int) -> float:
    """Student's t at 97.5 %; 1.96 where the table ends, at most 9 % too small."""
    return T_95[degrees - 1] if degrees <= len(T_95) else 1.96


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and half the width of its 95 % interval (Student's t); NaN for a single seed."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Interval:
        values = [value for value in values if not math.isnan(value)]
        if not values:
            return cls(math.nan, math.nan)
        if len(values) == 1:
            return cls(values[0], math.nan)
        half = t_95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
        return cls(statistics.fmean(values), half)


@dataclass
class Row:
    """One variant: a row of the CSV.

    `difference` is to the reference, seed by seed, in bits per byte as a share of the reference's mean: runs of a seed
    share the order of their data where their rows are as long, and their first weights where their modules are the
    same. `verdict` says on which side of it its whole interval lies. `first_eighth` and `last_eighth` are bits per
    token there in rows as long as in training; `spikes` counts hundredths of runs, see `spikes`; `state_bytes` is at
    1,024 tokens.
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
    tokens_per_second: float
    first_eighth: float
    last_eighth: float
    grad_norm_median: float
    grad_norm_peak: float
    spikes: int
    smallest_denominator: float | None
    state_bytes: int


def finish(console: Console, folder: Any, results: list[dict[str, Any]], details: dict[str, Any]) -> None:
    """Print the table and write CSV, JSON and the picture beside the runs."""
    grid = folder.grid
    measured = folder.read_speeds()
    speeds = {name: speed.tokens_per_second for name, speed in measured.items()}
    spreads = {name: speed.spread for name, speed in measured.items() if speed.spread is not None}
    machines = {speed.machine for speed in measured.values() if speed.machine is not None}
    rows = rows_of(results, grid, speeds)
    report.show(console, table_of(rows, grid), [*remarks(rows, results, grid), *remarks_on_speeds(spreads, machines)])
    details = {**details, "title": grid.title, "reference": grid.reference, "by_context": by_context(results)}
    details |= {"tokens_per_second": speeds, "spread_of_tokens_per_second": spreads}
    written = report.write(folder.path, "ablation", rows, details, lambda path: draw(path, rows, results, grid))
    console.print("wrote", *map(str, written), soft_wrap=True, highlight=False)


# --- numbers ---------------------------------------------------------------------------------------------------------


def rows_of(results: list[dict[str, Any]], grid: Any, speeds: dict[str, float]) -> list[Row]:
    """A row for each variant that has a finished run, best mean first; those without any mean come last."""
    metric, _, better = METRIC[grid.task]
    by_variant = {name: [r for r in results if r["variant"] == name] for name in grid.variants}
    reference = {r["seed"]: r["final"][metric] for r in by_variant[grid.reference] if r["diverged"] is None}
    budget = equal_seconds(by_variant, speeds)
    rows = [
        _row(name, runs, metric, better, {} if name == grid.reference else reference, budget, speeds.get(name))
        for name, runs in by_variant.items()
        if runs
    ]
    return sorted(rows, key=lambda row: (math.isnan(row.mean), -better * row.mean))


def _row(name, runs, metric, better, reference, budget, speed) -> Row:
    good = [r for r in runs if r["diverged"] is None]
    total = Interval.of([r["final"][metric] for r in good])
    both = [r for r in good if r["seed"] in reference]
    base = 1.0 if metric == "accuracy" else _mean(reference[r["seed"]] for r in both)
    gap = Interval.of([(r["final"][metric] - reference[r["seed"]]) / base for r in both])
    positions = [eighths(r) for r in good if eighths(r)]
    training = [r["training"] for r in runs]
    denominators = [r["smallest_denominator"] for r in good if r.get("smallest_denominator") is not None]
    return Row(
        variant=name,
        seeds=len(runs),
        diverged=len(runs) - len(good),
        parameters=runs[0]["parameters"],
        tokens=(good or runs)[0]["tokens"],
        mean=total.mean,
        interval=total.half,
        difference=gap.mean,
        difference_interval=gap.half,
        verdict=verdict(gap, better),
        at_equal_seconds=_mean(at_tokens(r, metric, speed, budget) for r in good),
        tokens_per_second=speed or math.nan,
        first_eighth=_mean(first for first, _ in positions),
        last_eighth=_mean(last for _, last in positions),
        grad_norm_median=statistics.median(t["grad_norm_median"] for t in training),
        grad_norm_peak=max(t["grad_norm_peak"] for t in training),
        spikes=sum(len(spikes(t["losses"])) for t in training) if metric == "bpb" else 0,
        smallest_denominator=min(denominators, default=None),
        state_bytes=runs[0]["state_bytes"],
    )


def spikes(losses: list[float]) -> list[int]:
    """Which hundredths of a run had a mean loss `SPIKE` times the median of the `SPIKE_WINDOW` before. (Single steps
    say nothing: a batch of two rows may just be hard. Nor does recall, whose batches are of several kinds.)"""
    found = range(SPIKE_WINDOW, len(losses))
    return [i for i in found if losses[i] > SPIKE * statistics.median(losses[i - SPIKE_WINDOW : i])]


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return statistics.fmean(values) if values else math.nan


def verdict(gap: Interval, better: int) -> str:
    """Whether the difference's interval excludes 0, and on which side it lies."""
    if math.isnan(gap.mean):
        return ""
    if math.isnan(gap.half):
        return "one seed"
    if abs(gap.mean) <= gap.half:
        return "within noise"
    return "better" if gap.mean * better > 0 else "worse"


def equal_seconds(by_variant: dict[str, list[dict[str, Any]]], speeds: dict[str, float]) -> float:
    """The seconds that the fastest variant takes for its run: all others are read at that time."""
    ended = {name: [r["tokens"] for r in runs if r["diverged"] is None] for name, runs in by_variant.items()}
    return min(
        (tokens[0] / speeds[name] for name, tokens in ended.items() if tokens and name in speeds), default=math.nan
    )


def at_tokens(run: dict[str, Any], metric: str, speed: float | None, seconds: float) -> float:
    """The final metric, less what the curve still gained after so many seconds at that speed (it reads a part of the
    text only); NaN before its first point. The learning rate had not come to its end there, so a run of that length
    would have done a little better."""
    curve = [(p["tokens"], p[metric]) for p in run["curve"] if metric in p]
    if not speed or not curve:
        return math.nan
    tokens = min(seconds * speed, curve[-1][0])
    for (t0, y0), (t1, y1) in itertools.pairwise(curve):
        if t0 <= tokens <= t1:
            share = math.log(tokens / t0) / math.log(t1 / t0)
            return run["final"][metric] + y0 + share * (y1 - y0) - curve[-1][1]
    return run["final"][metric] if tokens == curve[-1][0] else math.nan


def eighths(run: dict[str, Any]) -> tuple[float, float] | None:
    """Bits per token in the first and in the last eighth of rows as long as those of training, where they were read."""
    if not run.get("evaluation"):  # recall tasks have no text
        return None
    found = run["evaluation"].get(str(Settings(**run["settings"]).option("context")))
    return None if found is None else (found["eighths"][0], found["eighths"][-1])


def by_context(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By variant and context: bits per byte over seeds.

    `late` compares the last half of the rows with the same tokens read in rows of other lengths: positions 8k–16k of a
    row of 16k are 1k–2k of rows of 2k, where the text is the same and only what came before it differs.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(r["variant"] for r in results):
        runs = [r for r in results if r["variant"] == name and r.get("evaluation")]
        contexts = sorted({int(c) for r in runs for c in r["evaluation"]})
        found[name] = {
            str(context): {
                **asdict(Interval.of([r["evaluation"][str(context)]["bpb"] for r in runs])),
                "late": {str(short): asdict(_late(runs, context, short)) for short in contexts if short < context},
            }
            for context in contexts
        }
    return {name: values for name, values in found.items() if values}


def _late(runs: list[dict[str, Any]], context: int, short: int) -> Interval:
    """Relative change of bits per token from reading with `short` rows to reading with rows of `context`, over tokens
    that stand in the last half of both."""
    return Interval.of([_late_change(r["evaluation"], context, short) for r in runs])


def _late_change(evaluation: dict[str, Any], context: int, short: int) -> float:
    if short < 2 * BLOCK:
        return math.nan  # a block is no part of half a row
    long_blocks, short_blocks = evaluation[str(context)]["blocks"], evaluation[str(short)]["blocks"]
    chosen = [
        block
        for block in range(len(long_blocks))
        if block * BLOCK % context >= context / 2 and block * BLOCK % short >= short / 2
    ]
    return _mean(long_blocks[b] for b in chosen) / _mean(short_blocks[b] for b in chosen) - 1


# --- table and picture -----------------------------------------------------------------------------------------------


def table_of(rows: list[Row], grid: Any):
    """A row for each variant, best first."""
    metric, label, _ = METRIC[grid.task]
    length = f"{grid.tokens:,} tokens" if grid.tokens else f"{grid.minutes:g} minutes"
    table = report.new_table(
        f"{grid.title}\n{label} after {length}",
        f"±: 95 % over seeds. vs: to {grid.reference}, seed by seed\n+ better, - worse, ~ within noise, ? one seed\n"
        "equal s: in the time that the fastest variant takes\npeak: gradient norm after the warm-up, any seed",
        text=["variant"],
        numbers=[metric, "±", "vs", "±", "", "equal s", "tok/s", "peak", "runs"],
    )
    marks = {"better": "[green]+[/green]", "worse": "[red]-[/red]", "within noise": "~", "one seed": "?"}
    for row in rows:
        table.add_row(
            row.variant,
            f"{row.mean:.3f}",
            _or_blank("{:.3f}", row.interval),
            _or_blank("{:+.1%}", row.difference),
            _or_blank("{:.1%}", row.difference_interval),
            marks.get(row.verdict, ""),
            _or_blank("{:.3f}", row.at_equal_seconds),
            _or_blank("{:,.0f}", row.tokens_per_second),
            f"{row.grad_norm_peak:.2g}",
            f"{row.seeds}" + (f" [red]{row.diverged} diverged[/red]" if row.diverged else ""),
        )
    return table


def _or_blank(form: str, value: float) -> str:
    return "" if math.isnan(value) else form.format(value)


def remarks(rows: list[Row], results: list[dict[str, Any]], grid: Any) -> list[str]:
    """What the table does not say: runs that diverged, spikes, unequal sizes."""
    said = [f"{r['variant']}, seed {r['seed']}: diverged, {r['diverged']}" for r in results if r["diverged"]]
    said += [f"{row.variant}: the loss spiked, in {row.spikes} hundredths of a run" for row in rows if row.spikes]
    for row in rows:
        lengths = {r["steps"] for r in results if r["variant"] == row.variant and not r["diverged"]}
        if len(lengths) > 1:
            said.append(
                f"{row.variant}: its runs have {' and '.join(map(str, sorted(lengths)))} steps, not as many each"
            )
    read = [row.tokens for row in rows if row.diverged < row.seeds]
    if read and grid.tokens is not None and max(read) > (1 + TOLERANCE) * min(read):
        said.append(f"steps of unequal sizes: runs read {min(read):,} to {max(read):,} tokens, not as many each")
    sizes = [row.parameters for row in rows]
    if max(sizes) > (1 + TOLERANCE) * min(sizes):
        said.append(f"models differ in size: {min(sizes):,} to {max(sizes):,} parameters")
    for name, what in (("text", "texts"), ("device", "devices"), ("torch", "versions of PyTorch")):
        if len(found := {r[name] for r in results if r.get(name)}) > 1:
            said.append(f"the runs were made on different {what}: {', '.join(sorted(found))}")
    return said


def remarks_on_speeds(spreads: dict[str, float], machines: set[str]) -> list[str]:
    """How well speeds are known: the widest spread over the rounds that they were measured in, and where."""
    said = []
    if spreads:
        name = max(spreads, key=spreads.__getitem__)
        said.append(f"tok/s are medians: half of the rounds lie within {spreads[name]:.0%} of each other ({name})")
    if len(machines) > 1:
        said.append(f"tok/s were measured on different machines, so equal s is a guess: {', '.join(sorted(machines))}")
    return said


def draw(path: Path, rows: list[Row], results: list[dict[str, Any]], grid: Any) -> None:
    """Means with intervals; validation against tokens; by the length of the rows, where they were read in several."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if not math.isnan(row.mean)]
    metric, label, _ = METRIC[grid.task]
    contexts = by_context(results)
    panels = 3 if any(len(values) > 1 for values in contexts.values()) else 2
    figure = Figure(figsize=(6 * panels, max(4.5, 0.3 * len(shown) + 2)), layout="constrained")
    figure.suptitle(grid.title, fontsize="medium")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    colors = {row.variant: f"C{i % 10}" for i, row in enumerate(shown)}
    _draw_means(axes[0], shown, results, metric, label, colors)
    read = "on a quarter of the validation text" if grid.task == "text" else "in validation"  # see validation_batches
    _draw_curves(axes[1], shown, results, metric, f"{label} {read}", colors)
    if panels == 3:
        _draw_contexts(axes[2], shown, contexts, colors)
    figure.savefig(path, dpi=110)


def _draw_means(axes: Axes, rows: list[Row], results, metric: str, label: str, colors: dict[str, str]) -> None:
    for height, row in enumerate(reversed(rows)):
        half = 0 if math.isnan(row.interval) else row.interval
        axes.errorbar(row.mean, height, xerr=half, fmt="o", color=colors[row.variant], capsize=3)
        seeds = [r["final"][metric] for r in results if r["variant"] == row.variant and r["diverged"] is None]
        axes.plot(seeds, [height] * len(seeds), "|", color="black", markersize=7)
    axes.set_yticks(range(len(rows)), [row.variant for row in reversed(rows)], fontsize="small")
    axes.set_xlabel(f"{label}: mean, 95 % interval, each seed")
    axes.grid(alpha=0.3)


def _draw_curves(axes: Axes, rows: list[Row], results, metric: str, label: str, colors: dict[str, str]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    for number, row in enumerate(rows):
        curves = [r["curve"] for r in results if r["variant"] == row.variant and r["diverged"] is None]
        points = {p["tokens"] for curve in curves for p in curve if metric in p}
        means = {t: _mean(p[metric] for curve in curves for p in curve if p["tokens"] == t) for t in sorted(points)}
        style = ("-", "--", ":")[number // 10 % 3]
        axes.plot(means.keys(), means.values(), style, marker=".", color=colors[row.variant], label=row.variant)
    axes.set_xlabel("training tokens")
    axes.set_ylabel(label)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda tokens, _: report.count_text(tokens))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")


def _draw_contexts(axes: Axes, rows: list[Row], contexts: dict[str, Any], colors: dict[str, str]) -> None:
    for row in rows:
        found = contexts.get(row.variant, {})
        lengths = sorted(map(int, found))
        means = [found[str(length)]["mean"] for length in lengths]
        halves = [0 if math.isnan(found[str(n)]["half"]) else found[str(n)]["half"] for n in lengths]
        axes.errorbar(lengths, means, yerr=halves, marker=".", capsize=3, color=colors[row.variant], label=row.variant)
    lengths = sorted({int(length) for row in rows for length in contexts.get(row.variant, {})})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_xlabel("rows of so many tokens (the same text)")
    axes.set_ylabel("bits per byte")
    axes.grid(alpha=0.3)
