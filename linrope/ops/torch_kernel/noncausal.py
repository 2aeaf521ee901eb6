"""Attention to all keys, earlier and later ones alike, in time and memory linear in the length.

Without a causal order there are no pair weights: the state of all keys is summed block by block, then every query reads
it. For sequences shorter than the head the other order of the same product, `(q kᵀ) v`, costs less; the definition is
that product, and opt_einsum orders it as the sizes ask. Packed documents are taken out of their rows and attended one
after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from linrope.errors import InputError
from linrope.ops.call import Inputs
from linrope.ops.reference import reference_attention, without_signed
from linrope.ops.state import State
from linrope.ops.torch_kernel.blocks import Call, Gradients, Saved, Tokens, divide, load_features, pull_features
from linrope.ops.torch_kernel.memory import Pool


def by_document(inputs: Inputs, operator: Callable) -> tuple[Tensor, State]:
    """(o, final state) of one call with `causal=False`; `operator` is what attends to one document of long rows."""
    if inputs.settings.documents is None:
        return _one_document(inputs, operator)
    rows = [_documents_apart(row, operator) for row in _rows(inputs)]
    o = torch.cat([o for o, _ in rows])
    finals = [final for _, final in rows]
    stacked = {name: torch.cat([final.tensors[name] for final in finals]) for name in finals[0].tensors}
    return o, State(length=finals[0].length, **{**stacked, "log_decay": inputs.final_log_decay()})


def _one_document(inputs: Inputs, operator: Callable) -> tuple[Tensor, State]:
    queries, features = inputs.q.shape[2:]
    keys, width = inputs.v.shape[2:]
    quadratic_is_less = queries * keys * (features + width) <= (queries + keys) * features * width
    return reference_attention(inputs) if quadratic_is_less else operator(inputs)


def _rows(inputs: Inputs) -> list[Inputs]:
    """The batch as calls of one row each (`split`, whose backward is one concatenation)."""
    settings, batch = inputs.settings, inputs.q.shape[0]
    masks = [None] * batch if settings.key_mask is None else settings.key_mask.split(1)
    states = [None] * batch if inputs.state is None else _split_state(inputs.state)
    return [
        replace(inputs, q=q, k=k, v=v, state=state, settings=replace(settings, key_mask=mask, documents=documents))
        for q, k, v, state, mask, documents in zip(
            inputs.q.split(1), inputs.k.split(1), inputs.v.split(1), states, masks, settings.documents.split(1)
        )
    ]


def _split_state(state: State) -> list[State]:
    pieces = zip(*(tensor.split(1) for tensor in state.tensors.values()))
    return [State(length=state.length, **dict(zip(state.tensors, piece))) for piece in pieces]


def _documents_apart(row: Inputs, operator: Callable) -> tuple[Tensor, State]:
    """One row's documents, each attended by itself at its place in the row; the past belongs to the first."""
    if torch.compiler.is_compiling():
        raise InputError("segment_ids with causal=False decide how much there is to do: call it outside of a graph.")
    settings = row.settings
    lengths = settings.documents[0].unique_consecutive(return_counts=True)[1].tolist()
    masks = [None] * len(lengths) if settings.key_mask is None else settings.key_mask.split(lengths, dim=1)
    outputs, start, state = [], settings.start, row.state
    pieces = zip(*(x.split(lengths, dim=2) for x in (row.q, row.k, row.v)), masks)
    for q, k, v, mask in pieces:
        alone = replace(settings, key_mask=mask, documents=None, start=start)
        o, final = _one_document(replace(row, q=q, k=k, v=v, state=state, settings=alone), operator)
        outputs.append(o)
        start, state = final.length, None
    return torch.cat(outputs, dim=2), final


class Loaded(NamedTuple):
    """One block of queries or keys."""

    features: Tokens  # φ(x)
    slope: Tokens
    turned: Tokens  # φ(x), turned
    product: Tensor  # (R, t, D): the same as it enters products
    turn: Tensor | None


@dataclass(frozen=True)
class Side:
    """The queries, or the keys, of some rows: their features block by block. R = b·h."""

    call: Call
    pool: Pool
    name: str
    tokens: int  # of a block

    def blocks(self, x: Tensor) -> Iterator[tuple[int, slice]]:
        for index, start in enumerate(range(0, x.shape[2], self.tokens)):
            yield index, slice(start, min(start + self.tokens, x.shape[2]))

    def buffer(self, name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tokens:
        return Tokens(self.pool(name, like.shape, dtype or self.call.dtype), 1, like.shape[2])

    def hidden(self, span: slice) -> Tensor | None:
        mask = self.call.key_mask
        return None if mask is None or self.name == "q" else ~mask[:, None, span, None]

    def load(self, x: Tensor, index: int, span: slice) -> Loaded:
        rotations, hidden = self.call.rotations, self.hidden(span)
        features, slope = self.buffer("features", x), self.buffer("slope", x)
        load_features(self.call.phi, x, features.rows, slope.rows, hidden)
        if hidden is not None:
            features.rows.masked_fill_(hidden, 0)  # φ(0) is not 0
        turned, turn = features, None
        if rotations is not None:
            turn = rotations.of_block(index, x.shape[2])
            turned = features.rotated(turn, rotations.interleaved, out=self.buffer("turned", x))
        return Loaded(features, slope, turned, self.low(turned, "turned low").chunks, turn)

    def low(self, x: Tokens, name: str) -> Tokens:
        if self.call.product_dtype == self.call.dtype:
            return x
        return self.buffer(name, x.rows, self.call.product_dtype).filled(x)

    def values(self, span: slice) -> Tensor:
        """v (R, t, E) as it enters products."""
        v, hidden = self.call.v[:, :, span], self.hidden(span)
        into = self.buffer("v", v, self.call.product_dtype)
        into.rows.copy_(v)
        if hidden is not None:
            into.rows.masked_fill_(hidden, 0)
        return into.chunks

    def pull(self, grad: Tokens, x: Loaded, shift: Tensor, out: Tensor) -> None:
        """From the gradient of the turned features, and what is to be added to that of the plain ones, to that of x."""
        plain = self.buffer("plain", grad.rows)
        if x.turn is None:
            plain.rows.copy_(grad.rows)
        else:
            source = self.buffer("high", grad.rows).filled(grad) if grad.rows.dtype != self.call.dtype else grad
            source.rotated(x.turn.conj_physical(), self.call.rotations.interleaved, out=plain)
        plain.rows.add_(shift)
        pull_features(self.call.phi, plain.rows, x.features.rows, x.slope.rows, out=out)


def forward(call: Call, tokens: int, saved: Saved, pool: Pool) -> None:
    """Write o, den and the state of some rows, in blocks of so many tokens."""
    o, den, kv, k_sum = saved.o, saved.den, saved.kv_at[1], saved.k_sum_at[1]
    kv.copy_(saved.kv_at[0])
    k_sum.copy_(saved.k_sum_at[0])
    state, keys, queries = kv.view(-1, *kv.shape[2:]), Side(call, pool, "k", tokens), Side(call, pool, "q", tokens)
    for index, span in keys.blocks(call.k):
        k = keys.load(call.k[:, :, span], index, span)
        state += torch.bmm(keys.values(span).mT, k.product)
        k_sum[..., call.signed :] += k.features.rows[..., call.signed :].sum(dim=2)
    read = state.mT.to(call.product_dtype)
    for index, span in queries.blocks(call.q):
        q = queries.load(call.q[:, :, span], index, span)
        into = queries.buffer("num", o[:, :, span], call.product_dtype)
        torch.bmm(q.product, read, out=into.chunks)
        if call.plain:
            total = den[:, :, span, None]
            product = q.features.rows.mul_(k_sum[:, :, None])[..., call.signed :]
            torch.sum(product, dim=-1, keepdim=True, out=total).add_(call.eps)
            divide(into.rows, total, o[:, :, span], pool)
        else:
            o[:, :, span].copy_(into.rows)


def backward(call: Call, tokens: int, saved: Saved, grads: Gradients, pool: Pool) -> None:
    """Write the gradients of some rows: the state's sums over all queries before any key reads it."""
    _through_queries(Side(call, pool, "q", tokens), saved, grads)
    _through_keys(Side(call, pool, "k", tokens), grads)


def _through_queries(queries: Side, saved: Saved, grads: Gradients) -> None:
    """∂q, and what the queries add to the gradients of the state: ∂num = g / den and ∂den = -(∂numᵀ o)."""
    call, k_sum = queries.call, saved.k_sum_at[1]
    state = saved.kv_at[1].flatten(0, 1).to(call.product_dtype)
    d_state = grads.d_kv.view(state.shape)
    for index, span in queries.blocks(call.q):
        grad_o = grads.grad_o[:, :, span]
        q = queries.load(call.q[:, :, span], index, span)
        d_num = queries.buffer("d_num", grad_o, call.product_dtype)
        shift = q.features.rows.new_zeros(())
        if call.plain:
            divide(grad_o, saved.den[:, :, span, None], d_num.rows, queries.pool)
            d_den = (d_num.rows * saved.o[:, :, span]).sum(dim=-1, keepdim=True, dtype=call.dtype).neg_()
            grads.d_k_sum[..., call.signed :].add_((q.features.rows[..., call.signed :] * d_den).sum(dim=2))
            shift = d_den * without_signed(k_sum, call.signed)[:, :, None]
        else:
            d_num.rows.copy_(grad_o)
        d_state += torch.bmm(d_num.chunks.mT, q.product)
        grad = queries.buffer("grad", call.q[:, :, span], call.product_dtype)
        torch.bmm(d_num.chunks, state, out=grad.chunks)
        if grads.d_theta is not None:
            grads.d_theta.add(span.start, q.turned.rows, grad.rows.to(call.dtype))
        queries.pull(grad, q, shift, grads.dq[:, :, span])


def _through_keys(keys: Side, grads: Gradients) -> None:
    """∂k and ∂v, from the state's whole gradient."""
    call = keys.call
    d_state = grads.d_kv.flatten(0, 1).to(call.product_dtype)
    d_k_sum = without_signed(grads.d_k_sum, call.signed)[:, :, None]
    for index, span in keys.blocks(call.k):
        k = keys.load(call.k[:, :, span], index, span)
        grad = keys.buffer("grad", call.k[:, :, span], call.product_dtype)
        torch.bmm(keys.values(span), d_state, out=grad.chunks)
        dv = keys.buffer("num", call.v[:, :, span], call.product_dtype)
        torch.bmm(k.product, d_state.mT, out=dv.chunks)
        grads.dv[:, :, span].copy_(dv.rows)
        if grads.d_theta is not None:
            grads.d_theta.add(span.start, k.turned.rows, grad.rows.to(call.dtype))
        keys.pull(grad, k, d_k_sum, grads.dk[:, :, span])
        hidden = keys.hidden(span)
        if hidden is not None:
            grads.dk[:, :, span].masked_fill_(hidden, 0)
            grads.dv[:, :, span].masked_fill_(hidden, 0)
