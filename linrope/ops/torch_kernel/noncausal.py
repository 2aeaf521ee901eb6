"""The kernel for attention to all keys, earlier and later ones, linear in the length.

Without an order there are no weights of pairs: the state of all keys is summed block by block, then every query reads
it. The backward sums the state's gradient over all queries before any key reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from linrope.ops.call import Call
from linrope.ops.torch_kernel.buffers import Gradients, Saved, Tokens, divide, load_features, vjp_features
from linrope.ops.torch_kernel.plan import Plan


class Loaded(NamedTuple):
    """One block of queries or keys."""

    features: Tokens  # φ(x)
    derivative: Tokens
    rotated: Tokens  # φ(x), rotated
    product: Tensor  # (R, t, D): the same in the dtype of products
    rotation: Tensor | None


@dataclass(frozen=True)
class Side:
    """The queries, or the keys, of some rows: their features block by block. R = b·h."""

    call: Call
    plan: Plan
    name: str

    def blocks(self, x: Tensor) -> Iterator[tuple[int, slice]]:
        for index, start in enumerate(range(0, x.shape[2], self.plan.partition.tokens)):
            yield index, slice(start, min(start + self.plan.partition.tokens, x.shape[2]))

    def buffer(self, name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tokens:
        return Tokens(self.plan.pool(name, like.shape, dtype or self.call.dtype), 1, like.shape[2])

    def hidden(self, block: slice) -> Tensor | None:
        mask = self.call.key_mask if self.name == "k" else None
        return None if mask is None else ~mask[:, None, block, None]

    def load(self, x: Tensor, index: int, block: slice) -> Loaded:
        rotations, hidden = self.plan.rotations, self.hidden(block)
        features, derivative = self.buffer("features", x), self.buffer("derivative", x)
        load_features(self.call.phi, x, features.rows, derivative.rows, hidden)
        if hidden is not None:
            features.rows.masked_fill_(hidden, 0)  # φ(0) is not 0
        rotated, rotation = features, None
        if rotations is not None:
            rotation = rotations.of_block(index, x.shape[2])
            rotated = features.rotated(rotation, rotations.interleaved, out=self.buffer("rotated", x))
        return Loaded(features, derivative, rotated, self.low(rotated, "rotated low").chunks, rotation)

    def low(self, x: Tokens, name: str) -> Tokens:
        if self.plan.product_dtype == self.call.dtype:
            return x
        return self.buffer(name, x.rows, self.plan.product_dtype).filled(x)

    def values(self, block: slice) -> Tensor:
        """v (R, t, E) in the dtype of products."""
        v, hidden = self.call.v[:, :, block], self.hidden(block)
        into = self.buffer("v", v, self.plan.product_dtype)
        into.rows.copy_(v)
        if hidden is not None:
            into.rows.masked_fill_(hidden, 0)
        return into.chunks

    def vjp(self, grad: Tokens, x: Loaded, shift: Tensor, out: Tensor) -> None:
        """From the gradient of the rotated features, and the plain ones' gradient `shift`, to that of x."""
        plain = self.buffer("plain", grad.rows)
        if x.rotation is None:
            plain.rows.copy_(grad.rows)
        else:
            source = self.buffer("high", grad.rows).filled(grad) if grad.rows.dtype != self.call.dtype else grad
            source.rotated(x.rotation.conj_physical(), self.plan.rotations.interleaved, out=plain)
        plain.rows.add_(shift)
        vjp_features(self.call.phi, plain.rows, x.features.rows, x.derivative.rows, out=out)


def forward(call: Call, plan: Plan, saved: Saved) -> None:
    """Write o, den and the state of some rows."""
    o, den, kv, k_sum = saved.o, saved.den, saved.kv_at[1], saved.k_sum_at[1]
    kv.copy_(saved.kv_at[0])
    k_sum.copy_(saved.k_sum_at[0])
    state, keys, queries = kv.view(-1, *kv.shape[2:]), Side(call, plan, "k"), Side(call, plan, "q")
    for index, block in keys.blocks(call.k):
        k = keys.load(call.k[:, :, block], index, block)
        state += torch.bmm(keys.values(block).mT, k.product)
        k_sum[..., call.signed :] += k.features.rows[..., call.signed :].sum(dim=2)
    read = state.mT.to(plan.product_dtype)
    for index, block in queries.blocks(call.q):
        q = queries.load(call.q[:, :, block], index, block)
        into = queries.buffer("num", o[:, :, block], plan.product_dtype)
        torch.bmm(q.product, read, out=into.chunks)
        if call.plain:
            total = den[:, :, block, None]
            product = q.features.rows.mul_(k_sum[:, :, None])[..., call.signed :]
            torch.sum(product, dim=-1, keepdim=True, out=total).add_(call.eps)
            divide(into.rows, total, o[:, :, block], plan.pool)
        else:
            o[:, :, block].copy_(into.rows)


def backward(call: Call, plan: Plan, saved: Saved, grads: Gradients) -> None:
    """Write the gradients of some rows."""
    _through_queries(Side(call, plan, "q"), saved, grads)
    _through_keys(Side(call, plan, "k"), grads)


def _through_queries(queries: Side, saved: Saved, grads: Gradients) -> None:
    """∂q, and the gradients of the state: ∂num = g / den and ∂den = -(∂numᵀ o)."""
    call, plan, k_sum = queries.call, queries.plan, saved.k_sum_at[1]
    state = saved.kv_at[1].flatten(0, 1).to(plan.product_dtype)
    d_state = grads.d_kv.view(state.shape)
    for index, block in queries.blocks(call.q):
        grad_o = grads.grad_o[:, :, block]
        q = queries.load(call.q[:, :, block], index, block)
        d_num = queries.buffer("d_num", grad_o, plan.product_dtype)
        shift = q.features.rows.new_zeros(())
        if call.plain:
            divide(grad_o, saved.den[:, :, block, None], d_num.rows, queries.plan.pool)
            d_den = (d_num.rows * saved.o[:, :, block]).sum(dim=-1, keepdim=True, dtype=call.dtype).neg_()
            grads.d_k_sum[..., call.signed :].add_((q.features.rows[..., call.signed :] * d_den).sum(dim=2))
            shift = d_den * call.without_signed(k_sum)[:, :, None]
        else:
            d_num.rows.copy_(grad_o)
        d_state += torch.bmm(d_num.chunks.mT, q.product)
        grad = queries.buffer("grad", call.q[:, :, block], plan.product_dtype)
        torch.bmm(d_num.chunks, state, out=grad.chunks)
        if grads.d_theta is not None:
            grads.d_theta.add(block.start, q.rotated.rows, grad.rows.to(call.dtype))
        queries.vjp(grad, q, shift, grads.dq[:, :, block])


def _through_keys(keys: Side, grads: Gradients) -> None:
    """∂k and ∂v, from the gradient of the state."""
    call, plan = keys.call, keys.plan
    d_state = grads.d_kv.flatten(0, 1).to(plan.product_dtype)
    d_k_sum = call.without_signed(grads.d_k_sum)[:, :, None]
    for index, block in keys.blocks(call.k):
        k = keys.load(call.k[:, :, block], index, block)
        grad = keys.buffer("grad", call.k[:, :, block], plan.product_dtype)
        torch.bmm(keys.values(block), d_state, out=grad.chunks)
        dv = keys.buffer("num", call.v[:, :, block], plan.product_dtype)
        torch.bmm(k.product, d_state.mT, out=dv.chunks)
        grads.dv[:, :, block].copy_(dv.rows)
        if grads.d_theta is not None:
            grads.d_theta.add(block.start, k.rotated.rows, grad.rows.to(call.dtype))
        keys.vjp(grad, k, d_k_sum, grads.dk[:, :, block])
        hidden = keys.hidden(block)
        if hidden is not None:
            grads.dk[:, :, block].masked_fill_(hidden, 0)
            grads.dv[:, :, block].masked_fill_(hidden, 0)
