"""Data modules as a trainer would have them, without one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

from linrope.training import ResumableDataModule, TextDataModule


def attach(
    data: ResumableDataModule,
    *,
    rank: int = 0,
    world_size: int = 1,
    step: int = 0,
    accumulate: int = 1,
    max_steps: int = 1000,
    stage: str = "fit",
) -> None:
    """Sets a data module up for rank `rank` of a trainer that has finished `step` steps."""
    data.trainer = SimpleNamespace(
        global_rank=rank,
        world_size=world_size,
        global_step=step,
        max_steps=max_steps,
        accumulate_grad_batches=accumulate,
        limit_val_batches=1.0,
        limit_train_batches=1.0,
        overfit_batches=0.0,
        state=SimpleNamespace(fn=stage),
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    data.setup(stage)


OF_TRAINER = ("rank", "world_size", "step", "accumulate", "max_steps", "stage")


def attached(path: Path, **options: object) -> TextDataModule:
    """A text data module of these options, set up with those of `attach`."""
    of_trainer = {name: options.pop(name) for name in OF_TRAINER if name in options}
    data = TextDataModule(str(path), **{"context": 32, "batch_size": 2, **options})
    attach(data, **of_trainer)
    return data


def first_batches(data: ResumableDataModule, n: int) -> list[torch.Tensor]:
    """The inputs of the next `n` training batches."""
    loader = iter(data.train_dataloader())
    return [next(loader)["inputs"] for _ in range(n)]
