"""The language model as Lightning trains it: loss, bits per byte, optimizer, schedule, clipping."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from linrope.data.batches.shuffling import mix
from linrope.data.tokenizers.base import tokenizer_to_serialized
from linrope.data.tokenizers.bytes import bytes_of
from linrope.errors import InputError, NonFiniteError
from linrope.evaluation.loss_by_position import LossByPosition
from linrope.layers.state import ModelState, detach, from_serialized, map_state, reset_rows, to_serialized
from linrope.losses import IGNORE, bits_per_byte, summed_cross_entropy, token_losses
from linrope.models.language_model import LanguageModel, LanguageModelConfig
from linrope.segmented import require_carried_state, require_segments, segmented_loss
from linrope.training.checkpoint import (
    deals_by_step,
    require_same_order,
    require_same_tokenizer,
    rewind_to_step,
    run_order,
    warn_of_other_split,
)
from linrope.training.optimizer import OptimizerConfig, learning_rate_factor, parameter_groups


class LanguageModelingModule(LightningModule):
    """Trains a `LanguageModel` on batches `{"inputs", "targets"}`, each int64 (B, T); targets may be IGNORE.

    Targets are bytes and separators unless `"n_bytes"`, int64 (B, T), says how many bytes each stands for.
    Batches may have `"segment_ids"`, documents as the model takes them, and `"fresh"`, bool (B,): then rows go on from
    the state after the batch before, but for those that are fresh.

    Logs `train_loss` (nats per target), `train_bpb` (bits per byte), `grad_norm` (before clipping) and `lr` of each
    optimizer step, over all its micro-batches and devices, and `val_loss`, `val_bpb`, `test_loss`, `test_bpb` over a
    whole evaluation. Bits per byte are left out where the targets stand for no byte, or for nobody knows how many.
    `loss_by_position` holds the losses of the last evaluation by where in the row they fell.

    Args:
        model_config: the model to make.
        optimizer_config: how to train it.
        segment_length: read sequences in segments of so many tokens, with the gradients of the whole, so that memory
            does not grow with the length (see `linrope.segmented`); None reads each at once.
        seed: names dropout's draws: those of a training batch follow from it and the batch's number alone, so that a
            resumed run makes those that the run before it would have made.

    Raises:
        InputError: a segment length below 1, or one for a model whose past grows; when training starts, if
            `trainer.max_steps` is unset or `trainer.gradient_clip_val` is set, or if the run to resume had other data,
            batches or another seed.
        NonFiniteError: in training, at the first loss or gradient that is not finite.
    """

    # No save_hyperparameters(): Lightning's command line would let those in a checkpoint override the user's YAML.

    def __init__(
        self,
        model_config: LanguageModelConfig,
        optimizer_config: OptimizerConfig | None = None,
        segment_length: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.model = LanguageModel(model_config)
        if segment_length is not None:
            require_segments(self.model, segment_length)
        self.model_config, self.segment_length, self.seed = model_config, segment_length, seed
        self.optimizer_config = optimizer_config or OptimizerConfig()
        self._train_sums = torch.zeros(3)  # nats, bytes and targets since the last step
        self._train_places = 0  # the same, of places, with a target or without
        self._order: dict[str, Any] = {}
        self._carried: ModelState | None = None  # in lanes: the state after the last batch
        self._carried_at_step: ModelState | None = None  # and after the last optimizer step, for checkpoints
        self._start_evaluation()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, vocab_size) of tokens (B, T)."""
        return self.model(tokens)

    # Training.

    def on_train_start(self) -> None:
        self._train_sums, self._train_places = torch.zeros(3), 0  # an earlier run may have stopped within a step

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Makes every random draw of the batch a function of the seed and the batch's number in the run.

        Batches are counted over all devices, as the data module deals them: two devices draw what one draws in two.
        """
        trainer = self.trainer
        in_step = batch_idx % trainer.accumulate_grad_batches
        number = trainer.global_step * trainer.accumulate_grad_batches + in_step
        torch.manual_seed(mix(self.seed, number * trainer.world_size + trainer.global_rank))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        nats, after = self._read(batch, self._carried_into(batch))
        if "fresh" in batch:
            self._carried = detach(after)
            if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
                self._carried_at_step = self._carried
        sums = _sums(nats.detach(), batch)
        self._train_sums = self._train_sums.to(nats.device) + sums
        self._train_places += batch["targets"].numel()
        # The trainer takes the mean of these over micro-batches and devices. Those have as many places each, but not
        # always as many targets: `configure_gradient_clipping` puts that right, once for the whole step.
        return nats / batch["targets"].numel()

    def _carried_into(self, batch: dict[str, Tensor]) -> ModelState | None:
        """In lanes, the state that the rows of a batch go on from: none in those that begin anew."""
        if self._carried is None or "fresh" not in batch:
            return None
        return reset_rows(map_state(lambda _, x: x.to(self.device), self._carried), batch["fresh"])

    def configure_gradient_clipping(
        self, optimizer: AdamW, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Refuses a non-finite loss or gradient, logs and clips: Lightning calls it right before the weights change."""
        nats, n_bytes, targets, places = self._sums_of_step()
        metrics = self._metrics("train", nats, n_bytes, targets)
        self._require_finite("loss", metrics["train_loss"])
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if 0 < targets < places:  # from the gradient of the mean over all places to that of the mean over targets
            torch._foreach_mul_(gradients, places / targets)
        norm = nn.utils.get_total_norm(gradients)
        grad_norm = norm.item()
        if getattr(self.trainer.precision_plugin, "scaler", None) is None:  # GradScaler skips such steps by itself
            self._require_finite("gradient norm", grad_norm)
        if clip_norm := self.optimizer_config.clip_norm:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), clip_norm, norm)
        self.log_dict({**metrics, "grad_norm": grad_norm, "lr": optimizer.param_groups[0]["lr"]})

    def _sums_of_step(self) -> list[float]:
        """Nats, bytes, targets and places of the whole step: all its micro-batches, on all devices."""
        sums = torch.cat([self._train_sums, self._train_sums.new_tensor([self._train_places])])
        self._train_sums, self._train_places = torch.zeros(3), 0
        if self.trainer.world_size > 1:
            sums = self.trainer.strategy.reduce(sums, reduce_op="sum")
        return sums.tolist()

    def _require_finite(self, what: str, value: float) -> None:
        if math.isfinite(value):
            return
        paths = [getattr(callback, "last_path", None) for callback in self.trainer.checkpoint_callbacks]
        last_good = next(filter(None, paths), self.trainer.ckpt_path)
        step = self.trainer.global_step + 1
        restart = (
            f"Resume from the last good checkpoint, {last_good}," if last_good else "No checkpoint yet: start again"
        )
        raise NonFiniteError(
            f"the {what} is {value} at step {step}; the weights are as the step before left them. {restart} with a "
            "lower optimizer.lr, a longer optimizer.warmup_steps or a smaller optimizer.clip_norm."
        )

    # Evaluation.

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._add_to_evaluation(batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._add_to_evaluation(batch)

    def on_validation_epoch_start(self) -> None:
        self._start_evaluation()

    def on_test_epoch_start(self) -> None:
        self._start_evaluation()

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _start_evaluation(self) -> None:
        self.loss_by_position = LossByPosition()

    def _add_to_evaluation(self, batch: dict[str, Tensor]) -> None:
        self.loss_by_position.add(self._token_losses(batch), batch["targets"], batch.get("n_bytes"))

    def _log_evaluation(self, split: str) -> None:
        if self.trainer.world_size > 1:  # sums, not means of means: ranks may have seen unequal numbers of windows
            sums = self.loss_by_position.sums.to(self.device)
            self.loss_by_position.sums = self.trainer.strategy.reduce(sums, reduce_op="sum").cpu()
        # Every rank holds the sums already, so the logged values need no synchronising.
        self.log_dict(self._metrics(split, *self.loss_by_position.totals.tolist()))

    def _metrics(self, split: str, nats: float, n_bytes: float, tokens: float) -> dict[str, float]:
        loss = {f"{split}_loss": nats / max(tokens, 1)}
        return {**loss, f"{split}_bpb": bits_per_byte(nats, n_bytes)} if n_bytes else loss

    def _token_losses(self, batch: dict[str, Tensor]) -> Tensor:
        """The nats of each target of a batch, (B, T)."""
        inputs, targets, ids = batch["inputs"], batch["targets"], batch.get("segment_ids")
        if self.segment_length is None:
            return token_losses(self.model(inputs, segment_ids=ids), targets)
        pieces: list[Tensor] = []

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            pieces.append(token_losses(logits, targets))
            return pieces[-1].sum()

        with torch.no_grad():  # segments then come once each, in order
            segmented_loss(self.model, inputs, targets, self.segment_length, loss=loss, segment_ids=ids)
        return torch.cat(pieces, dim=1)

    def _nats(self, batch: dict[str, Tensor]) -> Tensor:
        """The nats of a batch's targets, in all."""
        return self._read(batch, None)[0]

    def _read(self, batch: dict[str, Tensor], state: ModelState | None) -> tuple[Tensor, ModelState]:
        """The nats of a batch's targets, in all, where it goes on from a state; and the state after it."""
        inputs, targets, ids = batch["inputs"], batch["targets"], batch.get("segment_ids")
        if self.segment_length is not None:
            return segmented_loss(self.model, inputs, targets, self.segment_length, segment_ids=ids, state=state)
        logits, after = self.model(inputs, state, segment_ids=ids, return_state=True)
        return summed_cross_entropy(logits, targets), after

    # The optimizer, and what checkpoints hold.

    def configure_optimizers(self) -> dict[str, Any]:
        config = self.optimizer_config
        optimizer = AdamW(parameter_groups(self.model, config.weight_decay), lr=config.lr, betas=config.betas)
        # Lightning steps schedulers per epoch unless told otherwise.
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, self._learning_rate_factor), "interval": "step"},
        }

    def _learning_rate_factor(self, step: int) -> float:
        config = self.optimizer_config
        return learning_rate_factor(
            step,
            warmup_steps=config.warmup_steps,
            max_steps=self.trainer.max_steps,
            final_fraction=config.final_lr_fraction,
            # Data whose steps may differ in tokens counts them.
            tokens_at=getattr(self.trainer.datamodule, "tokens_at", lambda step: step),
        )

    def setup(self, stage: str) -> None:
        datamodule = self.trainer.datamodule
        if hasattr(datamodule, "require_vocabulary"):  # data of ours
            datamodule.require_vocabulary(self.model_config.vocab_size)
            ours = tokenizer_to_serialized(datamodule.tokenizer)
            if self.model.tokenizer is not None:  # of a trained model
                require_same_tokenizer(self.model.tokenizer, ours, "the model that was loaded")
            self.model.tokenizer = ours
        if stage != "fit":
            return
        trainer = self.trainer
        if trainer.max_steps < 1:
            raise InputError(
                f"trainer.max_steps={trainer.max_steps} must be set to 1 or more: it is the number of optimizer steps, "
                "and the learning rate follows it."
            )
        if trainer.gradient_clip_val:
            raise InputError(
                f"trainer.gradient_clip_val={trainer.gradient_clip_val} would clip beside optimizer.clip_norm="
                f"{self.optimizer_config.clip_norm}: remove it and set optimizer.clip_norm."
            )
        self._carried = self._carried_at_step = None  # an earlier run's; a checkpoint is loaded after this
        if getattr(trainer.datamodule, "contiguous", False):
            require_carried_state(self.model, "data.contiguous=True")
        self._order = run_order(trainer, self.seed)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["linrope"] = {
            "config": self.model_config.to_dict(),
            "order": self._order,
            "tokenizer": self.model.tokenizer,
        }
        if self._carried_at_step is not None:
            on_cpu = map_state(lambda _, x: x.cpu(), self._carried_at_step)
            checkpoint["linrope"]["carried"] = self._of_all_ranks(to_serialized(on_cpu))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Has training go on right after the checkpoint's last step, on the same data, with this run's own options."""
        if self._trainer is None:  # it is only loaded
            self.model.tokenizer = checkpoint["linrope"].get("tokenizer")
            return
        if self.model.tokenizer is not None:
            theirs = checkpoint["linrope"].get("tokenizer")
            require_same_tokenizer(theirs, self.model.tokenizer, f"checkpoint {str(self.trainer.ckpt_path)!r}")
        if self.trainer.state.fn != "fit":  # nothing is trained
            if (fractions := getattr(self.trainer.datamodule, "fractions", None)) is not None:
                warn_of_other_split(checkpoint, fractions, self.trainer.ckpt_path)
            return
        require_same_order(checkpoint, self._order, self.trainer.ckpt_path)
        if deals_by_step(self.trainer.datamodule):
            rewind_to_step(checkpoint, self.trainer.accumulate_grad_batches)
        self._take_optimizer_options(checkpoint)
        if (carried := checkpoint["linrope"].get("carried")) is not None:
            self._carried = self._carried_at_step = from_serialized(carried[self.trainer.global_rank])

    def _of_all_ranks(self, value: Any) -> list[Any]:
        """What every rank has; all of them save checkpoints at the same moments."""
        values = [value] * self.trainer.world_size
        if self.trainer.world_size > 1:
            torch.distributed.all_gather_object(values, value)
        return values

    def _take_optimizer_options(self, checkpoint: dict[str, Any]) -> None:
        """Lets this run's optimizer options win over the checkpoint's, which Lightning would restore silently."""
        config, step = self.optimizer_config, checkpoint["global_step"]
        lr_now = config.lr * self._learning_rate_factor(step) if self.trainer.max_steps > 0 else config.lr
        for state in checkpoint.get("optimizer_states", []):
            for group, decay in zip(state["param_groups"], (config.weight_decay, 0.0), strict=True):
                group.update(lr=lr_now, initial_lr=config.lr, betas=config.betas, weight_decay=decay)
        for state in checkpoint.get("lr_schedulers", []):
            state["base_lrs"] = [config.lr] * len(state["base_lrs"])


def _sums(nats: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The nats of a batch's targets, the bytes they stand for and how many they are, IGNORE apart: float32 (3,)."""
    targets = batch["targets"]
    n_bytes = bytes_of(targets, batch.get("n_bytes"))
    return torch.stack([nats, n_bytes.sum().float(), (targets != IGNORE).sum().float()])
