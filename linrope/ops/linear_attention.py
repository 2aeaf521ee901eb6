"""The operator: `linear_attention`. It checks its arguments, chooses a backend and calls it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

from torch import Tensor

from linrope.errors import InputError, require_choice
from linrope.ops.backends import BACKENDS, WHY_NOT, linear, needs_gradient
from linrope.ops.call import Call, autocast_inputs, check_call, without_autocast
from linrope.ops.cpu_kernel import kernel as cpu_kernel
from linrope.ops.cpu_kernel import library
from linrope.ops.registration import NoTransforms
from linrope.ops.state import State
from linrope.rotary import RotaryEmbedding


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

    With `rope.signed` the rotated features are q and k themselves, without φ. They can be negative, and the denominator
    does not sum them. Here q and k are the first `rope.rotary_dim` dimensions, q' and k' the others:

        num_i = Σ_j ((R_i q_i)ᵀ(R_j k_j) + φ(q'_i)ᵀ φ(k'_j)) v_j      den_i = Σ_j φ(q'_i)ᵀ φ(k'_j)

    Causal sums run over j ≤ i. Time and memory are linear in T. Sums are float32 (float64 for float64 inputs), and
    angles are exact at any position. `state` continues an earlier call: a sequence cut anywhere gives the outputs, the
    final state and the gradients of the whole. At the end of a document, continue without the state.

    The backends "chunked", "cpu" and "triton" are operators of PyTorch. `torch.compile` and `torch.export` take them
    without a graph break, except `segment_ids` with `causal=False`. They have a first derivative only and no
    `torch.func` transforms; "reference" has both. bfloat16 inputs have bfloat16 matrix products, except in a backward
    that trains θ or, with "chunked", `log_decay`; with "cpu" only with AMX, and with the AVX512-BF16 of
    AMD, else float32. With "triton", float16 inputs have TF32 products, and float32 inputs too if PyTorch allows TF32.

    Under autocast q, k and v are cast to the autocast dtype, as in `scaled_dot_product_attention`.

    Args:
        q: (B, H, T, D) queries: float32, float64, bfloat16 or float16, any strides.
        k: (B, H, S, D) keys; S = T if causal.
        v: (B, H, S, E) values.
        rope: the rotation, with `rope.dim` equal to D; if `rope.base` is a list, it has H entries. None for linear
            attention without positions.
        log_decay: (B, H, T), each entry finite and ≤ 0. It multiplies the weight of pair (i, j) by exp(G_i - G_j) in
            both sums, where G is its running sum. Causal only. Graphs of `torch.compile` on a CPU do not check it. NaN
            gives NaN from its token on, or for the whole row.
        feature_map: φ: "elu1", "relu", "exp" (bounded), "identity", "softmax" (over features), or a differentiable
            callable from (..., D) to (..., F). `rope.dim` and the state then have F features.
        normalize: the denominator. "plain" sums unrotated features. "rotary" sums rotated features, and uses -ε if
            that sum is negative. "none" has no denominator.
        causal: True if query i sees keys j ≤ i only, False if it sees all keys.
        key_mask: (B, S) booleans, False for keys that are in neither sum. A masked token still has a position and a
            decay.
        segment_ids: (B, T) integers of packed documents. Each run of equal numbers is a document that attends only to
            itself. `state` belongs to the row's first document, the returned state to its last.
        state: the state from an earlier call on the same rows.
        return_state: also return the state after the last token. A non-causal call adds all its keys to the state.
        eps: ε ≥ 0, added to the denominator. With 0, a query that sees no key divides by 0.
        backend: "auto" (the fastest for the device), "reference" (the quadratic definition), "chunked" (linear, any
            device), "cpu" (linear, compiled, fused) or "triton" (linear, fused, NVIDIA GPUs). "cpu" takes no float64
            and at most 256 features; for those "auto" takes "chunked". Transforms of `torch.func` (grad, vmap, jvp) and
            forward-mode derivatives need "reference", which "auto" takes with a warning; vmap returns o alone.

    Returns:
        o: (B, H, T, E) in v's dtype, or (o, State) with `return_state`.

    Raises:
        InputError: (a ValueError) an argument that does not fit; the message names it, its value and the fix.
    """
    require_choice("backend", backend, ("auto", *BACKENDS))
    q, k, v = autocast_inputs(q, k, v)
    with without_autocast(q):
        options = log_decay, feature_map, normalize, causal, key_mask, segment_ids, state, eps, return_state
        call = check_call(q, k, v, rope, *options)
        chosen = _fastest(call) if backend == "auto" else backend
        if call.position is not None:
            _check_position(call, chosen)
        try:
            o, final = linear(call, chosen) if backend == "auto" else BACKENDS[chosen](call)
        except NoTransforms:
            if backend != "auto":
                raise
            _warn_once(
                "linrope takes backend 'reference' in transforms of torch.func and in forward-mode differentiation: "
                "time and memory grow with the square of the length."
            )
            o, final = BACKENDS["reference"](call)
    o = o.to(v.dtype)
    return (o, final) if return_state else o


def _check_position(call: Call, backend: str) -> None:
    """Raise InputError unless the backend reads a position on the device: only a step of decoding does."""
    if not (backend == "triton" and call.q.shape[2] == 1 and call.causal) or needs_gradient(call):
        raise InputError(
            f"state.length is a tensor, which backend={backend!r} cannot read in this call: only backend='triton' can, "
            "for one causal token without gradients; pass int(state.length)."
        )


def _fastest(call: Call) -> str:
    """The fastest backend for the device. Warns once if the compiled one made for it cannot be used."""
    if call.q.device.type == "cuda":
        if reason := WHY_NOT["triton"](call):
            _warn_once(f"linrope takes its slower backend 'chunked' on this GPU: {reason}.")
            return "chunked"
        return "triton"
    if cpu_kernel.why_not(call) is None:
        return "cpu"
    if call.q.device.type == "cpu" and (reason := library.why_none()) not in (None, library.OFF):
        _warn_once(f"linrope takes its slower backend 'chunked': the compiled one cannot be used, {reason}.")
    return "chunked"


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)
