"""The memory preflight: the largest batches of a curriculum, tried before training."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, Trainer

from linrope.errors import InputError
from linrope.profiling.memory_estimate import kept_by_optimizer
from linrope.training.data_modules.text import Batch, TextDataModule
from linrope.training.task import TrainingTask


class MemoryPreflight(Callback):
    """Tries the largest batches of a curriculum before training, so that a run out of memory fails at its start.

    The first batch of a stage goes forward and backward; its gradients are dropped and the random state is restored.
    Stages: those ahead that `TrainingPlan.larger_later` names, so none if the first stage has the largest batches.
    Raises InputError, naming the stage that failed.
    """

    def on_train_start(self, trainer: Trainer, pl_module: TrainingTask) -> None:
        data: TextDataModule = trainer.datamodule
        for number in data.plan.larger_later(trainer.global_step):
            stage = data.plan.stages[number]
            batch = trainer.strategy.batch_to_device(data.first_batch(stage))
            try:
                _try_batch(trainer, pl_module, batch)
            except (RuntimeError, MemoryError) as error:
                if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "memory" not in str(error).lower():
                    raise
                first_line = str(error).strip().partition("\n")[0] or type(error).__name__
                raise InputError(
                    f"data.curriculum[{number}] does not fit: a batch of {stage.batch_size} × {stage.seq_len:,} "
                    f"tokens, tried before training, failed with {first_line!r}. Lower the stage's batch_size "
                    "(and raise trainer.accumulate_grad_batches) or its seq_len, or set segment_length."
                ) from error


def _try_batch(trainer: Trainer, task: TrainingTask, batch: Batch) -> None:
    """Runs the batch forward and backward, beside as much memory as the optimizer will take; keeps nothing."""
    device = task.device
    parameters = [parameter for parameter in task.parameters() if parameter.requires_grad]
    first_step = not any(optimizer.state for optimizer in trainer.optimizers)
    # the optimizer's moments come with its first step; gradients exist already while later micro-batches run
    taken = kept_by_optimizer(task.model, task.optimizer_config.name) if first_step else []
    taken += parameters if trainer.accumulate_grad_batches > 1 else []
    copies = [torch.empty_like(parameter) for parameter in taken]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            with trainer.precision_plugin.train_step_context():
                loss = task.batch_loss(batch).total
            loss.backward()
    finally:
        copies.clear()
        for parameter in parameters:
            parameter.grad = None
