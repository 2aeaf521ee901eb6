"""How much memory a training step takes, found out without taking it.

The step is run on fake tensors, which have shapes and no contents, while every storage that PyTorch would make and free
is counted. So the estimate follows the code, whatever options a model has, and costs a second at any length.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from linrope.losses import summed_cross_entropy
from linrope.models.language_model import LanguageModel, LanguageModelConfig
from linrope.segmented import segmented_loss

WORKSPACE = 56 * 2**20
"""What the kernel works on its blocks in, and what PyTorch's libraries and threads keep, at any length."""


MMAP_THRESHOLD = 32 * 2**20
"""What is larger, glibc's malloc takes from the system and gives back to it; of smaller tensors it keeps the gaps."""


GAPS = {"cpu": 1.28, "cuda": 1.1}
"""What a process holds for each byte of tensors between which there are gaps. On a CPU measured on training steps of
several shapes (1.23 to 1.35); on a GPU, where the gaps are those of PyTorch's allocator, a guess and not measured."""


LEFT_BETWEEN_SEGMENTS = 24 * 2**20
"""What freed segments still hold on a CPU until it is given back, which happens every few of them."""


SEGMENTS_RUN = 4
"""Of a sequence in segments so many are run; each further one adds what is kept between two."""


class _Meter(TorchDispatchMode):
    """Counts the bytes that all storages alive hold on a device, and the most there were."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.live = self.peak = 0
        self._known: set[int] = set()

    def held(self, nbytes: int) -> int:
        """Of one storage, with its share of the gaps."""
        return nbytes if self.device == "cpu" and nbytes >= MMAP_THRESHOLD else round(GAPS[self.device] * nbytes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0  # what checks ask of a value, fake tensors cannot say
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.note(leaf)
        return out

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self._known:
            return
        self._known.add(id(storage))
        held = self.held(storage.nbytes())
        self.live += held
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, id(storage), held)

    def _freed(self, key: int, held: int) -> None:
        self._known.discard(key)
        self.live -= held


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a training step takes on one device, beside what a process takes in which PyTorch is imported.

    Attributes:
        weights: parameters, their gradients, AdamW's two moments and, where there is one, the moving average.
        activations: all other tensors, and the gaps between them, at the moment when they are most.
    """

    weights: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.activations + WORKSPACE


def estimate_training_memory(
    config: LanguageModelConfig,
    batch_size: int,
    length: int,
    segment_length: int | None = None,
    *,
    apart: bool = False,
    autocast: torch.dtype | None = None,
    averaged: bool = False,
    device: str = "cpu",
) -> MemoryEstimate:
    """The memory of one step, forward, backward and AdamW, on `batch_size` rows of `length` tokens.

    Args:
        segment_length: the rows are read in segments of so many tokens; None reads each at once.
        apart: rows are packed with documents.
        autocast: the dtype of mixed precision, or None for none.
        averaged: a moving average of the weights is kept.
        device: whose allocator holds it.
    """
    n_run = length if segment_length is None else min(length, SEGMENTS_RUN * segment_length)
    with torch.random.fork_rng([]), FakeTensorMode(), _Meter(device) as meter:
        model = LanguageModel(config)
        tokens = torch.zeros(batch_size, n_run + 1, dtype=torch.int64)
        ids = torch.zeros(batch_size, n_run, dtype=torch.int64) if apart else None
        before = meter.peak = meter.live  # parameters and tokens
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = _loss(model, tokens, ids, segment_length)
        kept = meter.live - before
        loss.backward()
    of_parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    activations = meter.peak - before
    if segment_length is not None and device == "cpu":
        activations += LEFT_BETWEEN_SEGMENTS
    if n_run < length:
        n_segments = -(-n_run // segment_length)
        further = -(-(length - n_run) // segment_length)
        activations += further * kept // n_segments + batch_size * (length - n_run) * tokens.element_size()
    copies = 5 if averaged else 4  # the weights, their gradients, AdamW's two moments
    return MemoryEstimate(copies * of_parameters, activations)


def shapes_only(config: LanguageModelConfig) -> LanguageModel:
    """A model whose weights have shapes and no memory: to count its parameters, its state and its operations."""
    with torch.random.fork_rng([]), FakeTensorMode():
        return LanguageModel(config)


def _loss(model: LanguageModel, tokens: Tensor, ids: Tensor | None, segment_length: int | None) -> Tensor:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if segment_length is not None:
        return segmented_loss(model, inputs, targets, segment_length, segment_ids=ids)[0]
    return summed_cross_entropy(model(inputs, segment_ids=ids), targets)
