"""Classification of texts and pairs of texts, and regression."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.functional import pearson_corrcoef, spearman_corrcoef
from torchmetrics.functional.classification import binary_f1_score, multiclass_f1_score

from linrope.training.data_modules.classification import ClassificationDataModule
from linrope.training.task import Batch, BatchLoss
from linrope.training.tasks.finetune import FineTuningModule


def f1(predicted: Tensor, targets: Tensor, n_labels: int) -> Tensor:
    """F1 of label 1 of two labels; of more labels the mean of each label's F1."""
    if n_labels == 2:
        return binary_f1_score(predicted, targets)
    return multiclass_f1_score(predicted, targets, n_labels, average="macro")


def correlation(measure: Callable[[Tensor, Tensor], Tensor], predicted: Tensor, targets: Tensor) -> Tensor:
    """A correlation, 0 where predictions or targets are all the same: torchmetrics has a warning and NaN for one of
    them, which would end a run with EarlyStopping."""
    if any((x == x[0]).all() for x in (predicted, targets)):
        return targets.new_tensor(0.0)
    return measure(predicted, targets)


METRICS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "accuracy": lambda predicted, targets, n_labels: (predicted == targets).double().mean(),
    "f1": lambda predicted, targets, n_labels: f1(predicted.long(), targets.long(), n_labels),
    "pearson": lambda predicted, targets, n_labels: correlation(pearson_corrcoef, predicted, targets),
    "spearman": lambda predicted, targets, n_labels: correlation(spearman_corrcoef, predicted, targets),
}
"""Of all predictions and targets, float64 (N,), and the number of labels."""


class ClassificationModule(FineTuningModule):
    """Trains a `SequenceClassifier` on the batches of a `ClassificationDataModule`.

    Logs `train_loss` of each optimizer step (nats per row; with values, n_labels = 1, the squared error), and of a
    whole validation `val_loss` and the metrics of the data: `val_accuracy`, `val_f1` (of label 1 of two, or the mean
    over labels), `val_pearson`, `val_spearman` (0 where predictions or values are all the same). Where a split has
    groups, as MNLI's matched and mismatched, each metric is logged for all rows and for each group, as
    `val_accuracy/matched`. For a test the same as `test_…`. Arguments and errors are those of `FineTuningModule`.
    """

    data_class, head = ClassificationDataModule, "classification"

    @property
    def regression(self) -> bool:
        return self.model_config.n_labels == 1

    @property
    def monitor(self) -> tuple[str, str]:
        return ("val_spearman" if self.regression else "val_accuracy"), "max"

    def batch_loss(self, batch: Batch) -> BatchLoss:
        targets = batch["targets"]
        losses = self._losses(self.logits(batch), targets)
        return BatchLoss(losses.sum(), losses.new_tensor(len(targets)), len(targets))

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross entropies in nats, or squared errors, (B,)."""
        if self.regression:
            return (logits[:, 0] - targets).square()
        return F.cross_entropy(logits, targets, reduction="none")

    def _predicted(self, logits: Tensor) -> Tensor:
        """Labels or values (B,)."""
        return logits[:, 0] if self.regression else logits.argmax(-1)

    def evaluate(self, batch: Batch, sums: dict[Hashable, Any]) -> None:
        logits, targets = self.logits(batch), batch["targets"]
        columns = self._losses(logits, targets), self._predicted(logits), targets
        rows = torch.stack([column.double() for column in columns], 1).tolist()
        for group, row in zip(batch["group"], rows, strict=True):
            sums.setdefault(group, []).append(row)

    def evaluation_metrics(self, split: str, sums: dict[Hashable, Any]) -> dict[str, float]:
        rows = {group: torch.tensor(of_group, dtype=torch.float64) for group, of_group in sums.items()}
        every = torch.cat(list(rows.values()))
        found = {f"{split}_loss": every[:, 0].mean().item(), **self._measured(f"{split}_", every)}
        if len(rows) > 1:
            for group in sorted(rows):
                found |= self._measured(f"{split}_", rows[group], f"/{group}")
        return found

    def _measured(self, before: str, rows: Tensor, after: str = "") -> dict[str, float]:
        _, predicted, targets = rows.T
        n_labels = self.model_config.n_labels
        return {
            f"{before}{name}{after}": METRICS[name](predicted, targets, n_labels).item() for name in self.data.metrics
        }

    def predict_step(self, batch: Batch, batch_idx: int) -> list[dict[str, Any]]:
        """For each row its id, the name of its label and the probability of each label; or its id and value. Rows of a
        group have its name too."""
        logits = self.logits(batch)
        if self.regression:
            rows = [{"id": id_, "value": value} for id_, value in zip(batch["id"], logits[:, 0].tolist())]
        else:
            rows = self.labelled(batch, logits)
        return [{**row, "group": group} if group else row for row, group in zip(rows, batch["group"], strict=True)]
