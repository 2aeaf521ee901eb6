"""A sample of text when training ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from linrope.generation.text import require_tokenizer, write_sample


class PrintSample(Callback):
    """Generates a text after training; the arguments are those of `write_sample`."""

    def __init__(self, write: Callable[[str], Any], prompt: str, **options: Any) -> None:
        self.write, self.prompt, self.options = write, prompt, options

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        require_tokenizer(pl_module.model, "sample.prompt")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.write("\n")
            write_sample(self.write, pl_module.model.eval(), self.prompt, **self.options)
