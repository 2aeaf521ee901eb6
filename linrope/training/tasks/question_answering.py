"""Question answering: where in a text does the answer stand?"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.functional.text import squad

from linrope.generation.sampling import require_finite
from linrope.losses import IGNORE, per_target
from linrope.training.data_modules.question_answering import QuestionAnsweringDataModule
from linrope.training.task import Batch, BatchLoss
from linrope.training.tasks.finetune import FineTuningModule


class QuestionAnsweringModule(FineTuningModule):
    """Trains a `QuestionAnswering` on the batches of a `QuestionAnsweringDataModule`.

    The loss of a row is the mean of two cross entropies in nats, of the first and of the last token of its answer. Rows
    whose answer was cut off have none. Logs `train_loss` of each optimizer step, and of a whole validation `val_loss`,
    and `val_exact_match` and `val_f1` of all rows, from 0 to 1, by the rules of SQuAD 2.0's script: lower case,
    without punctuation and articles, against the best of the right answers; two answers of which nothing remains are
    the same. For a test the same as `test_…`. Arguments and errors are those of `FineTuningModule`; the model's
    `n_labels` is unused.
    """

    data_class, head = QuestionAnsweringDataModule, "question_answering"

    @property
    def monitor(self) -> tuple[str, str]:
        return "val_f1", "max"

    def logits(self, batch: Batch) -> Tensor:
        """(B, T, 2), -∞ for padding."""
        return super().logits(batch).masked_fill(~batch["key_mask"][:, :, None], -torch.inf)

    def batch_loss(self, batch: Batch) -> BatchLoss:
        targets = batch["targets"]
        return BatchLoss(_nats(self.logits(batch), targets), (targets[:, 0] != IGNORE).sum(), len(targets))

    def evaluate(self, batch: Batch, sums: dict[Hashable, Any]) -> None:
        logits, targets = self.logits(batch), batch["targets"]
        # Not by the ids of the file, which may have one twice.
        found = [{"prediction_text": answer, "id": str(row)} for row, answer in enumerate(self.answers(batch, logits))]
        right = [
            {"answers": {"answer_start": [0] * len(answers), "text": answers}, "id": str(row)}
            for row, answers in enumerate(batch["answers"])
        ]
        scores, n = squad(found, right), len(found)
        n_asked = (targets[:, 0] != IGNORE).sum()
        counted = _nats(logits, targets), n_asked, scores["exact_match"] / 100 * n, scores["f1"] / 100 * n, n
        sums["rows"] = sums.get("rows", 0) + torch.tensor([float(x) for x in counted], dtype=torch.float64)

    def evaluation_metrics(self, split: str, sums: dict[Hashable, Any]) -> dict[str, float]:
        nats, n_asked, exact, f1, n = sums["rows"].tolist()
        loss = per_target(nats, n_asked)
        return {f"{split}_loss": loss, f"{split}_exact_match": exact / n, f"{split}_f1": f1 / n}

    def answers(self, batch: Batch, logits: Tensor) -> list[str]:
        """The best answer of each row, from its logits (B, T, 2)."""
        longest, spans = self.data.max_answer_length, batch["spans"].cpu()
        found = []
        for row, row_logits in enumerate(logits.cpu()):
            first, last = best_span(row_logits, spans[row, :, 1] > spans[row, :, 0], longest)
            of_answer = batch["context"][row].encode()[spans[row, first, 0] : spans[row, last, 1]]
            found.append(of_answer.decode(errors="ignore").strip())
        return found

    def predict_step(self, batch: Batch, batch_idx: int) -> list[dict[str, Any]]:
        """For each row its id and the answer."""
        logits = self.logits(batch)
        require_finite(logits[batch["key_mask"]])
        return [{"id": id_, "answer": answer} for id_, answer in zip(batch["id"], self.answers(batch, logits))]


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    """The summed losses of logits (B, T, 2) with targets (B, 2)."""
    return F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE) / 2


def best_span(logits: Tensor, allowed: Tensor, longest: int) -> tuple[int, int]:
    """The first and the last token i ≤ j < i + `longest` of the span with the largest logits[i, 0] + logits[j, 1], both
    among the tokens `allowed`, booleans (T,). Logits are (T, 2). With none allowed it is (0, 0)."""
    first, last = logits.masked_fill(~allowed[:, None], -torch.inf).unbind(1)
    longest = min(longest, len(logits))
    ends = F.pad(last, (0, longest - 1), value=-torch.inf).unfold(0, longest, 1)  # of the spans from each token
    begin, further = divmod(int((first[:, None] + ends).argmax()), longest)
    return begin, begin + further
