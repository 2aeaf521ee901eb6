"""Language modeling: predict the next token."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from linrope.data.tokenizers.base import known_or_bytes
from linrope.data.tokenizers.bytes import BYTES, bytes_of
from linrope.distributed.group import SequenceGroup
from linrope.distributed.segments import (
    sequence_parallel_segmented_loss,
    sequence_parallel_token_losses,
    state_of_last,
)
from linrope.distributed.sequence import sequence_parallel_loss
from linrope.errors import InputError
from linrope.evaluation.loss_by_position import LossByPosition
from linrope.layers.state import ModelState, from_serialized, map_state, to_serialized
from linrope.losses import IGNORE, bits_per_byte, per_target, token_losses
from linrope.models.language_model import LanguageModel, LanguageModelConfig
from linrope.profiling.flops import step_flops
from linrope.segmented import require_carried_state, require_fixed_state, require_segments, segmented_loss
from linrope.training.data_modules.base import data_parallel
from linrope.training.data_modules.text import TextDataModule
from linrope.training.optimizer import OptimizerConfig
from linrope.training.task import Batch, BatchLoss, TrainingTask


class LanguageModelingModule(TrainingTask):
    """Trains a `LanguageModel` to predict the next token; see `TrainingTask` for what all tasks share.

    Keys of a batch:
        inputs, targets: int64 (B, T); a target may be IGNORE.
        n_bytes: int64 (B, T), the bytes of each target; without it a target is one byte, or a separator of no byte. A
            model of more tokens and without tokenizer has no bits per byte then.
        segment_ids: int64 (B, T), the documents of packed rows, as the model takes them; optional.
        fresh: bool (B,), only in contiguous batches: rows that start without a state. The other rows start from the
            model's state after the batch before, without gradient.

    Where devices share rows (`ShardedStrategy`), each takes its slice of the batch, and `segment_length` counts the
    tokens of a segment on each device.

    Logs `train_loss` (nats per target) and `train_bpb` (bits per byte) of each optimizer step, and `val_loss`,
    `val_bpb`, `test_loss` and `test_bpb` of a whole evaluation. Bits per byte are omitted when the targets' byte count
    is zero or unknown.

    Args:
        model_config: the model to build, or one to train further.
        optimizer_config: how to train it.
        segment_length: tokens of a segment: sequences are read segment by segment, with exact gradients, so that memory
            does not grow with their length (see `linrope.segmented`). None reads a sequence in one call.
        seed: decides the random numbers of training.

    Raises:
        InputError: a segment length below 1, or one for a model whose state grows with the length; when training
            starts: contiguous batches for such a model; and as in `TrainingTask`.
        NonFiniteError: as in `TrainingTask`.
    """

    config_class = LanguageModelConfig
    data_class = TextDataModule

    def __init__(
        self,
        model_config: LanguageModelConfig | LanguageModel,
        optimizer_config: OptimizerConfig | None = None,
        segment_length: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model_config, optimizer_config, seed)
        if segment_length is not None:
            require_segments(self.model, segment_length)
        self.segment_length = segment_length
        self._carried: ModelState | None = None  # with contiguous batches: the state after the last batch
        self._carried_at_step: ModelState | None = None  # and after the last optimizer step, for checkpoints

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, vocab_size) of tokens (B, T)."""
        return self.model(tokens)

    @property
    def loss_by_position(self) -> LossByPosition:
        """The losses of the running or last evaluation by position in the row."""
        return self.evaluation.get("by_position", LossByPosition())

    def batch_loss(self, batch: Batch) -> BatchLoss:
        if not (isinstance(batch, Mapping) and batch.keys() >= {"inputs", "targets"}):
            found = sorted(batch) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
            raise InputError(
                f"a batch is {found}: a batch of language modeling is a dict with inputs and targets, (B, T) each, the "
                "targets one token ahead."
            )
        batch = self.slice_of(batch, self.segment_length)
        inputs, targets, ids = batch["inputs"], batch["targets"], batch.get("segment_ids")
        options = {"segment_ids": ids, "state": self._state_before(batch)}
        if self.sequence_group is not None:
            nats, after = self._loss_of_slice(batch, **options)
        elif self.segment_length is not None:
            nats, after = segmented_loss(self.model, inputs, targets, self.segment_length, **options)
        else:
            nats, after = self.model(inputs, **options, return_state=True, targets=targets)
        if "fresh" in batch:
            self._carried = after.detach()
        n_bytes = bytes_of(targets, self._n_bytes(batch))
        n_positions = batch.get("longest_slice", targets.shape[1]) * len(targets)
        return BatchLoss(nats, (targets != IGNORE).sum(), n_positions, {"bytes": n_bytes.sum()})

    def _loss_of_slice(self, batch: Batch, **options: Any) -> tuple[Tensor, ModelState]:
        """The loss of this device's slice of the rows, and for contiguous batches the state after the rows."""
        arguments, group = (self.model, batch["inputs"], batch["targets"]), self.sequence_group
        if self.segment_length is not None:
            return sequence_parallel_segmented_loss(*arguments, self.segment_length, group=group, **options)
        nats, after = sequence_parallel_loss(*arguments, group=group, **options)
        return nats, state_of_last(after.detach(), group) if "fresh" in batch else after

    def _state_before(self, batch: Batch) -> ModelState | None:
        """With contiguous batches, the state that each row starts from."""
        if self._carried is None or "fresh" not in batch:
            return None
        return map_state(lambda _, x: x.to(self.device), self._carried).reset_rows(batch["fresh"])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if "fresh" in batch and (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self._carried_at_step = self._carried
        return loss

    def training_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return _metrics("train", sums["loss"], sums["bytes"], sums["targets"])

    def _n_bytes(self, batch: Batch) -> Tensor | None:
        """The bytes of each target if they are given, 0 if they are unknown; None where targets are bytes."""
        if "n_bytes" in batch:
            return batch["n_bytes"]
        are_bytes = known_or_bytes(self.model.tokenizer, self.model_config.vocab_size) == BYTES
        return None if are_bytes else torch.zeros_like(batch["targets"])

    def evaluate(self, batch: Batch, sums: dict[Hashable, Any]) -> None:
        batch = self.slice_of(batch, self.segment_length)
        by_position = sums.setdefault("by_position", LossByPosition())
        by_position.add(self._token_losses(batch), batch["targets"], self._n_bytes(batch), batch.get("positions"))

    def evaluation_metrics(self, split: str, sums: dict[Hashable, Any]) -> dict[str, float]:
        return _metrics(split, *sums["by_position"].totals.tolist())

    def predict_step(self, batch: Batch, batch_idx: int) -> list[dict[str, Any]]:
        """The loss of each row, in nats, with its targets and bytes."""
        batch = self.slice_of(batch, self.segment_length)
        losses, n_bytes = self._token_losses(batch), bytes_of(batch["targets"], self._n_bytes(batch))
        sums = losses.sum(1), (batch["targets"] != IGNORE).sum(1), n_bytes.sum(1)
        values = [self.sum_slices(of_rows).tolist() for of_rows in sums]
        return [dict(zip(("loss", "targets", "bytes"), row, strict=True)) for row in zip(*values, strict=True)]

    def step_flops(self, batch: Batch) -> int:
        rows, length = self.slice_of(batch, self.segment_length)["inputs"].shape
        return step_flops(self.model, rows, length, self.segment_length)

    def _token_losses(self, batch: Batch) -> Tensor:
        """The loss of each target of a batch in nats, (B, T)."""
        inputs, targets, ids = batch["inputs"], batch["targets"], batch.get("segment_ids")
        if self.sequence_group is not None:
            options = {"group": self.sequence_group, "segment_ids": ids}
            return sequence_parallel_token_losses(self.model, inputs, targets, self.segment_length, **options)
        if self.segment_length is None:
            return self.model(inputs, segment_ids=ids, targets=targets, reduction="none")
        segments: list[Tensor] = []

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            segments.append(token_losses(logits, targets))
            return segments[-1].sum()

        with torch.no_grad():  # then each segment is computed once, in order
            segmented_loss(self.model, inputs, targets, self.segment_length, loss=loss, segment_ids=ids)
        return torch.cat(segments, dim=1)

    def require_slices(self, group: SequenceGroup) -> None:
        require_fixed_state(self.model, f"trainer.strategy.sequence_parallel_size={group.size}")
        if isinstance(self.resumable_data, TextDataModule):
            self.resumable_data.require_slices(self.segment_length, group)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            self._carried = self._carried_at_step = None  # of an earlier run; a checkpoint is loaded after this
            if (data := self.resumable_data) is not None and data.contiguous:
                require_carried_state(self.model, "data.contiguous=True")

    def task_state(self) -> dict[str, Any]:
        if self._carried_at_step is None:
            return {}
        on_cpu = map_state(lambda _, x: x.cpu(), self._carried_at_step)
        n_slices = 1 if self.sequence_group is None else self.sequence_group.size
        return {"carried": self.gather(to_serialized(on_cpu))[::n_slices]}  # the devices of a group have the same

    def load_task_state(self, saved: dict[str, Any]) -> None:
        if "carried" in saved:
            self._carried = self._carried_at_step = from_serialized(saved["carried"][data_parallel(self.trainer)[0]])


def _metrics(split: str, nats: float, n_bytes: float, n_targets: float) -> dict[str, float]:
    loss = {f"{split}_loss": per_target(nats, n_targets)}
    return {**loss, f"{split}_bpb": bits_per_byte(nats, n_bytes)} if n_bytes else loss
