"""The kernel for attention to all keys, earlier and later ones, linear in the length.

Without an order there are no weights of pairs: the state of all keys is summed block by block, then every query reads
it. The backward sums the state's gradient over all queries before any key reads it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linrope.ops.call import Call
from linrope.ops.torch_kernel.buffers import Gradients, Saved, Tokens, divide, load_features, vjp_features
from linrope.ops.torch_kernel.plan import Block, Plan


class Rows:
    """One block of queries or of keys x (b, h, T, D), those with a mask: their features, in buffers. R = b·h."""

    def __init__(self, call: Call, plan: Plan, block: Block, x: Tensor, mask: Tensor | None = None):
        self.call, self.plan, self.block, x = call, plan, block, block.of(x)
        self.hidden = None if mask is None else ~block.of(mask[:, None])[..., None]
        self.features, self.derivative = self.buffer("features", x), self.buffer("derivative", x)
        load_features(call.phi, x, self.features.rows, self.derivative.rows, self.hidden)
        self.hide(self.features.rows)  # φ(0) is not 0
        self.rotated = self.features
        if plan.rotations is not None:
            self.rotation = plan.rotations.of_block(block.index, block.chunk)
            self.rotated = self.buffer("rotated", x)
            self.features.rotated(self.rotation, plan.rotations.interleaved, out=self.rotated)
        low = plan.product_dtype != call.dtype
        product = self.product_buffer("rotated low", x).filled(self.rotated) if low else self.rotated
        self.product = product.chunks  # (R, t, D): the rotated features in the dtype of products

    def buffer(self, name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tokens:
        return Tokens(self.plan.pool(name, like.shape, dtype or self.call.dtype), 1, like.shape[2])

    def product_buffer(self, name: str, like: Tensor) -> Tokens:
        return self.buffer(name, like, self.plan.product_dtype)

    def hide(self, *tensors: Tensor) -> None:
        """0 where masked."""
        if self.hidden is not None:
            for x in tensors:
                x.masked_fill_(self.hidden, 0)

    def values(self) -> Tensor:
        """v (R, t, E) in the dtype of products."""
        v = self.block.of(self.call.v)
        into = self.product_buffer("v", v)
        into.rows.copy_(v)
        self.hide(into.rows)
        return into.chunks

    def vjp(self, factor: Tensor, state: Tensor, shift: Tensor, grads: Gradients, out: Tensor) -> None:
        """∂x into out: the rotated features have the gradient factor · state, the plain ones `shift` more."""
        grad = self.product_buffer("grad", self.features.rows)
        torch.bmm(factor, state, out=grad.chunks)
        if grads.d_theta is not None:
            grads.d_theta.add(self.block.start, self.rotated.rows, grad.rows.to(self.call.dtype))
        plain = self.buffer("plain", grad.rows)
        if self.plan.rotations is None:
            plain.rows.copy_(grad.rows)
        else:
            source = self.buffer("high", grad.rows).filled(grad) if grad.rows.dtype != self.call.dtype else grad
            source.rotated(self.rotation.conj_physical(), self.plan.rotations.interleaved, out=plain)
        plain.rows.add_(shift)
        vjp_features(self.call.phi, plain.rows, self.features.rows, self.derivative.rows, out=self.block.of(out))


def forward(call: Call, plan: Plan, saved: Saved) -> None:
    """Write o, den and the state of some rows."""
    kv, k_sum = saved.kv_at[1], saved.k_sum_at[1]
    kv.copy_(saved.kv_at[0])
    k_sum.copy_(saved.k_sum_at[0])
    state = kv.view(-1, *kv.shape[2:])
    for block in plan.partition.blocks(call.k.shape[2], causal=False):
        k = Rows(call, plan, block, call.k, call.key_mask)
        state += torch.bmm(k.values().mT, k.product)
        k_sum[..., call.signed :] += k.features.rows[..., call.signed :].sum(dim=2)
    read = state.mT.to(plan.product_dtype)
    for block in plan.partition.blocks(call.q.shape[2], causal=False):
        q, o = Rows(call, plan, block, call.q), block.of(saved.o)
        num = q.product_buffer("num", o)
        torch.bmm(q.product, read, out=num.chunks)
        if call.plain:
            total = block.of(saved.den)[..., None]
            product = q.features.rows.mul_(k_sum[:, :, None])[..., call.signed :]
            torch.sum(product, dim=-1, keepdim=True, out=total).add_(call.eps)
            divide(num.rows, total, o, plan.pool)
        else:
            o.copy_(num.rows)


def backward(call: Call, plan: Plan, saved: Saved, grads: Gradients) -> None:
    """Write the gradients of some rows: first ∂q and the gradients of the state, then ∂k and ∂v from these."""
    state = saved.kv_at[1].flatten(0, 1).to(plan.product_dtype)
    d_state = grads.d_kv.view(state.shape)
    for block in plan.partition.blocks(call.q.shape[2], causal=False):
        q, grad_o = Rows(call, plan, block, call.q), block.of(grads.grad_o)
        d_num = q.product_buffer("d_num", grad_o)
        shift = q.features.rows.new_zeros(())
        if call.plain:  # ∂num = g / den and ∂den = -(∂numᵀ o)
            divide(grad_o, block.of(saved.den)[..., None], d_num.rows, plan.pool)
            d_den = (d_num.rows * block.of(saved.o)).sum(dim=-1, keepdim=True, dtype=call.dtype).neg_()
            grads.d_k_sum[..., call.signed :].add_((q.features.rows[..., call.signed :] * d_den).sum(dim=2))
            shift = d_den * call.without_signed(saved.k_sum_at[1])[:, :, None]
        else:
            d_num.rows.copy_(grad_o)
        d_state += torch.bmm(d_num.chunks.mT, q.product)
        q.vjp(d_num.chunks, state, shift, grads, grads.dq)

    d_state = d_state.to(plan.product_dtype)
    d_k_sum = call.without_signed(grads.d_k_sum)[:, :, None]
    for block in plan.partition.blocks(call.k.shape[2], causal=False):
        k, dk, dv = Rows(call, plan, block, call.k, call.key_mask), block.of(grads.dk), block.of(grads.dv)
        num = k.product_buffer("num", dv)
        torch.bmm(k.product, d_state.mT, out=num.chunks)
        dv.copy_(num.rows)
        k.vjp(k.values(), d_state, d_k_sum, grads, grads.dk)
        k.hide(dk, dv)
