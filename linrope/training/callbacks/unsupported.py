"""Callbacks of Lightning that would change a run silently here."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)

from linrope.errors import InputError

UNSUPPORTED: dict[type[Callback], str] = {
    GradientAccumulationScheduler: "a resumed run would not know its schedule. Set trainer.accumulate_grad_batches, "
    "one number for the whole run.",
    BatchSizeFinder: "the run would have another batch size than its checkpoints and its config.yaml say. Set "
    "data.batch_size; `linrope plan` estimates the memory of a step.",
    StochasticWeightAveraging: "it averages at the ends of epochs, and training here is one endless epoch. Set "
    "run.ema_decay for an average of the weights.",
    LearningRateFinder: "the learning rate follows from optimizer.lr and its schedule. Compare short runs with "
    "different optimizer.lr.",
}
"""Why not, and what to use."""
UNSUPPORTED_IN_RUNS: dict[type[Callback], str] = {
    WeightAveraging: "a run with it could not be resumed. Set run.ema_decay for an average of the weights.",
    Timer: "its settings cannot be kept in the run's config.yaml. Set trainer.max_time, DD:HH:MM:SS.",
    OnExceptionCheckpoint: "a new run would begin with what an earlier one left there. Set "
    "run.checkpoint_every_n_steps; Ctrl-C saves a run too.",
}
"""Callbacks that `linrope fit` cannot honour either; a Trainer of one's own may have them."""


def require_supported(callbacks: Iterable[Callback], in_runs: bool = False) -> None:
    """Raise InputError, with the option to use, for a callback that training here cannot honour; with `in_runs`, that
    `linrope fit` cannot."""
    known = UNSUPPORTED | UNSUPPORTED_IN_RUNS if in_runs else UNSUPPORTED
    for callback in callbacks:
        for unsupported, why in known.items():
            if isinstance(callback, unsupported):
                raise InputError(f"trainer.callbacks has a {type(callback).__name__}, and {why}")
