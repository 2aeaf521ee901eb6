"""Loaders that know how long they were waited for, and whom they deal to."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from linrope.errors import InputError


@dataclass(frozen=True)
class Place:
    """Whom loaders deal to: a process of a run, and how far the run has come. By default the only one, at the start."""

    rank: int = 0
    world_size: int = 1
    batches_per_step: int = 1
    """Batches that a process learns from in one optimizer step."""
    step: int = 0
    """Optimizer steps that are done."""
    on_gpu: bool = False

    @classmethod
    def of(cls, trainer: Trainer | None) -> Place:
        """The place of `trainer`'s own process; without one, that of a training loop of somebody's own."""
        if trainer is None:
            return cls()
        on_gpu = trainer.strategy.root_device.type == "cuda"
        steps = trainer.accumulate_grad_batches, trainer.global_step
        return cls(trainer.global_rank, trainer.world_size, *steps, on_gpu)

    @property
    def batches_done(self) -> int:
        """Batches that each process has learned from."""
        return self.step * self.batches_per_step


class PlacedDataModule(LightningDataModule):
    """A data module whose loaders deal by `place`, with a Trainer or without."""

    @property
    def place(self) -> Place:
        """Whom the loaders deal to."""
        return Place.of(self.trainer)


def require_own_order(trainer: Trainer | None, stage: str) -> None:
    """Raise InputError where the trainer would deal samples in another way than loaders do that deal by `Place`, or
    never end a step."""
    if trainer is None:
        return
    if trainer.accumulate_grad_batches < 1:
        raise InputError(f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} must be 1 or more.")
    if stage == "fit" and (trainer.limit_train_batches not in (None, 1.0) or trainer.overfit_batches):
        raise InputError(
            f"trainer.limit_train_batches={trainer.limit_train_batches} and overfit_batches={trainer.overfit_batches} "
            "would train on the same first samples again and again, where training draws from an endless stream: set "
            "trainer.max_steps, and leave them out."
        )
    connector = getattr(trainer, "_accelerator_connector", None)
    if trainer.world_size > 1 and getattr(connector, "use_distributed_sampler", False):
        raise InputError(
            "trainer.use_distributed_sampler=True would deal out samples that these loaders have dealt to devices "
            "already: set it to False."
        )


def leave_signals_to_the_run(worker: int) -> None:
    """What a worker does first. Ctrl-C, and SIGTERM of a scheduler, reach all processes of a run: the main one finishes
    its step and saves, for which it needs batches. Workers end when it does."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)


class TimedLoader(DataLoader[Any]):
    """A DataLoader that keeps count, in `waited`, of the seconds in which somebody waited for its batches; its workers
    heed no signals."""

    waited = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, worker_init_fn=leave_signals_to_the_run, **options)

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.waited += time.perf_counter() - began
            yield batch
