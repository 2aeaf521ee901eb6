"""The prefix-sum kernel in plain PyTorch, for any device: linear in the length.

`causal.py` holds the arithmetic of one block; here stand the size of a block, the walk over all of them, the step of
decoding, and how much there is to compute. `operator.py` makes operators of PyTorch of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from linrope.feature_maps import FEATURE_MAPS, after_signed
from linrope.ops.call import Inputs, Options
from linrope.ops.reference import hide, without_signed
from linrope.ops.state import State
from linrope.ops.theta_gradient import ThetaGradient
from linrope.ops.torch_kernel import causal, noncausal
from linrope.ops.torch_kernel.blocks import Call, Gradients, Rotations, Saved, Span
from linrope.ops.torch_kernel.flops import causal_flops, noncausal_flops
from linrope.ops.torch_kernel.memory import Pool, empty
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


KEEPS_STATES = True
"""What `forward` returns of them is what `backward` needs: those before each block and at the end."""


def one_token(inputs: Inputs, past: State) -> tuple[Tensor, State]:
    """Decoding: the state takes the token in and is read, two passes over it whatever the position."""
    settings = inputs.settings
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


def _call(tile: Tile, q, k, v, log_decay, theta, options: Options, exact: bool = False) -> Call:
    """The operator's arguments as its blocks read them; `exact` keeps bfloat16 out of the products."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    if log_decay is None and options.documents is not None:  # a boundary is a decay of -inf
        log_decay = q.new_zeros((q.shape[0], 1, q.shape[2]), dtype=dtype)
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


def forward(q, k, v, log_decay, theta, kv, k_sum, options: Options) -> tuple[Tensor, ...]:
    """Returns o, den, kv_at, k_sum_at, kv, k_sum: the output, what the backward needs, and the final state."""
    tile, pool = _tile(q, v), Pool.on(q.device)
    spans = tile.spans(q.shape[2])
    call = _call(tile, q, k, v, log_decay, theta, options)
    o, den, kv_at, k_sum_at, *_ = outputs(q, v, kv, k_sum, options, empty)
    last = len(spans) if options.causal else 1
    kv_at[0], k_sum_at[0] = kv.mT, k_sum
    kv_at[last + 1 :], k_sum_at[last + 1 :] = 0, 0
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


def outputs(q, v, kv, k_sum, options: Options, make: Callable = torch.empty) -> tuple[Tensor, ...]:
    """Room for what `forward` returns."""
    batch, heads, length, features = q.shape
    # before each block and at the end; a bound, which says more to a graph with open lengths than the exact number
    tokens = Tile.tokens_of(batch, heads, max(features, v.shape[3]))
    n_states = (length - 1) // tokens + 3 if options.causal else 2
    o = make((batch, heads, length, v.shape[-1]), dtype=v.dtype, device=v.device)
    den = kv.new_empty((batch, heads, length) if options.plain else (0,))
    kv_at = kv.new_empty(n_states, batch, heads, kv.shape[3], kv.shape[2])
    k_sum_at = k_sum.new_empty(n_states, *k_sum.shape)
    return o, den, kv_at, k_sum_at, kv.new_empty(kv.shape), k_sum.new_empty(k_sum.shape)


def backward(
    grad_o, grad_kv, grad_k_sum, o, den, kv_at, k_sum_at, d_decay, d_theta, q, k, v, log_decay, theta, options: Options
) -> tuple[Tensor, ...]:
    """Returns the gradients of q, k, v, log_decay, theta, kv and k_sum; those not asked for are empty."""
    tile, pool = _tile(q, v), Pool.on(q.device)
    spans = tile.spans(q.shape[2])
    # ∂log_decay and ∂θ are small differences of large sums: products rounded to bfloat16 would cost them their digits
    call = _call(tile, q, k, v, log_decay, theta, options, exact=d_decay or d_theta)
    grads = Gradients(
        grad_o,
        *(empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)),
        torch.empty_like(log_decay, memory_format=torch.contiguous_format) if d_decay else None,
        ThetaGradient(theta, q.shape[2], options.interleaved) if d_theta else None,
        torch.zeros_like(kv_at[0]) if grad_kv is None else _own(grad_kv.mT),
        torch.zeros_like(k_sum_at[0]) if grad_k_sum is None else _own(grad_k_sum),
        options.plain or grad_k_sum is not None,
    )
    last = kv_at[len(spans) if options.causal else 1], grads.d_kv.clone()
    saved = Saved(o, den, kv_at, k_sum_at)
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


def flops(q_shape, v_shape, options: Options, backward: bool, sums_asked: bool = False) -> int:
    """Multiplications and additions of the matrix products of one call.

    Args:
        sums_asked: whether the backward has a gradient of the final sum of keys.
    """
    (batch, heads, length, features), (_, _, keys, width) = q_shape, v_shape
    if not options.causal:
        return noncausal_flops(batch * heads, length, keys, features, width, backward)
    n_sums = 1
    if backward:
        n_sums = 2 if options.plain else int(sums_asked)
    spans = Tile.of(batch, heads, length, max(features, width)).spans(length)
    return causal_flops(batch * heads, spans, features, width, n_sums, backward)
