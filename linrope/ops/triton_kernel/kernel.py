"""The "triton" backend: linear, fused, for NVIDIA GPUs. `registration.py` makes operators of PyTorch from it."""

from __future__ import annotations

import torch
from torch import Tensor

from linrope.ops.call import Call
from linrope.ops.theta_gradient import ThetaGradient
from linrope.ops.triton_kernel.launch import Launch, addressable
from linrope.ops.triton_kernel.plan import CHUNK, SHORTEST, Chosen, Plan, all_kernels, cdiv, usual

KEEPS_STATES = True
"""`forward` returns the states that `backward` needs: those before each stretch and at the end, in its own layout."""
TAKES_NO_PAST = True
"""`forward` takes None for no past, and writes no zeros for it."""


def outputs(call: Call, kv: Tensor | None, k_sum: Tensor | None) -> tuple[Tensor, ...]:
    """Empty tensors for what `forward` returns."""
    exporting = torch.compiler.is_exporting()  # for all lengths at once, whose stretches are not of one size
    plan = Plan(call, False, Chosen(SHORTEST, all_kernels()) if exporting else usual(call))  # not kept: has symbols
    slots = torch.library.get_ctx().new_dynamic_size(min=2) if exporting else plan.stretches(call.k.shape[2]) + 1
    return *_own_outputs(call, plan), plan.empty_states(slots), plan.empty(0), *plan.empty_state()


def _own_outputs(call: Call, plan: Plan) -> tuple[Tensor, Tensor]:
    shape = call.q.shape[:3]
    o = torch.empty((*shape, plan.width), dtype=call.v.dtype, device=call.v.device)
    return o, plan.empty(*(shape if call.plain else (0,)))


def forward(call: Call, kv: Tensor | None, k_sum: Tensor | None, chosen: Chosen | None = None) -> tuple[Tensor, ...]:
    """Returns o, den, the states, an empty tensor, kv and k_sum: the output, what the backward needs, and the final
    state."""
    launch = Launch(call, chosen=chosen)
    o, den = _own_outputs(call, launch.plan)
    state, last_kv, last_k_sum = launch.states(launch.call.k, launch.call.v, (kv, k_sum))
    launch.attend(state, o, den)
    return o, den, state, launch.plan.empty(0), last_kv, last_k_sum


def backward(
    call: Call, saved, grad_o, grad_kv, grad_k_sum, d_decay: bool, d_theta: bool, chosen: Chosen | None = None
) -> tuple[Tensor, ...]:
    """Returns the gradients of q, k, v, log_decay, theta, kv and k_sum; those not needed are empty.

    saved: `forward`'s first four tensors, with the same `chosen`. grad_kv and grad_k_sum: None for 0.
    """
    o, den, state, _ = saved
    # ∂θ is a small difference of large sums: bfloat16 would be too coarse
    launch = Launch(call, exact=d_theta, chosen=chosen)
    plan, grad_o = launch.plan, addressable(grad_o)
    q, k, v = launch.call.q, launch.call.k, launch.call.v
    if d_theta:
        state, *_ = launch.states(k, v, plan.split(state, 0))
    d_den = torch.empty_like(den) if call.plain else None
    running = [plan.empty(plan.e_blocks, *q.shape[:3]) if d_decay else None for _ in range(2)]
    shares = [_theta_shares(plan, x) if d_theta else None for x in (q, k)]

    dq = launch.gradients(grad_o, state, den, d_den, o, d_theta=shares[0], d_running=running[0])
    ends = grad_kv, grad_k_sum
    d_state, d_kv, d_k_sum = launch.states(q, grad_o, ends, den, d_den, later=True)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    to_keys = {"d_theta": shares[1], "d_running": running[1], "sums": call.plain or grad_k_sum is not None}
    dk = launch.gradients(grad_o, d_state, den, d_den, d_v=dv, **to_keys)

    d_log_decay = launch.finish_log_decay(*running, state, d_state) if d_decay else q.new_empty(0)
    total = q.new_empty(0)
    if d_theta:
        first, last = (plan.split(state, slot)[0] for slot in (0, -1))
        total = _finish_theta(call, plan, *shares, (first, d_kv), (last, grad_kv))
    return dq, dk, dv, d_log_decay, total, d_kv, d_k_sum


def _theta_shares(plan: Plan, x: Tensor) -> Tensor:
    """An empty tensor for each stretch's share of ∂θ."""
    shape = plan.e_blocks, plan.batch, plan.heads, plan.stretches(x.shape[2]), 2, plan.rotated // 2
    return torch.empty(shape, dtype=torch.float64, device=x.device)


def _finish_theta(call: Call, plan: Plan, of_queries: Tensor, of_keys: Tensor, first, last) -> Tensor:
    """∂θ from the shares of all stretches, in float64 around the middle of the sequence."""
    gradient = ThetaGradient(call.theta, call.q.shape[2], call.interleaved)
    for share in (of_queries, of_keys):
        crosses, placed = share.sum(dim=0).unbind(dim=3)
        starts = torch.arange(crosses.shape[2], device=share.device) * plan.stretch - gradient.middle
        total = placed.sum(dim=2) + (starts.to(torch.float64)[:, None] * crosses).sum(dim=2)
        gradient.total += total.sum(dim=gradient.sharing)
    d_last = torch.zeros_like(last[0]) if last[1] is None else last[1]
    gradient.add_origin(call.start, (first[0].mT, first[1].mT), (last[0].mT, d_last.mT))
    return gradient.total


def one_token(call: Call, kv: Tensor, k_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """o, and the new kv and k_sum, of a decoding step: one launch, without a gradient. The given state is not
    overwritten, so that several continuations can start from it."""
    return Launch(call).one_token(kv, k_sum)


def flops(call: Call, backward: bool, sums_needed: bool = False) -> int:
    """Multiplications and additions of the matrix products of one call, for chunks of `CHUNK` tokens. The products of
    plain denominators are counted. `call` has shapes in place of tensors.
    """
    (batch, heads, length, features), (_, _, keys, width) = call.q, call.v
    state, pairs = features * width, 0
    if call.causal:
        plain = features if call.normalize == "plain" else 0
        pairs = cdiv(length, CHUNK) * CHUNK**2
        if backward:
            return 2 * batch * heads * (pairs * (3 * features + 2 * width + 2 * plain) + 6 * length * state)
        return 2 * batch * heads * (pairs * (features + width + plain) + 3 * length * state)
    products = 3 * keys * state + 2 * length * state if backward else (keys + length) * state
    return 2 * batch * heads * products
