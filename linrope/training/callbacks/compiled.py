"""Training steps compiled by torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from lightning.pytorch import Callback, LightningModule, Trainer

from linrope.errors import InputError
from linrope.layers.linear_attention import LinearAttention
from linrope.profiling.fake_tensors import fake_tensors


def require_compiler(device: str) -> None:
    """Raise InputError unless torch.compile works on "cpu" or "cuda" here: it needs a C++ compiler, on a GPU Triton."""
    try:
        torch.compile(torch.neg)(torch.ones(8, device=device))
    except Exception as error:  # whatever a missing compiler, header or package leads to
        fix = "a C++ compiler (g++ and Python's headers; $CXX names another one)" if device == "cpu" else "Triton"
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"run.compile=True: torch.compile does not work here ({reason}). Install {fix}, or remove the option."
        ) from error


class CompiledTraining(Callback):
    """Compiles each block of the model in place, for training steps alone; names in checkpoints stay as they are.

    All else runs as without it: validation, samples, and steps with an operator hook, which would each be compiled
    anew, for other lengths, states and hooks. A second length of training rows is compiled for all further ones. Stands
    after callbacks that set hooks. InputError for a model without `blocks`.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not hasattr(pl_module.model, "blocks"):
            found = type(pl_module.model).__name__
            raise InputError(
                f"CompiledTraining compiles the blocks of a LanguageModel, and {found} has none: remove the callback."
            )
        # einops lists the types that it has met, and a new one would have the blocks compiled again; Throughput counts
        # FLOPs on fake tensors
        rearrange(torch.zeros(1, 1), "a b -> (a b)")
        with fake_tensors():
            rearrange(torch.zeros(1, 1), "a b -> (a b)")
        torch.compiler.set_stance("force_eager")
        for block in pl_module.model.blocks:
            block.compile()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        layers = [block.attention for block in pl_module.model.blocks]
        hooked = any(layer.watch is not None for layer in layers if isinstance(layer, LinearAttention))
        torch.compiler.set_stance("force_eager" if hooked else "default")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        torch.compiler.set_stance("force_eager")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        torch.compiler.set_stance("default")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        torch.compiler.set_stance("default")
