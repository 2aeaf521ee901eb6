"""The prefix-sum kernel in plain PyTorch, for any device: linear in the length, registered as operators of PyTorch.

`causal.py` holds the arithmetic of one block; here stand the size of a block, the walk over all of them, and what
PyTorch must know to compile, export and differentiate the whole: shapes, autograd and FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from linrope.errors import InputError
from linrope.feature_maps import FEATURE_MAPS, after_signed
from linrope.ops import causal, noncausal
from linrope.ops.blocks import Call, Gradients, Rotations, Saved, Span
from linrope.ops.flops import causal_flops, noncausal_flops
from linrope.ops.inputs import Inputs
from linrope.ops.memory import Pool, empty
from linrope.ops.reference import guarded, hide, reference_attention, without_signed
from linrope.ops.state import State
from linrope.ops.theta import ThetaGradient
from linrope.rotary import rotate, unit_rotations

CHUNK = 64
"""Tokens whose pairs are all formed: near the head's size, pairs and state cost about the same."""
BLOCK_ELEMENTS = 2**18
"""Size of one buffer of a block: 1 MiB in float32, so that the dozen and a half it needs stay in a shared cache."""
BLOCK_TOKENS = 512
"""Tokens of a block where there are heads enough to fill it: with more, passing states between chunks costs more.

`python -m benchmarks.block_sizes` measures these: half or twice as much is within a tenth, but chunks of 128 tokens
cost a fifth more.
"""
MAX_BLOCK = 2048


def chunked_attention(inputs: Inputs) -> tuple[Tensor, State]:
    """(o, final state) of one call, in time and memory linear in the length."""
    if 0 in (inputs.q.numel(), inputs.k.numel(), inputs.v.numel()):
        return reference_attention(inputs)  # nothing to make fast
    if inputs.settings.normalize == "rotary":
        return _with_rotary_denominator(inputs)
    if not inputs.settings.causal:
        return noncausal.by_document(inputs, _operator)
    return _one_token(inputs) if inputs.q.shape[2] == 1 else _operator(inputs)


def _operator(inputs: Inputs) -> tuple[Tensor, State]:
    settings, past = inputs.settings, _past(inputs)
    _refuse_tangents(inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.theta, past.kv, past.k_sum)
    log_decay = inputs.log_decay
    if log_decay is None and settings.documents is not None:
        log_decay = inputs.q.new_zeros((inputs.q.shape[0], 1, inputs.q.shape[2]), dtype=settings.dtype)
    o, _, _, _, kv, k_sum = torch.ops.linrope.linear_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        log_decay,
        inputs.theta,
        past.kv,
        past.k_sum,
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
    return o, State(kv, k_sum, settings.start + inputs.k.shape[2], inputs.final_log_decay())


def _refuse_tangents(*tensors: Tensor | None) -> None:
    """Forward-mode differentiation would find no rule here and take the tangent for 0."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise InputError("forward-mode differentiation (jvp) does not go through backend='chunked': use 'reference'.")


def _past(inputs: Inputs) -> State:
    if inputs.state is not None:
        return inputs.state
    batch, heads, _, features = inputs.q.shape
    width, settings = inputs.v.shape[-1], inputs.settings
    return State.zeros(batch, heads, features, width, dtype=settings.dtype, device=inputs.q.device)


def _with_rotary_denominator(inputs: Inputs) -> tuple[Tensor, State]:
    """Rotated features in the denominator are one more value column, of ones: Σ_j w_ij q̃ᵀk̃ · 1."""
    v = torch.nn.functional.pad(inputs.v.to(inputs.settings.dtype), (0, 1), value=1)
    past = inputs.state
    if past is not None:
        past = replace(past, kv=torch.cat((past.kv, past.k_rotated_sum[..., None]), dim=-1), k_rotated_sum=None)
    settings = replace(inputs.settings, normalize="none")
    both, final = chunked_attention(replace(inputs, v=v, state=past, settings=settings))
    num, den = both[..., :-1], both[..., -1:]
    o = num / guarded(den, inputs.settings.eps, "rotary")
    final = replace(final, kv=final.kv[..., :-1], k_rotated_sum=final.kv[..., -1])
    return o.to(inputs.v.dtype), final


def _one_token(inputs: Inputs) -> tuple[Tensor, State]:
    """Decoding: the state takes the token in and is read, two passes over it whatever the position."""
    settings, past = inputs.settings, _past(inputs)
    q, k, v = (x.to(settings.dtype) for x in (inputs.q, inputs.k, inputs.v))
    q, k = settings.feature_map.forward(q), settings.feature_map.forward(hide(k, settings.key_mask))
    k, v = hide(k, settings.key_mask), hide(v, settings.key_mask)
    kv, k_sum = past.kv, past.k_sum
    if inputs.log_decay is not None:
        kept = inputs.log_decay.exp()  # (B, H, 1)
        kv, k_sum = kept[..., None] * kv, kept * k_sum
    turn = None
    if inputs.theta is not None:
        turn = unit_rotations(torch.full((), settings.start, device=q.device), inputs.theta)
    q_turned, k_turned = rotate(q, turn, settings.interleaved), rotate(k, turn, settings.interleaved)
    kv = torch.baddbmm(kv.flatten(0, 1), k_turned.flatten(0, 1).mT, v.flatten(0, 1)).unflatten(0, kv.shape[:2])
    k_sum = k_sum + without_signed(k[:, :, 0], settings.signed)
    o = q_turned @ kv
    if settings.normalize == "plain":
        product = q[:, :, 0] * k_sum
        o = o / (product[..., settings.signed :].sum(dim=-1) + settings.eps)[..., None, None]
    return o.to(inputs.v.dtype), State(kv, k_sum, settings.start + 1, inputs.final_log_decay())


# --- the walk over all blocks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """How a call is cut into blocks: so many rows of the batch, heads and tokens each."""

    batch: int
    heads: int
    tokens: int

    @classmethod
    def of(cls, batch: int, heads: int, length: int, width: int) -> Tile:
        """Blocks of about `BLOCK_ELEMENTS`: few heads have long blocks, many heads are worked through in groups."""
        rows_of_batch, group = cls._rows(batch, heads, min(length, BLOCK_TOKENS), width)
        return cls(rows_of_batch, group, cls.tokens_of(batch, heads, width))

    @classmethod
    def tokens_of(cls, batch: int, heads: int, width: int) -> int:
        """Tokens of a block; the length has no say in it, so that graphs can leave it open."""
        rows_of_batch, group = cls._rows(batch, heads, BLOCK_TOKENS, width)
        tokens = max(BLOCK_ELEMENTS // width, CHUNK) // (rows_of_batch * group) // CHUNK * CHUNK
        return torch.sym_min(torch.sym_max(tokens, CHUNK), MAX_BLOCK)

    @staticmethod
    def _rows(batch: int, heads: int, tokens: int, width: int) -> tuple[int, int]:
        """Rows of the batch and heads whose blocks of so many tokens fit; heads in groups of about one size.

        Several rows go together with all of their heads only, so that states of a group lie in one piece.
        """
        rows = max(BLOCK_ELEMENTS // width // max(tokens, CHUNK), 1)
        n_groups = -(-heads // rows)
        group = -(-heads // n_groups)
        return torch.sym_max(torch.sym_min(batch, rows // group), 1), group

    def groups(self, batch: int, heads: int) -> Iterator[tuple[slice, slice]]:
        for b in range(0, batch, self.batch):
            for h in range(0, heads, self.heads):
                yield slice(b, b + self.batch), slice(h, h + self.heads)

    def starts(self, length: int, causal: bool) -> list[int]:
        """The first token of each block."""
        return [span.start for span in self.spans(length)] if causal else list(range(0, length, self.tokens))

    def spans(self, length: int) -> list[Span]:
        """Cover the length; what is left of a chunk at the end is a chunk of its own."""
        whole = length - length % CHUNK
        cuts = [(start, min(self.tokens, whole - start) // CHUNK, CHUNK) for start in range(0, whole, self.tokens)]
        cuts += [(whole, 1, length - whole)] if length > whole else []
        return [Span(index, *cut) for index, cut in enumerate(cuts)]


def _tile(q: Tensor, v: Tensor) -> Tile:
    batch, heads, length, features = q.shape
    return Tile.of(batch, heads, max(length, v.shape[2]), max(features, v.shape[3]))


class Options(NamedTuple):
    """What the operators take after their tensors of numbers."""

    key_mask: Tensor | None
    documents: Tensor | None
    start: int
    feature_map: str
    plain: bool
    eps: float
    interleaved: bool
    causal: bool
    signed: int = 0


def _call(tile: Tile, q, k, v, log_decay, theta, options: Options, exact: bool = False) -> Call:
    """The operator's arguments as its blocks read them; `exact` keeps bfloat16 out of the products."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    rounded = q.dtype == v.dtype == torch.bfloat16 and not exact and _multiplies_bfloat16(q.device.type)
    return Call(
        q,
        k,
        v,
        log_decay,
        options.key_mask,
        options.documents,
        None if theta is None else _rotations(theta, tile, max(q.shape[2], k.shape[2]), options, dtype),
        after_signed(FEATURE_MAPS[options.feature_map], options.signed),
        options.signed,
        options.plain,
        options.eps,
        dtype,
        torch.bfloat16 if rounded else dtype,
    )


def _rotations(theta: Tensor, tile: Tile, length: int, options: Options, dtype: torch.dtype) -> Rotations:
    """The turns of a call's tokens; those of a sequence's start, which training asks for again and again, are kept."""

    def make() -> Rotations:
        starts = options.start + torch.tensor(tile.starts(length, options.causal), device=theta.device)
        return Rotations.make(theta.detach(), options.interleaved, starts, min(tile.tokens, length), dtype)

    if options.start != 0 or theta.requires_grad or theta.device.type != "cpu":
        return make()
    key = (theta.numpy().tobytes(), theta.shape, options.interleaved, length, tile.tokens, options.causal, dtype)
    return Pool.on(theta.device).keep("rotations", key, make, most=8)


@lru_cache
def _multiplies_bfloat16(device: str) -> bool:
    """Whether matrix products of bfloat16 are faster than those of float32: emulated they are many times slower."""
    if device != "cpu":
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _forward(q, k, v, log_decay, theta, kv, k_sum, *rest):
    """Returns o, den, kv_at, k_sum_at, kv, k_sum: the output, what the backward needs, and the final state."""
    tile, options, pool = _tile(q, v), Options(*rest), Pool.on(q.device)
    spans = tile.spans(q.shape[2])
    call = _call(tile, q, k, v, log_decay, theta, options)
    o, den, kv_at, k_sum_at, *_ = _outputs(q, v, kv, k_sum, options, empty)
    last = len(spans) if options.causal else 1
    kv_at[0], k_sum_at[0] = kv.mT, k_sum
    kv_at[last + 1 :], k_sum_at[last + 1 :] = 0, 0
    with torch.autocast(q.device.type, enabled=False):
        for group in tile.groups(*q.shape[:2]):
            part, saved = call.rows(*group), Saved(o, den, kv_at, k_sum_at).rows(*group)
            if options.causal:
                causal.forward(part, spans, saved, pool)
            else:
                noncausal.forward(part, tile.tokens, saved, pool)
    return o, den, kv_at, k_sum_at, _own(kv_at[last].mT), _own(k_sum_at[last])


def _own(x: Tensor) -> Tensor:
    """A contiguous copy, also where `contiguous` would give x itself: what operators return shares no memory."""
    return x.clone(memory_format=torch.contiguous_format)


def _outputs(q, v, kv, k_sum, options: Options, make: Callable):
    batch, heads, length, features = q.shape
    # before each block and at the end; a bound, which says more to a graph with open lengths than the exact number
    tokens = Tile.tokens_of(batch, heads, max(features, v.shape[3]))
    n_states = (length - 1) // tokens + 3 if options.causal else 2
    o = make((batch, heads, length, v.shape[-1]), dtype=v.dtype, device=v.device)
    den = kv.new_empty((batch, heads, length) if options.plain else (0,))
    kv_at = kv.new_empty(n_states, batch, heads, kv.shape[3], kv.shape[2])
    k_sum_at = k_sum.new_empty(n_states, *k_sum.shape)
    return o, den, kv_at, k_sum_at, kv.new_empty(kv.shape), k_sum.new_empty(k_sum.shape)


def _backward(grad_o, grad_kv, grad_k_sum, o, den, kv_at, k_sum_at, d_decay, d_theta, q, k, v, log_decay, theta, *rest):
    """Returns the gradients of q, k, v, log_decay, theta, kv and k_sum; those not asked for are empty."""
    tile, options, pool = _tile(q, v), Options(*rest), Pool.on(q.device)
    spans = tile.spans(q.shape[2])
    # ∂log_decay and ∂θ are small differences of large sums: products rounded to bfloat16 would cost them their digits
    call = _call(tile, q, k, v, log_decay, theta, options, exact=d_decay or d_theta)
    grads = Gradients(
        grad_o,
        *(empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)),
        torch.empty_like(log_decay) if d_decay else None,
        ThetaGradient(theta, q.shape[2], options.interleaved) if d_theta else None,
        torch.zeros_like(kv_at[0]) if grad_kv is None else _own(grad_kv.mT),
        torch.zeros_like(k_sum_at[0]) if grad_k_sum is None else _own(grad_k_sum),
        options.plain or grad_k_sum is not None,
    )
    last = kv_at[len(spans) if options.causal else 1], grads.d_kv.clone()
    saved = Saved(o, den, kv_at, k_sum_at)
    with torch.autocast(q.device.type, enabled=False):
        for group in tile.groups(*q.shape[:2]):
            part = call.rows(*group), saved.rows(*group), grads.rows(*group)
            if options.causal:
                causal.backward(part[0], spans, *part[1:], pool)
            else:
                noncausal.backward(part[0], tile.tokens, *part[1:], pool)
    nothing = q.new_empty(0)
    if d_theta:
        grads.d_theta.add_origin(options.start, (kv_at[0], grads.d_kv), last)
    return (
        grads.dq,
        grads.dk,
        grads.dv,
        grads.d_log_decay if d_decay else nothing,
        grads.d_theta.total if d_theta else nothing.clone(),
        _own(grads.d_kv.mT),
        grads.d_k_sum,
    )


# --- operators of PyTorch --------------------------------------------------------------------------------------------

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? theta{past}, Tensor? key_mask, Tensor? documents, "
    "SymInt start, str feature_map, bool plain, float eps, bool interleaved, bool causal, int signed=0"
)
_FORWARD, _BACKWARD = "linrope::linear_attention", "linrope::linear_attention_backward"
torch.library.define(
    _FORWARD,
    f"({_ARGUMENTS.format(past=', Tensor kv, Tensor k_sum')}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    _BACKWARD,
    "(Tensor grad_o, Tensor? grad_kv, Tensor? grad_k_sum, Tensor o, Tensor den, Tensor kv_at, Tensor k_sum_at, "
    f"bool d_decay, bool d_theta, {_ARGUMENTS.format(past='')}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.impl(_FORWARD, "default", _forward)
torch.library.impl(_BACKWARD, "default", _backward)


@torch.library.register_fake(_FORWARD)
def _(q, k, v, log_decay, theta, kv, k_sum, *rest):
    return _outputs(q, v, kv, k_sum, Options(*rest), torch.empty)


@torch.library.register_fake(_BACKWARD)
def _(grad_o, grad_kv, grad_k_sum, o, den, kv_at, k_sum_at, d_decay, d_theta, q, k, v, log_decay, theta, *rest):
    like = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    nothing = q.new_empty(0)
    return (
        *like,
        torch.empty_like(log_decay) if d_decay else nothing,
        torch.empty_like(theta) if d_theta else nothing.clone(),
        kv_at.new_empty(*kv_at.shape[1:3], kv_at.shape[4], kv_at.shape[3]),
        k_sum_at.new_empty(k_sum_at.shape[1:]),
    )


def _save(ctx, inputs, output) -> None:
    q, k, v, log_decay, theta, _, _, key_mask, documents, *ctx.rest = inputs
    o, den, kv_at, k_sum_at, _, _ = output
    ctx.mark_non_differentiable(den, kv_at, k_sum_at)
    ctx.set_materialize_grads(False)
    plain = Options(key_mask, documents, *ctx.rest).plain  # else the output is not looked at again
    ctx.save_for_backward(o if plain else den, den, kv_at, k_sum_at, q, k, v, log_decay, theta, key_mask, documents)


def _differentiate(ctx, grad_o, _den, _kv_at, _k_sum_at, grad_kv, grad_k_sum):
    if torch.is_grad_enabled():
        raise InputError(
            "create_graph=True asks for a second derivative, which backend='chunked' does not have: "
            "use backend='reference'."
        )
    o, den, kv_at, k_sum_at, q, k, v, *others = ctx.saved_tensors  # once: checkpointing recomputes at each look
    if grad_o is None:
        grad_o = v.new_zeros(()).expand(*q.shape[:3], v.shape[-1])
    needs = ctx.needs_input_grad
    d_decay, d_theta = needs[3], needs[4]
    *dqkv, d_log_decay, d_theta_out, d_kv, d_k_sum = torch.ops.linrope.linear_attention_backward(
        grad_o, grad_kv, grad_k_sum, o, den, kv_at, k_sum_at, d_decay, d_theta, q, k, v, *others, *ctx.rest
    )
    optional = d_log_decay if d_decay else None, d_theta_out if d_theta else None
    return (*dqkv, *optional, d_kv, d_k_sum, *(None,) * (2 + len(ctx.rest)))


torch.library.register_autograd(_FORWARD, _differentiate, setup_context=_save)


@torch.library.register_vmap(_FORWARD)
def _(info, in_dims, *args):
    raise InputError(
        "torch.vmap does not go through backend='chunked': put the mapped dimension into B, which the operator takes "
        "in one call, or use backend='reference'."
    )


@register_flop_formula(torch.ops.linrope.linear_attention)
def _(q_shape, k_shape, v_shape, *rest, out_shape=None, **_unused) -> int:
    return _flops(q_shape, v_shape, Options(*rest[4:]), n_sums=1, backward=False)


@register_flop_formula(torch.ops.linrope.linear_attention_backward)
def _(*shapes_and_options, out_shape=None, **_unused) -> int:
    q_shape, _, v_shape, *rest = shapes_and_options[9:]
    options, grad_k_sum = Options(*rest[2:]), shapes_and_options[2]
    n_sums = 2 if options.plain else int(grad_k_sum is not None)
    return _flops(q_shape, v_shape, options, n_sums, backward=True)


def _flops(q_shape, v_shape, options: Options, n_sums: int, backward: bool) -> int:
    (batch, heads, length, features), (_, _, keys, width) = q_shape, v_shape
    if not options.causal:
        return noncausal_flops(batch * heads, length, keys, features, width, backward)
    spans = Tile.of(batch, heads, length, max(features, width)).spans(length)
    return causal_flops(batch * heads, spans, features, width, n_sums, backward)
