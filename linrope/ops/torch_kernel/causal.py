"""The causal kernel: blocks of a few heads' tokens, one after the other, and in the backward from the end.

A block is some tokens of some heads, in N chunks of C, small enough that its tensors stay in cache. Every pass writes
into buffers that are kept from call to call: new memory costs more than many of the passes. All buffers have the heads
first. PyTorch splits a pass among threads along the first axis, so each thread finds in its cache what it wrote.

Within a chunk all pairs are computed; earlier tokens are reached through the state, which is held transposed, (E, D):

    num = ((q̃ k̃ᵀ) ∘ M) v + a ∘ q̃ Sᵀ        S ← e^g S + vᵀ (b ∘ k̃)

with q̃, k̃ rotated by their positions, S the state before the chunk and, with G the chunk's running sum of log_decay,
M_pp' = e^{G_p - G_p'} for p' ≤ p, a_p = e^{G_p}, b_p = e^{G_C - G_p}, g = G_C. Without decay M is lower-triangular ones
and a, b, e^g are 1; a document boundary is a decay of -inf. The denominator is φ(q) times a running sum of φ(k), which
has the same form with chunks of `SUM_CHUNK`.

Each token is rotated once, by its position's exact angle, and states are not rotated again, so errors do not grow with
the length. The backward recomputes each block from q, k, v and the state before it: saved are q, k, v, o, den and one
state for each block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linrope.ops.call import Call
from linrope.ops.torch_kernel.buffers import Gradients, Saved, Tokens, divide, load_features, scaled, vjp_features
from linrope.ops.torch_kernel.decay import DecayWeights
from linrope.ops.torch_kernel.plan import Block, Plan, sum_chunk


def forward(call: Call, plan: Plan, saved: Saved) -> None:
    """Write o, den and the state after each block, of some rows."""
    for block in plan.blocks:
        _kept(Forward, call, plan, block).run(call, plan, block, saved)


def backward(call: Call, plan: Plan, saved: Saved, grads: Gradients) -> None:
    """Write the gradients of some rows, from the last block to the first."""
    for block in reversed(plan.blocks):
        _kept(Backward, call, plan, block).run(call, plan, block, saved, grads)


def _kept(direction: type, call: Call, plan: Plan, block: Block) -> Forward | Backward:
    """The buffers for that shape of block: made once, and kept with the memory they use."""
    sizes = (*call.q.shape[:2], block.n_chunks, block.chunk, call.q.shape[3], call.v.shape[3])
    key = (*sizes, call.dtype, plan.product_dtype, plan.rotations is None, call.log_decay is None)
    return plan.pool.keep(direction.__name__, key, lambda: direction(call, plan, block), most=32)


class Pass:
    """A pass over one block: buffers of that shape, and what both directions compute with them.

    R = b·h heads of N chunks of C tokens, G = R·N chunks in all. With bfloat16 products, `low` casts their factors and
    `high` their results before a sum; otherwise both do nothing.
    """

    keeps_derivatives = False

    def __init__(self, call: Call, plan: Plan, block: Block):
        self.pool, self.n, self.c = plan.pool, block.n_chunks, block.chunk
        self.batch, self.heads = call.q.shape[:2]
        self.n_rows = self.batch * self.heads
        self.features, self.width = call.q.shape[-1], call.v.shape[-1]
        self.dtype, self.product_dtype = call.dtype, plan.product_dtype
        rotates = plan.rotations is not None
        self.q, self.k, self.scratch = self.tokens("q"), self.tokens("k"), self.tokens("scratch")
        self.q_rotated = self.tokens("q rotated") if rotates else self.q
        self.k_rotated = self.tokens("k rotated") if rotates else self.k
        self.q_derivative = self.tokens("q derivative") if self.keeps_derivatives else self.scratch
        self.k_derivative = self.tokens("k derivative") if self.keeps_derivatives else self.scratch
        self.v = self.tokens("v", self.width, self.product_dtype)
        self.pairs = self.buffer("pairs", self.c, self.c)
        self.own = self.buffer("own", self.width, self.features)
        if call.log_decay is None:
            self.constant = tuple(
                DecayWeights.constant(self.n_rows, self.n * self.c // c, c, self.dtype, self.pool.device)
                for c in (self.c, sum_chunk(self.c))
            )

    def tokens(self, name: str, width: int | None = None, dtype: torch.dtype | None = None) -> Tokens:
        shape = (self.batch, self.heads, self.n * self.c, self.features if width is None else width)
        return Tokens(self.pool(name, shape, dtype or self.dtype), self.n, self.c)

    def buffer(self, name: str, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """(G, rows, columns), by default in the dtype of products."""
        return self.pool(name, (self.n_rows * self.n, rows, columns), dtype or self.product_dtype)

    def low(self, x: Tensor, name: str) -> Tensor:
        if x.dtype == self.product_dtype:
            return x
        return self.pool(f"low {name}", x.shape, self.product_dtype).copy_(x)

    def high(self, x: Tensor, name: str) -> Tensor:
        return x if x.dtype == self.dtype else self.pool(f"high {name}", x.shape, self.dtype).copy_(x)

    # Features and weights.

    def load(self, call: Call, plan: Plan, block: Block) -> None:
        """φ(q), φ(k), both rotated, and v, from tensors of any strides and dtype."""
        self.visible = None
        hidden = None
        if call.key_mask is not None:
            visible = block.of(call.key_mask[:, None])[..., None]
            hidden, self.visible = ~visible, visible.to(self.dtype)
        load_features(call.phi, block.of(call.q), self.q.rows, self.q_derivative.rows)
        load_features(call.phi, block.of(call.k), self.k.rows, self.k_derivative.rows, hidden)
        self.v.rows.copy_(block.of(call.v))
        if hidden is not None:
            self.k.rows.mul_(self.visible)  # φ(0) is not 0
            self.v.rows.masked_fill_(hidden, 0)
        if plan.rotations is not None:
            interleaved = plan.rotations.interleaved
            self.rotation = plan.rotations.of_block(block.index, self.n * self.c)
            self.q.rotated(self.rotation, interleaved, out=self.q_rotated)
            self.k.rotated(self.rotation, interleaved, out=self.k_rotated)
        self.positive = slice(call.signed, None)  # the features that denominators sum
        self.q_in, self.k_in = self.low(self.q_rotated.chunks, "q"), self.low(self.k_rotated.chunks, "k")
        self.weights, self.sum_weights = self.weigh(call, block)

    def weigh(self, call: Call, block: Block) -> tuple[DecayWeights, DecayWeights]:
        """For chunks, and for the smaller chunks of running sums."""
        if call.log_decay is None:
            return self.constant
        heads = call.log_decay.shape[1]
        made = []
        for name, c in (("weights", self.c), ("sum weights", sum_chunk(self.c))):
            n = self.n * self.c // c
            pairs = self.pool(name, (self.batch, heads, n, c, c), self.dtype)
            made.append(DecayWeights.decaying(call, block, n, c, pairs))
        return tuple(made)

    def weighted_pairs(self, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        """M ∘ (x yᵀ), (G, C, C)."""
        torch.bmm(x, y.mT, out=out)
        return out.tril_() if self.weights.reach is None else out.mul_(self.weights.pairs)

    # Sums over earlier tokens, or in the backward over later ones.

    def pass_states(
        self, name: str, carry: Tensor, values: Tensor, keys: Tensor, weights: DecayWeights, after=None
    ) -> Tensor:
        """The state before each chunk, (G, E, D), in the dtype of products.

        From `carry` (b, h, E, D), the state before the block, and the products of values (G, C, E) and keys (G, C, D)
        that each chunk adds. `after` receives the state after the block.
        """
        into = self.buffer(name, self.width, self.features, self.dtype)
        own = self.high(torch.bmm(values.mT, keys, out=self.own), "own").view(self.n_rows, self.n, -1)
        state = weights.before(carry.view(self.n_rows, -1), own, out=into.view(own.shape))
        if after is not None:
            weights.after(state, own, out=after.view(self.n_rows, -1))
        return self.low(into, name)

    def running_sum(self, x: Tokens, carry: Tensor, weights: DecayWeights, out: Tokens, after: Tensor | None = None):
        """Write the weighted sum of x (b, h, t, D) up to each token into out, from `carry` (b, h, D), the sum before
        the block. `after` receives that after it."""
        own = scaled(x.sum_chunks, weights.kept, out.sum_chunks).sum(dim=1).view(self.n_rows, -1, self.features)
        before = weights.before(carry.view(self.n_rows, -1), own, out=torch.empty_like(own))
        if after is not None:
            weights.after(before, own, out=after.view(self.n_rows, -1))
        before = before.view(-1, 1, self.features)
        if weights.reach is None:
            torch.baddbmm(before, weights.pairs, x.sum_chunks, out=out.sum_chunks)
        else:
            torch.mul(weights.reach, before, out=out.sum_chunks).baddbmm_(weights.pairs, x.sum_chunks)


class Forward(Pass):
    """The forward of a block."""

    def __init__(self, call: Call, plan: Plan, block: Block):
        super().__init__(call, plan, block)
        self.num = self.tokens("num", self.width, self.product_dtype)
        self.q_reach = None
        if call.log_decay is not None:
            self.q_reach = self.tokens("q reach", dtype=self.product_dtype).chunks

    def run(self, call: Call, plan: Plan, block: Block, saved: Saved) -> None:
        """Write the block's part of o (and of den), and the states after it."""
        self.load(call, plan, block)
        weights, now, after = self.weights, block.index, block.index + 1
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
            total = block.of(saved.den)[..., None]
            product = self.scratch.rows.mul_(self.q.rows)[..., self.positive]
            torch.sum(product, dim=-1, keepdim=True, out=total).add_(call.eps)
            divide(self.num.rows, total, block.of(saved.o), self.pool)
        else:
            block.of(saved.o).copy_(self.num.rows)


class Backward(Pass):
    """The backward of a block. With g = ∂L/∂o, ∂num = g / den and ∂den = -(∂numᵀ o):

        ∂q̃ = (M ∘ ∂num vᵀ) k̃ + a ∘ ∂num S    ∂k̃ = (M ∘ ∂num vᵀ)ᵀ q̃ + b ∘ v ∂S    ∂v = (M ∘ q̃ k̃ᵀ)ᵀ ∂num + b ∘ k̃ ∂Sᵀ

    where ∂S, the gradient of the state after each chunk, sums (a ∘ ∂num)ᵀ q̃ from the end. Rotated back, and with the
    denominator's share, ∂φ(q) = R⁻¹ ∂q̃ + ∂den Σ φ(k) and ∂φ(k) = R⁻¹ ∂k̃ + Σ ∂den φ(q), the last sum from the end.
    """

    keeps_derivatives = True

    def __init__(self, call: Call, plan: Plan, block: Block):
        super().__init__(call, plan, block)
        products = self.product_dtype
        self.d_num, self.dv = (self.tokens(name, self.width, products) for name in ("d_num", "num"))
        self.dq_rotated, self.dk_rotated = (self.tokens(name, dtype=products) for name in ("dq", "dk"))
        self.dq, self.dk = (
            (self.q_rotated, self.k_rotated) if plan.rotations is not None else map(self.tokens, ("dq out", "dk out"))
        )
        self.later = self.tokens("dq")
        self.d_num_reach = self.v_kept = self.k_kept = None
        if call.log_decay is not None:
            self.d_num_reach = self.tokens("d_num reach", self.width, products).chunks
            self.v_kept = self.tokens("v kept", self.width, products).chunks
            self.k_kept = self.tokens("k kept", dtype=products).chunks

    def run(self, call: Call, plan: Plan, block: Block, saved: Saved, grads: Gradients) -> None:
        """Write the block's part of the gradients, and update the state's gradient from its end to its start."""
        if grads.d_log_decay is not None:
            anchor = state_times_gradient(saved, grads, block.index + 1)
        self.load(call, plan, block)
        d_den = self.through_division(call, block, saved, grads)
        self.through_products(block, saved, grads)
        self.through_rotation(plan, block, grads)
        self.through_denominator(d_den, block, saved, grads)
        if self.visible is not None:
            self.dk.rows.mul_(self.visible)
        if grads.d_log_decay is not None:
            self.store_log_decay(block.of(grads.d_log_decay), anchor)
        vjp_features(call.phi, self.dq.rows, self.q.rows, self.q_derivative.rows, out=block.of(grads.dq))
        vjp_features(call.phi, self.dk.rows, self.k.rows, self.k_derivative.rows, out=block.of(grads.dk))

    def through_division(self, call: Call, block: Block, saved: Saved, grads: Gradients) -> Tensor | None:
        """∂num into its buffer; returns ∂den (b, h, t, 1)."""
        if not call.plain:
            self.d_num.rows.copy_(block.of(grads.grad_o))
            return None
        divide(block.of(grads.grad_o), block.of(saved.den)[..., None], self.d_num.rows, self.pool)
        product = torch.mul(self.d_num.rows, block.of(saved.o), out=self.dv.rows)
        return product.sum(dim=-1, keepdim=True, dtype=self.dtype).neg_()

    def through_products(self, block: Block, saved: Saved, grads: Gradients) -> None:
        """∂q̃ and ∂k̃ into their buffers, ∂v into the gradients; update the state's gradient to the block's start."""
        weights, d_num, v = self.weights, self.d_num.chunks, self.v.chunks
        v_kept, k_kept = scaled(v, weights.kept, self.v_kept), scaled(self.k_in, weights.kept, self.k_kept)
        d_num_reach = scaled(d_num, weights.reach, self.d_num_reach)
        state = self.pass_states("state", saved.kv_at[block.index], v_kept, self.k_in, weights)
        d_state = self.pass_states("d_state", grads.d_kv, d_num_reach, self.q_in, weights.reversed, after=grads.d_kv)
        d_pairs = self.weighted_pairs(d_num, v, self.pairs)
        torch.bmm(d_pairs, self.k_in, out=self.dq_rotated.chunks).baddbmm_(d_num_reach, state)
        torch.bmm(d_pairs.mT, self.q_in, out=self.dk_rotated.chunks).baddbmm_(v_kept, d_state)
        pairs = self.weighted_pairs(self.q_in, self.k_in, self.pairs)  # where d_pairs was
        torch.bmm(pairs.mT, d_num, out=self.dv.chunks).baddbmm_(k_kept, d_state.mT)
        if self.visible is not None:
            self.dv.rows.mul_(self.visible)
        block.of(grads.dv).copy_(self.dv.rows)

    def through_rotation(self, plan: Plan, block: Block, grads: Gradients) -> None:
        """The numerator's share of ∂φ(q) and ∂φ(k), and the block's share of ∂θ."""
        dq_rotated, dk_rotated = self.dq_rotated, self.dk_rotated
        if self.product_dtype != self.dtype:
            dq_rotated = self.tokens("high dq").filled(dq_rotated)
            dk_rotated = self.tokens("high dk").filled(dk_rotated)
        if grads.d_theta is not None:
            grads.d_theta.add(block.start, self.q_rotated.rows, dq_rotated.rows)
            grads.d_theta.add(block.start, self.k_rotated.rows, dk_rotated.rows)
        if plan.rotations is None:
            self.dq.rows.copy_(dq_rotated.rows)
            self.dk.rows.copy_(dk_rotated.rows)
        else:
            back = self.rotation.conj_physical()
            dq_rotated.rotated(back, plan.rotations.interleaved, out=self.dq)
            dk_rotated.rotated(back, plan.rotations.interleaved, out=self.dk)

    def through_denominator(self, d_den: Tensor | None, block: Block, saved: Saved, grads: Gradients) -> None:
        """The denominator's share of ∂φ(q) and ∂φ(k), and that of the final sum of keys."""
        weighted = self.scratch
        if d_den is None:
            weighted.rows.zero_()
        else:
            self.running_sum(self.k, saved.k_sum_at[block.index], self.sum_weights, self.scratch)
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
    """(b, h): the sum of all ∂G after a boundary, the final state's share included. It equals the product of the state
    there with its gradient, which avoids a running sum over the whole sequence, and its rounding."""
    share = (saved.kv_at[boundary] * grads.d_kv).sum(dim=(-2, -1))
    return share + (saved.k_sum_at[boundary] * grads.d_k_sum).sum(dim=-1)
