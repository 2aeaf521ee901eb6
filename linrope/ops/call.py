"""`Call`: one call of the operator, its arguments checked once. Every backend reads this record."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import debug_unwrap

from linrope.errors import InputError, require_choice
from linrope.feature_maps import FEATURE_MAPS, FeatureMap, get_feature_map, skip_first
from linrope.ops.checks import check_eps, check_rope, check_tensor
from linrope.ops.documents import check_segment_ids, number_documents
from linrope.ops.state import State
from linrope.rotary import RotaryEmbedding, check_positions
from linrope.utils import kept_tensors

NORMALIZE = ("plain", "rotary", "none")
FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
STRONGEST_DECAY = -1e4
"""exp of it is 0 in every precision. Stronger decays are set to it: a running sum with them would lose its digits."""


@dataclass(frozen=True)
class Call:
    """The arguments of one call, checked. B rows, H heads, T queries, S keys, D features, E values."""

    q: Tensor
    """(B, H, T, D)"""
    k: Tensor
    """(B, H, S, D)"""
    v: Tensor
    """(B, H, S, E)"""
    log_decay: Tensor | None
    """(B, H, T) in the dtype of sums; (B, 1, T) if all heads share it."""
    theta: Tensor | None
    """(R/2,) float64 frequencies, or (H, R/2) with one θ for each head; None without positions."""
    key_mask: Tensor | None
    """(B, S) booleans, False for masked keys."""
    documents: Tensor | None
    """(B, T) int64: the number of document boundaries up to each token; None if rows are not packed."""
    start: int
    """The position of the first token."""
    feature_map: str
    """A name in `FEATURE_MAPS`. A callable is applied before, and is "identity" here."""
    normalize: str
    eps: float
    interleaved: bool
    causal: bool
    signed: int
    """The number of first dimensions that are rotated but skip φ and the denominator."""
    state: State | None = None
    """What came before. The kernels get its kv and k_sum as tensors of their own, and leave this None."""
    position: Tensor | None = None
    """The position of one token, on the device: where a captured graph reads it anew, in place of `start`."""
    returns_state: bool = True
    """Whether the caller reads the final state."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of sums: float64 for float64 inputs, else float32."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def phi(self) -> FeatureMap:
        return skip_first(FEATURE_MAPS[self.feature_map], self.signed)

    @property
    def plain(self) -> bool:
        """Whether the denominator sums plain features."""
        return self.normalize == "plain"

    @property
    def is_empty(self) -> bool:
        return 0 in (self.q.numel(), self.k.numel(), self.v.numel())

    @property
    def past(self) -> State:
        """The state, or zeros without one."""
        if self.state is not None:
            return self.state
        batch, heads, _, features = self.q.shape
        options = {"normalize": self.normalize, "dtype": self.dtype, "device": self.q.device}
        return State.zeros(batch, heads, features, self.v.shape[3], **options)

    @property
    def operator_args(self) -> tuple:
        """All fields but the last three, in their order: what an operator of PyTorch takes. `Call(*args)` is the
        inverse."""
        options = self.start, self.feature_map, self.normalize, self.eps, self.interleaved, self.causal, self.signed
        return *self.operator_tensors, *options

    @property
    def operator_tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors among `operator_args`."""
        return self.q, self.k, self.v, self.log_decay, self.theta, self.key_mask, self.documents

    def without_signed(self, k: Tensor) -> Tensor:
        """Features (..., D) with 0 in the first `signed` dimensions, which the denominator does not sum."""
        if self.signed == 0:
            return k
        return torch.cat((torch.zeros_like(k[..., : self.signed]), k[..., self.signed :]), dim=-1)

    def keys_and_values(self, tokens: slice) -> tuple[Tensor, Tensor]:
        """φ(k) and v of some tokens, in the dtype of sums; 0 where masked, whatever the masked tokens hold."""
        k, v = self.k[:, :, tokens].to(self.dtype), self.v[:, :, tokens].to(self.dtype)
        if self.key_mask is None:
            return self.phi.forward(k), v
        hidden = ~self.key_mask[:, None, tokens, None]
        k = self.phi.forward(k.masked_fill(hidden, 0)).masked_fill(hidden, 0)  # φ(0) is not 0
        return k, v.masked_fill(hidden, 0)

    def rows(self, batch: slice, heads: slice) -> Call:
        """The same call for some rows and some heads, without θ and the state."""
        q, k, v = (x[batch, heads] for x in (self.q, self.k, self.v))
        key_mask, documents = (None if x is None else x[batch] for x in (self.key_mask, self.documents))
        log_decay = self.log_decay
        if log_decay is not None:
            log_decay = log_decay[batch, heads if log_decay.shape[1] > 1 else slice(None)]
        tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay, "key_mask": key_mask, "documents": documents}
        return replace(self, **tensors, theta=None, state=None)

    def final_log_decay(self) -> Tensor:
        """(B, H): the log decay of the state after this call; -inf in rows with a document boundary."""
        batch, heads = self.q.shape[:2]
        options = {"dtype": self.dtype, "device": self.q.device}
        if not self.returns_state:  # nobody reads it: nothing is written for it
            zero = kept_tensors.keep(("zero", self.dtype), self.q.device, lambda: torch.zeros((), **options))
            return zero.expand(batch, heads)
        total = torch.zeros(batch, heads, **options)
        if self.state is not None:
            total = total + self.state.log_decay
        if self.log_decay is not None:
            total = total + self.log_decay.sum(dim=-1)
        if self.documents is not None:
            total = total.masked_fill(self.documents[:, -1:] > 0, -math.inf)
        return total


def check_call(
    q: Tensor | None, k: Tensor, v: Tensor, rope: RotaryEmbedding | None = None, log_decay: Tensor | None = None,
    feature_map: str | Callable[[Tensor], Tensor] = "elu1", normalize: str = "plain", causal: bool = True,
    key_mask: Tensor | None = None, segment_ids: Tensor | None = None, state: State | None = None, eps: float = 0.0,
    returns_state: bool = True,
) -> Call:  # fmt: skip
    """The Call of `linear_attention`'s arguments, checked against each other (InputError).

    q is None if only the keys are used, as in `summarize`; the Call then has the keys in its place. A feature map given
    as a callable is applied here, by autograd.
    """
    _check_tensors({"k": k, "v": v} if q is None else {"q": q, "k": k, "v": v}, causal)
    require_choice("normalize", normalize, NORMALIZE)
    check_eps(eps)
    if not isinstance(causal, bool):
        raise InputError(f"causal={causal!r} must be True or False.")
    batch, heads, keys = k.shape[:3]
    length = keys if q is None else q.shape[2]
    working = torch.promote_types(k.dtype, torch.float32)
    if key_mask is not None:
        check_tensor("key_mask", key_mask, "booleans", "(B, S)", (batch, keys), k.device)
        # the backward reads it again, after the caller may have overwritten it
        key_mask = key_mask.clone(memory_format=torch.contiguous_format)
    signed = rope.signed_dim if isinstance(rope, RotaryEmbedding) else 0  # what is none is refused below
    if signed:
        _check_signed(signed, k.shape[-1], normalize)
    phi = get_feature_map(feature_map)
    if phi.load is None:
        if key_mask is not None:  # before φ: the gradient of φ at a masked NaN would be NaN
            k = k.masked_fill(~key_mask[:, None, :, None], 0)
        phi = skip_first(phi, signed)
        q, k = (
            None if x is None else map_features(name, x, phi, feature_map, working) for name, x in (("q", q), ("k", k))
        )
        v, phi = v.to(working), FEATURE_MAPS["identity"]
    q = k if q is None else q
    check_rope(rope, heads, k.shape[3])
    log_decay = _check_log_decay(log_decay, (batch, heads, length), k.device, causal, working)
    documents = _number_documents(segment_ids, length, k)
    if state is not None:
        _check_state(state, q, v, normalize, working)
    position = state.length if state is not None and isinstance(state.length, Tensor) else None
    start = 0 if state is None or position is not None else state.length
    check_positions("state.length", start, max(length, keys))
    theta, interleaved = (None, True) if rope is None else (rope.frequencies(k.device), rope.interleaved)
    tensors = q, k, v, log_decay, theta, key_mask, documents
    options = start, phi.name, normalize, float(eps), interleaved, causal, signed
    return Call(*tensors, *options, state, position, returns_state)


def device_type(x: Tensor) -> str:
    """For autocast; "cpu" for what is not a tensor, which a check refuses later."""
    return x.device.type if isinstance(x, Tensor) else "cpu"


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is enabled for x's device; on "meta", which it does not know, it never is."""
    device = device_type(x)
    return device != "meta" and torch.is_autocast_enabled(device)


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context in which autocast is disabled for x's device."""
    return torch.autocast(device_type(x), enabled=False) if is_autocast(x) else nullcontext()


def autocast_inputs(*tensors: Tensor) -> list[Tensor]:
    """The tensors in the autocast dtype, if autocast is enabled for the first one's device."""
    if not is_autocast(tensors[0]):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type(tensors[0]))

    def is_cast(x: Tensor) -> bool:
        return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64

    return [x.to(dtype) if is_cast(x) else x for x in tensors]


def _check_signed(rotary_dim: int, dim: int, normalize: str) -> None:
    if normalize == "rotary":
        raise InputError(
            "normalize='rotary' sums rotated features, rope.signed=True keeps them out of the denominator: "
            "choose one of the two."
        )
    if normalize == "plain" and rotary_dim >= dim:
        raise InputError(
            f"rope.signed=True with rotary_dim={rotary_dim} leaves none of the {dim} dimensions for the denominator: "
            "choose a smaller rotary_dim, a quarter of them for example, or set normalize='none'."
        )


def _check_tensors(tensors: dict[str, Tensor], causal: bool) -> None:
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name} is a {type(tensor).__name__}: pass a tensor of shape (B, H, T, D).")
        if tensor.ndim != 4:
            raise InputError(f"{name} has shape {tuple(tensor.shape)}: pass 4 dimensions, (B, H, T, D).")
        if tensor.dtype not in FLOATING:
            raise InputError(f"{name} has dtype {tensor.dtype}: pass float32, float64, bfloat16 or float16.")
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise InputError(
                f"{name} is {tensor.dtype} on {tensor.device}, {first_name} is {first.dtype} on {first.device}: "
                "use one dtype and one device."
            )
    q, k, v = tensors.get("q", tensors["k"]), tensors["k"], tensors["v"]
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise InputError(
            f"{shapes} do not fit together: all share B and H, q and k share D, k and v share their length."
        )
    if causal and q.shape[2] != k.shape[2]:
        raise InputError(
            f"q has length {q.shape[2]} and k has length {k.shape[2]}: causal=True needs one key for each query "
            "(pass causal=False for attention to another sequence, or state= for keys that came before)."
        )


def map_features(
    name: str, x: Tensor, phi: FeatureMap, given: Callable[[Tensor], Tensor], working: torch.dtype
) -> Tensor:
    """φ of x in the working dtype. A module is run in the dtype of its own weights."""
    own = next(given.parameters(), None) if isinstance(given, torch.nn.Module) else None
    taken = x.to(working if own is None else own.dtype)
    watched = taken is x and callable(given) and not torch.compiler.is_compiling()
    if watched and x.is_inference():  # such tensors do not count what is written
        taken, watched = x.clone(), False
    before = x._version if watched else 0
    features = phi.forward(taken)
    if watched and x._version != before:
        raise InputError(
            f"feature_map={phi.name} writes into its argument, the caller's {name}: use one without inplace=True."
        )
    if not isinstance(features, Tensor) or features.shape[:-1] != x.shape[:-1] or not features.is_floating_point():
        got = f"{tuple(features.shape)} {features.dtype}" if isinstance(features, Tensor) else type(features).__name__
        raise InputError(
            f"feature_map={phi.name} maps {name} of shape {tuple(x.shape)} to {got}: "
            "it must return floats and keep all but the last dimension."
        )
    return features.to(working)


def _check_log_decay(
    log_decay: Tensor | None, shape: tuple[int, int, int], device: torch.device, causal: bool, working: torch.dtype
) -> Tensor | None:
    if log_decay is None:
        return None
    if not causal:
        raise InputError("log_decay was given with causal=False: decay is defined for causal attention only.")
    check_tensor("log_decay", log_decay, "floats", "(B, H, T)", shape, device)
    if log_decay.numel() and not log_decay.is_meta:
        _check_decays(log_decay.detach())
    return log_decay.to(working).clamp(min=STRONGEST_DECAY)


def _check_decays(log_decay: Tensor) -> None:
    """Raise InputError if one is above 0 or infinite. In a traced graph of the CPU they have no values.

    NaN passes, as in q, k and v: that of a gate whose training diverged is for the training to report.
    """
    if not torch.compiler.is_compiling():
        log_decay = debug_unwrap(log_decay)  # a transform of torch.func has no rule for an assertion
    if log_decay.is_cuda:  # reading values here would make the host wait: the GPU checks, and stops the program
        torch._assert_async(~_are_wrong(log_decay).any(), "log_decay must be finite and at most 0")
    elif not torch.compiler.is_compiling():
        try:
            is_wrong = _are_wrong(log_decay).any().item()
        except RuntimeError:  # of a fake tensor, or in a trace of make_fx
            return
        if is_wrong is True:  # a fake tensor's is a symbol
            lowest, highest = (bound.item() for bound in log_decay[~log_decay.isnan()].aminmax())
            raise InputError(
                f"log_decay lies in [{lowest}, {highest}]: every entry must be finite and at most 0, as from "
                "logsigmoid (use segment_ids to forget everything before a token)."
            )


def _are_wrong(log_decay: Tensor) -> Tensor:
    return (log_decay > 0) | (log_decay == -math.inf)


def _number_documents(segment_ids: Tensor | None, length: int, k: Tensor) -> Tensor | None:
    if segment_ids is None:
        return None
    if length != k.shape[2]:
        raise InputError(
            f"segment_ids was given with q of length {length} and k of length {k.shape[2]}: "
            "packed documents need queries and keys of the same tokens."
        )
    check_segment_ids(segment_ids, k.shape[0], length, k.device)
    return None if length == 0 else number_documents(segment_ids)


def _check_state(state: State, q: Tensor, v: Tensor, normalize: str, working: torch.dtype) -> None:
    if not isinstance(state, State):
        raise InputError(f"state is a {type(state).__name__}: pass the linrope.State that an earlier call returned.")
    batch, heads, _, features = q.shape
    of_keys = batch, heads, features
    expected = {"kv": (*of_keys, v.shape[-1]), "k_sum": of_keys, "log_decay": (batch, heads)}
    if normalize == "rotary":
        expected["k_rotated_sum"] = of_keys
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
    if isinstance(state.length, Tensor):
        return check_tensor("state.length", state.length, "integers", "()", (), q.device)
    if not isinstance(state.length, (int, torch.SymInt)) or state.length < 0:  # SymInt in a graph of open length
        raise InputError(f"state.length={state.length!r} must be a whole number of tokens, at least 0.")
