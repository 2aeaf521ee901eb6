"""Conversion: what a hybrid recovers of a softmax model with few tokens, and what they give from scratch.

    python -m benchmarks.conversion --teacher SOFTMAX --data enwik8 --output results

Three stages share the tokens: alignment of attention layers, distillation of logits, ordinary training. Lists of
options make a run of each combination. Results that the output folder holds are kept, and not measured again.
"""

from __future__ import annotations

import argparse
import glob
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from rich.table import Table

from benchmarks.experiments.training_run import GridText
from benchmarks.harness.runner import AddOption, Benchmark
from benchmarks.harness.trainer import quiet_trainer
from linrope import LanguageModel
from linrope.cli.training import quiet_lightning
from linrope.errors import InputError
from linrope.evaluation.reports import name_of, write_csv
from linrope.interop.roformer import load_trained
from linrope.models.conversion import convert, hybrid_config
from linrope.models.language_model import LanguageModelConfig
from linrope.training import LanguageModelingModule, OptimizerConfig, TextDataModule, TrainingTask
from linrope.training.tasks.conversion import (
    AlignmentOptions,
    AttentionAlignmentModule,
    DistillationModule,
    DistillationOptions,
)
from linrope.utils.terminal import new_table

STAGES = ("align", "distill", "train")
SCRATCH = (0.0, 0.0, 1.0)
"""The shares of the stages where nothing is converted: the hybrid is trained from new weights."""


@dataclass(frozen=True)
class Case:
    """One run."""

    start: str
    """"teacher", or "scratch"."""
    placement: str
    feature_map: str
    forget_gate: bool
    shares: tuple[float, ...]
    """Of the tokens, by stage."""
    align_lr: float
    lr: float
    """Peak learning rate of distillation."""
    train_lr: float
    optimizer: str
    cross_entropy: float
    final_lr_fraction: float
    seed: int


@dataclass
class Point:
    """A case and what came of it. Losses are bits per byte of held-out text, `worse` percent against the teacher's."""

    case: dict[str, Any]
    tokens: int
    teacher: float
    bpb: float
    after: dict[str, float] = field(default_factory=dict)
    """The loss after each stage, and before the first as "start"."""

    @property
    def worse(self) -> float:
        return 100 * (self.bpb / self.teacher - 1)


class Conversion(Benchmark):
    name = "conversion"
    point = Point
    from_zero = ("shares", "cross_entropy", "seeds", "forget_gate", "final_lr_fraction")

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        add("--teacher", type=Path, required=True, help="the softmax model: a checkpoint or a folder")
        add("--data", default=None, help="text: a file, a folder or a glob (default: the built-in corpus)")
        add("--fractions", type=float, nargs=3, default=[0.9, 0.05, 0.05], help="of the text, as the teacher had them")
        add("--tokens", type=int, default=1_000_000, help="tokens of all stages (default: 1,000,000)")
        add("--context", type=int, default=1024, help="tokens of a row (default: 1,024)")
        add("--batch_size", type=int, default=1, help="rows of a step (default: 1)")
        add("--layers", default="linear,linear,linear,softmax", help="attention of the layers; it repeats")
        add("--window", type=int, default=512, help="last tokens that softmax layers see (default: 512)")
        add("--placement", nargs="+", default=["signed"], choices=["signed", "numerator"], help="RoPE of linear layers")
        add("--feature_map", nargs="+", default=["hedgehog"], help="of linear layers (default: hedgehog)")
        add("--forget_gate", type=int, nargs="+", default=[1], choices=[0, 1], help="0: without one (default: 1)")
        shares = "shares of the tokens for the three stages, as 0.1,0.8,0.1; repeatable"
        add("--shares", type=_shares, nargs="+", default=[(0.3, 0.7, 0.0)], help=shares)
        add("--align_lr", type=float, nargs="+", default=[3e-3], help="peak learning rate of the alignment")
        add("--lr", type=float, nargs="+", default=[5e-4], help="peak learning rate of the distillation")
        add("--train_lr", type=float, nargs="+", default=[2e-4], help="peak learning rate of the training")
        add("--optimizer", nargs="+", default=["muon"], choices=["muon", "adamw"], help="of the last two stages")
        add("--cross_entropy", type=float, nargs="+", default=[1.0], help="weight beside the divergence (default: 1)")
        add("--final_lr_fraction", type=float, nargs="+", default=[0.0], help="of all stages (default: 0)")
        add("--scratch_lr", type=float, nargs="*", default=[], help="rates of the same tokens from new weights")
        add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
        add("--validation_tokens", type=int, default=524_288, help="tokens of held-out text that are read at the end")
        add("--precision", default="bf16-mixed", choices=["bf16-mixed", "32-true"], help="(default: bf16-mixed)")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        """`trained` is added, the teacher; `measure` adds `loss_of_teacher`."""
        try:
            options.trained = load_trained(options.teacher, LanguageModelConfig)
        except InputError as error:
            parser.error(f"--teacher: {error}")
        for case in cases(options):  # raises what the hybrid cannot have
            convert(options.trained, config_of(case, options))
        if options.data is not None and not glob.has_magic(options.data) and not Path(options.data).exists():
            parser.error(f"--data {options.data}: no such file")
        per_step = options.context * options.batch_size
        for case in cases(options):
            if not any(round(share * options.tokens / per_step) for share in case.shares):
                enough = math.ceil(per_step / max(case.shares))
                parser.error(f"--tokens {options.tokens}: no step of {per_step} tokens; give {enough} or more")

    def measure(self) -> None:
        quiet_lightning()
        self.points = list(self._kept())
        done = [point.case for point in self.points]
        todo = [case for case in cases(self.options) if _plain(case) not in done]
        tick = self.progress("runs", len(todo))
        self.options.loss_of_teacher = validate(self.options.trained, self.options) if todo else None
        for case in todo:
            tick(description=f"{case.start} {case.feature_map} {case.placement} lr {case.lr} seed {case.seed}")
            self.points.append(run(case, self.options))
            self.write(self.options.output, self.contents())
            tick(advance=1)

    def write(self, folder: Path, details: dict[str, Any]) -> list[Path]:
        """As every benchmark; in the table of comma-separated values each option and each stage has a column."""
        files = super().write(folder, details)
        losses = [f.name for f in fields(Point) if f.name not in ("case", "after")]
        rows = [
            {
                **{**point.case, "shares": "/".join(map(str, point.case["shares"]))},
                **{name: getattr(point, name) for name in losses},
                **{f"after {stage}": point.after.get(stage) for stage in ("start", *STAGES)},
                "worse_percent": round(point.worse, 2),
            }
            for point in self.points
        ]
        if rows:
            write_csv(files[0], rows)
        return files

    def _kept(self) -> Iterator[Point]:
        """The points that the output folder holds, of the same teacher, text and number of tokens."""
        file = Path(self.options.output, f"{self.stem}.json")
        if not file.exists():
            return
        contents, same = json.loads(file.read_text()), ("teacher", "data", "tokens", "context", "batch_size", "layers")
        settings = self.contents()["settings"]
        for name in (*same, "fractions", "window", "validation_tokens", "precision"):
            if contents["settings"][name] != settings[name]:
                raise InputError(
                    f"--output {self.options.output} holds results of --{name} {contents['settings'][name]}, and here "
                    f"it is {settings[name]}: give another folder."
                )
        yield from (Point(**point) for point in contents[self.key])

    def table(self) -> Table:
        """The best first; seeds are put together. A run is named by the options in which the runs differ."""
        table = new_table(
            f"{self.options.tokens:,} tokens from {name_of(self.options.teacher)}",
            *("bits per byte", "against it", "runs"),
            text=["start", "options"],
            caption=self._caption(),
        )
        groups: dict[tuple[str, str], list[Point]] = {}
        for point in self.points:
            groups.setdefault(_named(point.case, self.points), []).append(point)
        means = {name: sum(point.bpb for point in found) / len(found) for name, found in groups.items()}
        for name in sorted(groups, key=means.__getitem__):
            worse = [point.worse for point in groups[name]]
            spread = f" ± {(max(worse) - min(worse)) / 2:.2f}" if len(worse) > 1 else ""
            mean = f"{sum(worse) / len(worse):+.2f} %{spread}"
            table.add_row(*name, f"{means[name]:.4f}", mean, str(len(worse)))
        return table

    def _caption(self) -> str:
        if not self.points:
            return "no run"
        return f"the teacher has {self.points[0].teacher:.4f} bits per byte; ± is half of the range over seeds"


def _shares(text: str) -> tuple[float, ...]:
    """The argparse type of --shares."""
    shares = tuple(float(part) for part in text.split(","))
    if len(shares) != len(STAGES) or min(shares) < 0 or abs(sum(shares) - 1) > 1e-9:
        raise argparse.ArgumentTypeError(f"{text}: three numbers from 0, which add up to 1")
    return shares


def cases(options: argparse.Namespace) -> list[Case]:
    """A case for each combination of the options that are lists, those from scratch last."""
    of_model = list(product(options.placement, options.feature_map, map(bool, options.forget_gate)))
    of_stages = product(options.shares, options.align_lr, options.lr, options.train_lr, options.optimizer)
    of_losses = product(options.cross_entropy, options.final_lr_fraction)
    found = [
        Case("teacher", *model, *stages, *of_loss, seed)
        for model, stages, of_loss, seed in product(of_model, list(of_stages), list(of_losses), options.seeds)
    ]
    of_scratch = product(options.scratch_lr, options.optimizer, options.final_lr_fraction)
    for model, (lr, optimizer, final), seed in product(of_model, of_scratch, options.seeds):
        found.append(Case("scratch", *model, SCRATCH, 0.0, 0.0, lr, optimizer, 0.0, final, seed))
    return found


def _plain(case: Case) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(case)))


def _named(case: dict[str, Any], points: list[Point]) -> tuple[str, str]:
    """A case in the table: how it starts, and the options in which the cases with this start differ, without seeds."""
    others = [point.case for point in points if point.case["start"] == case["start"]]
    names = [name for name in case if name != "seed" and any(other[name] != case[name] for other in others)]
    values = {name: "/".join(map(str, case[name])) if name == "shares" else case[name] for name in names}
    return case["start"], ", ".join(f"{name} {value}" for name, value in values.items())


def config_of(case: Case, options: argparse.Namespace) -> LanguageModelConfig:
    """The hybrid of a case."""
    own = {"feature_map": case.feature_map, "forget_gate": case.forget_gate, "window": options.window}
    layers = options.layers.split(",")
    return hybrid_config(options.trained.config, layers, signed=case.placement == "signed", **own)


def run(case: Case, options: argparse.Namespace) -> Point:
    """Convert, train the stages, and read the held-out text."""
    seed_everything(case.seed, verbose=False)
    config, after = config_of(case, options), {}
    if case.start == "teacher":
        model = convert(options.trained, config)
        after["start"] = validate(model, options)
    else:
        model = config.build()
    per_step, total = options.context * options.batch_size, 0
    for number, (stage, share) in enumerate(zip(STAGES, case.shares, strict=True)):
        if (steps := round(share * options.tokens / per_step)) == 0:
            continue
        task = task_of(stage, case, config, steps, str(options.teacher))
        task.model.load_state_dict(model.state_dict())
        data = text_of(options, seed=len(STAGES) * case.seed + number)
        limits = {"limit_val_batches": 0, "num_sanity_val_steps": 0, "precision": options.precision}
        quiet_trainer(steps, [], **limits).fit(task, data)
        model, total = task.model.eval(), total + steps * per_step
        after[stage] = validate(model, options)
    return Point(_plain(case), total, options.loss_of_teacher, list(after.values())[-1], after)


def task_of(stage: str, case: Case, config: LanguageModelConfig, steps: int, teacher: str) -> TrainingTask:
    """The task of a stage, with new weights."""
    rates = {"align": case.align_lr, "distill": case.lr, "train": case.train_lr}
    name = "adamw" if stage == "align" else case.optimizer
    optimizer = OptimizerConfig(
        name=name, lr=rates[stage], warmup_steps=min(50, steps // 10), final_lr_fraction=case.final_lr_fraction
    )
    if stage == "align":
        return AttentionAlignmentModule(config, optimizer, AlignmentOptions(teacher), seed=case.seed)
    if stage == "distill":
        options = DistillationOptions(teacher, case.cross_entropy)
        return DistillationModule(config, optimizer, options, seed=case.seed)
    return LanguageModelingModule(config, optimizer, seed=case.seed)


def text_of(options: argparse.Namespace, seed: int = 0) -> TextDataModule:
    sizes = {"context": options.context, "batch_size": options.batch_size, "fractions": options.fractions}
    return GridText(options.context, path=options.data, **sizes, seed=seed)


def validate(model: LanguageModel, options: argparse.Namespace) -> float:
    """Bits per byte of the validation split."""
    module = LanguageModelingModule(model.config)
    module.model.load_state_dict(model.state_dict())
    limit = max(1, options.validation_tokens // options.context)
    trainer = quiet_trainer(1, [], limit_val_batches=limit, precision=options.precision)
    with torch.no_grad():
        (found,) = trainer.validate(module, text_of(options), verbose=False)
    return found["val_bpb"]


if __name__ == "__main__":
    sys.exit(Conversion.main())
