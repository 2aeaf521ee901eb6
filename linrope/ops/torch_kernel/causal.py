"""The causal kernel: blocks of a few heads' tokens, one after the other, forward and then backward from the end.

Each token is turned once, by its position's exact angle, and never again as part of a state, so errors do not pile up
with length. The backward recomputes each block from q, k, v and the state before it: what is saved is q, k, v, o, den
and one state a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linrope.ops.torch_kernel.blocks import (
    Call,
    Gradients,
    Saved,
    Span,
    Tokens,
    Weights,
    divide,
    load_features,
    pull_features,
    scaled,
    sum_chunk,
)
from linrope.ops.torch_kernel.memory import Pool


def forward(call: Call, spans: list[Span], saved: Saved, pool: Pool) -> None:
    """Write o, den and the state after each block, of some rows."""
    for span in spans:
        _block(Forward, call, span, pool).run(call, span, saved)


def backward(call: Call, spans: list[Span], saved: Saved, grads: Gradients, pool: Pool) -> None:
    """Write the gradients of some rows."""
    for span in reversed(spans):
        _block(Backward, call, span, pool).run(call, span, saved, grads)


def _block(kind: type, call: Call, span: Span, pool: Pool) -> Forward | Backward:
    """The block of that shape: made once, and kept with the memory it uses."""
    sizes = (*call.q.shape[:2], span.n_chunks, span.chunk, call.q.shape[3], call.v.shape[3])
    key = (*sizes, call.dtype, call.product_dtype, call.rotations is None, call.log_decay is None)
    return pool.keep(kind.__name__, key, lambda: kind(call, span, pool), most=32)


class Block:
    """The buffers of one shape of block, and what both directions compute with them.

    R = b·h heads of N chunks of C tokens, G = R·N chunks in all. Where the inputs are bfloat16, `low` is what enters
    matrix products and `high` what comes out of them for a sum; both do nothing in other precisions.
    """

    keeps_slopes = False

    def __init__(self, call: Call, span: Span, pool: Pool):
        self.pool, self.n, self.c = pool, span.n_chunks, span.chunk
        self.batch, self.heads = call.q.shape[:2]
        self.n_rows = self.batch * self.heads
        self.features, self.width = call.q.shape[-1], call.v.shape[-1]
        self.dtype, self.product_dtype = call.dtype, call.product_dtype
        turns = call.rotations is not None
        self.q, self.k, self.scratch = self.tokens("q"), self.tokens("k"), self.tokens("scratch")
        self.q_turned = self.tokens("q turned") if turns else self.q
        self.k_turned = self.tokens("k turned") if turns else self.k
        self.q_slope = self.tokens("q slope") if self.keeps_slopes else self.scratch
        self.k_slope = self.tokens("k slope") if self.keeps_slopes else self.scratch
        self.v = self.tokens("v", self.width, self.product_dtype)
        self.pairs = self.buffer("pairs", self.c, self.c)
        self.own = self.buffer("own", self.width, self.features)
        if call.log_decay is None:
            self.constant = tuple(
                Weights.constant(self.n_rows, self.n * self.c // c, c, self.dtype, pool.device)
                for c in (self.c, sum_chunk(self.c))
            )

    def tokens(self, name: str, width: int | None = None, dtype: torch.dtype | None = None) -> Tokens:
        shape = (self.batch, self.heads, self.n * self.c, self.features if width is None else width)
        return Tokens(self.pool(name, shape, dtype or self.dtype), self.n, self.c)

    def buffer(self, name: str, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """(G, rows, columns), of the dtype of products unless another is given."""
        return self.pool(name, (self.n_rows * self.n, rows, columns), dtype or self.product_dtype)

    def low(self, x: Tensor, name: str) -> Tensor:
        if x.dtype == self.product_dtype:
            return x
        return self.pool(f"low {name}", x.shape, self.product_dtype).copy_(x)

    def high(self, x: Tensor, name: str) -> Tensor:
        return x if x.dtype == self.dtype else self.pool(f"high {name}", x.shape, self.dtype).copy_(x)

    # Features and weights.

    def load(self, call: Call, span: Span) -> None:
        """φ(q), φ(k), their turned forms and v, from what may have any strides and another dtype."""
        self.visible = None
        hidden = None
        if call.key_mask is not None:
            visible = span.of(call.key_mask[:, None])[..., None]
            hidden, self.visible = ~visible, visible.to(self.dtype)
        load_features(call.phi, span.of(call.q), self.q.rows, self.q_slope.rows)
        load_features(call.phi, span.of(call.k), self.k.rows, self.k_slope.rows, hidden)
        self.v.rows.copy_(span.of(call.v))
        if hidden is not None:
            self.k.rows.mul_(self.visible)  # φ(0) is not 0
            self.v.rows.masked_fill_(hidden, 0)
        if call.rotations is not None:
            interleaved = call.rotations.interleaved
            self.turn = call.rotations.of_block(span.index, self.n * self.c)
            self.q.rotated(self.turn, interleaved, out=self.q_turned)
            self.k.rotated(self.turn, interleaved, out=self.k_turned)
        self.positive = slice(call.signed, None)  # the features that denominators sum
        self.q_in, self.k_in = self.low(self.q_turned.chunks, "q"), self.low(self.k_turned.chunks, "k")
        self.weights, self.sum_weights = self.weigh(call, span)

    def weigh(self, call: Call, span: Span) -> tuple[Weights, Weights]:
        """Of the chunks, and of the finer ones of running sums."""
        if call.log_decay is None:
            return self.constant
        heads = call.log_decay.shape[1]
        made = []
        for name, c in (("weights", self.c), ("sum weights", sum_chunk(self.c))):
            n = self.n * self.c // c
            pairs = self.pool(name, (self.batch, heads, n, c, c), self.dtype)
            made.append(Weights.forgetting(call, span, n, c, pairs))
        return tuple(made)

    def weighted_pairs(self, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        """M ∘ (x yᵀ), (G, C, C)."""
        torch.bmm(x, y.mT, out=out)
        return out.tril_() if self.weights.reach is None else out.mul_(self.weights.pairs)

    # Sums over what came before, or in the backward over what comes after.

    def pass_states(
        self, name: str, carry: Tensor, values: Tensor, keys: Tensor, weights: Weights, after=None
    ) -> Tensor:
        """The state before each chunk, (G, E, D), low; the one after the block goes into `after`, if given.

        Args:
            name: of the buffer.
            carry, after: (b, h, E, D), the state before the block and where to write that after it.
            values, keys: (G, C, E) and (G, C, D), whose products the chunks add.
        """
        into = self.buffer(name, self.width, self.features, self.dtype)
        own = self.high(torch.bmm(values.mT, keys, out=self.own), "own").view(self.n_rows, self.n, -1)
        state = weights.before(carry.view(self.n_rows, -1), own, out=into.view(own.shape))
        if after is not None:
            weights.after(state, own, out=after.view(self.n_rows, -1))
        return self.low(into, name)

    def running_sum(self, x: Tokens, carry: Tensor, weights: Weights, out: Tokens, after: Tensor | None = None):
        """Into out the weighted sum of x (b, h, t, D) up to each token; into after, if given, that at the end.

        Args:
            carry, after: (b, h, D), the sum before the block and where to write that after it.
        """
        own = scaled(x.subs, weights.kept, out.subs).sum(dim=1).view(self.n_rows, -1, self.features)
        before = weights.before(carry.view(self.n_rows, -1), own, out=torch.empty_like(own))
        if after is not None:
            weights.after(before, own, out=after.view(self.n_rows, -1))
        before = before.view(-1, 1, self.features)
        if weights.reach is None:
            torch.baddbmm(before, weights.pairs, x.subs, out=out.subs)
        else:
            torch.mul(weights.reach, before, out=out.subs).baddbmm_(weights.pairs, x.subs)


class Forward(Block):
    """A block on the way forward."""

    def __init__(self, call: Call, span: Span, pool: Pool):
        super().__init__(call, span, pool)
        self.num = self.tokens("num", self.width, self.product_dtype)
        if call.log_decay is not None:
            self.q_reach = self.tokens("q reach", dtype=self.product_dtype).chunks
        else:
            self.q_reach = None

    def run(self, call: Call, span: Span, saved: Saved) -> None:
        """Write the block's part of o (and of den), and the states after it."""
        self.load(call, span)
        weights, now, after = self.weights, span.index, span.index + 1
        kv_at, k_sum_at = saved.kv_at, saved.k_sum_at
        v_kept = scaled(self.v.chunks, weights.kept, self.num.chunks)
        state = self.pass_states("state", kv_at[now], v_kept, self.k_in, weights, after=kv_at[after])
        if call.signed:
            self.k.rows[..., : call.signed] = 0
        self.running_sum(self.k, k_sum_at[now], self.sum_weights, self.scratch, after=k_sum_at[after])
        pairs = self.weighted_pairs(self.q_in, self.k_in, self.pairs)
        num = torch.bmm(pairs, self.v.chunks, out=self.num.chunks)
        num.baddbmm_(scaled(self.q_in, weights.reach, self.q_reach), state.mT)
        if call.plain:
            total = span.of(saved.den)[..., None]
            product = self.scratch.rows.mul_(self.q.rows)[..., self.positive]
            torch.sum(product, dim=-1, keepdim=True, out=total).add_(call.eps)
            divide(self.num.rows, total, span.of(saved.o), self.pool)
        else:
            span.of(saved.o).copy_(self.num.rows)


class Backward(Block):
    """A block on the way back. With g = ∂L/∂o, ∂num = g / den and ∂den = -(∂numᵀ o):

        ∂q̃ = (M ∘ ∂num vᵀ) k̃ + a ∘ ∂num S    ∂k̃ = (M ∘ ∂num vᵀ)ᵀ q̃ + b ∘ v ∂S    ∂v = (M ∘ q̃ k̃ᵀ)ᵀ ∂num + b ∘ k̃ ∂Sᵀ

    where ∂S, the gradient of the state after each chunk, sums (a ∘ ∂num)ᵀ q̃ from the end. Turned back, and with
    the denominator's share, ∂φ(q) = R⁻¹ ∂q̃ + ∂den Σ φ(k) and ∂φ(k) = R⁻¹ ∂k̃ + Σ ∂den φ(q), the last sum from the end.
    """

    keeps_slopes = True

    def __init__(self, call: Call, span: Span, pool: Pool):
        super().__init__(call, span, pool)
        products = self.product_dtype
        self.d_num, self.dv = (self.tokens(name, self.width, products) for name in ("d_num", "num"))
        self.dq_turned, self.dk_turned = (self.tokens(name, dtype=products) for name in ("dq", "dk"))
        self.dq, self.dk = (
            (self.q_turned, self.k_turned) if call.rotations is not None else map(self.tokens, ("dq out", "dk out"))
        )
        self.later = self.tokens("dq")
        self.d_num_reach = self.v_kept = self.k_kept = None
        if call.log_decay is not None:
            self.d_num_reach = self.tokens("d_num reach", self.width, products).chunks
            self.v_kept = self.tokens("v kept", self.width, products).chunks
            self.k_kept = self.tokens("k kept", dtype=products).chunks

    def run(self, call: Call, span: Span, saved: Saved, grads: Gradients) -> None:
        """Write the block's part of the gradients, and take those of the states from its end to its start."""
        if grads.d_log_decay is not None:
            anchor = state_times_gradient(saved, grads, span.index + 1)
        self.load(call, span)
        d_den = self.through_division(call, span, saved, grads)
        self.through_products(call, span, saved, grads)
        self.through_rotation(call, span, grads)
        self.through_denominator(d_den, span, saved, grads)
        if self.visible is not None:
            self.dk.rows.mul_(self.visible)
        if grads.d_log_decay is not None:
            self.store_log_decay(span.of(grads.d_log_decay), anchor)
        pull_features(call.phi, self.dq.rows, self.q.rows, self.q_slope.rows, out=span.of(grads.dq))
        pull_features(call.phi, self.dk.rows, self.k.rows, self.k_slope.rows, out=span.of(grads.dk))

    def through_division(self, call: Call, span: Span, saved: Saved, grads: Gradients) -> Tensor | None:
        """∂num into its buffer; returns ∂den (b, h, t, 1)."""
        if not call.plain:
            self.d_num.rows.copy_(span.of(grads.grad_o))
            return None
        divide(span.of(grads.grad_o), span.of(saved.den)[..., None], self.d_num.rows, self.pool)
        product = torch.mul(self.d_num.rows, span.of(saved.o), out=self.dv.rows)
        return product.sum(dim=-1, keepdim=True, dtype=self.dtype).neg_()

    def through_products(self, call: Call, span: Span, saved: Saved, grads: Gradients) -> None:
        """∂q̃ and ∂k̃ into their buffers, ∂v to where it goes; the state's gradient moves to the block's start."""
        weights, d_num, v = self.weights, self.d_num.chunks, self.v.chunks
        v_kept, k_kept = scaled(v, weights.kept, self.v_kept), scaled(self.k_in, weights.kept, self.k_kept)
        d_num_reach = scaled(d_num, weights.reach, self.d_num_reach)
        state = self.pass_states("state", saved.kv_at[span.index], v_kept, self.k_in, weights)
        d_state = self.pass_states("d_state", grads.d_kv, d_num_reach, self.q_in, weights.reversed, after=grads.d_kv)
        d_pairs = self.weighted_pairs(d_num, v, self.pairs)
        torch.bmm(d_pairs, self.k_in, out=self.dq_turned.chunks).baddbmm_(d_num_reach, state)
        torch.bmm(d_pairs.mT, self.q_in, out=self.dk_turned.chunks).baddbmm_(v_kept, d_state)
        pairs = self.weighted_pairs(self.q_in, self.k_in, self.pairs)  # where d_pairs was
        torch.bmm(pairs.mT, d_num, out=self.dv.chunks).baddbmm_(k_kept, d_state.mT)
        if self.visible is not None:
            self.dv.rows.mul_(self.visible)
        span.of(grads.dv).copy_(self.dv.rows)

    def through_rotation(self, call: Call, span: Span, grads: Gradients) -> None:
        """∂φ(q) and ∂φ(k) so far, and the share of ∂θ."""
        dq_turned, dk_turned = self.dq_turned, self.dk_turned
        if self.product_dtype != self.dtype:
            dq_turned, dk_turned = self.tokens("high dq").filled(dq_turned), self.tokens("high dk").filled(dk_turned)
        if grads.d_theta is not None:
            grads.d_theta.add(span.start, self.q_turned.rows, dq_turned.rows)
            grads.d_theta.add(span.start, self.k_turned.rows, dk_turned.rows)
        if call.rotations is None:
            self.dq.rows.copy_(dq_turned.rows)
            self.dk.rows.copy_(dk_turned.rows)
        else:
            back = self.turn.conj_physical()
            dq_turned.rotated(back, call.rotations.interleaved, out=self.dq)
            dk_turned.rotated(back, call.rotations.interleaved, out=self.dk)

    def through_denominator(self, d_den: Tensor | None, span: Span, saved: Saved, grads: Gradients) -> None:
        """The denominator's share of ∂φ(q) and ∂φ(k), and that of the final sum of keys."""
        weighted = self.scratch
        if d_den is None:
            weighted.rows.zero_()
        else:
            self.running_sum(self.k, saved.k_sum_at[span.index], self.sum_weights, self.scratch)
            self.dq.rows[..., self.positive].addcmul_(self.scratch.rows[..., self.positive], d_den)
            torch.mul(self.q.rows, d_den, out=weighted.rows)
            weighted.rows[..., : self.positive.start] = 0
        if grads.reach_sums:
            self.running_sum(weighted, grads.d_k_sum, self.sum_weights.reversed, self.later, after=grads.d_k_sum)
            self.dk.rows[..., self.positive].add_(self.later.rows[..., self.positive])

    def store_log_decay(self, into: Tensor, anchor: Tensor) -> None:
        """∂G_t = φ(q_t)·∂φ(q_t) - φ(k_t)·∂φ(k_t), and ∂log_decay_t is the sum of ∂G from t on."""
        product = torch.mul(self.q.rows, self.dq.rows, out=self.scratch.rows)
        d_running = product.addcmul_(self.k.rows, self.dk.rows, value=-1).sum(dim=-1)
        into.copy_(d_running.flip(-1).cumsum(dim=-1).flip(-1) + anchor[..., None])


def state_times_gradient(saved: Saved, grads: Gradients, boundary: int) -> Tensor:
    """(b, h): what all ∂G after a boundary sum to, the final state's share included. It equals the product of the state
    there with its gradient, which spares a running sum, and its rounding, over the whole sequence."""
    share = (saved.kv_at[boundary] * grads.d_kv).sum(dim=(-2, -1))
    return share + (saved.k_sum_at[boundary] * grads.d_k_sum).sum(dim=-1)
