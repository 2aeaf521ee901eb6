"""A decoding step: the state takes in one token and is read, two passes over it at any position."""

from __future__ import annotations

import torch
from torch import Tensor

from linrope.ops.call import Call
from linrope.ops.state import State
from linrope.rotary import rotate, unit_rotations


def one_token(call: Call) -> tuple[Tensor, State]:
    """(o, state) of a causal call of one token, differentiable by autograd."""
    q, k, v = (x.to(call.dtype) for x in (call.q, call.k, call.v))
    if call.key_mask is None:
        q, k = call.phi.forward(q), call.phi.forward(k)
    else:
        hidden = ~call.key_mask[:, None, :, None]
        q, k = call.phi.forward(q), call.phi.forward(k.masked_fill(hidden, 0))
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)  # φ(0) is not 0
    kv, k_sum = call.past.kv, call.past.k_sum
    if call.log_decay is not None:
        kept = call.log_decay.exp()  # (B, H, 1)
        kv, k_sum = kept[..., None] * kv, kept * k_sum
    rotation = None
    if call.theta is not None:
        rotation = unit_rotations(torch.full((), call.start, device=q.device), call.theta)
    q_rotated, k_rotated = rotate(q, rotation, call.interleaved), rotate(k, rotation, call.interleaved)
    kv = torch.baddbmm(kv.flatten(0, 1), k_rotated.flatten(0, 1).mT, v.flatten(0, 1)).unflatten(0, kv.shape[:2])
    plain = k[:, :, 0]
    if call.signed:
        plain = torch.cat((torch.zeros_like(plain[..., : call.signed]), plain[..., call.signed :]), dim=-1)
    k_sum = k_sum + plain
    o = q_rotated @ kv
    if call.plain:
        product = q[:, :, 0] * k_sum
        o = o / (product[..., call.signed :].sum(dim=-1) + call.eps)[..., None, None]
    return o.to(call.v.dtype), State(kv, k_sum, call.start + 1, call.final_log_decay())
