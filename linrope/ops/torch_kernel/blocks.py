"""What a block of the kernel is made of: the call it reads, its span, buffers, rotations and weights.

A block is some heads' tokens, cut into N chunks of C, so few that its tensors stay in cache; every pass writes into
buffers that outlive the call, since memory fetched anew costs more than many of the passes. All buffers have the heads
first: PyTorch splits a pass among threads along the first dimension, so that each thread finds in its own
cache what it wrote there.

Inside a chunk all pairs are formed; all earlier tokens are met through the state, which is held transposed, (E, D):

    num = ((q̃ k̃ᵀ) ∘ M) v + a ∘ q̃ Sᵀ        S ← e^g S + vᵀ (b ∘ k̃)

with q̃, k̃ turned by their positions, S the state before the chunk and, with G the chunk's running sum of log_decay,
M_pp' = e^{G_p - G_p'} for p' ≤ p, a_p = e^{G_p}, b_p = e^{G_C - G_p}, g = G_C. Without forgetting M is lower-triangular
ones and a, b, e^g are 1; a document boundary is a decay of -inf. The denominator is φ(q) times a running sum of φ(k),
of the same form at a finer grain: chunks of `SUM_CHUNK`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from linrope.feature_maps import FeatureMap, exp_below_zero
from linrope.ops.theta_gradient import ThetaGradient
from linrope.ops.torch_kernel.memory import Pool
from linrope.rotary import rotate, unit_rotations

SUM_CHUNK = 16
"""Running sums are small matrix products, a quarter of the work at 16 tokens of what it is at 64."""


def sum_chunk(chunk: int) -> int:
    """Tokens of a running sum's chunk in a chunk of so many: all of them at a ragged end."""
    return SUM_CHUNK if chunk % SUM_CHUNK == 0 else chunk


@dataclass(frozen=True)
class Rotations:
    """The turns of a token within its block, and of a block within the sequence; where each head has its own θ they
    have the heads first."""

    local: Tensor  # (block, R/2) or (H, block, R/2), exp(i·p·θ): one table for every block
    frames: Tensor  # (number of blocks, R/2) or (H, ...), exp(i·t·θ), t the position of the block's first token
    interleaved: bool

    @classmethod
    def make(cls, theta: Tensor, interleaved: bool, starts: Tensor, longest: int, dtype: torch.dtype) -> Rotations:
        """For blocks of up to `longest` tokens that begin at the positions `starts`."""
        # By the addition of angles: a few exact turns, and one product for each token.
        coarse = torch.arange(0, longest, 64, device=theta.device)
        fine = torch.arange(min(longest, 64), device=theta.device)
        positions = torch.cat((coarse, fine, starts))
        coarse, fine, frames = unit_rotations(positions, theta).split([len(coarse), len(fine), len(starts)], dim=-2)
        local = (coarse.unsqueeze(-2) * fine.unsqueeze(-3)).flatten(-3, -2)[..., :longest, :]
        complex_dtype = torch.promote_types(dtype, torch.complex64)
        return cls(local.to(complex_dtype), frames.to(complex_dtype), interleaved)

    def of_block(self, index: int, length: int) -> Tensor:
        """(length, R/2) or (H, length, R/2): the turns of one block's tokens; `conj_physical` turns back."""
        return self.local[..., :length, :] * self.frames[..., index, None, :]

    def of_heads(self, heads: slice) -> Rotations:
        """Those of some heads."""
        if self.local.ndim == 2:
            return self
        return Rotations(self.local[heads], self.frames[heads], self.interleaved)


@dataclass(frozen=True)
class Call:
    """The tensors of one call, or of some of its rows, and how they are to be read."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None  # (B, H or 1, T); None where nothing is forgotten
    key_mask: Tensor | None
    documents: Tensor | None
    rotations: Rotations | None
    phi: FeatureMap
    signed: int  # the first features so many, which have no part in the denominator
    plain: bool  # whether there is a denominator
    eps: float
    dtype: torch.dtype  # of sums
    product_dtype: torch.dtype  # of what enters matrix products

    def rows(self, batch: slice, heads: slice) -> Call:
        """The same for some rows of the batch and some heads."""

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[batch, heads if x.shape[1] > 1 else slice(None)]

        return replace(
            self,
            q=cut(self.q),
            k=cut(self.k),
            v=cut(self.v),
            log_decay=cut(self.log_decay),
            key_mask=None if self.key_mask is None else self.key_mask[batch],
            documents=None if self.documents is None else self.documents[batch],
            rotations=None if self.rotations is None else self.rotations.of_heads(heads),
        )


@dataclass(frozen=True)
class Span:
    """Block number `index`: the tokens of the sequence from `start` on, in chunks."""

    index: int
    start: int
    n_chunks: int
    chunk: int

    def of(self, x: Tensor) -> Tensor:
        """The span of x (B, H, T, ...)."""
        return x.narrow(2, self.start, self.n_chunks * self.chunk)


@dataclass(frozen=True)
class Saved:
    """What the forward writes and the backward reads. `den` is empty without a denominator."""

    o: Tensor
    den: Tensor
    kv_at: Tensor  # (n, b, h, E, D): causal, before each block and at the end; else before and after
    k_sum_at: Tensor  # (n, b, h, D)

    def rows(self, batch: slice, heads: slice) -> Saved:
        o, den = (x if x.numel() == 0 else x[batch, heads] for x in (self.o, self.den))
        return Saved(o, den, self.kv_at[:, batch, heads], self.k_sum_at[:, batch, heads])


@dataclass(frozen=True)
class Gradients:
    """What the backward writes to; `d_kv` and `d_k_sum` come in as the final state's and leave as the first one's."""

    grad_o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_log_decay: Tensor | None
    d_theta: ThetaGradient | None
    d_kv: Tensor  # (b, h, E, D)
    d_k_sum: Tensor  # (b, h, D)
    reach_sums: bool  # whether any gradient comes through sums of unturned keys

    def rows(self, batch: slice, heads: slice) -> Gradients:
        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[batch, heads]

        return Gradients(
            *map(cut, (self.grad_o, self.dq, self.dk, self.dv, self.d_log_decay)),
            None if self.d_theta is None else self.d_theta.of_heads(heads),
            *map(cut, (self.d_kv, self.d_k_sum)),
            self.reach_sums,
        )


class Tokens:
    """A buffer of one block's tokens, seen in the three ways that its passes ask for."""

    def __init__(self, flat: Tensor, n_chunks: int, chunk: int):
        batch, heads, _, width = flat.shape
        self.rows = flat  # (b, h, t, D)
        self.chunks = flat.view(batch * heads * n_chunks, chunk, width)  # (G, C, D)
        self.subs = flat.view(-1, sum_chunk(chunk), width)  # (G', c, D)

    @cached_property
    def complex(self) -> Tensor:
        """(b, h, t, D/2): dimensions (2m, 2m+1) as one number."""
        return torch.view_as_complex(self.rows.unflatten(-1, (-1, 2)))

    def filled(self, other: Tokens) -> Tokens:
        """This buffer, with the other's values."""
        self.rows.copy_(other.rows)
        return self

    def rotated(self, turn: Tensor, interleaved: bool, out: Tokens) -> Tokens:
        """Turn into `out`: one complex product where all of the head turns."""
        if interleaved and 2 * turn.shape[-1] == self.rows.shape[-1]:
            torch.mul(self.complex, turn, out=out.complex)
        else:
            rotate(self.rows, turn, interleaved, out=out.rows)
        return out


def load_features(phi: FeatureMap, x: Tensor, into: Tensor, slope: Tensor, hidden: Tensor | None = None) -> None:
    """φ of x, of any strides and dtype, into a buffer, and its slope into another; `hidden` tokens become φ(0)."""
    # Read in place only in whole vectors: elsewhere exp may differ in the last bit with the strides.
    whole = x.dtype == into.dtype and x.stride(-1) == 1 and x.shape[-1] % 64 == 0
    if hidden is not None or not whole:
        x = into.copy_(x)
    if hidden is not None:
        x.masked_fill_(hidden, 0)  # whatever a hidden key holds: a NaN times 0 would stay
    phi.load(x, into, slope)


def pull_features(phi: FeatureMap, grad: Tensor, y: Tensor, slope: Tensor, out: Tensor) -> None:
    """From ∂φ(x), which may be overwritten, to ∂x in out."""
    if out.dtype == grad.dtype:
        phi.pull(grad, y, slope, out=out)
    else:  # a pass over two dtypes takes several times one over each
        phi.pull(grad, y, slope, out=grad)
        out.copy_(grad)


def divide(x: Tensor, by: Tensor, out: Tensor, pool: Pool) -> None:
    """x / by, in by's dtype, into out."""
    if x.dtype == by.dtype:
        torch.div(x, by, out=out)
    else:
        out.copy_(pool("divided", x.shape, by.dtype).copy_(x).div_(by))


@dataclass(frozen=True)
class Weights:
    """What a token or a chunk counts for in a later one: for M chunks of c tokens in all, n of them in each of R heads.

    Without forgetting the optional ones are None, standing for ones, and `pairs` is one triangle for all.
    """

    pairs: Tensor  # M (M, c, c): from key p' to query p
    reach: Tensor | None  # a (M, c, 1): from the state before the chunk to query p
    kept: Tensor | None  # b (M, c, 1): from key p to the state after the chunk
    between: Tensor  # (R, n, n): from a chunk's own sum to the state before a later chunk
    enter: Tensor | None  # (R, n, 1): from the state before the block to the one before a chunk
    leave: Tensor | None  # (R, n, 1): from a chunk's own sum to the state after the block
    steps: Tensor | None  # (R, n, 1): from the state before a chunk to the one after it
    last: int = -1  # the chunk whose end is the block's: 0 on the way back

    @classmethod
    def constant(cls, rows: int, n: int, c: int, dtype: torch.dtype, device: torch.device) -> Weights:
        """Nothing is forgotten."""
        ones = torch.ones(max(n, c), max(n, c), dtype=dtype, device=device)
        pairs, between = ones[:c, :c].tril(), ones[:n, :n].tril(-1)
        return cls(pairs.expand(rows * n, c, c), None, None, between.expand(rows, n, n), None, None, None)

    @classmethod
    def forgetting(cls, call: Call, span: Span, n: int, c: int, pairs: Tensor) -> Weights:
        """exp of differences of running sums, and 0 from one document to another.

        The sums are float64: a chunk of strong decays reaches thousands, where float32 has lost the differences near
        0. Pairs are too many for that, so they take each sum as a float32 and what that rounded away.

        Args:
            pairs: (b, H or 1, n, c, c), to be filled.
        """
        total = span.of(call.log_decay).unflatten(2, (n, c)).cumsum(dim=-1, dtype=torch.float64)
        high = total.to(call.dtype)
        low = (total - high).to(call.dtype)
        torch.sub(high[..., :, None], high[..., None, :], out=pairs)
        pairs.add_(low[..., :, None]).sub_(low[..., None, :])
        exp_below_zero(pairs, out=pairs).tril_()
        boundary = torch.nn.functional.pad(total[..., -1].cumsum(dim=-1), (1, 0))  # before each chunk, and at the end
        chain = (boundary[..., :, None] - boundary[..., None, :]).to(call.dtype)
        exp_below_zero(chain, out=chain).tril_()
        reach, kept = high.exp(), (total[..., -1:] - total).to(call.dtype).exp()
        if call.documents is not None:
            document = span.of(call.documents[:, None]).unflatten(2, (n, c))
            # the document that the state at each boundary belongs to; before the first token it is that token's own
            before = call.documents[:, max(span.start - 1, 0)]
            at = torch.cat((before[:, None, None], document[..., -1]), dim=-1)
            pairs.mul_(document[..., :, None] == document[..., None, :])
            chain.mul_(at[..., :, None] == at[..., None, :])
            reach, kept = reach * (document == at[..., :-1, None]), kept * (document == at[..., 1:, None])
        batch, heads = call.q.shape[:2]

        def for_each_head(x: Tensor, first: int) -> Tensor:
            """(b, H or 1, ...) -> all dimensions before the given one as one."""
            return x.expand(batch, heads, *x.shape[2:]).flatten(0, first - 1)

        tokens = (for_each_head(x, 3) for x in (pairs, reach[..., None], kept[..., None]))
        steps = chain.diagonal(-1, dim1=-2, dim2=-1)[..., None]
        # row i: what the state at boundary i has of the incoming one, and of each chunk's own sum
        chained = chain[..., :-1, 1:], chain[..., :-1, :1], chain[..., -1:, 1:].mT, steps
        return cls(*tokens, *(for_each_head(x, 2) for x in chained))

    @cached_property
    def reversed(self) -> Weights:
        """The transpose: it passes gradients from later to earlier."""
        return Weights(
            self.pairs.mT, self.kept, self.reach, self.between.mT, self.leave, self.enter, self.steps, last=0
        )

    def before(self, carry: Tensor, own: Tensor, out: Tensor) -> Tensor:
        """The state before each chunk, (R, n, X), from the one before the block (R, X) and the chunks' own sums."""
        if self.enter is None:
            return torch.baddbmm(carry[:, None], self.between, own, out=out)
        return torch.mul(self.enter, carry[:, None], out=out).baddbmm_(self.between, own)

    def after(self, before: Tensor, own: Tensor, out: Tensor) -> Tensor:
        """The state after the block, (R, X): that before the last chunk, and the chunk's own."""
        before, own = before[:, self.last], own[:, self.last]
        if self.steps is None:
            return torch.add(before, own, out=out)
        return torch.addcmul(own, self.steps[:, self.last], before, out=out)


def scaled(x: Tensor, weight: Tensor | None, out: Tensor | None) -> Tensor:
    """weight ∘ x, or x itself where nothing is forgotten."""
    return x if weight is None else torch.mul(x, weight, out=out)
