"""The "chunked" backend: a prefix sum over chunks in plain PyTorch, for any device, linear in the length.

The rows and heads of a call are computed in groups, by `causal.py` or `noncausal.py`. `registration.py` makes operators
of PyTorch from the functions here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from linrope.ops.call import Call
from linrope.ops.theta_gradient import ThetaGradient
from linrope.ops.torch_kernel import causal, noncausal
from linrope.ops.torch_kernel.flops import causal_flops, noncausal_flops
from linrope.ops.torch_kernel.memory import empty
from linrope.ops.torch_kernel.plan import Partition, Plan
from linrope.ops.torch_kernel.records import Gradients, Saved

KEEPS_STATES = True
"""`forward` returns the states that `backward` needs: those before each block and at the end."""


def forward(call: Call, kv: Tensor, k_sum: Tensor) -> tuple[Tensor, ...]:
    """Returns o, den, kv_at, k_sum_at, kv, k_sum: the output, what the backward needs, and the final state."""
    plan, call = Plan.of(call), _with_boundaries(call)
    blocks = plan.partition.blocks(call.q.shape[2])
    o, den, kv_at, k_sum_at, *_ = outputs(call, kv, k_sum, empty)
    last = len(blocks) if call.causal else 1
    kv_at[0], k_sum_at[0] = kv.mT, k_sum
    kv_at[last + 1 :], k_sum_at[last + 1 :] = 0, 0
    for group in plan.partition.groups(*call.q.shape[:2]):
        part, saved = call.rows(*group), Saved(o, den, kv_at, k_sum_at).rows(*group)
        if call.causal:
            causal.forward(part, plan.of_heads(group[1]), blocks, saved)
        else:
            noncausal.forward(part, plan.of_heads(group[1]), saved)
    return o, den, kv_at, k_sum_at, _own(kv_at[last].mT), _own(k_sum_at[last])


def _with_boundaries(call: Call) -> Call:
    """A document boundary is a decay of -inf: packed rows need decay weights, with log_decay 0 if there is none."""
    if call.log_decay is not None or call.documents is None:
        return call
    return replace(call, log_decay=call.q.new_zeros((call.q.shape[0], 1, call.q.shape[2]), dtype=call.dtype))


def _own(x: Tensor) -> Tensor:
    """A contiguous copy, also if x is contiguous: an operator's results share no memory."""
    return x.clone(memory_format=torch.contiguous_format)


def outputs(call: Call, kv: Tensor, k_sum: Tensor, make: Callable = torch.empty) -> tuple[Tensor, ...]:
    """Empty tensors for what `forward` returns."""
    batch, heads, length, features = call.q.shape
    # before each block and at the end: a bound, which says more to a graph of open length than the exact number
    tokens = Partition.tokens_of(batch, heads, max(features, call.v.shape[3]))
    n_states = (length - 1) // tokens + 3 if call.causal else 2
    o = make((batch, heads, length, call.v.shape[-1]), dtype=call.v.dtype, device=call.v.device)
    den = kv.new_empty((batch, heads, length) if call.plain else (0,))
    kv_at = kv.new_empty(n_states, batch, heads, kv.shape[3], kv.shape[2])
    k_sum_at = k_sum.new_empty(n_states, *k_sum.shape)
    return o, den, kv_at, k_sum_at, kv.new_empty(kv.shape), k_sum.new_empty(k_sum.shape)


def backward(
    call: Call,
    saved: tuple[Tensor, ...],
    grad_o: Tensor,
    grad_kv: Tensor | None,
    grad_k_sum: Tensor | None,
    d_decay: bool,
    d_theta: bool,
) -> tuple[Tensor, ...]:
    """Returns the gradients of q, k, v, log_decay, theta, kv and k_sum; those not needed are empty."""
    # ∂log_decay and ∂θ are small differences of large sums: bfloat16 products would be too coarse
    plan, whole = Plan.of(call, exact=d_decay or d_theta), Saved(*saved)
    blocks = plan.partition.blocks(call.q.shape[2])
    grads = Gradients(
        grad_o,
        *(empty(x.shape, dtype=x.dtype, device=x.device) for x in (call.q, call.k, call.v)),
        torch.empty_like(call.log_decay, memory_format=torch.contiguous_format) if d_decay else None,
        ThetaGradient(call.theta, call.q.shape[2], call.interleaved) if d_theta else None,
        torch.zeros_like(whole.kv_at[0]) if grad_kv is None else _own(grad_kv.mT),
        torch.zeros_like(whole.k_sum_at[0]) if grad_k_sum is None else _own(grad_k_sum),
        call.plain or grad_k_sum is not None,
    )
    last = whole.kv_at[len(blocks) if call.causal else 1], grads.d_kv.clone()
    call = _with_boundaries(call)
    for group in plan.partition.groups(*call.q.shape[:2]):
        part, of_heads = call.rows(*group), plan.of_heads(group[1])
        if call.causal:
            causal.backward(part, of_heads, blocks, whole.rows(*group), grads.rows(*group))
        else:
            noncausal.backward(part, of_heads, whole.rows(*group), grads.rows(*group))
    nothing = call.q.new_empty(0)
    if d_theta:
        grads.d_theta.add_origin(call.start, (whole.kv_at[0], grads.d_kv), last)
    return (
        grads.dq,
        grads.dk,
        grads.dv,
        grads.d_log_decay if d_decay else nothing,
        grads.d_theta.total if d_theta else nothing.clone(),
        _own(grads.d_kv.mT),
        grads.d_k_sum,
    )


def flops(call: Call, backward: bool, sums_needed: bool = False) -> int:
    """Multiplications and additions of the matrix products of one call.

    Args:
        call: with shapes in place of tensors.
        sums_needed: whether the backward has a gradient of the final sum of keys.
    """
    (batch, heads, length, features), (_, _, keys, width) = call.q, call.v
    if not call.causal:
        return noncausal_flops(batch * heads, length, keys, features, width, backward)
    n_sums = 1
    if backward:
        n_sums = 2 if call.plain else int(sums_needed)
    return causal_flops(batch, heads, length, features, width, n_sums, backward)
