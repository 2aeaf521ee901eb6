"""One training step without Lightning, whose import takes memory that benchmarks of whole processes would count."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from linrope import LanguageModel, LanguageModelConfig


def mean_loss(model: LanguageModel, inputs: Tensor, targets: Tensor) -> Tensor:
    return model(inputs, targets=targets) / targets.numel()


def fused_adamw(model: LanguageModel) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def training_step(
    config: LanguageModelConfig,
    rows: int,
    length: int,
    device: str,
    loss: Callable[..., Tensor] = mean_loss,
    bfloat16: bool = False,
    optimizer_of: Callable[[LanguageModel], Optimizer] = fused_adamw,
) -> Callable[[], None]:
    """Forward, backward and the optimizer of a new model on random rows; `loss` takes the model, inputs and targets.

    bfloat16: under autocast, as with `trainer.precision: bf16-mixed`.
    """
    torch.manual_seed(0)
    model = LanguageModel(config).to(device)
    optimizer = optimizer_of(model)
    tokens = torch.randint(config.vocab_size, (rows, length + 1), device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=bfloat16):
            total = loss(model, tokens[:, :-1], tokens[:, 1:])
        total.backward()
        optimizer.step()

    return step
