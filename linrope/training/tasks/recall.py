"""Recall as a training task: accuracy by case beside the loss."""

from __future__ import annotations

import numpy as np
import torch

from linrope.data.synthetic.batches import Batch
from linrope.losses import IGNORE, token_losses
from linrope.training.task import LanguageModelingModule


class RecallModule(LanguageModelingModule):
    """Trains a `LanguageModel` on the batches of a `RecallDataModule` and measures how much it recalls.

    Logs `train_loss` (nats per question), `grad_norm` and `lr` per optimizer step, and over a whole evaluation
    `val_loss`, `val_accuracy/{case}` (the share of a case's questions, each of one token, whose answer has the highest
    logit) and `val_accuracy` (the mean over cases); in a test the same as `test_…`. Arguments and errors are those of
    `LanguageModelingModule`.
    """

    def _start_evaluation(self) -> None:
        self._cases: dict[str, np.ndarray] = {}  # by name: (nats, right answers, questions)

    def _add_to_evaluation(self, batch: Batch) -> None:
        logits, targets = self.model(batch["inputs"]), batch["targets"]
        losses, right, asked = token_losses(logits, targets), logits.argmax(-1) == targets, targets != IGNORE
        sums = np.array(torch.stack([losses.sum(), right.sum(), asked.sum()]).tolist())  # one transfer
        self._cases[batch["case"]] = self._cases.get(batch["case"], 0) + sums

    def _log_evaluation(self, split: str) -> None:
        cases: dict[str, np.ndarray] = {}
        for of_rank in self._cases_of_all_ranks():
            for case, sums in of_rank.items():
                cases[case] = cases.get(case, 0) + sums
        accuracies = {f"{split}_accuracy/{name}": right / asked for name, (_, right, asked) in cases.items()}
        nats, _, asked = sum(cases.values())
        mean = sum(accuracies.values()) / len(accuracies)
        self.log_dict({**self._metrics(split, nats, 0, asked), f"{split}_accuracy": mean, **accuracies})

    def _cases_of_all_ranks(self) -> list[dict[str, np.ndarray]]:
        if self.trainer.world_size == 1:
            return [self._cases]
        gathered: list[dict[str, np.ndarray]] = [{}] * self.trainer.world_size
        torch.distributed.all_gather_object(gathered, self._cases)  # ranks may not have seen the same cases
        return gathered

    def _metrics(self, split: str, nats: float, n_bytes: float, tokens: float) -> dict[str, float]:
        return {f"{split}_loss": nats / max(tokens, 1)}  # there are no bytes here
