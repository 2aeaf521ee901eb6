"""The end of a run before its last step: a time limit, and the reason of any such end."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason


class TimeLimit(Timer):
    """Ends training after a time that counts anew in each process, also in one that resumes.

    Lightning's own, of `trainer.max_time`, counts the time before too: a resumed run would end at once.
    """

    def state_dict(self) -> dict[str, Any]:
        return {}


def reason_of_early_end(trainer: Trainer) -> str | None:
    """Why training ended before `trainer.max_steps`; None if it did not."""
    if trainer.global_step >= trainer.max_steps:
        return None
    remaining = [callback.time_remaining() for callback in trainer.callbacks if isinstance(callback, Timer)]
    if any(seconds is not None and seconds <= 0 for seconds in remaining):
        return "the time limit is reached"
    for callback in trainer.callbacks:
        if isinstance(callback, EarlyStopping) and callback.stopping_reason != EarlyStoppingReason.NOT_STOPPED:
            return f"EarlyStopping of {callback.monitor}, {callback.stopping_reason.name.lower().replace('_', ' ')}"
    return "a callback ended it"
