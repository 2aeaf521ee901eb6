"""The base class of training tasks: everything of training but the loss and the metrics."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from linrope.data.batches.shuffling import mix
from linrope.data.tokenizers.base import tokenizer_to_serialized
from linrope.distributed.group import SequenceGroup
from linrope.distributed.segments import slice_of
from linrope.errors import InputError, NonFiniteError
from linrope.models.base import ModelConfig, config_in
from linrope.models.saving import open_checkpoint
from linrope.models.sharded_checkpoint import read_sharded_checkpoint
from linrope.models.sharded_files import is_sharded_checkpoint
from linrope.training.agreement import require_same_samples
from linrope.training.callbacks.saving import LastCheckpoint
from linrope.training.callbacks.unsupported import require_supported
from linrope.training.checkpoint import (
    WholeCheckpointIO,
    require_same_optimizer,
    require_same_order,
    require_same_tokenizer,
    rewind_to_step,
    run_order,
    warn_of_other_split,
)
from linrope.training.data_modules.base import ResumableDataModule, data_parallel
from linrope.training.optimizer import OptimizerConfig, changed_options, fused_on, learning_rate_factor, options_of
from linrope.training.precision import why_slow
from linrope.training.sharding import require_shareable, require_supported_strategy, shard
from linrope.utils.options import class_path_of

if TYPE_CHECKING:
    from typing_extensions import Self  # Python 3.10 lacks it

Batch = dict[str, Any]


@dataclass(frozen=True)
class BatchLoss:
    """The loss of one training batch, as a sum, so that each target of an optimizer step has the same weight."""

    total: Tensor
    """Sum of the losses of all targets, a scalar with gradient."""
    n_targets: Tensor
    """Number of targets, a scalar."""
    n_positions: int
    """Number of positions, with or without a target, by which losses are divided on their way: the gradient is that of
    the mean over targets, whatever it is. With a `ResumableDataModule` the same on all devices."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Other scalars to add up over the step, for `training_metrics`; the same names in every batch."""


class TrainingTask(LightningModule):
    """What all tasks share; a new task derives from it and writes its loss and its metrics.

    A task writes

    - `config_class` and `data_class`: the sections model and data of `linrope fit` (`task: MODULE.CLASS`), which builds
      it from a configuration, `optimizer_config` and `seed`.
    - `batch_loss(batch)`: the loss of a training batch, as a `BatchLoss`; `linrope plan` calls it without a trainer.
    - `evaluate(batch, sums)`: adds the contribution of a validation or test batch to `sums`.
    - `evaluation_metrics(split, sums)`: the metrics of a whole validation or test, from the sums over all ranks.
    - optionally `training_metrics(sums)`, `monitor`, `step_flops(batch)`, `require_data(data)`, `own_sections` for
      further options, and `task_state` and `load_task_state` for what else a checkpoint must hold.
    - for `linrope predict`: `predict_step(batch, batch_idx)`, a list with the predictions of each row as plain values.

    and gets

    - the loss as mean over all targets of an optimizer step, whatever their share of its micro-batches and devices;
    - AdamW or Muon with its schedule and clipping (see `OptimizerConfig`), and `grad_norm` (before clipping), `lr` and
      the training metrics logged in each step; with a curriculum also `stage`, its number from 0, beside the metrics of
      training and validation;
    - an error at the first loss or gradient that is not finite, before the weights change;
    - random numbers that follow from the seed and the batch's number: a resumed run draws what it would have drawn;
    - checkpoints that resume at the next step, on the same data, with this run's optimizer options (with those of the
      checkpoint, as in Lightning, if the task has its own `configure_optimizers`). With a `ResumableDataModule` a run
      that differs in data, batches or seed is refused.

    Args:
        model: the model to train, or the configuration to build it from. A model has `config`, with `vocab_size` and
            `to_dict()`, and `tokenizer`.
        optimizer_config: how to train it.
        seed: decides the random numbers of training.

    Raises:
        InputError: a model of another kind; when training starts: `trainer.max_steps` is unset,
            `trainer.gradient_clip_val` is set, a callback is not supported, or the run to resume had other data,
            batches or another seed.
        NonFiniteError: in training, at the first loss or gradient that is not finite.
    """

    config_class: ClassVar[type[ModelConfig]]
    """The configuration of its models."""
    data_class: ClassVar[type[ResumableDataModule]]
    """The data that it is trained on."""
    own_sections: ClassVar[Mapping[str, type]] = {}
    """Dataclasses of further options, by the names of their sections, which are also arguments of the constructor."""

    # No save_hyperparameters(): Lightning's command line would let those in a checkpoint override the user's YAML.

    def __init__(
        self, model: nn.Module | ModelConfig, optimizer_config: OptimizerConfig | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.model = self._built(model)
        self.model_config, self.seed = self.model.config, seed
        if not isinstance(seed, Integral):
            raise InputError(f"seed={seed!r} must be a whole number.")
        if not isinstance(optimizer_config, OptimizerConfig | None):
            found = type(optimizer_config).__name__
            raise InputError(f"optimizer_config is a {found}: pass a linrope.training.optimizer.OptimizerConfig.")
        self.optimizer_config = optimizer_config or OptimizerConfig()
        self.evaluation: dict[Hashable, Any] = {}
        """Sums of the running or last evaluation; once it has ended, over all ranks."""
        self._step_sums: dict[str, Tensor] = {}  # of the micro-batches since the last optimizer step
        self._step_divisor = 1  # of the losses since then
        self._stage: str | None = None  # what a trainer does with this module; None before there was one
        self._order: dict[str, Any] = {}
        self._last_batch: Batch | None = None  # of a running evaluation
        self._made_options: list[dict[str, Any]] = []  # of the optimizer's groups before the first step

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: str | Path, map_location: Any = None, **options: Any) -> Self:
        """The module of a checkpoint, as Lightning's method of this name. The configuration of its model is that of the
        checkpoint unless `model_config` is among the options. InputError for a checkpoint of something else."""
        if "model_config" not in options:
            values = open_checkpoint(checkpoint_path)["linrope"]["config"]
            options["model_config"] = config_in(values, cls.config_class, checkpoint_path)
        if not is_sharded_checkpoint(checkpoint_path):
            return super().load_from_checkpoint(checkpoint_path, map_location, **options)
        torch.save(read_sharded_checkpoint(checkpoint_path, optimizers=False), file := BytesIO())
        file.seek(0)
        return super().load_from_checkpoint(file, map_location, **{"weights_only": True, **options})

    def _built(self, model: nn.Module | ModelConfig) -> nn.Module:
        """A model as it is, or that of a configuration. InputError for one that is not of this task."""
        config, expected = getattr(model, "config", model), getattr(self, "config_class", object)
        name = type(self).__name__
        if not isinstance(config, expected):
            raise InputError(
                f"{name} cannot train {reprlib.repr(model)}: pass a {expected.__name__}, or a model made from one."
            )
        if hasattr(model, "_orig_mod"):
            callback = ", and the Trainer's callbacks a linrope.training.callbacks.compiled.CompiledTraining()"
            fix = f"pass the model itself{callback if hasattr(model, 'blocks') else ''}."
            raise InputError(f"{name} cannot train a model of torch.compile, whose weights have other names: {fix}")
        return self.config_of(config).build() if model is config else model.train()

    # What a task writes.

    def batch_loss(self, batch: Batch) -> BatchLoss:
        """The loss of a training batch."""
        raise NotImplementedError

    def training_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """The metrics of an optimizer step, from its sums over all micro-batches and ranks: "loss", "targets" and
        those of `BatchLoss.sums`."""
        return {"train_loss": sums["loss"] / max(sums["targets"], 1)}

    def evaluate(self, batch: Batch, sums: dict[Hashable, Any]) -> None:
        """Adds the contribution of one batch to `sums`, whose values of one name are added over ranks with `+`."""
        raise NotImplementedError

    def evaluation_metrics(self, split: str, sums: dict[Hashable, Any]) -> dict[str, float]:
        """The metrics of an evaluation by name, `{split}_loss` among them; `split` is "val" or "test"."""
        raise NotImplementedError

    @classmethod
    def config_of(cls, config: ModelConfig) -> ModelConfig:
        """The configuration of the model that this task trains, of one that may leave open what the task decides."""
        return config

    def require_data(self, data: ResumableDataModule) -> None:
        """Raise InputError unless the model has the vocabulary of this data, which is set up, and reads its rows."""
        data.require_vocabulary(self.model_config.vocab_size)
        if (positions := getattr(self.model_config, "positions", None)) is not None:  # one's own model may have none
            data.require_positions(positions)

    def require_slices(self, group: SequenceGroup) -> None:
        """Raise InputError unless devices can share rows of the data, which is set up: here, that none can."""
        raise InputError(
            f"trainer.strategy.sequence_parallel_size={group.size} has devices share rows, which the tasks "
            f"language_modeling and masked_lm can. {type(self).__name__} reads whole rows: set it to 1."
        )

    @property
    def monitor(self) -> tuple[str, str]:
        """The metric of the best checkpoint, and whether "min" or "max" is best."""
        return "val_loss", "min"

    def step_flops(self, batch: Batch) -> int | None:
        """FLOPs of training on a batch, from its shapes; None if unknown."""
        return None

    def task_state(self) -> dict[str, Any]:
        """What else training needs to resume, as tensors and plain values; every rank calls it."""
        return {}

    def load_task_state(self, saved: dict[str, Any]) -> None:
        """Restores `task_state` when training resumes; `saved` has more than that."""

    # What a task may use.

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, by rank; every rank must call it."""
        values = [value] * self.trainer.world_size
        if self.trainer.world_size > 1:
            torch.distributed.all_gather_object(values, value)
        return values

    @property
    def sequence_group(self) -> SequenceGroup | None:
        """The devices that share the rows of this one; None if each reads whole rows."""
        return None if self._stage is None else getattr(self.trainer.strategy, "sequence_group", None)

    def slice_of(self, batch: Batch, segment_length: int | None = None) -> Batch:
        """This device's part of the rows of a batch, where devices share them (see `linrope.distributed.segments`)."""
        return batch if self.sequence_group is None else slice_of(batch, segment_length, self.sequence_group)

    def sum_slices(self, of_slice: Tensor) -> Tensor:
        """Values of this device's part of each row, added up over the devices that share the rows."""
        return of_slice if self.sequence_group is None else self.sequence_group.all_gather(of_slice).sum(0)

    @property
    def resumable_data(self) -> ResumableDataModule | None:
        """The trainer's data module; None if it is not a `ResumableDataModule`."""
        data = self.trainer.datamodule
        return data if isinstance(data, ResumableDataModule) else None

    def on_train_start(self) -> None:
        self._step_sums = {}  # an earlier run may have stopped within a step

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Makes every random number of the batch a function of the seed and the batch's number in the run, counted over
        all devices as the data module shards them: two devices draw what one device draws in two batches."""
        trainer = self.trainer
        in_step = batch_idx % trainer.accumulate_grad_batches
        number = trainer.global_step * trainer.accumulate_grad_batches + in_step
        rank, n_ranks = data_parallel(trainer)
        if (group := self.sequence_group) is not None:
            rank, n_ranks = rank * group.size + group.rank, n_ranks * group.size
        torch.manual_seed(mix(self.seed, number * n_ranks + rank))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.batch_loss(batch)
        if not self._step_sums:
            self._step_divisor = self._same_on_all_devices(loss.n_positions)
        total = loss.total.detach()
        total = total.to(torch.promote_types(total.dtype, torch.float32))  # bfloat16 rounds sums and counts
        for name, value in {"loss": total, "targets": loss.n_targets, **loss.sums}.items():
            self._step_sums[name] = self._step_sums.get(name, 0) + value
        # The trainer takes the mean of these over micro-batches and devices: `configure_gradient_clipping` makes it one
        # over targets, once for the whole step.
        return loss.total / self._step_divisor

    def _same_on_all_devices(self, n_positions: int) -> int:
        if self._stage is None or self.resumable_data is not None or self.trainer.world_size == 1:
            return n_positions
        return self.trainer.strategy.broadcast(n_positions)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Refuses a non-finite loss or gradient, logs and clips: Lightning calls it right before the weights change."""
        sums = self._finish_step_sums()
        self._require_finite("loss", sums["loss"])
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.optimizer_config.require_optimized(self, optimizer)
        trainer = self.trainer
        divided_by = self._step_divisor * trainer.accumulate_grad_batches * trainer.world_size
        if sums["targets"] not in (0, divided_by):
            torch._foreach_mul_(gradients, divided_by / sums["targets"])
        norm = nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):  # of a sharded model, each rank has the norm of its shards
            norm = norm.full_tensor()
        grad_norm = norm.item()
        if not self._scales_gradients:  # GradScaler skips such steps by itself
            self._require_finite("gradient norm", grad_norm)
        if clip_norm := self.optimizer_config.clip_norm:
            nn.utils.clip_grads_with_norm_(self.parameters(), clip_norm, norm)
        learning_rate = optimizer.param_groups[0]["lr"]
        metrics = {**self.training_metrics(sums), "grad_norm": grad_norm, "lr": learning_rate}
        self.log_dict({**metrics, **self._stage_of_curriculum(trainer.global_step)})

    @property
    def _scales_gradients(self) -> bool:
        """Whether a GradScaler does, as in 16-mixed."""
        precision = self.trainer.precision_plugin
        return isinstance(precision, MixedPrecision) and precision.scaler is not None

    @property
    def _fused(self) -> bool | None:
        """AdamW's option. A fused AdamW would take the gradients of a GradScaler scaled, and clipping needs them as
        they are."""
        device = self.trainer.strategy.root_device  # the model may not be there yet
        return None if self._scales_gradients else fused_on(device.type)

    def _finish_step_sums(self) -> dict[str, float]:
        """The sums of the whole step, over its micro-batches and ranks."""
        names, loss = list(self._step_sums), self._step_sums["loss"]
        sums = torch.stack([value.to(loss.dtype) for value in self._step_sums.values()])
        self._step_sums = {}
        if self.trainer.world_size > 1:
            sums = self.trainer.strategy.reduce(sums, reduce_op="sum")
        return dict(zip(names, sums.tolist(), strict=True))

    def _require_finite(self, what: str, value: float) -> None:
        if math.isfinite(value):
            return
        savers = [callback for callback in self.trainer.checkpoint_callbacks if isinstance(callback, LastCheckpoint)]
        last_good = next(filter(None, (saver.last_path for saver in savers)), self.trainer.ckpt_path)
        step = self.trainer.global_step + 1
        restart = f"Resume from the last good checkpoint, {last_good}," if last_good else "Start again (no checkpoint)"
        raise NonFiniteError(
            f"the {what} is {value} at step {step}; the weights are those of the step before. {restart} with a "
            "lower optimizer.lr, a longer optimizer.warmup_steps or a smaller optimizer.clip_norm."
        )

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._any_rank_has(batch)
        self.evaluate(batch, self.evaluation)

    def _any_rank_has(self, batch: Batch | None) -> bool:
        """Whether another batch is evaluated on any rank of a sharded model; every rank must call it before each."""
        if batch is not None:
            self._last_batch = batch
        return self.is_sharded and self.trainer.strategy.reduce_boolean_decision(batch is not None, all=False)

    def on_validation_epoch_start(self) -> None:
        self.evaluation = {}

    def on_validation_epoch_end(self) -> None:
        # Ranks may have more batches than others, and gather the weights for each: all must take part.
        while self._any_rank_has(None):
            self.evaluate(self._last_batch, {})
        self._last_batch = None
        first, *others = self.gather(self.evaluation)
        self.evaluation = dict(first)
        for sums in others:  # ranks may have different names
            for name, value in sums.items():
                self.evaluation[name] = self.evaluation[name] + value if name in self.evaluation else value
        # Every rank has the sums of all ranks, so the logged values need no synchronisation.
        metrics = self.evaluation_metrics("test" if self.trainer.testing else "val", self.evaluation)
        in_training = self._stage == "fit" and self.trainer.global_step > 0
        self.log_dict({**metrics, **(self._stage_of_curriculum(self.trainer.global_step - 1) if in_training else {})})

    def _stage_of_curriculum(self, step: int) -> dict[str, float]:
        """The column `stage` of optimizer step `step`, counted from 0; a validation belongs to the step before it."""
        number = None if self.resumable_data is None else self.resumable_data.stage_at(step)
        return {} if number is None else {"stage": float(number)}

    test_step, on_test_epoch_start = validation_step, on_validation_epoch_start
    on_test_epoch_end = on_validation_epoch_end

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self.optimizer_config.optimizer_of(self.model, self._fused)
        self._made_options = options_of(optimizer.param_groups)
        # Lightning steps schedulers per epoch unless told otherwise.
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, self._learning_rate_factor), "interval": "step"},
        }

    @property
    def makes_optimizer(self) -> bool:
        """Whether the task has its own `configure_optimizers`."""
        return type(self).configure_optimizers is not TrainingTask.configure_optimizers

    def _learning_rate_factor(self, step: int) -> float:
        config, data = self.optimizer_config, self.resumable_data
        return learning_rate_factor(
            step,
            warmup_steps=config.warmup_steps,
            max_steps=self.trainer.max_steps,
            final_fraction=config.final_lr_fraction,
            schedule=config.schedule,
            **({} if data is None else {"tokens_at": data.tokens_at}),
        )

    @property
    def is_sharded(self) -> bool:
        """Whether the weights are divided among devices; then every rank must call the model equally often."""
        return isinstance(self.model, FSDPModule)

    def configure_model(self) -> None:
        """Divides the model among the devices, if the strategy has a mesh of them (see `linrope.training.sharding`)."""
        if self._device_mesh is None:
            return
        require_shareable(self._device_mesh, self._stage, self._scales_gradients)
        shard(self.model, self._device_mesh, getattr(self.trainer.strategy, "activation_checkpointing", False))

    def on_fit_start(self) -> None:
        """Refuses a sharded model with weights of several dtypes, which cannot be gathered together."""
        if self.is_sharded and len({parameter.dtype for parameter in self.model.parameters()}) > 1:
            raise InputError(
                f"trainer.precision={self.trainer.precision!r} leaves trained frequencies (rope.trainable) in float32, "
                "and a sharded model needs weights of one dtype: set bf16-mixed or 32-true."
            )

    def setup(self, stage: str) -> None:
        self._stage, trainer = stage, self.trainer
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # neither the user's nor a special strategy's
            trainer.strategy.checkpoint_io = WholeCheckpointIO()
        if (data := self.resumable_data) is not None:
            self.require_data(data)
            tokenizer = tokenizer_to_serialized(data.tokenizer)
            if self.model.tokenizer is not None:  # of a trained model
                require_same_tokenizer(self.model.tokenizer, tokenizer, "the model that was loaded")
            self.model.tokenizer = tokenizer
        if self.sequence_group is not None:
            self.require_slices(self.sequence_group)
        if slow := why_slow(str(trainer.precision), trainer.strategy.root_device.type):
            rank_zero_warn(slow)
        if stage != "fit":
            return
        require_supported(trainer.callbacks)
        require_supported_strategy(trainer.strategy)
        self.optimizer_config.require_trainer(trainer)
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise InputError("no parameter of the model has requires_grad=True: there is nothing to train.")
        self._order = run_order(trainer, self.seed)
        require_same_samples(self.gather(self._order))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["linrope"] = {
            "task": class_path_of(type(self)),
            "config": self.model_config.to_dict(),
            "order": self._order,
            "tokenizer": self.model.tokenizer,
            "precision": str(self.trainer.precision),
            "optimizer": self.optimizer_config.name,
            "optimizer_class": class_path_of(type(self)) if self.makes_optimizer else self.optimizer_config.own_class,
            "optimizer_changes": changed_options(self._parameter_groups, self._made_options),
            **self.task_state(),
        }

    @property
    def _parameter_groups(self) -> list[dict[str, Any]]:
        """Those of the trainer's optimizer."""
        return [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Makes training continue after the checkpoint's last step, on the same data, with this run's own options."""
        saved = checkpoint["linrope"]
        if self._stage is None:  # loaded without a trainer
            self.model.tokenizer = saved["tokenizer"]
            return
        path = self.trainer.ckpt_path
        if self.model.tokenizer is not None:
            require_same_tokenizer(saved["tokenizer"], self.model.tokenizer, f"checkpoint {str(path)!r}")
        data = self.resumable_data
        if self._stage != "fit":
            if data is not None and data.fractions is not None:
                warn_of_other_split(checkpoint, data.fractions, path)
            return
        if n := self.trainer.overfit_batches:
            raise InputError(f"trainer.overfit_batches={n} is a check, which resumes no run: drop --ckpt_path.")
        require_same_order(checkpoint, self._order, path)
        if data is not None:
            rewind_to_step(checkpoint, self.trainer.accumulate_grad_batches)
        if not self.makes_optimizer:
            require_same_optimizer(checkpoint, self.optimizer_config, path)
            self._take_optimizer_options(checkpoint)
        self.load_task_state(saved)

    def _take_optimizer_options(self, checkpoint: dict[str, Any]) -> None:
        """Replaces the checkpoint's optimizer options, which Lightning would restore silently, by those that this run's
        configuration makes; those that the optimizer changes by itself stay."""
        made = self.optimizer_config.optimizer_of(self.model, self._fused).param_groups
        factor = self._learning_rate_factor(checkpoint["global_step"])
        kept = ("params", *checkpoint["linrope"]["optimizer_changes"])
        found = [state["param_groups"] for state in checkpoint.get("optimizer_states", [])]
        if not self.trainer.strategy.lightning_restore_optimizer:
            found.append(self._parameter_groups)  # restored before by the strategy, without states in the checkpoint
        for groups in found:
            for group, now in zip(groups, made):
                group.update({name: value for name, value in now.items() if name not in kept})
                group.update(lr=now["lr"] * factor, initial_lr=now["lr"])
        for state in checkpoint.get("lr_schedulers", []):
            state["base_lrs"] = [group["lr"] for group in made]
