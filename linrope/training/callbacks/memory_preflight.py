"""A try of a curriculum's largest batches, so that running out of memory happens before training, not hours into it."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, Trainer

from linrope.errors import InputError
from linrope.training.data_modules.text import Batch, TextDataModule
from linrope.training.task import LanguageModelingModule


class MemoryPreflight(Callback):
    """Tries the largest batches of a curriculum before training, so that one that does not fit stops the run at once.

    A stage's first batch goes forward and backward; its gradients are thrown away, and random numbers go on as if it
    had not been. Which stages: those ahead that `TrainingPlan.larger_later` names, so none where the first is largest.

    Raises:
        InputError: as training starts, naming the stage that failed.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModelingModule) -> None:
        data: TextDataModule = trainer.datamodule
        for number in data.plan.larger_later(trainer.global_step):
            stage = data.plan.stages[number]
            batch = trainer.strategy.batch_to_device(data.first_batch(stage))
            try:
                _try_batch(trainer, pl_module, batch)
            except (RuntimeError, MemoryError) as error:
                if not _is_out_of_memory(error):
                    raise
                raise InputError(
                    f"data.curriculum[{number}] does not fit: a batch of {stage.batch_size} × {stage.seq_len:,} "
                    f"tokens, tried before training, failed with {_first_line(error)!r}. Lower the stage's batch_size "
                    "(and raise trainer.accumulate_grad_batches) or its seq_len, or set segment_length."
                ) from error


def _try_batch(trainer: Trainer, module: LanguageModelingModule, batch: Batch) -> None:
    """The batch forward and backward, beside what the optimizer will keep; nothing of it stays."""
    device = module.device
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    fresh = not any(optimizer.state for optimizer in trainer.optimizers)
    # AdamW's moments come with its first step; gradients lie there already while later micro-batches run
    n_beside = 2 * fresh + (trainer.accumulate_grad_batches > 1)
    beside = [torch.empty_like(parameter) for parameter in parameters for _ in range(n_beside)]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            with trainer.precision_plugin.train_step_context():
                nats = module._nats(batch)
            nats.backward()
    finally:
        beside.clear()
        for parameter in parameters:
            parameter.grad = None


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "memory" in str(error).lower()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
