"""An exponential moving average of the weights, by Lightning's own callback."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging

from linrope.errors import InputError


class AverageWeights(EMAWeightAveraging):
    """Lightning's EMA: validation and checkpoints' `state_dict` have the average, training goes on from the last
    weights, which checkpoints hold too.

    It differs in two places. The average lives on the device of training, where Lightning's would be where the module
    was made. And it takes the weights' place after all callbacks had their end of training, so that a checkpoint that
    is saved there still holds what training would go on from.
    """

    def __init__(self, decay: float) -> None:
        super().__init__(decay=decay, use_buffers=False)  # buffers are copied: none of ours is trained

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._device = trainer.strategy.root_device
        super().setup(trainer, pl_module, stage)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pass

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)


def require_same_averaging(checkpoint: dict[str, Any], ema_decay: float | None, path: str) -> None:
    """Raise InputError where a run with an average would resume from one without, or the other way round: the weights
    would not be those that training had."""
    averaged = "averaging_state" in checkpoint
    if averaged and ema_decay is None:
        raise InputError(f"checkpoint {path!r} averages the weights of its run: set run.ema_decay to resume from it.")
    if not averaged and ema_decay is not None:
        raise InputError(
            f"run.ema_decay={ema_decay}, but checkpoint {path!r} has no average of its run's weights: leave it out "
            "to resume."
        )
