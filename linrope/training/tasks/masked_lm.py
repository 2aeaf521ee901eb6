"""Masked language modeling: predict the hidden tokens of a row from both sides."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from linrope.distributed.group import SequenceGroup
from linrope.distributed.sequence import slice_of_encoder
from linrope.errors import InputError
from linrope.layers.state import ModelState
from linrope.losses import IGNORE, per_target, summed_cross_entropy, token_losses
from linrope.training.data_modules.masked_text import MaskedTextDataModule
from linrope.training.task import Batch, BatchLoss
from linrope.training.tasks.encoder import EncoderTask


class MaskedLMModule(EncoderTask):
    """Trains a `MaskedLM` on the batches of a `MaskedTextDataModule`.

    Logs `train_loss` (nats per masked token) and `train_accuracy` (the share of masked tokens that have the highest
    logit) of each optimizer step, and `val_loss` and `val_accuracy` of a whole validation; for a test the same as
    `test_…`. Accuracy in training is that of the weights before the step, with dropout. Arguments are those of
    `EncoderTask`.
    """

    data_class, head = MaskedTextDataModule, "masked_lm"

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, vocab_size) of tokens (B, T)."""
        return self.model(tokens)

    def batch_loss(self, batch: Batch) -> BatchLoss:
        batch = self.slice_of(batch)
        targets = batch["targets"]
        asked = targets != IGNORE
        # As the model's own loss, which keeps no logits to count: only those at targets are computed.
        logits, of_asked = self.model.logits_at(asked, batch["inputs"], self._other_slices(batch)), targets[asked]
        right = (logits.detach().argmax(-1) == of_asked).sum()
        n_positions = len(targets) * batch.get("longest_slice", targets.shape[1])
        return BatchLoss(summed_cross_entropy(logits, of_asked), asked.sum(), n_positions, {"right": right})

    def _other_slices(self, batch: Batch) -> ModelState | None:
        """What layers take from the devices that have the rest of these rows; None if there are none."""
        if self.sequence_group is None:
            return None
        where = slice_of_encoder(self.model, batch["inputs"], batch["targets"], group=self.sequence_group)
        return where.states_before(self.model_config.n_layers)

    def require_slices(self, group: SequenceGroup) -> None:
        if self.model_config.attention != "linear":
            raise InputError(
                f"trainer.strategy.sequence_parallel_size={group.size} needs linear attention, and model.attention is "
                f"{self.model_config.attention!r}: set it to linear, or the size to 1."
            )
        if isinstance(self.resumable_data, MaskedTextDataModule):
            self.resumable_data.require_slices(None, group)

    def training_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {**super().training_metrics(sums), "train_accuracy": sums["right"] / max(sums["targets"], 1)}

    def evaluate(self, batch: Batch, sums: dict[Hashable, Any]) -> None:
        of_batch = torch.stack(self._measured(batch)).sum(-1).cpu().double()  # one transfer
        sums["masked"] = sums.get("masked", 0) + of_batch

    def evaluation_metrics(self, split: str, sums: dict[Hashable, Any]) -> dict[str, float]:
        nats, right, asked = sums["masked"].tolist()
        return {f"{split}_loss": per_target(nats, asked), f"{split}_accuracy": per_target(right, asked)}

    def predict_step(self, batch: Batch, batch_idx: int) -> list[dict[str, Any]]:
        """The loss of each row in nats, its masked tokens, and how many of them were predicted."""
        rows = self.sum_slices(torch.stack(self._measured(batch))).T.tolist()
        return [{"loss": nats, "right": int(right), "masked": int(asked)} for nats, right, asked in rows]

    def _measured(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, right predictions and masked tokens of each row, (B,) float32."""
        batch = self.slice_of(batch)
        logits, targets = self.model(batch["inputs"], state=self._other_slices(batch)), batch["targets"]
        right = logits.argmax(-1) == targets
        return token_losses(logits, targets).sum(1), right.sum(1).float(), (targets != IGNORE).sum(1).float()
