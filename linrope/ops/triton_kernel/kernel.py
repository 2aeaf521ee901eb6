"""The "triton" backend: linear, fused, for NVIDIA GPUs. `registration.py` makes operators of PyTorch from it."""

from __future__ import annotations

import torch
from torch import Tensor

from linrope.ops.call import Call
from linrope.ops.theta_gradient import ThetaGradient
from linrope.ops.triton_kernel import launch as launching
from linrope.ops.triton_kernel.launch import Launch, cdiv

KEEPS_STATES = False
"""`forward` returns no states: `backward` sums them again from the past."""


def outputs(call: Call, kv: Tensor, k_sum: Tensor) -> tuple[Tensor, ...]:
    """Empty tensors for what `forward` returns."""
    return *_outputs_without_state(call, kv), kv.new_empty(kv.shape), k_sum.new_empty(k_sum.shape)


def _outputs_without_state(call: Call, kv: Tensor) -> tuple[Tensor, ...]:
    o = torch.empty((*call.q.shape[:3], call.v.shape[-1]), dtype=call.v.dtype, device=call.v.device)
    return o, kv.new_empty(call.q.shape[:3] if call.plain else (0,)), kv.new_empty(0), kv.new_empty(0)


def forward(call: Call, kv: Tensor, k_sum: Tensor) -> tuple[Tensor, ...]:
    """Returns o, den, two empty tensors, kv and k_sum: the output, what the backward needs, and the final state."""
    o, den, *nothing = _outputs_without_state(call, kv)
    launch = Launch(call)
    state, last_kv, last_k_sum = launch.states(call.k, call.v, (kv, k_sum))
    launch.attend((call.q, call.v), (call.k, call.v), state, values=o, den=den, sums=call.plain)
    return o, den, *nothing, last_kv, last_k_sum


def backward(call: Call, saved, grad_o, grad_kv, grad_k_sum, d_decay: bool, d_theta: bool) -> tuple[Tensor, ...]:
    """Returns the gradients of q, k, v, log_decay, theta, kv and k_sum; those not needed are empty.

    saved: o, den, and the kv and k_sum that `forward` was given. grad_kv and grad_k_sum: None for 0.
    """
    q, k, v = call.q, call.k, call.v
    o, den, kv, k_sum = saved
    launch = Launch(call, exact=d_theta)  # ∂θ is a small difference of large sums: bfloat16 would be too coarse
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    common = {"den": den, "d_den": launch.d_den(grad_o, o, den) if call.plain else None}
    running = [launch.empty(*q.shape[:3]) if d_decay else None for _ in range(2)]
    shares = [_theta_shares(launch, x) if d_theta else None for x in (q, k)]

    state, last_kv, _ = launch.states(k, v, (kv, k_sum))
    to_queries = {"d_theta": shares[0], "d_running": running[0], "sums": call.plain}
    launch.attend((q, grad_o), (k, v), state, features=dq, **common, **to_queries)
    room = None if d_decay else state
    d_state, d_kv, d_k_sum = launch.states(q, grad_o, (grad_kv, grad_k_sum), **common, later=True, out=room)
    to_keys = {"d_theta": shares[1], "d_running": running[1], "sums": call.plain or grad_k_sum is not None}
    keys, queries = (k, v), (q, grad_o)
    if max(launch.features, launch.width) <= 64:  # the accumulators of both fit into registers
        launch.attend(keys, queries, d_state, values=dv, features=dk, later=True, **common, **to_keys)
    else:
        launch.attend(keys, queries, d_state, values=dv, later=True, **common)
        launch.attend(keys, queries, d_state, features=dk, later=True, **common, **to_keys)

    nothing = q.new_empty(0)
    d_log_decay = launch.finish_log_decay(*running, state, d_state) if d_decay else nothing
    total = _finish_theta(launch, *shares, (kv, d_kv), (last_kv, grad_kv)) if d_theta else nothing.clone()
    return dq, dk, dv, d_log_decay, total, d_kv, d_k_sum


def _theta_shares(launch: Launch, x: Tensor) -> Tensor:
    """An empty tensor for each block's share of ∂θ."""
    return launch.empty(launch.batch, launch.heads, cdiv(x.shape[2], launch.block), 2, launch.rotated // 2)


def _finish_theta(launch: Launch, of_queries: Tensor, of_keys: Tensor, first, last) -> Tensor:
    """∂θ from the shares of all blocks, in float64 around the middle of the sequence."""
    call = launch.call
    gradient = ThetaGradient(call.theta, call.q.shape[2], call.interleaved)
    for share in (of_queries, of_keys):
        crosses, placed = share.to(torch.float64).unbind(dim=3)
        blocks = torch.arange(share.shape[2], device=share.device)
        starts = blocks * launch.block // launch.stretch * launch.stretch - gradient.middle
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
    """Multiplications and additions of the matrix products of one call, for stretches of bfloat16 inputs. The products
    of running sums, which only decay or documents need, are not counted. `call` has shapes in place of tensors.
    """
    (batch, heads, length, features), (_, _, keys, width) = call.q, call.v
    state, pairs = features * width, 0
    if call.causal:
        stretch, block = launching.stretch_of(batch * heads, length, width, itemsize=2), launching.BLOCK
        whole, rest = divmod(length, stretch)
        blocks = [stretch // block] * whole + [cdiv(rest, block)]
        pairs = sum(n * (n + 1) // 2 for n in blocks) * block**2 * (features + width)
    products = 3 * (pairs + keys * state) + 2 * length * state if backward else pairs + (keys + length) * state
    return 2 * batch * heads * products
