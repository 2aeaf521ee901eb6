"""Warnings when the loss or the gradient norm spikes."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console


class SpikeWarning(Callback):
    """Says where the loss or the gradient's norm leaves its course: above `factor` times the running median.

    One line on the console, with the step and the samples of its batch, which a data module with `samples_of(step)`
    names: the order is a function of the seed and the step, so that the batch can be looked at. `found` keeps them as
    (step, what, value, median).

    Args:
        console: where to.
        factor: from where on it is a spike.
        window: how many steps the median is of; before there are a quarter of them nothing is said.
    """

    def __init__(self, console: Console, factor: float, window: int = 100) -> None:
        self.console, self.factor, self.window = console, factor, window
        self.before = {name: deque[float](maxlen=window) for name in ("train_loss", "grad_norm")}
        self.found: list[tuple[int, str, float, float]] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
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
            samples = getattr(trainer.datamodule, "samples_of", lambda step: f"batch {batch_idx}")
            where = samples(trainer.global_step - 1)
            line = f"spike at step {trainer.global_step}: {', '.join(spikes)}; {where}"
            self.console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
