"""Warnings when the loss or the gradient norm spikes."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console

from linrope.training.callbacks.last_checkpoint import finished_a_step
from linrope.training.data_modules.base import ResumableDataModule


class SpikeWarning(Callback):
    """Prints a line when the loss or the gradient norm exceeds `factor` × its running median.

    The line has the step and, with a `ResumableDataModule`, the samples of its batches, so that they can be inspected.
    `found` holds all spikes as (step, name, value, median).

    Args:
        console: where to print.
        factor: the smallest ratio to the median that is a spike.
        window: number of steps of the median; nothing is printed before a quarter of them.
    """

    def __init__(self, console: Console, factor: float, window: int = 100) -> None:
        self.console, self.factor, self.window = console, factor, window
        self.before = {name: deque[float](maxlen=window) for name in ("train_loss", "grad_norm")}
        self.found: list[tuple[int, str, float, float]] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not finished_a_step(trainer, batch_idx):
            return
        spikes = []
        for name, before in self.before.items():
            value = trainer.callback_metrics[name].item()
            median = statistics.median(before) if len(before) >= self.window // 4 else None
            if median is not None and value > self.factor * median:
                self.found.append((trainer.global_step, name, value, median))
                spikes.append(f"{name} {value:.3g} is {value / median:.1f} times its median")
            before.append(value)
        if spikes and trainer.is_global_zero:
            data = trainer.datamodule
            resumable = isinstance(data, ResumableDataModule)
            where = data.samples_of(trainer.global_step - 1) if resumable else f"batch {batch_idx}"
            line = f"spike at step {trainer.global_step}: {', '.join(spikes)}; {where}"
            self.console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
