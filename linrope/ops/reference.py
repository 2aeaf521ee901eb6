"""The definition: linear attention with RoPE in the numerator, written out over all pairs of tokens.

    num_i = Σ_j w_ij (R_i φ(q_i))ᵀ(R_j φ(k_j)) v_j      den_i = Σ_j w_ij φ(q_i)ᵀ φ(k_j)      o_i = num_i / (den_i + ε)

RoFormer (arXiv 2104.09864), eq. 19: the rotated products can be negative, so the denominator keeps the plain ones.
The weight w_ij is 1 where key j is visible to query i (0 elsewhere), times exp(G_i - G_j) with forgetting, G being
the running sum of `log_decay`. Time and memory grow with the square of the length; every other backend is held to
this one, outputs and gradients.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from opt_einsum import contract
from torch import Tensor

from linrope.ops.call import Inputs
from linrope.ops.state import State
from linrope.rotary import rotate, unit_rotations


def reference_attention(inputs: Inputs) -> tuple[Tensor, State]:
    """(o, final state) of one call, by the formula; float64 throughout for float64 inputs, float32 for others."""
    dtype = inputs.settings.dtype
    q = inputs.settings.feature_map.forward(inputs.q.to(dtype))
    k = inputs.settings.feature_map.forward(hide(inputs.k.to(dtype), inputs.settings.key_mask))
    k = hide(k, inputs.settings.key_mask)  # after φ: φ(0) is not 0, so a zero key would still count in the denominator
    v = hide(inputs.v.to(dtype), inputs.settings.key_mask)
    q_rotated, k_rotated = _rotate(q, inputs), _rotate(k, inputs)
    k = without_signed(k, inputs.settings.signed)

    weights = _weights(inputs)
    num = _pair_sum(q_rotated, k_rotated, weights, v)
    den = _pair_sum(q, k, weights)
    den_rotated = _pair_sum(q_rotated, k_rotated, weights) if inputs.settings.normalize == "rotary" else None
    past = inputs.state
    if past is not None:
        reach = _weight_of_past(inputs)
        num = num + reach[..., None] * contract("bhid,bhde->bhie", q_rotated, past.kv)
        k_sum = without_signed(past.k_sum, inputs.settings.signed)
        den = den + reach * contract("bhid,bhd->bhi", q, k_sum)
        if den_rotated is not None:
            den_rotated = den_rotated + reach * contract("bhid,bhd->bhi", q_rotated, past.k_rotated_sum)

    den = {"plain": den, "rotary": den_rotated, "none": None}[inputs.settings.normalize]
    o = num if den is None else num / guarded(den, inputs.settings.eps, inputs.settings.normalize)[..., None]
    return o.to(inputs.v.dtype), _final_state(inputs, k, k_rotated, v)


def guarded(den: Tensor, eps: float, normalize: str) -> Tensor:
    """den + ε, and den - ε where rotated features made it negative: never nearer to zero than it was."""
    return den + (den.new_tensor(eps).copysign(den) if normalize == "rotary" else eps)


def hide(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Zero the masked tokens of x (B, H, S, ·), whatever they hold (a NaN times 0 would stay)."""
    return x if key_mask is None else x.masked_fill(~rearrange(key_mask, "b s -> b 1 s 1"), 0)


def without_signed(k: Tensor, signed: int) -> Tensor:
    """Features of keys (..., D) as denominators sum them: 0 in the first `signed` dimensions."""
    return k if signed == 0 else torch.cat((torch.zeros_like(k[..., :signed]), k[..., signed:]), dim=-1)


def _rotate(x: Tensor, inputs: Inputs) -> Tensor:
    """R_t x_t, positions running on from the state's."""
    if inputs.theta is None:
        return x
    positions = torch.arange(inputs.settings.start, inputs.settings.start + x.shape[2], device=x.device)
    return rotate(x, unit_rotations(positions, inputs.theta), inputs.settings.interleaved)


def _pair_sum(q: Tensor, k: Tensor, weights: Tensor | None, v: Tensor | None = None) -> Tensor:
    """Σ_j w_ij (q_iᵀ k_j) v_j, or without v the sum of the weights. Without w the order of the products is free, and
    opt_einsum finds the one that is linear in the length when the length is large."""
    factors = {"bhid": q, "bhjd": k, "bhij": weights, "bhje": v}
    factors = {axes: factor for axes, factor in factors.items() if factor is not None}
    return contract(",".join(factors) + ("->bhi" if v is None else "->bhie"), *factors.values())


def _weights(inputs: Inputs) -> Tensor | None:
    """w_ij (B, H, T, S), or None where every key counts fully for every query."""
    documents = inputs.settings.documents
    if not inputs.settings.causal and documents is None:
        return None
    batch, heads, length = inputs.q.shape[:3]
    visible = torch.ones(batch, heads, length, length, dtype=torch.bool, device=inputs.q.device)
    if documents is not None:
        visible = visible & rearrange(documents[:, :, None] == documents[:, None, :], "b i j -> b 1 i j")
    if inputs.settings.causal:
        visible = visible.tril()
    if inputs.log_decay is None:
        return visible.to(inputs.settings.dtype)
    total = _running_decay(inputs)
    exponent = total[..., :, None] - total[..., None, :]  # differences first: exp(-G) alone overflows
    return exponent.masked_fill(~visible, -math.inf).exp().to(inputs.settings.dtype)


def _running_decay(inputs: Inputs) -> Tensor:
    """G (B, H, T) in float64: the sum of log_decay up to and including each token."""
    return inputs.log_decay.to(torch.float64).cumsum(dim=-1)


def _weight_of_past(inputs: Inputs) -> Tensor:
    """(B, H, T): how much of the incoming state each query sees. It belongs to the row's first document."""
    reach = inputs.q.new_ones(inputs.q.shape[:3], dtype=inputs.settings.dtype)
    if inputs.log_decay is not None:
        reach = _running_decay(inputs).exp().to(reach.dtype)
    if inputs.settings.documents is not None:
        reach = reach * (inputs.settings.documents == 0)[:, None]
    return reach


def _final_state(inputs: Inputs, k: Tensor, k_rotated: Tensor, v: Tensor) -> State:
    kept = k.new_ones(k.shape[:3])  # the weight of each key in the final state
    if inputs.log_decay is not None:
        total = _running_decay(inputs)
        kept = (total[..., -1:] - total).exp().to(k.dtype)
    if inputs.settings.documents is not None:
        kept = kept * (inputs.settings.documents == inputs.settings.documents[:, -1:])[:, None]
    kv = contract("bhjd,bhj,bhje->bhde", k_rotated, kept, v)
    k_sum = contract("bhjd,bhj->bhd", k, kept)
    k_rotated_sum = contract("bhjd,bhj->bhd", k_rotated, kept) if inputs.settings.normalize == "rotary" else None
    past = inputs.state
    if past is not None:
        left = _kept_of_past(inputs)
        kv = kv + left[..., None, None] * past.kv
        k_sum = k_sum + left[..., None] * past.k_sum
        if k_rotated_sum is not None:
            k_rotated_sum = k_rotated_sum + left[..., None] * past.k_rotated_sum
    return State(kv, k_sum, inputs.settings.start + k.shape[2], inputs.final_log_decay(), k_rotated_sum)


def _kept_of_past(inputs: Inputs) -> Tensor:
    """(B, H): the weight of the incoming state in the final one."""
    kept = inputs.q.new_ones(inputs.q.shape[:2], dtype=inputs.settings.dtype)
    if inputs.log_decay is not None:
        kept = inputs.log_decay.to(torch.float64).sum(dim=-1).exp().to(kept.dtype)
    if inputs.settings.documents is not None:
        kept = kept * (inputs.settings.documents[:, -1:] == 0)
    return kept
