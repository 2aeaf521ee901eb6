"""Running a model's code on fake tensors, which have shapes and dtypes but no contents and no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # PyTorch documents it under this name
from torch.utils._python_dispatch import TorchDispatchMode

from linrope.models.language_model import LanguageModel, LanguageModelConfig


class _ValuesAreZero(TorchDispatchMode):
    """Answers 0 where a check asks for a value, which a fake tensor does not have."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside, all new tensors are fake. Random numbers that are drawn inside change nothing outside."""
    with torch.random.fork_rng([]), FakeTensorMode(), _ValuesAreZero():
        yield


def shapes_only(config: LanguageModelConfig) -> LanguageModel:
    """A model with fake weights: it takes no memory, and tells its number of parameters and the size of its state."""
    with fake_tensors():
        return config.build()
