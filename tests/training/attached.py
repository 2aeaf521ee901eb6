"""Data modules as a trainer would have them, without one, and the batches that a trainer gives its task."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from linrope.training import LanguageModelingModule, ResumableDataModule, TextDataModule

OF_TRAINER = {
    "rank": 0,
    "world_size": 1,
    "step": 0,
    "accumulate": 1,
    "max_steps": 1000,
    "max_epochs": -1,
    "stage": "fit",
}
"""What a test may set of the trainer: the rank, the number of ranks, finished steps, micro-batches of a step, …"""


def attach(data: ResumableDataModule, **of_trainer: Any) -> None:
    """Sets a data module up for a trainer with these of `OF_TRAINER`."""
    given = SimpleNamespace(**{**OF_TRAINER, **of_trainer})
    limits = {"limit_val_batches": 1.0, "limit_train_batches": 1.0, "overfit_batches": 0.0, "fast_dev_run": False}
    data.trainer = SimpleNamespace(
        global_rank=given.rank,
        world_size=given.world_size,
        global_step=given.step,
        max_steps=given.max_steps,
        max_epochs=given.max_epochs,
        accumulate_grad_batches=given.accumulate,
        state=SimpleNamespace(fn=given.stage),
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        **limits,
    )
    data.setup(given.stage)


def attached(path: Path, **options: Any) -> TextDataModule:
    """A text data module of these options, set up with those of `OF_TRAINER`."""
    of_trainer = {name: options.pop(name) for name in OF_TRAINER if name in options}
    data = TextDataModule(str(path), **{"context": 32, "batch_size": 2, **options})
    attach(data, **of_trainer)
    return data


def first_batches(data: ResumableDataModule, n: int) -> list[torch.Tensor]:
    """The inputs of the next `n` training batches."""
    loader = iter(data.train_dataloader())
    return [next(loader)["inputs"] for _ in range(n)]


def record_batches(patch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Every training batch of the runs to come, in order."""
    batches: list[dict[str, torch.Tensor]] = []
    training_step = LanguageModelingModule.training_step

    def recorded(self, batch, batch_idx):
        batches.append(batch)
        return training_step(self, batch, batch_idx)

    patch.setattr(LanguageModelingModule, "training_step", recorded)
    return batches
