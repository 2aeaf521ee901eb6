"""The cost of the health metrics of attention: their share of a training run's time.

A model of configs/quickstart.yaml's sizes trains as `linrope fit` does, with `run.health_every_n_steps` as given.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from lightning.pytorch import seed_everything
from rich.table import Table

from benchmarks.harness.runner import AddOption, Benchmark
from benchmarks.harness.timing import clock, milliseconds_text
from benchmarks.harness.trainer import quiet_trainer
from linrope import LanguageModelConfig
from linrope.cli.training import quiet_lightning
from linrope.profiling.fake_tensors import shapes_only
from linrope.training import LanguageModelingModule, OptimizerConfig, TextDataModule
from linrope.training.callbacks.health import HealthMonitor
from linrope.utils.terminal import new_table


@dataclass
class Cost:
    """Of one run, in seconds."""

    every_n_steps: int
    looks: int
    seconds_of_looks: float
    seconds: float
    share_of_time: float


def config_of(options: argparse.Namespace) -> LanguageModelConfig:
    sizes = {"d_model": options.d_model, "n_layers": options.layers, "n_heads": options.heads}
    return LanguageModelConfig(**sizes, short_conv=4, forget_gate=True)


class Health(Benchmark):
    name = "health"
    point = Cost

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        add("--steps", type=int, default=200)
        add("--every", type=int, default=100, help="steps between two measurements (default: 100, as `linrope fit`)")
        add("--context", type=int, default=1024)
        add("--batch_size", type=int, default=2)
        add("--layers", type=int, default=4)
        add("--d_model", type=int, default=128)
        add("--heads", type=int, default=4)

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        if options.every > options.steps:
            parser.error(f"--every {options.every}: must be at most --steps {options.steps}, or nothing is measured")
        shapes_only(config_of(options))

    def measure(self) -> None:
        options = self.options
        quiet_lightning()
        seed_everything(0, verbose=False)
        module = LanguageModelingModule(config_of(options), OptimizerConfig(lr=1e-2))
        data = TextDataModule(context=options.context, batch_size=options.batch_size)
        monitor = HealthMonitor(options.every)
        trainer = quiet_trainer(options.steps, [monitor], limit_val_batches=0)
        with self.console.status("training"):
            seconds = clock(lambda: trainer.fit(module, data))
        looks = options.steps // options.every
        self.points.append(Cost(options.every, looks, monitor.seconds, seconds, monitor.seconds / seconds))

    def table(self) -> Table:
        table = new_table("Cost of health metrics", "measurements", "ms each", "s of the run", "share of the time")
        for cost in self.points:
            each = milliseconds_text(cost.seconds_of_looks / max(1, cost.looks))
            table.add_row(str(cost.looks), each, f"{cost.seconds:.1f}", f"{100 * cost.share_of_time:.2f} %")
        return table


if __name__ == "__main__":
    sys.exit(Health.main())
