"""The metrics that callbacks monitor."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from linrope.errors import InputError, suggest


class RequireMonitored(Callback):
    """Raises InputError at the end of the first validation if a callback monitors a metric that was not logged.

    It must come before those callbacks. One with `strict=False` may wait for its metric.
    """

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        logged = list(trainer.callback_metrics)
        for callback in trainer.callbacks:
            monitor = getattr(callback, "monitor", None)
            if isinstance(monitor, str) and monitor not in logged and getattr(callback, "strict", True):
                raise InputError(
                    f"{type(callback).__name__}.monitor={monitor!r} is not logged by this run: choose one of "
                    f"{', '.join(sorted(logged))}.{suggest(monitor, logged)}"
                )
