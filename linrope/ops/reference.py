"""The definition: linear attention with RoPE in the numerator, written out over all pairs of tokens.

    num_i = Σ_j w_ij (R_i φ(q_i))ᵀ(R_j φ(k_j)) v_j      den_i = Σ_j w_ij φ(q_i)ᵀ φ(k_j)      o_i = num_i / (den_i + ε)

RoFormer (arXiv 2104.09864), eq. 19: the rotated products can be negative, so the denominator keeps the plain ones.
The weight w_ij is 1 if query i sees key j, else 0. With decay it is multiplied by exp(G_i - G_j), where G is the
running sum of `log_decay`. Time and memory grow with the square of the length. Tests compare every other backend with
this one, outputs and gradients, so no kernel may import from here.
"""

from __future__ import annotations

import math

import opt_einsum
import torch
from einops import rearrange
from torch import Tensor

from linrope.ops.call import Call
from linrope.ops.state import State
from linrope.rotary import rotate, unit_rotations


def reference_attention(call: Call) -> tuple[Tensor, State]:
    """(o, final state) of one call, by the formula, in float64 for float64 inputs and float32 for others."""
    q, (k, v) = call.phi.forward(call.q.to(call.dtype)), call.keys_and_values(slice(None))
    q_rotated, k_rotated = _rotate(q, call), _rotate(k, call)
    k = call.without_signed(k)

    weights = _weights(call)
    num = _pair_sum(q_rotated, k_rotated, weights, v)
    den = _pair_sum(q, k, weights)
    den_rotated = _pair_sum(q_rotated, k_rotated, weights) if call.normalize == "rotary" else None
    past = call.state
    if past is not None:
        reach = _weight_of_past(call)
        num = num + reach[..., None] * contract("bhid,bhde->bhie", q_rotated, past.kv)
        k_sum = call.without_signed(past.k_sum)
        den = den + reach * contract("bhid,bhd->bhi", q, k_sum)
        if den_rotated is not None:
            den_rotated = den_rotated + reach * contract("bhid,bhd->bhi", q_rotated, past.k_rotated_sum)

    den = {"plain": den, "rotary": den_rotated, "none": None}[call.normalize]
    if den is not None:
        # ε never moves a denominator that rotated features made negative towards 0
        eps = den.new_tensor(call.eps).copysign(den) if call.normalize == "rotary" else call.eps
        num = num / (den + eps)[..., None]
    return num.to(call.v.dtype), _final_state(call, k, k_rotated, v)


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


def contract(equation: str, *factors: Tensor) -> Tensor:
    """`opt_einsum.contract`; in a graph `torch.einsum`, which asks opt_einsum too, where Dynamo cannot trace it."""
    return (torch.einsum if torch.compiler.is_compiling() else opt_einsum.contract)(equation, *factors)


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
        left = _weight_of_past(call)[..., -1] if call.q.shape[2] else kv.new_ones(kv.shape[:2])
        kv = kv + left[..., None, None] * past.kv
        k_sum = k_sum + left[..., None] * past.k_sum
        if k_rotated_sum is not None:
            k_rotated_sum = k_rotated_sum + left[..., None] * past.k_rotated_sum
    return State(kv, k_sum, call.start + k.shape[2], call.final_log_decay(), k_rotated_sum)
