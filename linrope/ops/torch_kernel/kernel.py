"""The "chunked" backend: a prefix sum over chunks in plain PyTorch, for any device, linear in the length.

Rows and heads are computed in groups, by `causal.py` or `noncausal.py`; `registration.py` makes operators from this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from linrope.ops.call import Call
from linrope.ops.state import State
from linrope.ops.theta_gradient import ThetaGradient
from linrope.ops.torch_kernel import causal, noncausal
from linrope.ops.torch_kernel.buffers import Gradients, Saved
from linrope.ops.torch_kernel.memory import empty
from linrope.ops.torch_kernel.plan import Partition, Plan, sum_chunk
from linrope.rotary import rotate, unit_rotations

KEEPS_STATES = True
"""`forward` returns the states that `backward` needs: those before each block and at the end."""
TAKES_NO_PAST = False
"""`forward` is given zeros where there is no past."""


def forward(call: Call, kv: Tensor, k_sum: Tensor) -> tuple[Tensor, ...]:
    """Returns o, den, kv_at, k_sum_at, kv, k_sum: the output, what the backward needs, and the final state."""
    plan, call = Plan.of(call), _with_boundaries(call)
    o, den, kv_at, k_sum_at, *_ = outputs(call, kv, k_sum, empty)
    passes, last = (causal, len(plan.blocks)) if call.causal else (noncausal, 1)
    kv_at[0], k_sum_at[0] = kv.mT, k_sum
    kv_at[last + 1 :], k_sum_at[last + 1 :] = 0, 0
    saved = Saved(o, den, kv_at, k_sum_at)
    for group in plan.partition.groups(*call.q.shape[:2]):
        passes.forward(call.rows(*group), plan.of_heads(group[1]), saved.rows(*group))
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


def backward(call: Call, saved, grad_o, grad_kv, grad_k_sum, d_decay: bool, d_theta: bool) -> tuple[Tensor, ...]:
    """Returns the gradients of q, k, v, log_decay, theta, kv and k_sum; those not needed are empty.

    saved: `forward`'s first four tensors. grad_kv and grad_k_sum: None for 0.
    """
    # ∂log_decay and ∂θ are small differences of large sums: bfloat16 products would be too coarse
    plan, whole = Plan.of(call, exact=d_decay or d_theta), Saved(*saved)
    dqkv = (empty(x.shape, dtype=x.dtype, device=x.device) for x in (call.q, call.k, call.v))
    d_log_decay = torch.empty_like(call.log_decay, memory_format=torch.contiguous_format) if d_decay else None
    theta_gradient = ThetaGradient(call.theta, call.q.shape[2], call.interleaved) if d_theta else None
    d_kv = torch.zeros_like(whole.kv_at[0]) if grad_kv is None else _own(grad_kv.mT)
    d_k_sum = torch.zeros_like(whole.k_sum_at[0]) if grad_k_sum is None else _own(grad_k_sum)
    reach_sums = call.plain or grad_k_sum is not None
    grads = Gradients(grad_o, *dqkv, d_log_decay, theta_gradient, d_kv, d_k_sum, reach_sums)
    passes, last = (causal, len(plan.blocks)) if call.causal else (noncausal, 1)
    final = whole.kv_at[last], d_kv.clone()
    call = _with_boundaries(call)
    for group in plan.partition.groups(*call.q.shape[:2]):
        passes.backward(call.rows(*group), plan.of_heads(group[1]), whole.rows(*group), grads.rows(*group))
    nothing = call.q.new_empty(0)
    if d_theta:
        theta_gradient.add_origin(call.start, (whole.kv_at[0], d_kv), final)
    optional = d_log_decay if d_decay else nothing, theta_gradient.total if d_theta else nothing.clone()
    return grads.dq, grads.dk, grads.dv, *optional, _own(d_kv.mT), d_k_sum


def one_token(call: Call) -> tuple[Tensor, State]:
    """(o, state) of a causal call of one token, differentiable by autograd: two passes over the state."""
    q, (k, v) = call.phi.forward(call.q.to(call.dtype)), call.keys_and_values(slice(0, 1))
    kv, k_sum = call.past.kv, call.past.k_sum
    if call.log_decay is not None:
        kept = call.log_decay.exp()  # (B, H, 1)
        kv, k_sum = kept[..., None] * kv, kept * k_sum
    rotation = None
    if call.theta is not None:
        rotation = unit_rotations(torch.full((), call.start, device=q.device), call.theta)
    q_rotated, k_rotated = rotate(q, rotation, call.interleaved), rotate(k, rotation, call.interleaved)
    kv = torch.baddbmm(kv.flatten(0, 1), k_rotated.flatten(0, 1).mT, v.flatten(0, 1)).unflatten(0, kv.shape[:2])
    k_sum = k_sum + call.without_signed(k[:, :, 0])
    o = q_rotated @ kv
    if call.plain:
        product = q[:, :, 0] * k_sum
        o = o / (product[..., call.signed :].sum(dim=-1) + call.eps)[..., None, None]
    return o.to(call.v.dtype), State(kv, k_sum, call.start + 1, call.final_log_decay())


def flops(call: Call, backward: bool, sums_needed: bool = False) -> int:
    """Multiplications and additions of all matrix products that one call computes, the whole of a chunk's pairs and the
    backward's recomputation included, so that a rate in FLOP/s compares with that of a matrix product. `call` has
    shapes in place of tensors; `sums_needed`: whether the backward has a gradient of the final sum of keys.
    """
    (batch, heads, length, features), (_, _, keys, width) = call.q, call.v
    if not call.causal:
        return 2 * batch * heads * (2 if backward else 1) * (keys + length) * features * width
    n_sums = 1 if not backward else 2 if call.plain else int(sums_needed)
    total = 0
    for block in Partition.of(batch, heads, length, max(features, width)).blocks(length, causal=True):
        n, c = block.n_chunks, block.chunk
        pairs_qk, pairs_v, state = n * c * c * features, n * c * c * width, n * c * features * width
        pass_states = n * n * features * width
        fine = sum_chunk(c)
        if backward:
            total += 3 * pairs_qk + 2 * pairs_v + 5 * state + 2 * pass_states
        else:
            total += pairs_qk + pairs_v + 2 * state + pass_states
        total += n_sums * (n * c * fine * features + (n * c // fine) ** 2 * features)
    return 2 * batch * heads * total
