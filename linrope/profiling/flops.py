"""Floating-point operations (FLOPs) of a training step: the step runs on fake tensors under `FlopCounterMode`.

Counted are the matrix products and convolutions; activations, norms and sums are not. Softmax attention counts all
pairs, also those that causality hides. The linear kernel counts the products that it computes, with those that its
backward computes again.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from linrope.layers.state import tensors_of
from linrope.models.language_model import LanguageModel
from linrope.profiling.fake_tensors import fake_tensors

# The short convolution is a sum of products on some shapes and devices: its FLOPs come from its weights.
_NO_CONVOLUTIONS = dict.fromkeys(
    (torch.ops.aten.convolution, torch.ops.aten.convolution_backward), lambda *args, **options: 0
)


def step_flops(model: LanguageModel, batch_size: int, length: int, segment_length: int | None = None) -> int:
    """FLOPs of a forward and a backward pass over (batch_size, length) tokens; of the model only the configuration
    matters. Where rows are read in segments, of `segment_length` tokens, the forward pass runs twice.
    """
    size = segment_length or length
    forwards = 1 if segment_length is None else 2
    # segments differ in whether others come before and after, and in their length
    segments = Counter(
        (start > 0, start + size < length, min(size, length - start)) for start in range(0, length, size)
    )
    with fake_tensors(), sdpa_kernel(SDPBackend.MATH):  # the counter does not know the fused kernel of CPUs
        copy = type(model)(model.config)
        products = sum(
            count * _segment_flops(copy, batch_size, n, size if past else 0, followed, forwards)
            for (past, followed, n), count in segments.items()
        )
    return products + 2 * batch_size * length * _convolution_weights(copy) * (forwards + 2)


def _segment_flops(model: LanguageModel, batch_size: int, n: int, past: int, followed: bool, forwards: int) -> int:
    """FLOPs of a segment of `n` tokens after `past` others; `followed`: its state receives a gradient."""
    state = None
    if past:
        with torch.no_grad():
            _, state = model(torch.zeros(batch_size, past, dtype=torch.int64), return_state=True)
        state = state.detach(differentiable=True)
    tokens = torch.zeros(batch_size, n, dtype=torch.int64)
    with FlopCounterMode(display=False, custom_mapping=_NO_CONVOLUTIONS) as forward:
        logits, after = model(tokens, state, return_state=True)
    outputs = [logits, *(x for x in tensors_of(after) if followed and x.requires_grad)]
    with FlopCounterMode(display=False, custom_mapping=_NO_CONVOLUTIONS) as backward:
        torch.autograd.backward(outputs, [torch.zeros_like(x) for x in outputs])
    return forwards * forward.get_total_flops() + backward.get_total_flops()


def _convolution_weights(model: LanguageModel) -> int:
    convolutions = (block.attention.conv for block in model.blocks)
    return sum(conv.weight.numel() for conv in convolutions if conv is not None)
