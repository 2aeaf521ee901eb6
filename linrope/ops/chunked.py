"""The prefix-sum causal kernel: linear in the length, in plain PyTorch, on any device.

A sequence is worked through block by block, so that a block's tensors stay in cache; a block is a few chunks of
`CHUNK` tokens. Inside a chunk all pairs are formed (C × C); all earlier tokens are met through the state:

    num = ((q̃ k̃ᵀ) ∘ M) v + a ∘ q̃ S        den = φ(q)·(M φ(k) + a z)        S ← e^g S + (b ∘ k̃)ᵀ v      z likewise

with q̃, k̃ turned by their position within the block, S and z the state before the chunk in the block's frame, and,
with G the chunk's running sum of log_decay, M_pp' = e^{G_p - G_p'} for p' ≤ p, a_p = e^{G_p}, b_p = e^{G_C - G_p},
g = G_C. Without forgetting M is lower-triangular ones and a, b, e^g are 1. A document boundary is a decay of -inf.

Between blocks the state stands in the frame of the sequence's first token and is turned by one exact angle on the way
into a block and out of it; each token's contribution is turned once, so errors do not pile up with length.

The backward goes through the blocks from the end, recomputing each from q, k, v and the state before it: what is
saved is q, k, v, o, den and one state a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from torch import Tensor

from linrope.errors import InputError
from linrope.ops.inputs import Inputs, Settings
from linrope.ops.noncausal import noncausal_attention
from linrope.ops.reference import guarded
from linrope.ops.state import State, rotate_rows
from linrope.rotary import as_pairs, rotate, unit_rotations

CHUNK = 64
"""Tokens whose pairs are all formed: near the head's size, pairs and state cost about the same."""
BLOCK_ELEMENTS = 2**18
"""Size of one (B, H, block, D) tensor: 1 MiB in float32, so that the ten a block needs stay in a shared cache."""
MAX_BLOCK = 2048


@torch.compiler.disable  # traced, its blocks would be unrolled one by one; a graph break costs less
def chunked_attention(inputs: Inputs) -> tuple[Tensor, State]:
    """(o, final state) of one call, in time and memory linear in the length."""
    if not inputs.settings.causal:
        return noncausal_attention(inputs)
    if inputs.settings.normalize == "rotary":
        return _with_rotary_denominator(inputs)
    batch, heads, _, features = inputs.q.shape
    past = inputs.state or State.zeros(
        batch, heads, features, inputs.v.shape[-1], dtype=inputs.settings.dtype, device=inputs.q.device
    )
    o, kv, k_sum = _Causal.apply(
        inputs.settings, inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.theta, past.kv, past.k_sum
    )
    return o, State(kv, k_sum, inputs.settings.start + inputs.q.shape[2], inputs.final_log_decay())


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


# --- one block -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Span:
    """Tokens `start … start + n_chunks · chunk` of the sequence."""

    start: int
    n_chunks: int
    chunk: int

    @property
    def stop(self) -> int:
        return self.start + self.n_chunks * self.chunk

    def load(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The span of x (B, H, T, D) by chunks: (B, H, N, C, D), contiguous."""
        piece = x[:, :, self.start : self.stop].to(dtype)
        return rearrange(piece, "b h (n c) d -> b h n c d", c=self.chunk).contiguous()

    def load_rows(self, x: Tensor) -> Tensor:
        """The span of x (B, H, T) by chunks: (B, H, N, C)."""
        return rearrange(x[:, :, self.start : self.stop], "b h (n c) -> b h n c", c=self.chunk)

    def store(self, into: Tensor, chunks: Tensor) -> None:
        """Write (B, H, N, C, D) into the span of (B, H, T, D), rounding to its dtype."""
        into[:, :, self.start : self.stop] = rearrange(chunks, "b h n c d -> b h (n c) d")


def _spans(length: int, block: int) -> list[_Span]:
    """Cover the length by spans of at most `block` tokens; what is left of a chunk at the end is a chunk of its own."""
    whole = length - length % CHUNK
    spans = [_Span(start, min(block, whole - start) // CHUNK, CHUNK) for start in range(0, whole, block)]
    return spans + ([_Span(whole, 1, length - whole)] if length > whole else [])


def _block_size(batch: int, heads: int, width: int) -> int:
    """Tokens in a block: a multiple of CHUNK, fewer where there are more heads."""
    tokens = BLOCK_ELEMENTS // max(1, batch * heads * width)
    return min(max(tokens // CHUNK, 1) * CHUNK, MAX_BLOCK)


@dataclass(frozen=True)
class _Decay:
    """The weights of one block: what is left of the past, between tokens and from chunk to chunk."""

    pairs: Tensor  # M (B, H, N, C, C): from key p' to query p
    reach: Tensor  # a (B, H, N, C, 1): from the state before the chunk to query p
    kept: Tensor  # b (B, H, N, C, 1): from key p to the state after the chunk
    through: Tensor  # e^g (B, H, N): from the state before a chunk to the one after it


def _decay(settings: Settings, log_decay: Tensor | None, span: _Span) -> _Decay | None:
    """The block's weights, or None where nothing is forgotten."""
    documents = settings.documents
    if log_decay is None and documents is None:
        return None
    if log_decay is None:
        total = torch.zeros((), dtype=torch.float64, device=documents.device)
        total = total.expand(documents.shape[0], 1, span.n_chunks, span.chunk)
    else:
        # A chunk of strong decays sums to thousands, whose differences near 0 float32 would have lost.
        total = span.load_rows(log_decay).cumsum(dim=-1, dtype=torch.float64)
    pairs = total[..., :, None] - total[..., None, :]
    reach, kept, through = total, total[..., -1:] - total, total[..., -1]
    hidden = torch.ones(span.chunk, span.chunk, dtype=torch.bool, device=total.device).triu(1)
    if documents is not None:
        document = span.load_rows(documents[:, None])
        first = documents[:, span.start - 1] if span.start else torch.zeros_like(documents[:, 0])
        before = torch.cat((first[:, None, None], document[:, :, :-1, -1]), dim=-1)  # of the token before each chunk
        last = document[..., -1]
        hidden = hidden | (document[..., :, None] != document[..., None, :])
        reach = reach.masked_fill(document != before[..., None], -math.inf)
        kept = kept.masked_fill(document != last[..., None], -math.inf)
        through = through.masked_fill(before != last, -math.inf)
    dtype = settings.dtype
    return _Decay(
        pairs=pairs.to(dtype).masked_fill_(hidden, -math.inf).exp_(),
        reach=reach.to(dtype).exp()[..., None],
        kept=kept.to(dtype).exp()[..., None],
        through=through.to(dtype).exp(),
    )


def _scan(increments: Tensor, through: Tensor | None, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """s ← e^g s + increment along the chunks, from s = 0.

    Args:
        increments: (B, H, N, ...).
        through: e^g (B, H, N), or None for 1.
        reverse: go from the last chunk to the first.

    Returns:
        s before each chunk (B, H, N, ...), and s after the last (B, H, ...).
    """
    before = torch.empty_like(increments)
    s = torch.zeros_like(increments[:, :, 0])
    order = range(increments.shape[2])
    for n in reversed(order) if reverse else order:
        before[:, :, n] = s
        s = increments[:, :, n] + (s if through is None else _over(through[:, :, n], s) * s)
    return before, s


def _over(weight: Tensor, x: Tensor) -> Tensor:
    """View weight so that it broadcasts over x, whose first dimensions it has."""
    return weight.reshape(*weight.shape, *(1,) * (x.ndim - weight.ndim))


def _carried(through: Tensor | None, carry: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """What an incoming carry (B, H, ...) adds before each chunk (B, H, N, ...), and its weight after them all."""
    if through is None:
        return carry.unsqueeze(2), torch.ones((), dtype=carry.dtype, device=carry.device)
    steps = through.flip(-1) if reverse else through
    products = steps.cumprod(dim=-1)
    before = torch.cat((torch.ones_like(products[..., :1]), products[..., :-1]), dim=-1)
    before = before.flip(-1) if reverse else before
    carry = carry.unsqueeze(2)
    return _over(before, carry) * carry, _over(products[..., -1], carry[:, :, 0])


class _Block:
    """One block's features and weights, and what both directions compute with them."""

    def __init__(self, settings: Settings, span: _Span, tensors: _Saved):
        dtype = settings.dtype
        self.span, self.settings = span, settings
        self.q_raw, self.k_raw = span.load(tensors.q, dtype), span.load(tensors.k, dtype)
        self.v = span.load(tensors.v, dtype)
        self.hidden = None
        if settings.key_mask is not None:
            self.hidden = ~span.load_rows(settings.key_mask[:, None])[..., None]
            self.k_raw, self.v = self.k_raw.masked_fill(self.hidden, 0), self.v.masked_fill(self.hidden, 0)
        phi = settings.feature_map.forward
        self.q, self.k = phi(self.q_raw), phi(self.k_raw)
        if self.hidden is not None:
            self.k = self.k.masked_fill(self.hidden, 0)  # φ(0) is not 0
        self.turn, self.frame = tensors.rotations(span)
        self.q_rotated = rotate(self.q, self.turn, settings.interleaved)
        self.k_rotated = rotate(self.k, self.turn, settings.interleaved)
        self.decay = _decay(settings, tensors.log_decay, span)

    # The weights, each skipping the work where nothing is forgotten.

    def pair_weights(self, pairs: Tensor) -> Tensor:
        """M ∘ pairs."""
        return pairs.tril_() if self.decay is None else pairs * self.decay.pairs

    def running(self, x: Tensor) -> Tensor:
        """M x: the decayed running sum over the tokens of each chunk."""
        return x.cumsum(dim=-2) if self.decay is None else self.decay.pairs @ x

    def running_back(self, x: Tensor) -> Tensor:
        """Mᵀ x: the decayed sum from each token to the end of its chunk."""
        return x.flip(-2).cumsum(dim=-2).flip(-2) if self.decay is None else self.decay.pairs.mT @ x

    def reach(self, x: Tensor) -> Tensor:
        """a ∘ x."""
        return x if self.decay is None else x * self.decay.reach

    def kept(self, x: Tensor) -> Tensor:
        """b ∘ x."""
        return x if self.decay is None else x * self.decay.kept

    @property
    def through(self) -> Tensor | None:
        return None if self.decay is None else self.decay.through

    # The two prefix sums, kv (turned into the block's frame and back) and k_sum, forward and backward in time.

    def pass_kv(self, carry: Tensor, increments: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor]:
        """Carry (B, H, D, E) in the sequence's frame through the block: (before each chunk in the block's, after)."""
        interleaved = self.settings.interleaved
        inverse = None if self.frame is None else self.frame.conj()
        before, total = _scan(increments, self.through, reverse)
        carried, weight = _carried(self.through, rotate_rows(carry, inverse, interleaved), reverse)
        return before + carried, weight * carry + rotate_rows(total, self.frame, interleaved)

    def pass_sum(self, carry: Tensor, increments: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor]:
        """Carry (B, H, D) through the block: (before each chunk, after)."""
        before, total = _scan(increments, self.through, reverse)
        carried, weight = _carried(self.through, carry, reverse)
        return before + carried, weight * carry + total

    def states(self, kv: Tensor, k_sum: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(kv, k_sum) before each chunk, and after the block."""
        kv_before, kv = self.pass_kv(kv, self.kept(self.k_rotated).mT @ self.v)
        k_sum_before, k_sum = self.pass_sum(k_sum, self.kept(self.k).sum(dim=-2))
        return kv_before, k_sum_before, kv, k_sum


@dataclass(frozen=True)
class _Saved:
    """The tensors that a block reads, and the rotations that all blocks share."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    theta: Tensor | None
    local: Tensor | None  # (block, R/2) exp(i·p·θ): the same table for every block
    start: int

    @classmethod
    def make(cls, settings: Settings, q, k, v, log_decay, theta, block: int) -> _Saved:
        local = None
        if theta is not None:
            local = unit_rotations(torch.arange(min(block, q.shape[2]), device=q.device), theta)
            local = local.to(torch.promote_types(settings.dtype, torch.complex64))
        return cls(q, k, v, log_decay, theta, local, settings.start)

    def rotations(self, span: _Span) -> tuple[Tensor | None, Tensor | None]:
        """Of each token within the block (N, C, R/2), and of the block within the sequence (R/2,), exact."""
        if self.local is None:
            return None, None
        position = torch.full((), self.start + span.start, device=self.q.device)
        frame = unit_rotations(position, self.theta)
        return rearrange(self.local[: span.stop - span.start], "(n c) m -> n c m", c=span.chunk), frame


# --- the whole sequence ----------------------------------------------------------------------------------------------


class _Causal(torch.autograd.Function):
    """Forward and backward over the blocks. `normalize` is "plain" or "none" here."""

    @staticmethod
    def forward(ctx, settings: Settings, q, k, v, log_decay, theta, kv, k_sum):
        batch, heads, length, features = q.shape
        block = _block_size(batch, heads, max(features, v.shape[-1]))
        saved = _Saved.make(settings, q, k, v, log_decay, theta, block)
        spans = _spans(length, block)
        plain = settings.normalize == "plain"
        o = torch.empty(batch, heads, length, v.shape[-1], dtype=v.dtype, device=v.device)
        den = torch.empty(batch, heads, length, dtype=kv.dtype, device=v.device) if plain else None
        kv_at = kv.new_empty(len(spans) + 1, *kv.shape)  # before each block, and at the end
        k_sum_at = k_sum.new_empty(len(spans) + 1, *k_sum.shape)
        for n, span in enumerate(spans):
            kv_at[n], k_sum_at[n] = kv, k_sum
            b = _Block(settings, span, saved)
            kv_before, k_sum_before, kv, k_sum = b.states(kv, k_sum)
            num = b.pair_weights(b.q_rotated @ b.k_rotated.mT) @ b.v + b.reach(b.q_rotated @ kv_before)
            if plain:
                seen = b.running(b.k) + b.reach(k_sum_before[..., None, :])
                total = (b.q * seen).sum(dim=-1, keepdim=True).add_(settings.eps)
                num = num / total
                den[:, :, span.start : span.stop] = rearrange(total, "b h n c 1 -> b h (n c)")
            span.store(o, num)
        kv_at[-1], k_sum_at[-1] = kv, k_sum
        ctx.settings, ctx.block, ctx.spans = settings, block, spans
        ctx.save_for_backward(q, k, v, log_decay, theta, o, den, kv_at, k_sum_at)
        ctx.set_materialize_grads(False)
        return o, kv.clone(), k_sum.clone()

    @staticmethod
    def backward(ctx, grad_o, grad_kv, grad_k_sum):
        if torch.is_grad_enabled():
            raise InputError(
                "create_graph=True asks for a second derivative, which backend='chunked' does not have: "
                "use backend='reference'."
            )
        tensors = ctx.saved_tensors  # once: checkpointing recomputes, and unpacks, at each look
        with torch.autocast(tensors[0].device.type, enabled=False):
            return (None, *_Backward(ctx, tensors, grad_o, grad_kv, grad_k_sum).run())


class _Backward:
    """The blocks from the end to the start; the gradient of the state is carried the other way."""

    def __init__(self, ctx, tensors, grad_o, grad_kv, grad_k_sum):
        self.settings, self.spans = ctx.settings, ctx.spans
        q, k, v, log_decay, theta, self.o, self.den, self.kv_at, self.k_sum_at = tensors
        self.saved = _Saved.make(ctx.settings, q, k, v, log_decay, theta, ctx.block)
        self.grad_o = torch.zeros_like(self.o) if grad_o is None else grad_o
        self.grad_kv = torch.zeros_like(self.kv_at[0]) if grad_kv is None else grad_kv
        self.grad_kv_out = self.grad_kv
        self.grad_k_sum = torch.zeros_like(self.k_sum_at[0]) if grad_k_sum is None else grad_k_sum
        self.dq, self.dk, self.dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        needs = ctx.needs_input_grad
        self.d_log_decay = torch.empty_like(log_decay) if log_decay is not None and needs[4] else None
        self.d_theta = torch.zeros_like(theta) if theta is not None and needs[5] else None

    def run(self):
        for n in reversed(range(len(self.spans))):
            self.block(n)
        if self.d_theta is not None:
            self.add_frame_share()
        return self.dq, self.dk, self.dv, self.d_log_decay, self.d_theta, self.grad_kv, self.grad_k_sum

    def block(self, n: int) -> None:
        settings, span = self.settings, self.spans[n]
        if self.d_log_decay is not None:
            anchor = self.state_times_gradient(n + 1)
        b = _Block(settings, span, self.saved)
        kv_before, k_sum_before, _, _ = b.states(self.kv_at[n], self.k_sum_at[n])
        d_num, d_den = self.through_division(b)

        pairs = b.pair_weights(b.q_rotated @ b.k_rotated.mT)
        d_pairs = b.pair_weights(d_num @ b.v.mT)
        q_reach, d_num_reach = b.reach(b.q_rotated), b.reach(d_num)
        d_kv_after, self.grad_kv = b.pass_kv(self.grad_kv, q_reach.mT @ d_num, reverse=True)
        k_kept = b.kept(b.k_rotated)
        dq_rotated = d_pairs @ b.k_rotated + d_num_reach @ kv_before.mT
        dk_rotated = d_pairs.mT @ b.q_rotated + b.kept(b.v) @ d_kv_after.mT
        dv = pairs.mT @ d_num + k_kept @ d_kv_after

        inverse = None if b.turn is None else b.turn.conj()
        dq, dk = rotate(dq_rotated, inverse, settings.interleaved), rotate(dk_rotated, inverse, settings.interleaved)
        if d_den is not None:
            dq = dq + d_den * (b.running(b.k) + b.reach(k_sum_before[..., None, :]))
            weighted = d_den * b.q
            d_sum_after, self.grad_k_sum = b.pass_sum(self.grad_k_sum, b.reach(weighted).sum(dim=-2), reverse=True)
            dk = dk + b.running_back(weighted) + b.kept(d_sum_after[..., None, :])
        else:
            nothing = torch.zeros_like(k_sum_before)
            d_sum_after, self.grad_k_sum = b.pass_sum(self.grad_k_sum, nothing, reverse=True)
            dk = dk + b.kept(d_sum_after[..., None, :])

        if self.d_log_decay is not None:
            self.store_log_decay(span, (b.q * dq - b.k * dk).sum(dim=-1), anchor)
        if self.d_theta is not None:
            self.add_theta(span, b, dq_rotated, dk_rotated)
        self.store(b, dq, dk, dv)

    def through_division(self, b: _Block) -> tuple[Tensor, Tensor | None]:
        """∂num = g / (den + ε) and ∂den = -(∂numᵀ o)."""
        grad = b.span.load(self.grad_o, self.settings.dtype)
        if self.den is None:
            return grad, None
        d_num = grad / b.span.load_rows(self.den)[..., None]
        o = b.span.load(self.o, self.settings.dtype)
        return d_num, -(d_num * o).sum(dim=-1, keepdim=True)

    def store(self, b: _Block, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        if b.hidden is not None:
            dk, dv = dk.masked_fill(b.hidden, 0), dv.masked_fill(b.hidden, 0)
        slope = self.settings.feature_map.backward
        b.span.store(self.dq, slope(dq, b.q_raw, b.q))
        b.span.store(self.dk, slope(dk, b.k_raw, b.k))
        b.span.store(self.dv, dv)

    # Forgetting: ∂G_t = φ(q_t)·∂φ(q_t) - φ(k_t)·∂φ(k_t), and ∂log_decay_t is the sum of ∂G from t on.

    def state_times_gradient(self, n: int) -> Tensor:
        """(B, H): what all ∂G after block n - 1 sum to, the final state's share included. It equals the product of
        the state there with its gradient, which spares a running sum, and its rounding, over the whole sequence."""
        return (self.kv_at[n] * self.grad_kv).sum(dim=(-2, -1)) + (self.k_sum_at[n] * self.grad_k_sum).sum(dim=-1)

    def store_log_decay(self, span: _Span, d_running: Tensor, anchor: Tensor) -> None:
        d_running = rearrange(d_running, "b h n c -> b h (n c)").flip(-1).cumsum(dim=-1).flip(-1)
        self.d_log_decay[:, :, span.start : span.stop] = d_running + anchor[..., None]

    # Trainable θ: ∂θ_m = Σ_t t·(q̃_t × ∂q̃_t + k̃_t × ∂k̃_t)_m, in float64 around the middle of the sequence.

    @property
    def middle(self) -> int:
        return self.dq.shape[2] // 2

    def add_theta(self, span: _Span, b: _Block, dq_rotated: Tensor, dk_rotated: Tensor) -> None:
        cross = _cross(b.q_rotated, dq_rotated, self.d_theta, self.settings.interleaved)
        cross = cross + _cross(b.k_rotated, dk_rotated, self.d_theta, self.settings.interleaved)
        cross = rearrange(cross.sum(dim=(0, 1)), "n c m -> (n c) m")
        positions = torch.arange(span.start, span.stop, dtype=torch.float64, device=cross.device) - self.middle
        self.d_theta += (positions[:, None] * cross).sum(dim=0)

    def add_frame_share(self) -> None:
        """The middle's own position times the whole sum of crosses. To turn all tokens at once is to turn the states at
        both ends instead, so that sum is read off the states: exactly 0 where there are none."""
        d_turn = self.cross_of_state(-1, self.grad_kv_out) - self.cross_of_state(0, self.grad_kv)
        self.d_theta += (self.settings.start + self.middle) * d_turn

    def cross_of_state(self, n: int, d_kv: Tensor) -> Tensor:
        return _cross(self.kv_at[n].mT, d_kv.mT, self.d_theta, self.settings.interleaved).sum(dim=(0, 1, 2))


def _cross(x: Tensor, dx: Tensor, theta: Tensor, interleaved: bool) -> Tensor:
    """x × ∂x of each pair: (..., D) -> (..., R/2), float64."""
    width = 2 * theta.shape[-1]
    return (as_pairs(x, width, interleaved).conj() * as_pairs(dx, width, interleaved)).imag.to(torch.float64)
