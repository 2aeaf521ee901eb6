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

from linrope.model import LanguageModel, LanguageModelConfig
from linrope.segments import segmented_loss, summed_cross_entropy

WORKSPACE = 56 * 2**20
"""What the kernel works on its blocks in, and what PyTorch's libraries and threads keep, at any length."""
HELD = {"cpu": 1.27, "cuda": 1.1}
"""What the process holds for each byte of activations: allocators keep gaps between tensors of many sizes. On a CPU it is
glibc's malloc, measured on ten shapes of training steps (1.23 to 1.35); on a GPU it is a guess, not measured."""
SEGMENTS_RUN = 4
"""Of a sequence in segments so many are run; each further one adds what is kept between two."""


class _Meter(TorchDispatchMode):
    """Counts the bytes of all storages alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

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
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, id(storage), storage.nbytes())

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


@dataclass(frozen=True)
class Footprint:
    """Bytes that a training step takes on one device, beside what a process takes in which PyTorch is imported.

    Attributes:
        weights: parameters, their gradients and AdamW's two moments.
        activations: all other tensors at the moment when they are most, the row's tokens among them.
        device: "cpu" or "cuda".
    """

    weights: int
    activations: int
    device: str

    @property
    def total(self) -> int:
        return self.weights + round(HELD[self.device] * self.activations) + WORKSPACE


def training_footprint(
    config: LanguageModelConfig,
    batch_size: int,
    length: int,
    segment_length: int | None = None,
    *,
    apart: bool = False,
    autocast: torch.dtype | None = None,
    device: str = "cpu",
) -> Footprint:
    """The memory of one step, forward, backward and AdamW, on `batch_size` rows of `length` tokens.

    Args:
        segment_length: the rows are read in segments of so many tokens; None reads each at once.
        apart: rows are packed with documents.
        autocast: the dtype of mixed precision, or None for none.
        device: whose allocator holds it.
    """
    n_run = length if segment_length is None else min(length, SEGMENTS_RUN * segment_length)
    rng = torch.get_rng_state()
    with FakeTensorMode(), _Meter() as meter:
        model = LanguageModel(config)
        tokens = torch.zeros(batch_size, n_run + 1, dtype=torch.int64)
        ids = torch.zeros(batch_size, n_run, dtype=torch.int64) if apart else None
        parameters = meter.peak = meter.live
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = _loss(model, tokens, ids, segment_length)
        kept = meter.live - parameters
        loss.backward()
        peak = meter.peak
    torch.set_rng_state(rng)
    of_parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    activations = peak - of_parameters  # some gradients are there by then, or not: they are counted with the weights
    if n_run < length:
        n_segments = -(-n_run // segment_length)
        further = -(-(length - n_run) // segment_length)
        activations += further * kept // n_segments + batch_size * (length - n_run) * tokens.element_size()
    return Footprint(4 * of_parameters, activations, device)


def _loss(model: LanguageModel, tokens: Tensor, ids: Tensor | None, segment_length: int | None) -> Tensor:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if segment_length is not None:
        return segmented_loss(model, inputs, targets, segment_length, segment_ids=ids)[0]
    return summed_cross_entropy(model(inputs, segment_ids=ids), targets)
