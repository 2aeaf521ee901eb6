"""Decay weights between tokens and between chunks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from linrope.feature_maps import exp_below_zero
from linrope.ops.call import Call
from linrope.ops.torch_kernel.plan import Block


@dataclass(frozen=True)
class DecayWeights:
    """Decay weights between tokens and between chunks: M chunks of c tokens in all, n of them in each of R heads.

    Without decay the optional ones are None, which stands for ones, and `pairs` is one triangle for all chunks.
    """

    pairs: Tensor  # M (M, c, c): from key p' to query p
    reach: Tensor | None  # a (M, c, 1): from the state before the chunk to query p
    kept: Tensor | None  # b (M, c, 1): from key p to the state after the chunk
    between: Tensor  # (R, n, n): from a chunk's own sum to the state before a later chunk
    enter: Tensor | None  # (R, n, 1): from the state before the block to the one before a chunk
    leave: Tensor | None  # (R, n, 1): from a chunk's own sum to the state after the block
    steps: Tensor | None  # (R, n, 1): from the state before a chunk to the one after it
    last: int = -1  # the chunk whose end is the block's: 0 in the backward

    @classmethod
    def constant(cls, rows: int, n: int, c: int, dtype: torch.dtype, device: torch.device) -> DecayWeights:
        """Without decay."""
        ones = torch.ones(max(n, c), max(n, c), dtype=dtype, device=device)
        pairs, between = ones[:c, :c].tril(), ones[:n, :n].tril(-1)
        return cls(pairs.expand(rows * n, c, c), None, None, between.expand(rows, n, n), None, None, None)

    @classmethod
    def decaying(cls, call: Call, block: Block, n: int, c: int, pairs: Tensor) -> DecayWeights:
        """exp of differences of running sums, and 0 between documents.

        The sums are float64: with strong decays a chunk's sum is in the thousands, where float32 loses differences near
        0. Float64 would be slow for all pairs, so they use each sum as two float32: rounded, and the rest.

        Args:
            pairs: (b, H or 1, n, c, c), the buffer to fill.
        """
        total = block.of(call.log_decay).unflatten(2, (n, c)).cumsum(dim=-1, dtype=torch.float64)
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
            document = block.of(call.documents[:, None]).unflatten(2, (n, c))
            # the document of the state at each boundary; before the first token it is that token's document
            before = call.documents[:, max(block.start - 1, 0)]
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
        # row i: the weights, in the state at boundary i, of the incoming state and of each chunk's own sum
        chained = chain[..., :-1, 1:], chain[..., :-1, :1], chain[..., -1:, 1:].mT, steps
        return cls(*tokens, *(for_each_head(x, 2) for x in chained))

    @cached_property
    def reversed(self) -> DecayWeights:
        """The transpose, for gradients, which pass from later to earlier."""
        return DecayWeights(
            self.pairs.mT, self.kept, self.reach, self.between.mT, self.leave, self.enter, self.steps, last=0
        )

    def before(self, carry: Tensor, own: Tensor, out: Tensor) -> Tensor:
        """The state before each chunk, (R, n, X), from the state before the block (R, X) and the chunks' own sums."""
        if self.enter is None:
            return torch.baddbmm(carry[:, None], self.between, own, out=out)
        return torch.mul(self.enter, carry[:, None], out=out).baddbmm_(self.between, own)

    def after(self, before: Tensor, own: Tensor, out: Tensor) -> Tensor:
        """The state after the block, (R, X), from that before the last chunk and the chunk's own sum."""
        before, own = before[:, self.last], own[:, self.last]
        if self.steps is None:
            return torch.add(before, own, out=out)
        return torch.addcmul(own, self.steps[:, self.last], before, out=out)
