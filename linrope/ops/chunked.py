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
        """The span of x (B, H, T, D) by chunks: (B·H·N, C, D), contiguous, in one pass whatever x's strides."""
        batch, heads, _, width = x.shape
        piece = torch.empty(batch, heads, self.stop - self.start, width, dtype=dtype, device=x.device)
        piece.copy_(x[:, :, self.start : self.stop])
        return piece.view(batch * heads * self.n_chunks, self.chunk, width)

    def load_rows(self, x: Tensor) -> Tensor:
        """The span of x (B, H, T) by chunks: (B, H, N, C)."""
        return x[:, :, self.start : self.stop].unflatten(2, (self.n_chunks, self.chunk))

    def store(self, into: Tensor, chunks: Tensor) -> None:
        """Write (B·H·N, C, D) into the span of (B, H, T, D), rounding to its dtype."""
        piece = into[:, :, self.start : self.stop]
        piece.copy_(chunks.view(piece.shape))


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
class _Chain:
    """How states pass from chunk to chunk of a block: everything a sum over earlier chunks needs.

    Each is (N, ·) without forgetting, and has leading (B, H or 1) with it. The transpose passes gradients back.
    """

    between: Tensor  # (N, N): from a chunk's own sum to the state before a later chunk
    enter: Tensor  # (N, 1): from the state before the block to the one before a chunk
    leave: Tensor  # (1, N): from a chunk's own sum to the state after the block
    across: Tensor  # (1, 1): from the state before the block to the one after it

    @classmethod
    def of(cls, weights: Tensor) -> _Chain:
        """From weights (…, N+1, N+1), row n: what the state at boundary n has of the incoming one and of each chunk."""
        return cls(weights[..., :-1, 1:], weights[..., :-1, :1], weights[..., -1:, 1:], weights[..., -1:, :1])

    @property
    def mT(self) -> _Chain:
        return _Chain(self.between.mT, self.leave.mT, self.enter.mT, self.across)

    def run(self, carry: Tensor, own: Tensor, to_block, from_block) -> tuple[Tensor, Tensor]:
        """Carry a state (B, H, ...) through the chunks' own sums (B, H, N, ...): (before each chunk, after them all).

        `to_block` and `from_block` turn a state from the sequence's frame into the block's and back. The carry itself
        is never turned there and back again: rounding would pile up.
        """
        sums = own.flatten(3)
        before = self.between @ sums + self.enter * to_block(carry).flatten(2).unsqueeze(2)
        total = (self.leave @ sums).view(carry.shape)
        after = self.across.view(*self.across.shape[:-2], *(1,) * (carry.ndim - 2)) * carry + from_block(total)
        return before.view(own.shape), after


@dataclass(frozen=True)
class _Decay:
    """The weights of one block's chunks, G = B·H·N of them: between tokens, and between tokens and states."""

    pairs: Tensor  # M (G, C, C): from key p' to query p
    reach: Tensor  # a (G, C, 1): from the state before the chunk to query p
    kept: Tensor  # b (G, C, 1): from key p to the state after the chunk


def _decay(settings: Settings, log_decay: Tensor, span: _Span, heads: int) -> tuple[_Decay, _Chain]:
    """The weights of a block where something is forgotten: exp of differences of running sums, -inf across documents.

    Args:
        log_decay: (B, H or 1, T); zeros where only documents end.
    """
    # In float64: a chunk of strong decays sums to thousands, whose differences near 0 float32 would have lost.
    total = span.load_rows(log_decay).cumsum(dim=-1, dtype=torch.float64)
    at_boundary = torch.nn.functional.pad(total[..., -1].cumsum(dim=-1), (1, 0))  # G before each chunk, and at the end
    pairs, reach, kept = total[..., :, None] - total[..., None, :], total, total[..., -1:] - total
    chain = at_boundary[..., :, None] - at_boundary[..., None, :]
    later = torch.ones(pairs.shape[-2:], dtype=torch.bool, device=total.device).triu(1)
    later_chunk = torch.ones(chain.shape[-2:], dtype=torch.bool, device=total.device).triu(1)
    if settings.documents is not None:
        document = span.load_rows(settings.documents[:, None])
        # the document that the state at each boundary belongs to; the one before the first token is that token's own
        before = settings.documents[:, max(span.start - 1, 0)]
        at = torch.cat((before[:, None, None], document[..., -1]), dim=-1)
        later = later | (document[..., :, None] != document[..., None, :])
        later_chunk = later_chunk | (at[..., :, None] != at[..., None, :])
        reach = reach.masked_fill(document != at[..., :-1, None], -math.inf)
        kept = kept.masked_fill(document != at[..., 1:, None], -math.inf)

    def weights(exponent: Tensor) -> Tensor:
        exponent = exponent.to(settings.dtype).exp_()
        return exponent.expand(-1, heads, *exponent.shape[2:]).flatten(0, 2)

    decay = _Decay(weights(pairs.masked_fill_(later, -math.inf)), weights(reach[..., None]), weights(kept[..., None]))
    return decay, _Chain.of(chain.masked_fill_(later_chunk, -math.inf).to(settings.dtype).exp_())


def _same(x: Tensor) -> Tensor:
    return x


def _inverse(turn: Tensor | None) -> Tensor | None:
    return None if turn is None else turn.conj()


class _Block:
    """One block's features and weights, by chunks (G, C, ·), and what both directions compute with them."""

    def __init__(self, settings: Settings, span: _Span, tensors: _Saved):
        dtype = settings.dtype
        self.span, self.settings = span, settings
        self.leading = (*tensors.q.shape[:2], span.n_chunks)
        self.q_raw, self.k_raw = span.load(tensors.q, dtype), span.load(tensors.k, dtype)
        self.v = span.load(tensors.v, dtype)
        self.hidden = None
        if settings.key_mask is not None:
            self.hidden = ~span.load_rows(settings.key_mask[:, None]).expand(*self.leading, -1).flatten(0, 2)[..., None]
            self.k_raw, self.v = self.k_raw.masked_fill(self.hidden, 0), self.v.masked_fill(self.hidden, 0)
        phi = settings.feature_map.forward
        self.q, self.k = phi(self.q_raw), phi(self.k_raw)
        if self.hidden is not None:
            self.k = self.k.masked_fill(self.hidden, 0)  # φ(0) is not 0
        self.turn, self.frame = tensors.rotations(span)
        self.q_rotated, self.k_rotated = self.rotate(self.q), self.rotate(self.k)
        if tensors.log_decay is None:
            self.decay, self.chain = None, _Chain.of(self.v.new_ones(span.n_chunks + 1, span.n_chunks + 1).tril())
        else:
            self.decay, self.chain = _decay(settings, tensors.log_decay, span, self.leading[1])

    # Rotations: of tokens by their place in the block, and of states into the block's frame and back.

    def rotate(self, x: Tensor) -> Tensor:
        return rotate(self.by_chunk(x), self.turn, self.settings.interleaved).view_as(x)

    def rotate_back(self, x: Tensor) -> Tensor:
        return rotate(self.by_chunk(x), _inverse(self.turn), self.settings.interleaved).view_as(x)

    def to_block(self, kv: Tensor) -> Tensor:
        return rotate_rows(kv, _inverse(self.frame), self.settings.interleaved)

    def from_block(self, kv: Tensor) -> Tensor:
        return rotate_rows(kv, self.frame, self.settings.interleaved)

    # The weights, each skipping the work where nothing is forgotten.

    def pair_weights(self, pairs: Tensor) -> Tensor:
        """M ∘ pairs, in place."""
        return pairs.tril_() if self.decay is None else pairs.mul_(self.decay.pairs)

    @property
    def running(self) -> Tensor:
        """M (G, C, C) itself, as a factor."""
        if self.decay is not None:
            return self.decay.pairs
        return self.v.new_ones(self.span.chunk, self.span.chunk).tril_().expand(len(self.v), -1, -1)

    def reach(self, x: Tensor) -> Tensor:
        """a ∘ x."""
        return x if self.decay is None else x * self.decay.reach

    def kept(self, x: Tensor) -> Tensor:
        """b ∘ x."""
        return x if self.decay is None else x * self.decay.kept

    # Sums over chunks.

    def by_chunk(self, x: Tensor) -> Tensor:
        """(G, ...) -> (B, H, N, ...)."""
        return x.view(*self.leading, *x.shape[1:])

    def states(self, kv: Tensor, k_sum: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(kv, k_sum) before each chunk, (G, ...), and after the block, (B, H, ...)."""
        own = self.by_chunk(torch.bmm(self.kept(self.k_rotated).mT, self.v))
        kv_before, kv = self.chain.run(kv, own, self.to_block, self.from_block)
        own = self.by_chunk(self.kept(self.k).sum(dim=-2))
        k_sum_before, k_sum = self.chain.run(k_sum, own, _same, _same)
        return kv_before.flatten(0, 2), k_sum_before.flatten(0, 2), kv, k_sum

    def keys_seen(self, k_sum_before: Tensor) -> Tensor:
        """(G, C, D): M φ(k) + a z, the decayed sum of all keys up to each token."""
        earlier = k_sum_before[:, None, :]
        earlier = earlier if self.decay is None else self.decay.reach * earlier
        return torch.baddbmm(earlier, self.running, self.k)


@dataclass(frozen=True)
class _Saved:
    """The tensors that a block reads, and the rotations that all blocks share."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None  # (B, H or 1, T); None where nothing is forgotten
    theta: Tensor | None
    local: Tensor | None  # (block, R/2) exp(i·p·θ): the same table for every block
    start: int

    @classmethod
    def make(cls, settings: Settings, q, k, v, log_decay, theta, block: int) -> _Saved:
        local = None
        if theta is not None:
            local = unit_rotations(torch.arange(min(block, q.shape[2]), device=q.device), theta)
            local = local.to(torch.promote_types(settings.dtype, torch.complex64))
        if log_decay is None and settings.documents is not None:
            log_decay = q.new_zeros((), dtype=settings.dtype).expand(q.shape[0], 1, q.shape[2])
        return cls(q, k, v, log_decay, theta, local, settings.start)

    def rotations(self, span: _Span) -> tuple[Tensor | None, Tensor | None]:
        """Of each token within the block (N, C, R/2), and of the block within the sequence (R/2,), exact."""
        if self.local is None:
            return None, None
        position = torch.full((), self.start + span.start, device=self.q.device)
        frame = unit_rotations(position, self.theta)
        return self.local[: span.stop - span.start].unflatten(0, (span.n_chunks, span.chunk)), frame


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
            num = torch.bmm(b.pair_weights(torch.bmm(b.q_rotated, b.k_rotated.mT)), b.v)
            num.baddbmm_(b.reach(b.q_rotated), kv_before)
            if plain:
                total = b.keys_seen(k_sum_before).mul_(b.q).sum(dim=-1, keepdim=True).add_(settings.eps)
                num.div_(total)
                span.store(den[..., None], total)
            span.store(o, num)
        kv_at[-1], k_sum_at[-1] = kv, k_sum
        ctx.settings, ctx.block, ctx.spans = settings, block, spans
        ctx.save_for_backward(q, k, v, log_decay, theta, o if plain else None, den, kv_at, k_sum_at)
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
        self.grad_o = v.new_zeros(*q.shape[:3], v.shape[-1]) if grad_o is None else grad_o
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

        pairs = b.pair_weights(torch.bmm(b.q_rotated, b.k_rotated.mT))
        d_pairs = b.pair_weights(torch.bmm(d_num, b.v.mT))
        own = b.by_chunk(torch.bmm(b.reach(b.q_rotated).mT, d_num))
        d_kv_after, self.grad_kv = b.chain.mT.run(self.grad_kv, own, b.to_block, b.from_block)
        d_kv_after = d_kv_after.flatten(0, 2)
        dq_rotated = torch.bmm(d_pairs, b.k_rotated).baddbmm_(b.reach(d_num), kv_before.mT)
        dk_rotated = torch.bmm(d_pairs.mT, b.q_rotated).baddbmm_(b.kept(b.v), d_kv_after.mT)
        dv = torch.bmm(pairs.mT, d_num).baddbmm_(b.kept(b.k_rotated), d_kv_after)

        dq, dk = b.rotate_back(dq_rotated), b.rotate_back(dk_rotated)
        weighted = torch.zeros_like(b.q) if d_den is None else d_den * b.q
        own = b.by_chunk(b.reach(weighted).sum(dim=-2))
        d_sum_after, self.grad_k_sum = b.chain.mT.run(self.grad_k_sum, own, _same, _same)
        d_sum_after = d_sum_after.flatten(0, 2)[:, None, :]
        dk = dk + (d_sum_after if b.decay is None else b.decay.kept * d_sum_after)
        if d_den is not None:
            dq = torch.addcmul(dq, d_den, b.keys_seen(k_sum_before))
            dk.baddbmm_(b.running.mT, weighted)

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
        d_num = grad.div_(b.span.load(self.den[..., None], grad.dtype))
        o = b.span.load(self.o, self.settings.dtype)
        return d_num, o.mul_(d_num).sum(dim=-1, keepdim=True).neg_()

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
        piece = self.d_log_decay[:, :, span.start : span.stop]
        piece.copy_(d_running.view(piece.shape).flip(-1).cumsum(dim=-1).flip(-1) + anchor[..., None])

    # Trainable θ: ∂θ_m = Σ_t t·(q̃_t × ∂q̃_t + k̃_t × ∂k̃_t)_m, in float64 around the middle of the sequence.

    @property
    def middle(self) -> int:
        return self.dq.shape[2] // 2

    def add_theta(self, span: _Span, b: _Block, dq_rotated: Tensor, dk_rotated: Tensor) -> None:
        cross = _cross(b.q_rotated, dq_rotated, self.d_theta, self.settings.interleaved)
        cross = cross + _cross(b.k_rotated, dk_rotated, self.d_theta, self.settings.interleaved)
        cross = b.by_chunk(cross).sum(dim=(0, 1)).flatten(0, 1)
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
