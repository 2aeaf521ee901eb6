"""The device that `--device` names."""

from __future__ import annotations

import torch

from linrope.errors import InputError


def _pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    available = {"cpu": True, "cuda": torch.cuda.is_available()}
    if not available[name]:
        raise InputError(f"--device={name} is not available on this machine: choose auto or cpu.")
    return torch.device(name)
