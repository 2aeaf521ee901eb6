"""The definition: linear attention with RoPE in the numerator, written out over all pairs of tokens.

    num_i = Σ_j w_ij (R_i φ(q_i))ᵀ(R_j φ(k_j)) v_j      den_i = Σ_j w_ij φ(q_i)ᵀ φ(k_j)      o_i = num_i / (den_i + ε)

RoFormer (arXiv 2104.09864), eq. 19: the rotated products can be negative, so the denominator keeps the plain ones.
The weight w_ij is 1 if query i sees key j, else 0. With decay it is multiplied by exp(G_i - G_j), where G is the
running sum of `log_decay`. Time and memory grow with the square of the length. Tests compare every other backend with
this one, outputs and gradients, so no kernel may import from here.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from opt_einsum import contract
from torch import Tensor

from linrope.ops.call import Call
from linrope.ops.state import State
from linrope.rotary import rotate, unit_rotations


def reference_attention(call: Call) -> tuple[Tensor, State]:
    """(o, final state) of one call, by the formula, in float64 for float64 inputs and float32 for others."""
    dtype = call.dtype
    q = call.phi.forward(call.q.to(dtype))
    k = call.phi.forward(_zero_masked(call.k.to(dtype), call.key_mask))
    k = _zero_masked(k, call.key_mask)  # after φ too: φ(0) is not 0, and would stay in the denominator
    v = _zero_masked(call.v.to(dtype), call.key_mask)
    q_rotated, k_rotated = _rotate(q, call), _rotate(k, call)
    k = _zero_signed(k, call.signed)

    weights = _weights(call)
    num = _pair_sum(q_rotated, k_rotated, weights, v)
    den = _pair_sum(q, k, weights)
    den_rotated = _pair_sum(q_rotated, k_rotated, weights) if call.normalize == "rotary" else None
    past = call.state
    if past is not None:
        reach = _weight_of_past(call)
        num = num + reach[..., None] * contract("bhid,bhde->bhie", q_rotated, past.kv)
        k_sum = _zero_signed(past.k_sum, call.signed)
        den = den + reach * contract("bhid,bhd->bhi", q, k_sum)
        if den_rotated is not None:
            den_rotated = den_rotated + reach * contract("bhid,bhd->bhi", q_rotated, past.k_rotated_sum)

    den = {"plain": den, "rotary": den_rotated, "none": None}[call.normalize]
    o = num if den is None else num / _add_eps(den, call.eps, call.normalize)[..., None]
    return o.to(call.v.dtype), _final_state(call, k, k_rotated, v)


def _add_eps(den: Tensor, eps: float, normalize: str) -> Tensor:
    """den + ε, or den - ε where rotated features made it negative: ε never moves it towards zero."""
    return den + (den.new_tensor(eps).copysign(den) if normalize == "rotary" else eps)


def _zero_masked(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """x (B, H, S, ·) with masked tokens set to 0, also where they are NaN."""
    return x if key_mask is None else x.masked_fill(~rearrange(key_mask, "b s -> b 1 s 1"), 0)


def _zero_signed(k: Tensor, signed: int) -> Tensor:
    """Features of keys (..., D) with 0 in the first `signed` dimensions, which the denominator does not sum."""
    return k if signed == 0 else torch.cat((torch.zeros_like(k[..., :signed]), k[..., signed:]), dim=-1)


def _rotate(x: Tensor, call: Call) -> Tensor:
    """R_t x_t, with positions that continue those of the state."""
    if call.theta is None:
        return x
    positions = torch.arange(call.start, call.start + x.shape[2], device=x.device)
    return rotate(x, unit_rotations(positions, call.theta), call.interleaved)


def _pair_sum(q: Tensor, k: Tensor, weights: Tensor | None, v: Tensor | None = None) -> Tensor:
    """Σ_j w_ij (q_iᵀ k_j) v_j, or Σ_j w_ij q_iᵀ k_j without v. Without w opt_einsum is free to choose the order of the
    products: the one that is linear in the length, if the length is large."""
    factors = {"bhid": q, "bhjd": k, "bhij": weights, "bhje": v}
    factors = {axes: factor for axes, factor in factors.items() if factor is not None}
    return contract(",".join(factors) + ("->bhi" if v is None else "->bhie"), *factors.values())


def _weights(call: Call) -> Tensor | None:
    """w_ij (B, H, T, S), or None if all are 1."""
    documents = call.documents
    if not call.causal and documents is None:
        return None
    batch, heads, length = call.q.shape[:3]
    visible = torch.ones(batch, heads, length, length, dtype=torch.bool, device=call.q.device)
    if documents is not None:
        visible = visible & rearrange(documents[:, :, None] == documents[:, None, :], "b i j -> b 1 i j")
    if call.causal:
        visible = visible.tril()
    if call.log_decay is None:
        return visible.to(call.dtype)
    total = _running_decay(call)
    exponent = total[..., :, None] - total[..., None, :]  # differences before exp: exp(-G) overflows
    return exponent.masked_fill(~visible, -math.inf).exp().to(call.dtype)


def _running_decay(call: Call) -> Tensor:
    """G (B, H, T) in float64: the sum of log_decay up to and including each token."""
    return call.log_decay.to(torch.float64).cumsum(dim=-1)


def _weight_of_past(call: Call) -> Tensor:
    """(B, H, T): the weight of the incoming state for each query. The state belongs to the row's first document."""
    reach = call.q.new_ones(call.q.shape[:3], dtype=call.dtype)
    if call.log_decay is not None:
        reach = _running_decay(call).exp().to(reach.dtype)
    if call.documents is not None:
        reach = reach * (call.documents == 0)[:, None]
    return reach


def _final_state(call: Call, k: Tensor, k_rotated: Tensor, v: Tensor) -> State:
    kept = k.new_ones(k.shape[:3])  # the weight of each key in the final state
    if call.log_decay is not None:
        total = _running_decay(call)
        kept = (total[..., -1:] - total).exp().to(k.dtype)
    if call.documents is not None:
        kept = kept * (call.documents == call.documents[:, -1:])[:, None]
    kv = contract("bhjd,bhj,bhje->bhde", k_rotated, kept, v)
    k_sum = contract("bhjd,bhj->bhd", k, kept)
    k_rotated_sum = contract("bhjd,bhj->bhd", k_rotated, kept) if call.normalize == "rotary" else None
    past = call.state
    if past is not None:
        left = _kept_of_past(call)
        kv = kv + left[..., None, None] * past.kv
        k_sum = k_sum + left[..., None] * past.k_sum
        if k_rotated_sum is not None:
            k_rotated_sum = k_rotated_sum + left[..., None] * past.k_rotated_sum
    return State(kv, k_sum, call.start + k.shape[2], call.final_log_decay(), k_rotated_sum)


def _kept_of_past(call: Call) -> Tensor:
    """(B, H): the weight of the incoming state in the final one."""
    kept = call.q.new_ones(call.q.shape[:2], dtype=call.dtype)
    if call.log_decay is not None:
        kept = call.log_decay.to(torch.float64).sum(dim=-1).exp().to(kept.dtype)
    if call.documents is not None:
        kept = kept * (call.documents[:, -1:] == 0)
    return kept
