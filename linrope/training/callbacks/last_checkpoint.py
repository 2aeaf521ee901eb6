"""The checkpoint to resume from, `last.ckpt`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint


def finished_a_step(trainer: Trainer, batch_idx: int) -> bool:
    """Whether the batch that just ended was the last of its optimizer step."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


class LastCheckpoint(Checkpoint):
    """Writes `last.ckpt` every `every_n_steps` optimizer steps and at the end of training.

    If a validation follows the step, it is written again after it, because a resumed run does not repeat that.
    `last_path` is the file; None before it was first written.
    """

    def __init__(self, folder: str | Path, every_n_steps: int) -> None:
        self.path, self.every_n_steps = Path(folder) / "last.ckpt", every_n_steps
        self.last_path: Path | None = None
        self._saved_at = -1

    def save(self, trainer: Trainer) -> None:
        """Writes the checkpoint unless it is of this step already. Every rank must call it."""
        if self._saved_at != trainer.global_step:
            trainer.save_checkpoint(self.path)
            self._saved_at, self.last_path = trainer.global_step, self.path

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # The checkpoint of the last step is saved here too, not in on_train_end: a longer run that resumes from one of
        # on_train_end logs its steps off by one (Lightning counts logged steps separately from its global step).
        due = trainer.global_step % self.every_n_steps == 0 or trainer.global_step == trainer.max_steps
        if due and finished_a_step(trainer, batch_idx):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and self._saved_at == trainer.global_step:
            self._saved_at = -1
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)  # max_time or a user's callback stopped it early
