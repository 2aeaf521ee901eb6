"""A decoding step: the state takes in one token and is read, two passes over it at any position."""

from __future__ import annotations

import torch
from torch import Tensor

from linrope.ops.call import Call
from linrope.ops.state import State
from linrope.rotary import rotate, unit_rotations


def one_token(call: Call) -> tuple[Tensor, State]:
    """(o, state) of a causal call of one token, differentiable by autograd."""
    q, (k, v) = call.phi.forward(call.q.to(call.dtype)), call.keys_and_values()
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
