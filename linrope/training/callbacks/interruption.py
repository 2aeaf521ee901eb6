"""Ctrl-C and SIGTERM: finish the step, save a checkpoint, stop."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from linrope.errors import Interrupted
from linrope.training.callbacks.last_checkpoint import LastCheckpoint


class GracefulStop(Callback):
    """On SIGINT (Ctrl-C) or SIGTERM: finish the step, save `checkpoint`, raise `Interrupted`.

    A validation that is running or due is finished first. A second SIGINT aborts immediately.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, checkpoint: LastCheckpoint) -> None:
        self.checkpoint = checkpoint
        self._received: int | None = None
        self._previous: dict[int, Any] = {}
        self._prints = True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._prints = trainer.is_global_zero
        if stage == "fit":
            self._previous = {signum: signal.signal(signum, self._on_signal) for signum in self.SIGNALS}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Again: since setup() Lightning has installed a SIGTERM handler that exits without saving.
        for signum in self.SIGNALS:
            signal.signal(signum, self._on_signal)
        self._first_step = trainer.global_step
        self._stop_if_asked(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Not at the end of the step before: its metrics are logged and its validation runs only after that.
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._stop_if_asked(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore_handlers()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._received is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = signum
        if self._prints:  # not print(): a signal can arrive while the main thread is inside print()
            os.write(2, b"\nfinishing this step, then saving a checkpoint (Ctrl-C again aborts immediately)\n")

    def _stop_if_asked(self, trainer: Trainer) -> None:
        if trainer.global_step >= trainer.max_steps:
            return  # nothing to resume: let it end
        # Ranks may get the signal at different times, and saving needs all of them.
        if not trainer.strategy.reduce_boolean_decision(self._received is not None, all=False):
            return
        path = self.checkpoint.path if trainer.global_step > self._first_step else None
        if path is not None:
            self.checkpoint.save(trainer)
        raise Interrupted(self._received or signal.SIGTERM, trainer.global_step, path)
