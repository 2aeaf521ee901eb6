"""Training that is measured: Lightning's trainer without output, and a single step without Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from linrope import LanguageModel, LanguageModelConfig
from linrope.losses import token_losses
from linrope.training.optimizer import parameter_groups


def quiet_trainer(max_steps: int, callbacks: list[Callback], device: str = "cpu", **options: Any) -> Trainer:
    """One device, no logs, no checkpoints, nothing printed."""
    return Trainer(
        max_steps=max_steps,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def mean_loss(model: LanguageModel, inputs: Tensor, targets: Tensor) -> Tensor:
    return token_losses(model(inputs), targets).mean()


def training_step(
    config: LanguageModelConfig, rows: int, length: int, device: str, loss: Callable[..., Tensor] = mean_loss
) -> Callable[[], None]:
    """Forward, backward and AdamW of a new model on random rows; `loss` takes the model, inputs and targets."""
    torch.manual_seed(0)
    model = LanguageModel(config).to(device)
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.01))
    tokens = torch.randint(config.vocab_size, (rows, length + 1), device=device)

    def step() -> None:
        optimizer.zero_grad()
        loss(model, tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()

    return step
