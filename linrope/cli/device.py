"""The device that `--device` names."""

from __future__ import annotations

import torch

from linrope.errors import InputError


def pick_device(name: str) -> torch.device:
    """The device "cpu", "cuda" or "auto" (CUDA if available). InputError if it is not available."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device=cuda is not available on this machine: choose auto or cpu.")
    return torch.device(name)
