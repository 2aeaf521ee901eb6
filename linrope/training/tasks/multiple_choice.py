"""Multiple choice: which of several pairs of texts is the right one?"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F

from linrope.training.data_modules.multiple_choice import MultipleChoiceDataModule
from linrope.training.task import Batch, BatchLoss
from linrope.training.tasks.finetune import FineTuningModule


class MultipleChoiceModule(FineTuningModule):
    """Trains a `MultipleChoice` on the batches of a `MultipleChoiceDataModule`.

    Logs `train_loss` of each optimizer step (nats per row), and `val_loss` and `val_accuracy` of a whole validation;
    for a test the same as `test_…`. Arguments and errors are those of `FineTuningModule`; the model's `n_labels` is
    unused.
    """

    data_class, head = MultipleChoiceDataModule, "multiple_choice"

    @property
    def monitor(self) -> tuple[str, str]:
        return "val_accuracy", "max"

    def batch_loss(self, batch: Batch) -> BatchLoss:
        logits, targets = self.logits(batch), batch["targets"]
        nats = F.cross_entropy(logits, targets, reduction="sum")
        return BatchLoss(nats, nats.new_tensor(len(targets)), len(targets))

    def evaluate(self, batch: Batch, sums: dict[Hashable, Any]) -> None:
        logits, targets = self.logits(batch), batch["targets"]
        nats = F.cross_entropy(logits, targets, reduction="sum")
        right = (logits.argmax(-1) == targets).sum()
        of_batch = torch.stack([nats, right, torch.ones_like(targets).sum()]).cpu().double()  # one transfer
        sums["rows"] = sums.get("rows", 0) + of_batch

    def evaluation_metrics(self, split: str, sums: dict[Hashable, Any]) -> dict[str, float]:
        nats, right, n_rows = sums["rows"].tolist()
        return {f"{split}_loss": nats / n_rows, f"{split}_accuracy": right / n_rows}

    def predict_step(self, batch: Batch, batch_idx: int) -> list[dict[str, Any]]:
        """For each row its id, the name of the choice, and the probability of each choice."""
        return self.labelled(batch, self.logits(batch))
