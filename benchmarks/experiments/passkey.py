"""A small model learns to find a pass key in short rows of real text, and is tested on longer rows: a heat map.

    python -m benchmarks.passkey --output benchmarks/results/cpu/passkey

The map shows the share of rows with all five digits right. `linrope recall --task passkey` tests any other model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer, seed_everything
from rich.table import Table

from benchmarks.experiments.training_run import in_means
from benchmarks.harness.pictures import Figure
from benchmarks.harness.runner import AddOption, Benchmark
from benchmarks.harness.trainer import quiet_trainer
from linrope import LanguageModelConfig, RotaryConfig
from linrope.cli.training import quiet_lightning
from linrope.evaluation import recall_map
from linrope.evaluation.recall_map import Recalled, recall_by_depth, require_cases
from linrope.profiling.fake_tensors import shapes_only
from linrope.training import OptimizerConfig, PasskeyDataModule, RecallModule

STAGES = ((96, 4), (128, 2), (256, 1), (512, 1))
TOKENS_PER_BATCH = 4096


class Watch(Callback):
    """Moves the progress bar, and keeps the loss of each step."""

    def __init__(self, tick: Callable[..., None]) -> None:
        self.tick = tick
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.losses.append(trainer.callback_metrics["train_loss"].item())
        self.tick(advance=1, description=f"training, loss {self.losses[-1]:.3f}")


def config_of(options: argparse.Namespace) -> LanguageModelConfig:
    sizes = {"d_model": options.d_model, "n_layers": options.layers, "n_heads": options.heads}
    return LanguageModelConfig(**sizes, short_conv=4, forget_gate=True, rope=RotaryConfig(placement="signed"))


class Passkey(Benchmark):
    name = "passkey"
    point, key, stem = Recalled, "cases", "recall"
    from_zero = ("seed", "depths")

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        lengths = [128, 256, 512, 1024, 2048, 4096]
        add("--steps", type=int, default=4000, help="steps of 4,096 tokens (default: 4000)")
        add("--layers", type=int, default=2)
        add("--d_model", type=int, default=64)
        add("--heads", type=int, default=2)
        add("--lr", type=float, default=1e-2)
        add("--seed", type=int, default=0)
        add("--lengths", type=int, nargs="+", default=lengths, help="tokens of the rows in which it is asked")
        add("--depths", type=int, nargs="+", default=list(range(0, 101, 10)), help="in percent of the row")
        add("--rows", type=int, default=50, help="rows of each length and depth (default: 50)")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        """`data` is added: the data module."""
        options.data = PasskeyDataModule(stages=STAGES, tokens_per_batch=TOKENS_PER_BATCH, seed=options.seed)
        require_cases(options.data.task_of("val"), options.lengths, options.depths, options.rows)
        shapes_only(config_of(options))

    def measure(self) -> None:
        options = self.options
        quiet_lightning()
        self.watch = Watch(self.progress("training", options.steps))
        seed_everything(options.seed, verbose=False)
        module = RecallModule(config_of(options), OptimizerConfig(lr=options.lr))
        quiet_trainer(options.steps, [self.watch], limit_val_batches=0).fit(module, options.data)
        module.model.save_pretrained(options.output / "passkey.model")
        tick = partial(self.progress("asking", len(options.lengths) * len(options.depths)), advance=1)
        asked = options.lengths, options.depths, options.rows
        self.points.extend(recall_by_depth(module.model.eval(), options.data.task_of("val"), *asked, tick=tick))

    @property
    def title(self) -> str:
        return f"Pass keys found in rows up to {max(self.options.lengths):,} tokens, trained on up to {STAGES[-1][0]}"

    def table(self) -> Table:
        return recall_map.table_of(self.points, self.title)

    def write(self, folder: Path, details: dict[str, Any]) -> list[Path]:
        if not self.points:
            return []
        details |= {"stages": STAGES, "trained_to": STAGES[-1][0], "train_losses": in_means(self.watch.losses)}
        return recall_map.write(folder, self.points, details, self.title)

    def figures(self) -> dict[str, Figure]:
        return {"": recall_map.figure_of(self.points, self.title, STAGES[-1][0])}


if __name__ == "__main__":
    sys.exit(Passkey.main())
