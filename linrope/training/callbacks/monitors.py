"""The metrics that callbacks monitor."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from linrope.errors import InputError, suggest
from linrope.training.callbacks.saving import LastCheckpoint

ALWAYS_LOGGED = ("grad_norm", "lr", "train_loss")
"""Metrics that every task logs in training."""
PASSED_TO_CHECKPOINTS = ("epoch", "step")
"""What Lightning tells each ModelCheckpoint beside the metrics."""


def monitored(callback: Callback) -> str | None:
    """The metric that a callback needs; None if it needs none, or may wait for it (`strict=False`)."""
    monitor = getattr(callback, "monitor", None)
    if not isinstance(monitor, str) or not getattr(callback, "strict", True):
        return None
    return None if isinstance(callback, ModelCheckpoint) and monitor in PASSED_TO_CHECKPOINTS else monitor


def needs_sanity_check(callbacks: Iterable[Callback], task_monitor: str) -> bool:
    """Whether only a validation can tell if a metric that a callback monitors is logged."""
    known = {None, task_monitor, *ALWAYS_LOGGED}
    return any(monitored(callback) not in known for callback in callbacks)


class RequireMonitored(Callback):
    """Raises InputError if a callback monitors a metric that is not logged. It must come before those callbacks.

    A metric whose name begins with "val" must be logged by Lightning's sanity check, which comes before training, if
    there is one. All must be logged by the end of the first validation: a callback may log its own seldom. An error
    after training has begun comes with a checkpoint.
    """

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":  # a measurement, with the callbacks of its run
            return
        logged = set(trainer.callback_metrics)
        missing = [callback for callback in trainer.callbacks if monitored(callback) not in (None, *logged)]
        if trainer.sanity_checking:  # a part of a validation may lack the metric of a part, as val_accuracy/mismatched
            whole = {name.partition("/")[0] for name in logged}
            wholes = ((callback, monitored(callback).partition("/")[0]) for callback in missing)
            missing = [callback for callback, name in wholes if name.startswith("val") and name not in whole]
        if not missing:
            return
        name, choices = monitored(missing[0]), sorted({*logged, *ALWAYS_LOGGED})
        raise InputError(
            f"{type(missing[0]).__name__}.monitor={name!r} is not logged by this run: choose one of "
            f"{', '.join(choices)}.{suggest(name, choices)}{_saved(trainer)}"
        )


def _saved(trainer: Trainer) -> str:
    """Save the run so far; what to add to an error."""
    savers = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, LastCheckpoint)]
    if trainer.sanity_checking or not savers:
        return ""
    savers[0].save(trainer)
    return f" The run so far is in {savers[0].path}: resume from it with --ckpt_path."
