"""An exponential moving average of the weights, by Lightning's own callback."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from linrope.errors import InputError


class AverageWeights(WeightAveraging):
    """Lightning's average: validation and the `state_dict` of checkpoints use it, training uses the last weights.

    Checkpoints hold both. After n steps the decay is min(decay, (1 + n) / (10 + n)), as in TensorFlow's
    `ExponentialMovingAverage`: with one of 0.999, half of the average of 700 steps would be the first weights, which
    are nearly random. It differs from Lightning's in two more ways. The average is on the device of training, not where
    the module was made. And the average replaces the weights only after `on_train_end` of all callbacks, so that a
    checkpoint saved there still has the last weights.
    """

    def __init__(self, decay: float) -> None:
        # buffers are copied: none is trained
        super().__init__(use_buffers=False, avg_fn=partial(moved_average, decay))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, ModelParallelStrategy):
            raise InputError(
                "run.ema_decay keeps a whole second model on each device, and the model is divided among several: "
                "remove it. run.keep_checkpoints with `linrope average` gives a mean of the weights too."
            )
        self._device = trainer.strategy.root_device
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*overrides the configure_model")  # which does nothing here
            super().setup(trainer, pl_module, stage)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pass

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)


def moved_average(decay: float, average: Tensor, weight: Tensor, n_steps: Tensor) -> Tensor:
    """The average after a step, of which there were `n_steps` before."""
    kept = ((1 + n_steps) / (10 + n_steps)).clamp(max=decay)
    return average + (weight - average) * (1 - kept)


def require_same_averaging(checkpoint: dict[str, Any], ema_decay: float | None, path: str) -> None:
    """Raise InputError if only one of the checkpoint's run and this run averages the weights."""
    averaged = "averaging_state" in checkpoint
    if averaged and ema_decay is None:
        raise InputError(f"checkpoint {path!r} averages the weights of its run: set run.ema_decay to resume from it.")
    if not averaged and ema_decay is not None:
        raise InputError(
            f"run.ema_decay={ema_decay}, but checkpoint {path!r} has no average of its run's weights: remove the "
            "option to resume."
        )
