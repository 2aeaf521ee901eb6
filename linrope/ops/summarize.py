"""`summarize`: the state of a run of tokens, without their outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import repeat

import torch
from torch import Tensor

from linrope.ops.call import Call, autocast_inputs, check_call, without_autocast
from linrope.ops.state import State, rotate_keys
from linrope.rotary import RotaryEmbedding, rotate, unit_rotations

BLOCK = 1024
"""Tokens whose rotated keys are in memory at a time."""


def summarize(
    k: Tensor,
    v: Tensor,
    rope: RotaryEmbedding | None = None,
    *,
    log_decay: Tensor | None = None,
    feature_map: str | Callable[[Tensor], Tensor] = "elu1",
    normalize: str = "plain",
    key_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> State:
    """The state that `linear_attention` returns after these keys and values, without queries and outputs.

    `merge(state, summarize(k, v, ...), rope)` continues an earlier state. Time and memory are linear in T; without
    gradients the memory does not depend on T. Sums and products are float32 (float64 for float64 inputs), angles are
    exact. Differentiable by autograd.

    Args:
        k, v: (B, H, T, D) keys and (B, H, T, E) values, any strides.
        rope, log_decay, feature_map, normalize, key_mask, segment_ids: as in `linear_attention`, causal.

    Raises:
        InputError: an argument that does not fit; the message names it, its value and the fix.
    """
    k, v = autocast_inputs(k, v)
    with without_autocast(k):
        return _sum_blocks(check_call(None, k, v, rope, log_decay, feature_map, normalize, True, key_mask, segment_ids))


def _sum_blocks(call: Call) -> State:
    """Rotate the keys of each block by their place in it, and the block's sums by the position of its first token."""
    length, zeros = call.k.shape[2], call.past
    kv, k_sum, k_rotated_sum = zeros.kv, zeros.k_sum, zeros.k_rotated_sum
    weight, local = _weights(call), None
    if call.theta is not None:
        positions = torch.arange(min(length, BLOCK), device=call.k.device)
        local = unit_rotations(positions, call.theta).to(torch.promote_types(call.dtype, torch.complex64))
    start = 0
    for block, block_weight in _blocks(call, weight):
        k, v = block.keys_and_values(slice(None))
        if block_weight is not None:
            k = k * block_weight[..., None].to(k.dtype)
        k_sum = k_sum + call.without_signed(k.sum(dim=2))
        rotation = None
        if local is not None:
            k = rotate(k, local[..., : k.shape[2], :], call.interleaved)
            rotation = unit_rotations(torch.full((), start, device=k.device), call.theta)
        kv = kv + rotate_keys(k.mT @ v, rotation, call.interleaved)
        if k_rotated_sum is not None:
            k_rotated_sum = k_rotated_sum + rotate_keys(k.sum(dim=2)[..., None], rotation, call.interleaved)[..., 0]
        start += BLOCK
    return State(kv, k_sum, length, call.final_log_decay(), k_rotated_sum)


def _blocks(call: Call, weight: Tensor | None) -> Iterator[tuple[Call, Tensor | None]]:
    """The call and the weights of each block of tokens. Split at once: the gradient of one slice is as long as all."""
    if call.k.shape[2] == 0:
        return
    tensors = call.k, call.v, call.key_mask, weight
    parts = [repeat(None) if x is None else x.split(BLOCK, dim=min(2, x.ndim - 1)) for x in tensors]
    for k, v, key_mask, block_weight in zip(*parts):
        yield replace(call, k=k, v=v, key_mask=key_mask), block_weight


def _weights(call: Call) -> Tensor | None:
    """(B, H or 1, T) float64: each token's weight in the final state, exp(G_T - G_t), 0 before the last document; None
    if all are 1."""
    if call.log_decay is None and call.documents is None:
        return None
    exponent = torch.zeros(1, 1, 1, dtype=torch.float64, device=call.k.device)
    if call.log_decay is not None:
        total = call.log_decay.cumsum(dim=-1, dtype=torch.float64)
        exponent = total[..., -1:] - total
    if call.documents is not None:
        exponent = exponent.masked_fill((call.documents != call.documents[:, -1:])[:, None], -math.inf)
    return exponent.exp()
