"""The model that `--ckpt_path` and `--device` name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from linrope.errors import InputError
from linrope.models.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, and where it runs."""

    ckpt_path: str
    """Checkpoint file, or a folder that save_pretrained or `linrope export` wrote."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes a CUDA GPU if there is one."""

    def load(self) -> LanguageModel:
        """The model in evaluation mode. InputError: no such model, or no such device."""
        model = LanguageModel.from_pretrained(self.ckpt_path)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InputError("--device=cuda is not available on this machine: choose auto or cpu.")
        return model.to("cuda" if self.device != "cpu" and torch.cuda.is_available() else "cpu").eval()
