"""What looking at the health of attention costs: its share of a training run's time.

    python -m benchmarks.health --steps 200 --every 100

A model of configs/quickstart.yaml's sizes trains as `linrope fit` does, with `run.health_every_n_steps` as given.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import Trainer, seed_everything
from rich.console import Console

from benchmarks.harness import report
from linrope import LanguageModelConfig
from linrope.cli.training import quiet_lightning
from linrope.training import LanguageModelingModule, OptimizerConfig, TextDataModule
from linrope.training.callbacks.health import HealthMonitor


@dataclass
class Cost:
    """Of one run, in seconds."""

    every_n_steps: int
    looks: int
    seconds_of_looks: float
    seconds: float
    share_of_time: float


def measure(options: argparse.Namespace) -> Cost:
    seed_everything(0, verbose=False)
    sizes = {"d_model": options.d_model, "n_layers": options.layers, "n_heads": options.heads}
    module = LanguageModelingModule(
        LanguageModelConfig(**sizes, short_conv=4, forget_gate=True), OptimizerConfig(lr=1e-2)
    )
    monitor = HealthMonitor(options.every)
    trainer = Trainer(
        max_steps=options.steps,
        accelerator="cpu",
        devices=1,
        callbacks=[monitor],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    began = time.perf_counter()
    trainer.fit(module, TextDataModule(context=options.context, batch_size=options.batch_size))
    seconds = time.perf_counter() - began
    looks = options.steps // options.every
    return Cost(options.every, looks, monitor.seconds, seconds, monitor.seconds / seconds)


def parse(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.health", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=200)
    add("--every", type=int, default=100, help="steps between two looks (default: 100, that of `linrope fit`)")
    add("--context", type=int, default=1024)
    add("--batch_size", type=int, default=2)
    add("--layers", type=int, default=4)
    add("--d_model", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--output", type=Path, default=Path("results"), help="folder for CSV and JSON (default: results)")
    options = parser.parse_args(args)
    report.check_positive(parser, options, "steps", "every", "context", "batch_size", "layers", "d_model", "heads")
    report.make_folder(parser, options.output)
    return options


def main(args: list[str] | None = None) -> int:
    options = parse(args)
    quiet_lightning()
    console = Console()
    with console.status("training"):
        cost = measure(options)
    per_look = report.seconds_text(cost.seconds_of_looks / max(1, cost.looks))
    console.print(
        f"{cost.looks} looks of {per_look} ms in {cost.seconds:.1f} s: {100 * cost.share_of_time:.2f} % of the time",
        highlight=False,
    )
    details = {**report.surroundings("cpu", "health", args), "interrupted": False}
    return report.finish(console, options.output, "health", [cost], details)


if __name__ == "__main__":
    sys.exit(main())
