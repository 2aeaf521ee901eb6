"""A warning where other programs hold the cores that a CPU trains on."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from linrope.utils import busy_cores

EVERY = 5.0
"""Seconds between two looks."""


class BusyCores(Callback):
    """Warns once if the threads of a CPU wait for another program at two looks in a row."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._looked_at, self._waited = time.perf_counter(), False
        self._looking = trainer.strategy.root_device.type == "cpu"

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._looking or time.perf_counter() - self._looked_at < EVERY:
            return
        why = busy_cores.why_slow()
        if why and self._waited:
            rank_zero_warn(f"Training is slow: {why}")
            self._looking = False
        self._looked_at, self._waited = time.perf_counter(), why is not None
