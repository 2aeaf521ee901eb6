"""Token classification: a label for each word, as in named-entity recognition."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torchmetrics.functional.classification import multiclass_f1_score

from linrope.data.finetune.conll import are_entities, entities
from linrope.generation.sampling import require_finite
from linrope.losses import IGNORE, per_target, token_losses
from linrope.training.data_modules.token_classification import TokenClassificationDataModule
from linrope.training.task import Batch, BatchLoss
from linrope.training.tasks.finetune import FineTuningModule


class TokenClassificationModule(FineTuningModule):
    """Trains a `TokenClassifier` on the batches of a `TokenClassificationDataModule`.

    Logs `train_loss` (nats per word) of each optimizer step, and of a whole validation `val_loss`, `val_accuracy` (the
    share of words with the right label) and `val_f1`: with labels O, B-TYPE and I-TYPE that of whole entities, by the
    rules of conlleval; with others the mean of each label's F1. Words that were cut off are left out. For a test the
    same as `test_…`. Arguments and errors are those of `FineTuningModule`.
    """

    data_class, head = TokenClassificationDataModule, "token_classification"

    @property
    def monitor(self) -> tuple[str, str]:
        return "val_f1", "max"

    def batch_loss(self, batch: Batch) -> BatchLoss:
        targets = batch["targets"]
        nats = token_losses(self.logits(batch), targets).sum()
        return BatchLoss(nats, (targets != IGNORE).sum(), batch["n_positions"])

    def evaluate(self, batch: Batch, sums: dict[Hashable, Any]) -> None:
        logits, targets = self.logits(batch), batch["targets"]
        losses, predicted = token_losses(logits, targets).sum(1).tolist(), logits.argmax(-1)
        for row, loss in enumerate(losses):
            asked = targets[row] != IGNORE
            labels = predicted[row][asked].tolist(), targets[row][asked].tolist()
            sums.setdefault("rows", []).append((loss, *labels))

    def evaluation_metrics(self, split: str, sums: dict[Hashable, Any]) -> dict[str, float]:
        losses, predicted, targets = zip(*sums["rows"])
        found, right = (torch.tensor([label for row in rows for label in row]) for rows in (predicted, targets))
        n_words, labels = len(right), self.data.labels
        if not n_words:
            f1 = math.nan  # each word was cut off
        elif are_entities(labels):
            f1 = _entity_f1(_named(predicted, labels), _named(targets, labels))
        else:
            f1 = multiclass_f1_score(found, right, len(labels), average="macro").item()
        loss, accuracy = (per_target(total, n_words) for total in (sum(losses), (found == right).sum().item()))
        return {f"{split}_loss": loss, f"{split}_accuracy": accuracy, f"{split}_f1": f1}

    def predict_step(self, batch: Batch, batch_idx: int) -> list[dict[str, Any]]:
        """For each row its id and the label of each word; null for words that were cut off."""
        logits = self.logits(batch)
        require_finite(logits)
        predicted, words, labels = logits.argmax(-1), batch["words"], self.data.labels
        found = []
        for row, (id_, n_words) in enumerate(zip(batch["id"], batch["n_words"])):
            of_row: list[str | None] = [None] * n_words
            begins = words[row] >= 0
            for word, label in zip(words[row][begins].tolist(), predicted[row][begins].tolist()):
                of_row[word] = labels[label]
            found.append({"id": id_, "labels": of_row})
        return found


def _named(rows: tuple[list[int], ...], labels: tuple[str, ...]) -> list[list[str]]:
    return [[labels[number] for number in row] for row in rows]


def _entity_f1(predicted: list[list[str]], targets: list[list[str]]) -> float:
    """F1 of whole entities; 0 without any."""
    found, right = ([entities(row) for row in rows] for rows in (predicted, targets))
    hits = sum(len(a & b) for a, b in zip(found, right))
    return 2 * hits / max(sum(map(len, found)) + sum(map(len, right)), 1)
