"""A small model learns to find a pass key in short rows of real text, and is asked in longer ones: a heat map.

    python -m benchmarks.passkey --output benchmarks/results/cpu/passkey

Rows of 96 to 512 tokens to learn from, five digits told at any depth; then how many rows are answered whole, by length
and depth. `linrope recall --task passkey` asks any other model.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer, seed_everything
from rich.console import Console
from rich.progress import Progress

from benchmarks.harness import report
from linrope import InputError, LanguageModelConfig, RotaryConfig
from linrope.cli.training import quiet_lightning
from linrope.evaluation.recall_map import recall_by_depth, require_cases, table_of, write
from linrope.profiling.fake_tensors import shapes_only
from linrope.training import OptimizerConfig, PasskeyDataModule, RecallModule

STAGES = ((96, 4), (128, 2), (256, 1), (512, 1))
TOKENS_PER_BATCH = 4096


class Watch(Callback):
    """The bar, and means of the loss over stretches of training."""

    def __init__(self, bar: Progress, task: int, n_means: int = 100) -> None:
        self.bar, self.task, self.n_means = bar, task, n_means
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.losses.append(trainer.callback_metrics["train_loss"].item())
        self.bar.update(self.task, advance=1, description=f"training, loss {self.losses[-1]:.3f}")

    def means(self) -> list[float]:
        size = max(1, math.ceil(len(self.losses) / self.n_means))
        stretches = (self.losses[i : i + size] for i in range(0, len(self.losses), size))
        return [round(sum(losses) / len(losses), 4) for losses in stretches]


def config_of(options: argparse.Namespace) -> LanguageModelConfig:
    return LanguageModelConfig(
        d_model=options.d_model,
        n_layers=options.layers,
        n_heads=options.heads,
        short_conv=4,
        forget_gate=True,
        rope=RotaryConfig(placement="signed"),
    )


def train(options: argparse.Namespace, data: PasskeyDataModule, bar: Progress) -> tuple[RecallModule, list[float]]:
    seed_everything(options.seed, verbose=False)
    module = RecallModule(config_of(options), OptimizerConfig(lr=options.lr))
    watch = Watch(bar, bar.add_task("training", total=options.steps))
    trainer = Trainer(
        max_steps=options.steps,
        accelerator="cpu",
        devices=1,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(module, data)
    return module, watch.means()


def parse(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.passkey", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=4000, help="steps of 4,096 tokens (default: 4000)")
    add("--layers", type=int, default=2)
    add("--d_model", type=int, default=64)
    add("--heads", type=int, default=2)
    add("--lr", type=float, default=1e-2)
    add("--seed", type=int, default=0)
    add("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096], help="rows that are asked")
    add("--depths", type=int, nargs="+", default=list(range(0, 101, 10)), help="in percent")
    add("--rows", type=int, default=50, help="rows of each length and depth (default: 50)")
    add("--output", type=Path, default=Path("results"), help="folder for CSV, JSON, PNG and model (default: results)")
    options = parser.parse_args(args)
    report.check_positive(parser, options, "steps", "layers", "d_model", "heads", "lr", "lengths", "rows")
    try:
        options.data = PasskeyDataModule(stages=STAGES, tokens_per_batch=TOKENS_PER_BATCH, seed=options.seed)
        require_cases(options.data.task_of("val"), options.lengths, options.depths, options.rows)
        shapes_only(config_of(options))
    except InputError as error:
        parser.error(str(error))
    report.make_folder(parser, options.output)
    return options


def main(args: list[str] | None = None) -> int:
    options = parse(args)
    quiet_lightning()
    console = Console()
    data = options.data
    with report.progress_bar(console) as bar:
        module, losses = train(options, data, bar)
        module.model.save_pretrained(options.output / "passkey.model")
        task = bar.add_task("asking", total=len(options.lengths) * len(options.depths))
        asked = options.lengths, options.depths, options.rows
        found = list(recall_by_depth(module.model.eval(), data.task_of("val"), *asked, tick=lambda: bar.advance(task)))
    title = f"Pass keys found, {module.model.n_parameters:,} parameters, trained on rows up to {STAGES[-1][0]}"
    console.print(table_of(found, title))
    details = {
        **report.surroundings("cpu", "passkey", args),
        "settings": {name: value for name, value in vars(options).items() if name not in ("output", "data")},
        "stages": STAGES,
        "trained_to": STAGES[-1][0],
        "train_losses": losses,
    }
    console.print("wrote", *map(str, write(options.output, found, details, title)), soft_wrap=True, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
