"""The memory of a training step, estimated without allocating it.

The step runs on fake tensors, and every storage that PyTorch would allocate and free is counted. So the estimate
follows the code, whatever the model's options, and takes about a second at any length.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from linrope.models.base import Model
from linrope.models.language_model import LanguageModel, LanguageModelConfig
from linrope.profiling.fake_tensors import fake_tensors
from linrope.segmented import segmented_loss

WORKSPACE = 24 * 2**20
"""Bytes of the kernel's buffers and of PyTorch's libraries and threads, at any length. Without the compiled kernel it
is some 30 MiB more."""
MMAP_THRESHOLD = 32 * 2**20
"""glibc's malloc returns larger allocations to the system when they are freed; smaller ones leave gaps in its heap."""
GAPS = {"cpu": 1.28, "cuda": 1.1}
"""Bytes that a process holds for each byte of tensors, gaps included, by device. CPU: measured on training steps of
several shapes (1.23 to 1.35). CUDA: a guess for the gaps of PyTorch's allocator, not measured."""
LEFT_BETWEEN_SEGMENTS = 24 * 2**20
"""Bytes that freed segments still hold on a CPU; `segmented_loss` returns them to the system every few segments."""
SEGMENTS_RUN = 4
"""Segments of a sequence that are run; each further one adds what is kept between two segments."""


class StorageMeter(TorchDispatchMode):
    """Counts the bytes that all live storages hold on a device, and their peak."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)):
            if id(storage) in self._known:
                continue
            held = storage.nbytes()
            if self.device != "cpu" or held < MMAP_THRESHOLD:
                held = round(GAPS[self.device] * held)
            self._known.add(id(storage))
            self.live += held
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._freed, id(storage), held)
        return out

    def _freed(self, key: int, held: int) -> None:
        self._known.discard(key)
        self.live -= held


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a training step on one device, in addition to those of a process that has imported PyTorch."""

    weights: int
    """Parameters, their gradients, the optimizer's moments and, if there is one, the moving average."""
    activations: int
    """All other tensors and the gaps between them, at their peak."""

    @property
    def total(self) -> int:
        return self.weights + self.activations + WORKSPACE


def kept_by_optimizer(model: Model, name: str) -> list[nn.Parameter]:
    """The parameter of each moment that optimizer `name` keeps, and that has its size: AdamW keeps two of a parameter,
    Muon one of the matrices."""
    of_muon = model.matrices_of_blocks if name == "muon" else set()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [parameter for parameter in trained for _ in range(1 if parameter in of_muon else 2)]


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of these tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def estimate_training_memory(
    config: LanguageModelConfig,
    batch_size: int,
    length: int,
    segment_length: int | None = None,
    *,
    document_mask: bool = False,
    autocast: torch.dtype | None = None,
    averaged: bool = False,
    optimizer: str = "adamw",
    device: str = "cpu",
) -> MemoryEstimate:
    """The memory of one step, forward, backward and the optimizer, on `batch_size` rows of `length` tokens.

    Args:
        segment_length: tokens of a segment where rows are read in segments; None otherwise.
        document_mask: rows are packed documents, and each attends to itself only.
        autocast: the dtype of mixed precision; None for full precision.
        averaged: whether a moving average of the weights is kept.
        optimizer: `optimizer.name`.
        device: "cpu" or "cuda", whose allocator holds the tensors.
    """
    n_run = length if segment_length is None else min(length, SEGMENTS_RUN * segment_length)
    with fake_tensors(), StorageMeter(device) as meter:
        model = config.build()
        tokens = torch.zeros(batch_size, n_run + 1, dtype=torch.int64)
        ids = torch.zeros(batch_size, n_run, dtype=torch.int64) if document_mask else None
        before = meter.peak = meter.live  # parameters and tokens
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = step_loss(model, tokens, segment_length, ids)
        kept = meter.live - before
        loss.backward()
    of_parameters = size_of(model.parameters())
    activations = meter.peak - before
    if segment_length is not None and device == "cpu":
        activations += LEFT_BETWEEN_SEGMENTS
    if n_run < length:
        n_segments = -(-n_run // segment_length)
        further = -(-(length - n_run) // segment_length)
        activations += further * kept // n_segments + batch_size * (length - n_run) * tokens.element_size()
    copies = 3 if averaged else 2  # the weights and their gradients
    return MemoryEstimate(copies * of_parameters + size_of(kept_by_optimizer(model, optimizer)), activations)


def step_loss(model: LanguageModel, tokens: Tensor, segment_length: int | None, ids: Tensor | None = None) -> Tensor:
    """The summed loss of tokens (B, T + 1), read as a whole or in segments; `ids` (B, T) are the documents' numbers."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if segment_length is not None:
        return segmented_loss(model, inputs, targets, segment_length, segment_ids=ids)[0]
    return model(inputs, segment_ids=ids, targets=targets)
