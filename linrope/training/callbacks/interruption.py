"""Ctrl-C and SIGTERM: finish the step, save, stop."""

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

    A validation that is under way or due is finished too. A second SIGINT aborts at once.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, checkpoint: LastCheckpoint) -> None:
        self.checkpoint = checkpoint
        self._received: int | None = None
        self._previous: dict[int, Any] = {}
        self._speaks = True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._speaks = trainer.is_global_zero
        if stage == "fit":
            self._previous = {signum: signal.signal(signum, self._on_signal) for signum in self.SIGNALS}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Once more: since setup() Lightning has put a SIGTERM handler around ours that exits without saving.
        for signum in self.SIGNALS:
            signal.signal(signum, self._on_signal)
        self._first_step = trainer.global_step
        self._stop_if_asked(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Not where the step before ends: its metrics are logged, and what follows it is validated, only after that.
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
        if self._speaks:  # not print(): a signal can arrive while the main thread is inside a print of its own
            os.write(2, b"\nfinishing this step, then saving a checkpoint (Ctrl-C again aborts at once)\n")

    def _stop_if_asked(self, trainer: Trainer) -> None:
        if trainer.global_step >= trainer.max_steps:
            return  # nothing is left to resume: let it end
        # Ranks may hear of it at different times, and saving needs all of them.
        if not trainer.strategy.reduce_boolean_decision(self._received is not None, all=False):
            return
        stepped = trainer.global_step > self._first_step
        if stepped:
            self.checkpoint.save(trainer)
        raise Interrupted(
            self._received or signal.SIGTERM, trainer.global_step, self.checkpoint.path if stepped else None
        )
