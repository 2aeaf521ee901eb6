"""Recall: answer questions about the row; accuracy by case beside the loss."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from linrope.losses import IGNORE, per_target, token_losses
from linrope.training.task import Batch, TrainingTask
from linrope.training.tasks.language_modeling import LanguageModelingModule


class RecallModule(LanguageModelingModule):
    """Trains a `LanguageModel` on the batches of a `RecallDataModule` and measures how much it recalls.

    Logs `train_loss` (nats per question), `grad_norm` and `lr` of each optimizer step, and for a whole validation
    `val_loss`, `val_accuracy/{case}` (the share of a case's questions, each of one token, whose answer has the highest
    logit) and `val_accuracy` (the mean over cases); for a test the same as `test_…`. Arguments and errors are those of
    `LanguageModelingModule`.
    """

    require_slices = TrainingTask.require_slices  # its evaluation reads whole rows

    def training_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return TrainingTask.training_metrics(self, sums)  # random tokens are no bytes

    def evaluate(self, batch: Batch, sums: dict[Hashable, Any]) -> None:
        logits, targets = self.model(batch["inputs"]), batch["targets"]
        losses, right, asked = token_losses(logits, targets), logits.argmax(-1) == targets, targets != IGNORE
        of_batch = torch.stack([losses.sum(), right.sum(), asked.sum()]).cpu().double()  # one transfer
        sums[batch["case"]] = sums.get(batch["case"], 0) + of_batch

    def evaluation_metrics(self, split: str, sums: dict[Hashable, Any]) -> dict[str, float]:
        by_case = {case: of_case.tolist() for case, of_case in sums.items()}
        of_case = {case: per_target(right, asked) for case, (_, right, asked) in by_case.items()}
        accuracies = {f"{split}_accuracy/{case}": accuracy for case, accuracy in of_case.items()}
        nats, _, asked = map(sum, zip(*by_case.values(), strict=True))
        mean = sum(accuracies.values()) / len(accuracies)
        return {f"{split}_loss": per_target(nats, asked), f"{split}_accuracy": mean, **accuracies}
