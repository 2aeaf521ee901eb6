"""The prefix-sum kernel in plain PyTorch, for any device: linear in the length, registered as operators of PyTorch.

`causal.py` holds the arithmetic of one block; here stand the size of a block, the walk over all of them, and what
PyTorch must know to compile, export and differentiate the whole: shapes, autograd and FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from linrope.errors import InputError
from linrope.feature_maps import FEATURE_MAPS
from linrope.ops.blocks import Call, Rotations, Span
from linrope.ops.causal import Backward, Forward, Gradients, Saved, ThetaGradient
from linrope.ops.inputs import Inputs
from linrope.ops.memory import Pool, empty
from linrope.ops.noncausal import noncausal_attention
from linrope.ops.reference import guarded, reference_attention
from linrope.ops.state import State
from linrope.rotary import rotate, unit_rotations

CHUNK = 64
"""Tokens whose pairs are all formed: near the head's size, pairs and state cost about the same."""
BLOCK_ELEMENTS = 2**18
"""Size of one buffer of a block: 1 MiB in float32, so that the dozen it needs stay in a shared cache. Half of it spends
more of the time on dispatching, twice as much falls out of the cache (each about a tenth slower)."""
BLOCK_TOKENS = 512
"""Tokens of a block where there are heads enough to fill it: with more, passing states between chunks costs more."""
MAX_BLOCK = 2048


def chunked_attention(inputs: Inputs) -> tuple[Tensor, State]:
    """(o, final state) of one call, in time and memory linear in the length."""
    if inputs.q.numel() == 0:
        return reference_attention(inputs)  # no row or no token: nothing to make fast
    if not inputs.settings.causal:
        return noncausal_attention(inputs)
    if inputs.settings.normalize == "rotary":
        return _with_rotary_denominator(inputs)
    if inputs.q.shape[2] == 1:
        return _one_token(inputs)
    settings = inputs.settings
    log_decay = inputs.log_decay
    if log_decay is None and settings.documents is not None:
        log_decay = inputs.q.new_zeros((inputs.q.shape[0], 1, inputs.q.shape[2]), dtype=settings.dtype)
    past = _past(inputs)
    o, _, _, _, kv, k_sum = torch.ops.linrope.causal_forward(
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
    )
    return o, State(kv, k_sum, settings.start + inputs.q.shape[2], inputs.final_log_decay())


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
    hidden = None if settings.key_mask is None else ~settings.key_mask[:, None, :, None]
    k = k if hidden is None else k.masked_fill(hidden, 0)
    q, k = settings.feature_map.forward(q), settings.feature_map.forward(k)
    if hidden is not None:
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    kv, k_sum = past.kv, past.k_sum
    if inputs.log_decay is not None:
        kept = inputs.log_decay.exp()  # (B, H, 1)
        kv, k_sum = kept[..., None] * kv, kept * k_sum
    turn = None
    if inputs.theta is not None:
        turn = unit_rotations(torch.full((), settings.start, device=q.device), inputs.theta)
    q_turned, k_turned = rotate(q, turn, settings.interleaved), rotate(k, turn, settings.interleaved)
    kv = torch.baddbmm(kv.flatten(0, 1), k_turned.flatten(0, 1).mT, v.flatten(0, 1)).unflatten(0, kv.shape[:2])
    k_sum = k_sum + k[:, :, 0]
    o = q_turned @ kv
    if settings.normalize == "plain":
        o = o / ((q[:, :, 0] * k_sum).sum(dim=-1) + settings.eps)[..., None, None]
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
        fit = max(BLOCK_ELEMENTS // max(width, 1), CHUNK)
        rows = max(fit // max(min(length, BLOCK_TOKENS), CHUNK), 1)
        group = min(heads, rows)
        if heads > group:
            group = -(-heads // -(-heads // group))  # groups of about one size
        rows_of_batch = max(min(batch, rows // max(group, 1)), 1)
        tokens = fit // max(rows_of_batch * group, 1) // CHUNK * CHUNK
        return cls(rows_of_batch, group, min(max(tokens, CHUNK), MAX_BLOCK))

    def groups(self, batch: int, heads: int) -> Iterator[tuple[slice, slice]]:
        for b in range(0, batch, self.batch):
            for h in range(0, heads, self.heads):
                yield slice(b, b + self.batch), slice(h, h + self.heads)

    def spans(self, length: int) -> list[Span]:
        """Cover the length; what is left of a chunk at the end is a chunk of its own."""
        whole = length - length % CHUNK
        cuts = [(start, min(self.tokens, whole - start) // CHUNK, CHUNK) for start in range(0, whole, self.tokens)]
        cuts += [(whole, 1, length - whole)] if length > whole else []
        return [Span(index, *cut) for index, cut in enumerate(cuts)]


def _tile(q: Tensor, v: Tensor) -> Tile:
    batch, heads, length, features = q.shape
    return Tile.of(batch, heads, length, max(features, v.shape[-1]))


def _call(
    tile, spans, q, k, v, log_decay, theta, key_mask, documents, start, feature_map, plain, eps, interleaved, exact=False
) -> Call:
    """The operator's arguments as its blocks read them; `exact` keeps bfloat16 out of the products."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    rotations = None
    if theta is not None:
        block_starts = torch.tensor([start + span.start for span in spans])
        longest = max(span.stop - span.start for span in spans)
        rotations = Rotations.make(theta, interleaved, block_starts, longest, dtype)
    rounded = q.dtype == torch.bfloat16 and not exact and _multiplies_bfloat16(q.device.type)
    products = torch.bfloat16 if rounded else dtype
    phi = FEATURE_MAPS[feature_map]
    return Call(q, k, v, log_decay, key_mask, documents, rotations, phi, plain, eps, dtype, products)


@lru_cache
def _multiplies_bfloat16(device: str) -> bool:
    """Whether matrix products of bfloat16 are faster than those of float32: emulated they are many times slower."""
    return device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _block(kind: type, call: Call, span: Span, pool: Pool):
    """The block of that shape: made once, and kept with the memory it uses."""
    sizes = (*call.q.shape[:2], span.n_chunks, span.chunk, call.q.shape[3], call.v.shape[3])
    key = (kind, *sizes, call.dtype, call.product_dtype, call.rotations is None, call.log_decay is None)
    return pool.keep(key, lambda: kind(call, span, pool))


def _forward(q, k, v, log_decay, theta, kv, k_sum, *rest):
    """Returns o, den, kv_at, k_sum_at, kv, k_sum: the output, what the backward needs, and the final state."""
    batch, heads, length = q.shape[:3]
    tile = _tile(q, v)
    spans = tile.spans(length)
    call = _call(tile, spans, q, k, v, log_decay, theta, *rest)
    o, den, kv_at, k_sum_at, *_ = _outputs(q, v, kv, k_sum, call.plain, len(spans))
    kv_at[0], k_sum_at[0] = kv.mT, k_sum
    pool = Pool.on(q.device)
    for group in tile.groups(batch, heads):
        part, saved = call.rows(*group), Saved(o, den, kv_at, k_sum_at).rows(*group)
        for span in spans:
            _block(Forward, part, span, pool).run(part, span, saved)
    return o, den, kv_at, k_sum_at, kv_at[-1].mT.contiguous(), k_sum_at[-1].clone()


def _outputs(q, v, kv, k_sum, plain: bool, n_blocks: int, make: Callable = empty):
    batch, heads, length = q.shape[:3]
    o = make((batch, heads, length, v.shape[-1]), dtype=v.dtype, device=v.device)
    den = kv.new_empty((batch, heads, length) if plain else (0,))
    kv_at = kv.new_empty(n_blocks + 1, batch, heads, kv.shape[3], kv.shape[2])  # before each block, and at the end
    k_sum_at = k_sum.new_empty(n_blocks + 1, *k_sum.shape)
    return o, den, kv_at, k_sum_at, torch.empty_like(kv), torch.empty_like(k_sum)


def _backward(grad_o, grad_kv, grad_k_sum, o, den, kv_at, k_sum_at, d_decay, d_theta, q, k, v, log_decay, theta, *rest):
    """Returns the gradients of q, k, v, log_decay, theta, kv and k_sum; those not asked for are empty."""
    batch, heads, length = q.shape[:3]
    tile = _tile(q, v)
    spans = tile.spans(length)
    # ∂log_decay is a small difference of two large sums: products rounded to bfloat16 would cost it its digits
    call = _call(tile, spans, q, k, v, log_decay, theta, *rest, exact=d_decay)
    start, interleaved = rest[2], rest[-1]
    grads = Gradients(
        grad_o,
        *(empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)),
        torch.empty_like(log_decay) if d_decay else None,
        ThetaGradient(theta, length, interleaved) if d_theta else None,
        torch.zeros_like(kv_at[-1]) if grad_kv is None else grad_kv.mT.contiguous(),
        torch.zeros_like(k_sum_at[-1]) if grad_k_sum is None else grad_k_sum.clone(),
    )
    saved = Saved(o, den, kv_at, k_sum_at)
    last = kv_at[-1], grads.d_kv.clone()
    pool = Pool.on(q.device)
    for group in tile.groups(batch, heads):
        part, saved_part, grads_part = call.rows(*group), saved.rows(*group), grads.rows(*group)
        for span in reversed(spans):
            _block(Backward, part, span, pool).run(part, span, saved_part, grads_part)
    nothing = q.new_empty(0)
    if d_theta:
        grads.d_theta.add_origin(start, (kv_at[0], grads.d_kv), last)
    return (
        grads.dq,
        grads.dk,
        grads.dv,
        grads.d_log_decay if d_decay else nothing,
        grads.d_theta.total if d_theta else nothing.clone(),
        grads.d_kv.mT.contiguous(),
        grads.d_k_sum,
    )


# --- operators of PyTorch --------------------------------------------------------------------------------------------

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? theta{past}, Tensor? key_mask, Tensor? documents, "
    "SymInt start, str feature_map, bool plain, float eps, bool interleaved"
)
_FORWARD, _BACKWARD = "linrope::causal_forward", "linrope::causal_backward"
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
def _(q, k, v, log_decay, theta, kv, k_sum, key_mask, documents, start, feature_map, plain, eps, interleaved):
    return _outputs(q, v, kv, k_sum, plain, _n_blocks(q, v), torch.empty)


def _n_blocks(q: Tensor, v: Tensor) -> int:
    """As many as `Tile.spans` gives, without a list of them."""
    whole, tokens = q.shape[2] // CHUNK * CHUNK, _tile(q, v).tokens
    return (whole + tokens - 1) // tokens + (q.shape[2] % CHUNK > 0)


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
    plain = ctx.rest[2]
    ctx.save_for_backward(
        o if plain else den, den, kv_at, k_sum_at, q, k, v, log_decay, theta, key_mask, documents
    )


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
    *dqkv, d_log_decay, d_theta_out, d_kv, d_k_sum = torch.ops.linrope.causal_backward(
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
