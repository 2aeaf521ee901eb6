"""The health of a training run: metrics of linear attention, and warnings at spikes."""

from __future__ import annotations

import statistics
import time
from collections import deque
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console

from linrope.profiling.attention_health import LayerHealth
from linrope.profiling.hooks import OperatorCall, operator_hook
from linrope.training.callbacks.saving import finished_a_step
from linrope.training.data_modules.base import ResumableDataModule

_OVERALL = {"smallest_denominator": min, "negative_weights": statistics.fmean}
"""Metrics that are one number for all layers."""


class HealthMonitor(Callback):
    """Logs every `every_n_steps` optimizer steps, for the linear layers of the model:

    - `health/smallest_denominator`: over layers, heads and 16 positions of a row; near ε outputs are noise.
    - `health/negative_weights`: the share of numerator weights below 0, between 16 queries and 256 keys.
    - `health/reach/layerL/headH`: -1 / mean log_decay: with a constant gate, the tokens after which a weight has
      decayed to 1/e.
    - `health/output/layerL`: mean |o|, before norm and gate; it should neither grow nor shrink with depth.
    - `health/state_norm/layerL`: the norm of the state at the end of the row.
    - `health/share_of_time`: the share of training time that this callback takes; `seconds` is that time so far.

    All are from the first row of the step's last batch on rank 0, where devices share rows from its slice of it, and
    are logged in rows of their own.
    """

    def __init__(self, every_n_steps: int) -> None:
        self.every_n_steps = every_n_steps
        self.seconds = 0.0
        self._layers: dict[int, LayerHealth] = {}
        self._watching = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if finished_a_step(trainer, batch_idx) and (trainer.global_step + 1) % self.every_n_steps == 0:
            self._layers = {}
            self._watching.enter_context(operator_hook(pl_module.model, self._note))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._watching.close()
        if not self._layers:
            return
        began = time.perf_counter()
        metrics = self._metrics()
        self._layers = {}
        now = time.perf_counter()
        self.seconds += now - began
        metrics["health/share_of_time"] = self.seconds / (now - self._began)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step - 1)  # Lightning counts logged steps from 0

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._watching.close()

    @torch.no_grad()
    def _note(self, seen: OperatorCall) -> None:
        began = time.perf_counter()
        with torch.autocast(seen.q.device.type, enabled=False):
            self._layers.setdefault(seen.layer, LayerHealth()).add(seen)
        self.seconds += time.perf_counter() - began

    def _metrics(self) -> dict[str, float]:
        of_layers = {layer: health.values() for layer, health in sorted(self._layers.items())}
        tensors = {(name, layer): value.float() for layer, found in of_layers.items() for name, value in found.items()}
        values = dict(zip(tensors, torch.stack(list(tensors.values())).tolist()))  # one transfer
        metrics = {}
        for (name, layer), value in values.items():
            if name not in _OVERALL:
                measure, *head = name.split("/")
                metrics["/".join(("health", measure, f"layer{layer}", *head))] = value
        for name, over in _OVERALL.items():
            if found := [value for (other, _), value in values.items() if other == name]:
                metrics[f"health/{name}"] = over(found)
        return metrics


class SpikeWarning(Callback):
    """Prints a line when the loss or the gradient norm exceeds `factor` × its running median, if the task logs it.

    The line has the step and, with a `ResumableDataModule`, the samples of its batches, so that they can be inspected.
    The median is over the last `window` steps; nothing is printed before a quarter of them. `found` holds all spikes as
    (step, name, value, median).
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
            if name not in trainer.callback_metrics:  # a task may have `training_metrics` of its own
                continue
            value = trainer.callback_metrics[name].item()
            median = statistics.median(before) if len(before) >= self.window // 4 else None
            if median and value > self.factor * median:  # a median of 0, of targets learned by heart, tells nothing
                self.found.append((trainer.global_step, name, value, median))
                spikes.append(f"{name} {value:.3g} is {value / median:.1f} times its median")
            before.append(value)
        if spikes and trainer.is_global_zero:
            data = trainer.datamodule
            resumable = isinstance(data, ResumableDataModule)
            step = trainer.global_step - 1
            if trainer.overfit_batches:  # the same few steps again and again
                step %= trainer.overfit_batches // trainer.accumulate_grad_batches
            where = data.samples_of(step) if resumable else f"batch {batch_idx}"
            line = f"spike at step {trainer.global_step}: {', '.join(spikes)}; {where}"
            self.console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
