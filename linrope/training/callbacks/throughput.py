"""Speed of a run: tokens and operations per second, share of the device's peak, time waiting for data, and memory."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer

from linrope.training.callbacks.saving import finished_a_step
from linrope.training.data_modules.base import TimedLoader, data_parallel

if sys.platform != "win32":
    import resource

DTYPES = {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32, "64": torch.float64}
"""The dtype of matrix products by the first part of Lightning's precision."""


class Throughput(Callback):
    """Logs the speed of a run at every step that the Trainer logs, as means over the last `window` optimizer steps,
    without the run's first one, which compiles and warms up, where there are others:

    - `tokens_per_second`: tokens trained on, over all devices, per second of wall time between steps. The time includes
      loading data, not validation. Tokens are the elements of a batch's `inputs`; omitted where batches have none.
    - `tflops_per_device`: 10¹² operations per second of each device, as the task counts them (`step_flops`); omitted
      where it does not.
    - `share_of_peak`: the same as a share of the GPU's peak in this precision, by Lightning's `get_available_flops`;
      omitted for a device that it does not list.
    - `waiting_for_data`: the share of the time spent waiting for a `TimedLoader`; omitted for other loaders.
    - `peak_memory_gib`: the largest memory of this device's tensors since training began; on a CPU, of the process
      (omitted on Windows).

    At these steps and at each validation it logs `tokens` and `seconds`: how far the run has come, over all devices and
    without the time of validations. A resumed run continues both.
    """

    def __init__(self, window: int = 20) -> None:
        self._steps: deque[tuple[float, ...]] = deque(maxlen=window)  # tokens, flops, seconds, seconds waited
        self._tokens = self._flops = 0
        self._began = self._waited = 0.0
        self._warming_up = True
        self._peak: float | None = None
        self._flops_of: dict[tuple[int, ...], int] = {}
        self._so_far = {"tokens": 0, "seconds": 0.0}  # of the whole run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._so_far = {"tokens": 0, "seconds": 0.0}  # a checkpoint is loaded after this

    def state_dict(self) -> dict[str, Any]:
        return dict(self._so_far)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._so_far = dict(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tokens = self._flops = 0
        self._began, self._waited = time.perf_counter(), self._waited_so_far(trainer)
        self._steps.clear()
        self._warming_up = True
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            dtype = DTYPES.get(str(trainer.precision).partition("-")[0])
            self._peak = None if dtype is None else get_available_flops(device, dtype)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if "inputs" in batch:
            self._tokens += batch["inputs"].numel() * data_parallel(trainer)[1]
            self._flops += self._batch_flops(pl_module, batch)
        if not finished_a_step(trainer, batch_idx):
            return
        now, waited = time.perf_counter(), self._waited_so_far(trainer)
        if self._warming_up and self._steps:  # not the first step, which may compile for a minute
            self._steps.clear()
            self._warming_up = False
        self._steps.append((self._tokens, self._flops, now - self._began, waited - self._waited))
        self._so_far["tokens"] += self._tokens
        self._so_far["seconds"] += now - self._began
        self._tokens = self._flops = 0
        self._began, self._waited = now, waited
        step, every = trainer.global_step, trainer.log_every_n_steps
        if step == trainer.max_steps or (every and step % every == 0):  # logging takes Lightning a millisecond
            pl_module.log_dict(self._metrics(trainer))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused = time.perf_counter()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            pl_module.log_dict({name: float(value) for name, value in self._so_far.items()})

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began += time.perf_counter() - self._paused

    def _metrics(self, trainer: Trainer) -> dict[str, float]:
        tokens, flops, seconds, waited = map(sum, zip(*self._steps))
        metrics = {name: float(value) for name, value in self._so_far.items()}
        if tokens:
            metrics["tokens_per_second"] = tokens / seconds
        if flops:
            metrics["tflops_per_device"] = flops / seconds / 1e12
        if (peak := _peak_memory(trainer.strategy.root_device)) is not None:
            metrics["peak_memory_gib"] = peak / 2**30
        if flops and self._peak is not None:
            metrics["share_of_peak"] = flops / seconds / self._peak
        if isinstance(trainer.train_dataloader, TimedLoader):
            metrics["waiting_for_data"] = waited / seconds
        return metrics

    def _batch_flops(self, module: LightningModule, batch: Any) -> int:
        """Operations for one batch of this device; computed once for each shape of its inputs."""
        shape = tuple(batch["inputs"].shape)
        if shape not in self._flops_of:
            began = time.perf_counter()
            self._flops_of[shape] = module.step_flops(batch) or 0
            self._began += time.perf_counter() - began  # counting is no part of the step
        return self._flops_of[shape]

    @staticmethod
    def _waited_so_far(trainer: Trainer) -> float:
        loader = trainer.train_dataloader
        return loader.waited if isinstance(loader, TimedLoader) else 0.0


def _peak_memory(device: torch.device) -> int | None:
    """Bytes; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
