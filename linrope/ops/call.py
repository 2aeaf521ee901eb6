"""What a backend is given: the arguments of `linear_attention`, checked once and brought to one form."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from linrope.errors import InputError, require_choice
from linrope.feature_maps import FEATURE_MAPS, FeatureMap, after_signed, get_feature_map
from linrope.ops.documents import check_segment_ids, number_documents
from linrope.ops.state import State, check_rope
from linrope.rotary import RotaryEmbedding, check_positions

NORMALIZE = ("plain", "rotary", "none")


FORGET_ALL = -1e4
"""exp of it is 0 in every precision. Stronger decays count as this one: in a running sum they would swallow others."""


FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Settings:
    """All of a call that no gradient flows to."""

    feature_map: FeatureMap
    signed: int
    """The first features, which turn, skip φ and the denominator: so many of them."""
    normalize: str
    causal: bool
    eps: float
    interleaved: bool
    key_mask: Tensor | None
    """(B, S) bool, True where the key takes part."""
    documents: Tensor | None
    """(B, T) int64: the number of document boundaries up to each token; None where rows are not packed."""
    start: int
    """The position of the first token."""
    dtype: torch.dtype
    """What is summed in: float64 for float64 inputs, float32 for all others."""


class Options(NamedTuple):
    """The settings in the form and order that the operators of PyTorch take them in, after their tensors of numbers."""

    key_mask: Tensor | None
    documents: Tensor | None
    start: int
    feature_map: str
    plain: bool
    eps: float
    interleaved: bool
    causal: bool
    signed: int = 0

    @classmethod
    def of(cls, settings: Settings) -> Options:
        return cls(
            settings.key_mask,
            settings.documents,
            settings.start,
            settings.feature_map.name,
            settings.normalize == "plain",
            settings.eps,
            settings.interleaved,
            settings.causal,
            settings.signed,
        )


@dataclass(frozen=True)
class Inputs:
    """One call of the operator, checked."""

    q: Tensor
    """(B, H, T, D)"""
    k: Tensor
    """(B, H, S, D)"""
    v: Tensor
    """(B, H, S, E)"""
    log_decay: Tensor | None
    """(B, H, T) in the working dtype."""
    theta: Tensor | None
    """(R/2,) float64 frequencies, or (H, R/2), those of each head; None without positions."""
    state: State | None
    settings: Settings

    def final_log_decay(self) -> Tensor:
        """(B, H): the log decay of the state after this call; -inf in rows that hold a document boundary."""
        batch, heads = self.q.shape[:2]
        total = self.q.new_zeros(batch, heads, dtype=self.settings.dtype)
        if self.state is not None:
            total = total + self.state.log_decay
        if self.log_decay is not None:
            total = total + self.log_decay.sum(dim=-1)
        documents = self.settings.documents
        if documents is not None:
            total = total.masked_fill(documents[:, -1:] > 0, -math.inf)
        return total


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: RotaryEmbedding | None,
    log_decay: Tensor | None,
    feature_map: str | Callable[[Tensor], Tensor],
    normalize: str,
    causal: bool,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
    state: State | None,
    eps: float,
) -> Inputs:
    """Check every argument of `linear_attention` against the others; raise InputError, or return the call's Inputs.

    A map given as a callable is applied here, by autograd, so that backends meet maps of the table only.
    """
    _check_tensors(q, k, v, causal)
    require_choice("normalize", normalize, NORMALIZE)
    check_eps(eps)
    if not isinstance(causal, bool):
        raise InputError(f"causal={causal!r} must be True or False.")
    key_mask = _check_key_mask(key_mask, k)
    signed = _check_signed(rope, q, normalize)
    phi = after_signed(get_feature_map(feature_map), signed)
    working = torch.promote_types(q.dtype, torch.float32)
    if phi.load is None:
        if key_mask is not None:  # before φ, through which the gradient of a masked NaN would be NaN
            k = k.masked_fill(~key_mask[:, None, :, None], 0)
        q, k = (_mapped(name, x, phi, feature_map, working) for name, x in (("q", q), ("k", k)))
        v, phi = v.to(working), after_signed(FEATURE_MAPS["identity"], signed)
    check_rope(rope, q.shape[1], q.shape[3])
    log_decay = _check_log_decay(log_decay, q, causal, working)
    documents = _check_segment_ids(segment_ids, q, k)
    _check_state(state, q, v, normalize, working)
    settings = Settings(
        feature_map=phi,
        signed=signed,
        normalize=normalize,
        causal=causal,
        eps=float(eps),
        interleaved=True if rope is None else rope.interleaved,
        key_mask=key_mask,
        documents=documents,
        start=0 if state is None else state.length,
        dtype=working,
    )
    check_positions("state.length", settings.start, max(q.shape[2], k.shape[2]))
    return Inputs(q, k, v, log_decay, None if rope is None else rope.frequencies(q.device), state, settings)


def check_eps(eps: float) -> None:
    """Raise InputError unless ε can stand in a denominator."""
    if not (isinstance(eps, (int, float)) and 0 <= eps < math.inf):
        raise InputError(f"eps={eps!r} must be a finite number, at least 0: it keeps the denominator away from 0.")


def _check_signed(rope: RotaryEmbedding | None, q: Tensor, normalize: str) -> int:
    """How many of the first dimensions skip φ and the denominator."""
    signed = getattr(rope, "signed_dim", 0)  # what is no rope at all is refused later
    if signed:
        check_signed(signed, q.shape[-1], normalize)
    return signed


def check_signed(rotary_dim: int, dim: int, normalize: str) -> None:
    """Raise InputError unless a denominator is left when `rotary_dim` of `dim` dimensions have no part in it."""
    if normalize == "rotary":
        raise InputError(
            "normalize='rotary' sums turned features, rope.signed=True keeps them out: drop one of the two."
        )
    if normalize == "plain" and rotary_dim >= dim:
        raise InputError(
            f"rope.signed=True with rotary_dim={rotary_dim} leaves none of the {dim} dimensions to the denominator: "
            "let fewer turn, a quarter of them for example, or set normalize='none'."
        )


def values_may_be_checked(tensor: Tensor) -> bool:
    """Whether looking at a tensor's values is possible and affordable: not while compiling or capturing a graph."""
    capturing = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    return not (torch.compiler.is_compiling() or capturing)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name} is a {type(tensor).__name__}: pass a tensor of shape (B, H, T, D).")
        if tensor.ndim != 4:
            raise InputError(f"{name} has shape {tuple(tensor.shape)}: pass 4 dimensions, (B, H, T, D).")
        if tensor.dtype not in FLOATING:
            raise InputError(f"{name} has dtype {tensor.dtype}: pass float32, float64, bfloat16 or float16.")
        if (tensor.dtype, tensor.device) != (q.dtype, q.device):
            raise InputError(
                f"{name} is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}: "
                "bring q, k and v to one dtype and device."
            )
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise InputError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together: they share B and H, "
            "q and k share D, k and v share their length."
        )
    if causal and q.shape[2] != k.shape[2]:
        raise InputError(
            f"q has length {q.shape[2]} and k has length {k.shape[2]}: causal=True needs one key for each query "
            "(pass causal=False for attention to another sequence, or state= for keys that came before)."
        )


def _mapped(name: str, x: Tensor, phi: FeatureMap, given: Callable[[Tensor], Tensor], working: torch.dtype) -> Tensor:
    """φ of x, in the precision that a given module's own weights have."""
    own = next(given.parameters(), None) if isinstance(given, torch.nn.Module) else None
    features = phi.forward(x.to(working if own is None else own.dtype))
    if not isinstance(features, Tensor) or features.shape[:-1] != x.shape[:-1] or not features.is_floating_point():
        got = f"{tuple(features.shape)} {features.dtype}" if isinstance(features, Tensor) else type(features).__name__
        raise InputError(
            f"feature_map={phi.name} turned {name} of shape {tuple(x.shape)} into {got}: "
            "it must return floats and keep all but the last dimension."
        )
    return features.to(working)


def _check_log_decay(log_decay: Tensor | None, q: Tensor, causal: bool, working: torch.dtype) -> Tensor | None:
    if log_decay is None:
        return None
    if not causal:
        raise InputError("log_decay was given with causal=False: forgetting is defined for causal attention only.")
    if not isinstance(log_decay, Tensor) or log_decay.shape != q.shape[:3] or not log_decay.is_floating_point():
        shape = tuple(log_decay.shape) if isinstance(log_decay, Tensor) else type(log_decay).__name__
        raise InputError(f"log_decay is {shape}: pass floats of shape (B, H, T) = {tuple(q.shape[:3])}.")
    if log_decay.device != q.device:
        raise InputError(f"log_decay is on {log_decay.device}, q on {q.device}: bring them to one device.")
    if log_decay.is_cuda:  # to look at values would have the GPU wait: it looks for itself, and stops the program
        torch._assert_async(((log_decay <= 0) & log_decay.isfinite()).all(), "log_decay must be finite and at most 0")
    elif values_may_be_checked(log_decay) and log_decay.numel():
        lowest, highest = (bound.item() for bound in log_decay.detach().aminmax())
        if not (math.isfinite(lowest) and highest <= 0):
            raise InputError(
                f"log_decay lies in [{lowest}, {highest}]: every entry must be finite and at most 0, as from "
                "logsigmoid (segment_ids is what forgets everything at once)."
            )
    return log_decay.to(working).clamp(min=FORGET_ALL)


def _check_key_mask(key_mask: Tensor | None, k: Tensor) -> Tensor | None:
    if key_mask is None:
        return None
    expected = (k.shape[0], k.shape[2])
    if not isinstance(key_mask, Tensor) or key_mask.shape != expected or key_mask.dtype != torch.bool:
        got = f"{tuple(key_mask.shape)} {key_mask.dtype}" if isinstance(key_mask, Tensor) else type(key_mask).__name__
        raise InputError(f"key_mask is {got}: pass booleans of shape (B, S) = {expected}, True where a key counts.")
    if key_mask.device != k.device:
        raise InputError(f"key_mask is on {key_mask.device}, k on {k.device}: bring them to one device.")
    # the backward looks at it again, when the caller may have filled it anew
    return key_mask.clone(memory_format=torch.contiguous_format)


def _check_segment_ids(segment_ids: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    if segment_ids is None:
        return None
    if q.shape[2] != k.shape[2]:
        raise InputError(
            f"segment_ids was given with q of length {q.shape[2]} and k of length {k.shape[2]}: "
            "packed documents need queries and keys of the same tokens."
        )
    check_segment_ids(segment_ids, q.shape[0], q.shape[2], q.device)
    if q.shape[2] == 0:
        return None
    return number_documents(segment_ids)


def _check_state(state: State | None, q: Tensor, v: Tensor, normalize: str, working: torch.dtype) -> None:
    if state is None:
        return
    if not isinstance(state, State):
        raise InputError(f"state is a {type(state).__name__}: pass the linrope.State that an earlier call returned.")
    batch, heads, _, features = q.shape
    expected = {
        "kv": (batch, heads, features, v.shape[-1]),
        "k_sum": (batch, heads, features),
        "log_decay": (batch, heads),
    }
    if normalize == "rotary":
        expected["k_rotated_sum"] = (batch, heads, features)
        if state.k_rotated_sum is None:
            raise InputError("state has no k_rotated_sum: normalize='rotary' continues only states made with it.")
    for name, shape in expected.items():
        tensor = getattr(state, name)
        if not isinstance(tensor, Tensor):
            raise InputError(f"state.{name} is a {type(tensor).__name__}: pass a tensor {shape}.")
        if tensor.shape != shape:
            raise InputError(f"state.{name} has shape {tuple(tensor.shape)}, this call needs {shape}.")
        if tensor.dtype != working:
            raise InputError(f"state.{name} is {tensor.dtype}, {q.dtype} inputs need {working}: state.to({working}).")
        if tensor.device != q.device:
            raise InputError(f"state.{name} is on {tensor.device}, q on {q.device}: state.to({str(q.device)!r}).")
    if not isinstance(state.length, (int, torch.SymInt)) or state.length < 0:  # symbolic in a graph that leaves it open
        raise InputError(f"state.length={state.length!r} must be a whole number of tokens, at least 0.")
