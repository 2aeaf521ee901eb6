"""A page of the claims of RoFormer and its announcements: the command that tests each, what it gave, whether it held.

    python -m benchmarks.seed_claims --results benchmarks/results/cpu --output docs/seed-claims.md

It reads results of other benchmarks and runs nothing. A verdict follows from the figures: a difference holds where its
95 % interval over the seeds excludes 0.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.experiments.ablation_report import Interval
from benchmarks.experiments.decay import HEAD_DIM
from benchmarks.experiments.family_report import SPEEDS, Row, Runs, by_variant, rows_of, with_interval
from linrope.errors import InputError
from linrope.evaluation.reports import print_written
from linrope.utils.files import whole_file

HELD, NOT, OPEN, ELSEWHERE = "held", "did not hold", "no difference found", "not tested here"
INTRODUCTION = """# The claims of RoFormer, tested

RoFormer ([arXiv 2104.09864](https://arxiv.org/abs/2104.09864)) and its announcements claim the following. Each entry
has the command that tests the claim here, what it gave on two CPU cores, and whether the claim held at that scale:
models of about one million parameters, one to four million tokens (20 million for any sequence length). A small model
that disagrees refutes nothing at the paper's scale; claims that need a larger machine have the configuration that would
test them.

This page is written by `python -m benchmarks.seed_claims` from the files in benchmarks/results. Intervals are 95 %
(Student's t) over the seeds, and a verdict follows from them. Equal time is from speeds that the commands measure with
`--speeds`, with nothing else running.
"""


@dataclass(frozen=True)
class Finding:
    """What was measured of a claim, in words, and the verdict."""

    text: str
    verdict: str
    picture: str = ""
    """Below the folder of results."""


@dataclass(frozen=True)
class Claim:
    title: str
    said: str
    """The claim, and where it stands."""
    command: str
    """Tests it here; "" where that needs a larger machine."""
    find: Callable[[Path], Finding]
    elsewhere: str = ""
    """The configuration that tests it at the paper's scale."""


def read(file: Path) -> Any:
    """Raises InputError for a file that is missing or is no JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--results: {file} cannot be read ({error}); run the command that makes it.") from error


# Results of `benchmarks.family`.


@dataclass(frozen=True)
class Family:
    """The runs of a grid, their speeds, and what is measured of them."""

    runs: Runs
    speeds: dict[str, float]
    metric: str
    scores: tuple[str, ...] = ()

    @classmethod
    def read(cls, results: Path, grid: str, metric: str, *scores: str) -> Family:
        folder = results / "family" / grid
        found = [read(file) for file in sorted((folder / "runs").glob("*.json"))]
        if not found:
            raise InputError(f"--results: {folder} has no finished run; run benchmarks.family with the grid {grid}.")
        runs = by_variant(found, list(dict.fromkeys(run["variant"] for run in found)))
        return cls(runs, read(folder / SPEEDS), metric, scores)

    def row(self, variant: str, reference: str | None = None, metric: str | None = None) -> Row:
        """The loss, or a score, of a variant, against another."""
        rows = rows_of(self.runs, self.speeds, reference or variant, self.metric, list(self.scores))
        return next(row for row in rows if (row.variant, row.metric) == (variant, metric or self.metric))

    def mean(self, variant: str) -> str:
        row = self.row(variant)
        return with_interval(row.mean, row.interval)

    def difference(self, variant: str, reference: str) -> Interval:
        """Of the last losses, as a share of the reference's mean."""
        row = self.row(variant, reference)
        return Interval(row.difference, row.difference_interval)

    def steps(self, variant: str, reference: str, text: str) -> str:
        """A sentence with the share of steps until the last loss of the reference; "" if that is not reached."""
        n_steps = self.row(variant, reference).share_of_steps
        return "" if math.isnan(n_steps) else " " + text.format(f"{100 * n_steps:.0f} % of the steps")

    def at_equal_time(self, variant: str) -> str:
        """The loss of a variant when the fastest one ends, in words."""
        row = self.row(variant)
        if math.isnan(row.at_equal_seconds):
            return f"When the fastest ends, {NAMES[variant]} has not come to its first validation."
        loss = with_interval(row.at_equal_seconds, row.interval_at_equal_seconds)
        return f"When the fastest ends, {NAMES[variant]} has {loss}."


def share(value: Interval) -> str:
    return f"{100 * value.mean:+.1f} %" + ("" if math.isnan(value.half) else f" ± {100 * value.half:.1f} %")


def verdict_of(difference: Interval) -> str:
    """Of a claim that a difference is below 0."""
    if math.isnan(difference.half) or abs(difference.mean) <= difference.half:
        return OPEN
    return HELD if difference.mean < 0 else NOT


# The claims.


def relative(_: Path) -> Finding:
    text = (
        "A test (tests/test_rotary.py) holds the product of a rotated query and a rotated key to that of their "
        "distance, to 1e-11, up to position 10⁹."
    )
    return Finding(text, HELD)


def decay(results: Path) -> Finding:
    points = read(results / "decay/whole/decay.json")["points"]
    bound = [point["value"] for point in points if point["curve"] == "bound"]
    quarter = len(bound) // 4
    near, far = (sum(part) / quarter for part in (bound[:quarter], bound[-quarter:]))
    text = (
        f"The bound's mean over distances 0 to {quarter - 1} is {near:.1f}, over {len(bound) - quarter} to "
        f"{len(bound) - 1} it is {far:.1f} (head size {HEAD_DIM}, base 10,000). The bound decays, not evenly. The "
        "weights of a trained linear model oscillate, and a forget gate decides what is near."
    )
    return Finding(text, HELD if far < near else NOT, "decay/whole/decay.png")


def any_length(results: Path) -> Finding:
    softmax = read(results / "ablation/long/ablation.json")["by_context"]["softmax"]
    linear = read(results / "ablation/placement/ablation.json")["by_context"]["numerator"]
    short, long, near, far = (
        with_interval(one["mean"], one["half"])
        for one in (softmax["1024"], softmax["16384"], linear["512"], linear["4096"])
    )
    text = (
        f"A row of any length can be computed. But softmax with RoPE, trained in rows of 1,024, has {short} bits per "
        f"byte there and {long} in rows of 16,384; the bare linear operator, trained in rows of 512, has {near} there "
        f"and {far} in rows of 4,096. With a window or a forget gate models lose nothing: docs/long-context.md."
    )
    worse = softmax["16384"]["mean"] - softmax["16384"]["half"] > softmax["1024"]["mean"]
    return Finding(text, f"{NOT} beyond the length of training" if worse else HELD)


def linear_attention(results: Path) -> Finding:
    rows = {row["variant"]: row for row in read(results / "ablation/placement/ablation.json")["points"]}
    numerator, both, none = (rows[name] for name in ("numerator", "both", "none"))
    difference = Interval(-none["difference"], none["difference_interval"])
    text = (
        f"Causal language models of the bare operator, {numerator['tokens']:,} bytes, rows of 512: RoPE in the "
        f"numerator alone {numerator['mean']:.3f} bits per byte, no positions {none['mean']:.3f}, RoPE in both sums "
        f"{both['mean']:.3f}, with gradient norms up to {both['grad_norm_peak']:,.0f} (numerator alone: "
        f"{numerator['grad_norm_peak']:.1f})."
    )
    return Finding(text, verdict_of(difference), "ablation/placement/convergence.png")


def faster_than_bert(results: Path) -> Finding:
    grid = Family.read(results, "masked_lm", "val_loss")
    difference = grid.difference("softmax", "softmax.learned")
    text = (
        f"Softmax encoders of 0.8 to 1 million parameters, masked bytes of enwik8, rows of 512: RoPE ends at "
        f"{grid.mean('softmax')} nats per masked byte, learned absolute positions at {grid.mean('softmax.learned')} "
        f"({share(difference)})."
    )
    text += grid.steps("softmax", "softmax.learned", "RoPE has the others' last loss after {}.")
    return Finding(text, verdict_of(difference), "family/masked_lm/family-bert.png")


def linear_roformer(results: Path) -> Finding:
    texts, held = [], []
    for grid_name, rows in (("masked_lm", "512"), ("masked_lm_4096", "4,096")):
        grid = Family.read(results, grid_name, "val_loss")
        names = [name for name in ("numerator", "none", "sinusoidal", "both", "softmax") if name in grid.runs]
        losses = ", ".join(f"{NAMES[name]} {grid.mean(name)}" for name in names)
        against = grid.difference("numerator", "none")
        texts.append(f"Rows of {rows}, nats per masked byte: {losses}.")
        texts.append(grid.at_equal_time("softmax"))
        held.append(verdict_of(against))
        texts.append(f"RoPE in the numerator against no positions: {share(against)}.")
    verdict = held[0] if len(set(held)) == 1 else f"{held[0]} (512), {held[1]} (4,096)"
    return Finding(" ".join(texts), f"against no positions: {verdict}", "family/masked_lm_4096/family.png")


NAMES = {
    "numerator": "RoPE in the numerator",
    "none": "no positions",
    "sinusoidal": "sinusoids",
    "both": "RoPE in both sums",
    "softmax": "softmax with RoPE",
}


def from_softmax(results: Path) -> Finding:
    grid = Family.read(results, "masked_lm", "val_loss")
    difference = grid.difference("numerator.from_softmax", "numerator")
    first = Interval.of(run["curve"][0]["val_loss"] for run in grid.runs["numerator.from_softmax"].values())
    text = (
        f"A linear encoder that starts from the weights of the trained softmax encoder ends at "
        f"{grid.mean('numerator.from_softmax')} nats, from scratch at {grid.mean('numerator')} ({share(difference)}); "
        f"it has {with_interval(first.mean, first.half)} at its first validation, after a tenth of the steps."
    )
    text += grid.steps("numerator.from_softmax", "numerator", "It needs {} for the loss from scratch.")
    return Finding(text, verdict_of(difference))


def performer(results: Path) -> Finding:
    grid = Family.read(results, "performer", "val_bpb")
    difference = grid.difference("rope", "none")
    text = (
        f"Performer on enwik8, 0.85 million parameters: with RoPE {grid.mean('rope')} bits per byte, without "
        f"{grid.mean('none')} ({share(difference)})."
    )
    text += grid.steps("rope", "none", "With RoPE {} suffice.")
    return Finding(text, verdict_of(difference), "family/performer/family.png")


def translation(results: Path) -> Finding:
    grid = Family.read(results, "translation", "val_loss", "test_bleu", "test_chrf")
    names = [f"{kind}.{positions}" for kind in ("softmax", "linear") for positions in ("rope", "sinusoidal")]
    found = {(name, score): grid.row(name, metric=score) for name in names for score in grid.scores}
    shown = {key: with_interval(row.mean, row.interval, digits=1) for key, row in found.items()}
    scores = ", ".join(
        f"{name.replace('.', ' with ')} {shown[name, 'test_bleu']} and {shown[name, 'test_chrf']}" for name in names
    )
    row = grid.row("softmax.sinusoidal", "softmax.rope", "test_bleu")
    bleu = Interval(row.difference, row.difference_interval)
    text = (
        f"English to German, help texts of LibreOffice, 1.2 million parameters, 600 steps; BLEU and chrF of the test "
        f"split: {scores}."
    )
    return Finding(text, verdict_of(bleu), "family/translation/family.png")


def not_here(_: Path) -> Finding:
    return Finding("", ELSEWHERE)


FAMILY = "python -m benchmarks.family --grid benchmarks/grids/family/{}.yaml --data {}"
CLAIMS = [
    Claim(
        "Only the distance counts",
        "The product of a rotated query and key depends on their relative position (section 3.2, equation 11).",
        "",
        relative,
    ),
    Claim(
        "Dependence decays with the distance",
        "A bound of the products falls with the distance (section 3.4.3, figure 2).",
        "python -m benchmarks.decay",
        decay,
    ),
    Claim(
        "Any sequence length",
        "RoPE makes the length of sequences flexible (abstract).",
        "python -m benchmarks.ablation --grid benchmarks/grids/long.yaml",
        any_length,
    ),
    Claim(
        "RoPE goes with linear attention",
        "With RoPE in the numerator and a plain denominator linear attention has relative positions (equation 19); in "
        "the denominator a sum might be zero.",
        "python -m benchmarks.ablation --grid benchmarks/grids/placement.yaml",
        linear_attention,
    ),
    Claim(
        "Faster convergence than BERT",
        "In masked language modeling RoFormer's loss falls faster than BERT's (section 4.2, figure 3 left).",
        FAMILY.format("masked_lm", "enwik8"),
        faster_than_bert,
        "configs/mlm-roformer.yaml, and the same with model.positions.name: learned",
    ),
    Claim(
        "A linear RoFormer",
        "The announcements name a linear RoFormer as the next model; none was published.",
        FAMILY.format("masked_lm", "enwik8") + "\n" + FAMILY.format("masked_lm_4096", "enwik8"),
        linear_roformer,
    ),
    Claim(
        "A linear model can start from a softmax one",
        "(Not in the paper.) The weights of a trained softmax encoder save steps of a linear one.",
        FAMILY.format("masked_lm", "enwik8"),
        from_softmax,
    ),
    Claim(
        "Performer with RoPE",
        "Performer converges faster and to a lower loss with RoPE (section 4.4, figure 3 right).",
        FAMILY.format("performer", "enwik8"),
        performer,
        "configs/performer-enwik8.yaml, and the same with model.rope: null",
    ),
    Claim(
        "Translation",
        "On WMT 2014 English–German RoFormer has 27.5 BLEU, the Transformer with sinusoids 27.3 (section 4.1).",
        "python -m benchmarks.help_texts --output help\n" + FAMILY.format("translation", "help"),
        translation,
        "configs/translation-small.yaml with data.path: a folder of WMT 2014, and the size of Transformer base",
    ),
    Claim(
        "GLUE",
        "After pretraining, fine-tuned RoFormer is ahead of BERT on MRPC, STS-B and QQP, behind it on SST-2, QNLI and "
        "MNLI (section 4.3, table 2).",
        "",
        not_here,
        "configs/glue-mrpc.yaml from a published checkpoint; data.dataset names the other tasks",
    ),
    Claim(
        "Longer texts help: CAIL2019-SCM",
        "RoFormer gains 1.5 points of accuracy when it reads 1,024 tokens in place of 512 (section 4.5.3, table 5).",
        "",
        not_here,
        "configs/cail-scm.yaml with data.max_length 512 and 1024",
    ),
    Claim(
        "Six stages of pretraining",
        "Accuracy of masked tokens rises through stages of other lengths and batches (section 4.5.2, table 4).",
        "",
        not_here,
        "configs/mlm-roformer.yaml",
    ),
]


def page(results: Path, claims: list[Claim], output: Path) -> str:
    """The page in Markdown. Links to pictures are relative to `output`."""
    findings = [claim.find(results) for claim in claims]
    lines = [INTRODUCTION, "| claim | at this scale |", "|---|---|"]
    lines += [f"| {claim.title} | {found.verdict} |" for claim, found in zip(claims, findings, strict=True)]
    for claim, found in zip(claims, findings, strict=True):
        lines += ["", f"## {claim.title}", "", claim.said]
        if claim.command:
            lines += ["", "```sh", claim.command, "```"]
        if found.text:
            lines += ["", found.text]
        lines += ["", f"**{found.verdict[0].upper()}{found.verdict[1:]}.**"]
        if claim.elsewhere:
            lines += ["", f"At the paper's scale: {claim.elsewhere}."]
        if found.picture and (picture := results / found.picture).exists():
            lines += ["", f"![{claim.title}]({Path(os.path.relpath(picture, output.parent)).as_posix()})"]
    return "\n".join(lines) + "\n"


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.seed_claims", description=__doc__.splitlines()[0])
    default = Path("benchmarks/results/cpu")
    parser.add_argument("--results", type=Path, default=default, help=f"folder of results (default: {default})")
    output = Path("docs/seed-claims.md")
    parser.add_argument("--output", type=Path, default=output, help=f"the page to write (default: {output})")
    options = parser.parse_args(args)
    try:
        text = page(options.results, CLAIMS, options.output)
    except InputError as error:
        parser.error(str(error))
    with whole_file(options.output) as file:
        file.write(text.encode())
    print_written(Console(), [options.output])
    return 0


if __name__ == "__main__":
    sys.exit(main())
