"""Errors of Lightning's own callbacks as messages that name them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lightning.pytorch import Callback, LightningModule, Trainer

from linrope.errors import InputError


def name_setup_errors(callback: Callback) -> None:
    """Make what a callback of Lightning's raises when a run is set up, as for a missing package, an InputError that
    names it. Errors of other callbacks keep their traceback: it is their author who reads it."""
    if type(callback).__module__.startswith("lightning."):
        # a LambdaCallback has its hooks as attributes; and no closure, which a strategy that spawns could not pickle
        callback.setup = partial(_setup, type(callback).__name__, callback.setup)


def _setup(name: str, setup: Callable[..., None], trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
    try:
        setup(trainer, pl_module, stage)
    except (InputError, OSError):  # the disk may be full
        raise
    except Exception as error:
        raise InputError(f"{name} of trainer.callbacks cannot be set up: {str(error).strip()}") from error
