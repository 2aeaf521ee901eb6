"""The operator: `linear_attention`, its backends, and the state that connects its calls."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from linrope.errors import require_choice
from linrope.ops.call import Inputs, check_inputs
from linrope.ops.reference import reference_attention
from linrope.ops.registration import chunked_attention, triton_attention
from linrope.ops.state import State
from linrope.ops.triton_kernel import launch as triton
from linrope.rotary import RotaryEmbedding

BACKENDS = {"reference": reference_attention, "chunked": chunked_attention, "triton": triton_attention}


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: RotaryEmbedding | None = None,
    *,
    log_decay: Tensor | None = None,
    feature_map: str | Callable[[Tensor], Tensor] = "elu1",
    normalize: str = "plain",
    causal: bool = True,
    key_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    state: State | None = None,
    return_state: bool = False,
    eps: float = 1e-6,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, State]:
    """Linear attention with rotary positions in the numerator only (RoFormer, arXiv 2104.09864, eq. 19).

        num_i = Σ_j (R_i φ(q_i))ᵀ(R_j φ(k_j)) v_j      den_i = Σ_j φ(q_i)ᵀ φ(k_j)      o_i = num_i / (den_i + ε)

    With `rope.signed` the features that turn are q and k themselves, of either sign, and have no part in the
    denominator. With q' and k' the dimensions after the first `rope.rotary_dim`, and q and k those:

        num_i = Σ_j ((R_i q_i)ᵀ(R_j k_j) + φ(q'_i)ᵀ φ(k'_j)) v_j      den_i = Σ_j φ(q'_i)ᵀ φ(k'_j)

    All run over j ≤ i where causal, in time and memory linear in T. Sums are float32 (float64 for float64 inputs),
    angles are exact at any position, and calls chain through `state`: a sequence cut anywhere gives the outputs, the
    final state and the gradients of the whole (cut where a document ends, go on without the state).

    The chunked backend is one operator of PyTorch: `torch.compile` and `torch.export` take it without a graph break
    (not documents with `causal=False`, whose number decides the work). It has a first derivative only, and no
    `torch.func` transforms; "reference" has both. Its matrix products are bfloat16 where the inputs are, except on the
    way back to a `log_decay` or θ that is trained. All of that holds for the Triton backend too, but that only θ makes
    an exception. There float16 inputs have TF32 products, and float32 ones too where PyTorch allows them.

    Under autocast q, k and v are taken in the autocast dtype, as `scaled_dot_product_attention` takes them.

    Args:
        q: (B, H, T, D) queries: float32, float64, bfloat16 or float16, any strides.
        k: (B, H, S, D) keys; S = T where causal.
        v: (B, H, S, E) values.
        rope: the rotation, with `rope.dim` equal to D, and H entries in `rope.base` where each head has its own; None
            for linear attention without positions.
        log_decay: (B, H, T), each entry finite and ≤ 0: forgetting. Pair (i, j) weighs exp(G_i - G_j) in both sums, G
            being the running sum. Causal only.
        feature_map: φ: "elu1", "relu", "exp" (bounded), "identity", "softmax" (over features), or a differentiable
            callable from (..., D) to (..., F); `rope.dim` and the state then have F features.
        normalize: the denominator: "plain" sums unrotated features; "rotary" sums rotated ones, and takes -ε where
            they came out negative; "none" divides by nothing and leaves the scale to a norm after it.
        causal: whether query i sees keys j ≤ i only, or all.
        key_mask: (B, S) booleans, False for keys that count in neither sum. A masked token still takes up a position
            and still decays the past.
        segment_ids: (B, T) integers: each run of equal numbers is a document of a packed row, and attends to itself
            alone. `state` belongs to the first document of the row; the final state is the last one's.
        state: what came before, from an earlier call on the same rows.
        return_state: also return the state after the last token. A non-causal call adds all its keys to the past.
        eps: ε ≥ 0, in the denominator. With 0 a query that sees no key divides by 0.
        backend: "auto" (the fastest for the device), "reference" (the quadratic definition), "chunked" (linear, on any
            device) or "triton" (linear, fused for NVIDIA GPUs).

    Returns:
        o: (B, H, T, E) in v's dtype, or (o, State) with `return_state`.

    Raises:
        InputError: (a ValueError) an argument that does not fit; the message names it, its value and the mend.
    """
    require_choice("backend", backend, ("auto", *BACKENDS))
    device = q.device.type if isinstance(q, Tensor) else "cpu"
    if torch.is_autocast_enabled(device):
        q, k, v = (_autocast(x, torch.get_autocast_dtype(device)) for x in (q, k, v))
    with torch.autocast(device, enabled=False):
        inputs = check_inputs(
            q, k, v, rope, log_decay, feature_map, normalize, causal, key_mask, segment_ids, state, eps
        )
        o, final = BACKENDS[_pick(inputs) if backend == "auto" else backend](inputs)
    o = o.to(v.dtype)
    return (o, final) if return_state else o


def _pick(inputs: Inputs) -> str:
    """The fastest backend for the device; one warning where a GPU must do without the one that was made for it."""
    if inputs.q.device.type != "cuda":
        return "chunked"
    if reason := triton.why_not(inputs.q, inputs.v, inputs.settings.normalize):
        _warn_once(f"linrope takes its slower backend 'chunked' on this GPU: {reason}.")
        return "chunked"
    return "triton"


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def _autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    eligible = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(dtype) if eligible else x
