"""The backends by name, and the work that the linear ones share: from a checked `Call` to outputs and state.

A kernel is given causal calls, and calls to all keys of one document. Other calls are reduced to those here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from linrope.errors import InputError
from linrope.ops import registration
from linrope.ops.call import Call
from linrope.ops.cpu_kernel import kernel as cpu_kernel
from linrope.ops.reference import reference_attention
from linrope.ops.state import State
from linrope.ops.torch_kernel.kernel import one_token
from linrope.ops.triton_kernel import launch as triton_kernel
from linrope.ops.triton_kernel import self_check


def _why_not_triton(call: Call) -> str | None:
    return triton_kernel.why_not(call) or self_check.why_wrong(call, needs_gradient(call))


Operator = Callable[[Call], tuple[Tensor, State]]
WHY_NOT: dict[str, Callable[[Call], str | None]] = {
    "chunked": lambda call: None,
    "cpu": cpu_kernel.why_not,
    "triton": _why_not_triton,
}
"""The reason why a linear backend cannot take a call; None if it can."""


def _checked(call: Call, backend: str) -> tuple[Tensor, State]:
    if reason := WHY_NOT[backend](call):
        raise InputError(f"backend={backend!r} cannot take this call: {reason}; choose 'auto' or 'chunked'.")
    return linear(call, backend)


def linear(call: Call, backend: str) -> tuple[Tensor, State]:
    """(o, final state) of one call that the backend can take, in time and memory linear in the length."""
    if call.is_empty:
        return reference_attention(call)
    return _rotary_denominator(call, partial(_any_order, backend=backend))


BACKENDS: dict[str, Operator] = {
    "reference": reference_attention,
    "chunked": partial(_checked, backend="chunked"),
    "cpu": partial(_checked, backend="cpu"),
    "triton": partial(_checked, backend="triton"),
}


def _rotary_denominator(call: Call, operator: Operator) -> tuple[Tensor, State]:
    """`normalize="rotary"`: its denominator is one more value column, of ones: Σ_j w_ij q̃ᵀk̃ · 1."""
    if call.normalize != "rotary":
        return operator(call)
    v = torch.nn.functional.pad(call.v.to(call.dtype), (0, 1), value=1)
    past = call.state
    if past is not None:
        past = replace(past, kv=torch.cat((past.kv, past.k_rotated_sum[..., None]), dim=-1), k_rotated_sum=None)
    both, final = operator(replace(call, v=v, state=past, normalize="none"))
    num, den = both[..., :-1], both[..., -1:]
    o = num / (den + den.new_tensor(call.eps).copysign(den))  # ε never moves a negative one towards 0
    final = replace(final, kv=final.kv[..., :-1], k_rotated_sum=final.kv[..., -1])
    return o.to(call.v.dtype), final


def _any_order(call: Call, backend: str) -> tuple[Tensor, State]:
    """Causal or not, with a denominator of plain features or none."""
    if not call.causal:
        return _by_document(call, backend)
    if call.q.shape[2] == 1 and backend != "chunked" and not needs_gradient(call):
        return registration.one_token(call, backend)
    if call.q.shape[2] == 1 and backend != "triton":
        return one_token(call)
    return registration.operator(call, backend)


def needs_gradient(call: Call) -> bool:
    """Whether autograd follows the call."""
    past = () if call.state is None else call.state.tensors.values()
    tensors = call.q, call.k, call.v, call.log_decay, call.theta, *past
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


# --- all keys, earlier and later ones --------------------------------------------------------------------------------


SHORT = 64
"""Tokens of a document up to which pairs take less time than the kernel."""
TOGETHER = 512
"""Tokens of several such documents, filled up to the longest one, that are computed together: calls take time too."""


def _by_document(call: Call, backend: str) -> tuple[Tensor, State]:
    """`causal=False`: each long document of each row is a call of its own, short ones share one."""
    if call.documents is None or call.documents.is_meta:  # on meta documents have no numbers, and they change no shape
        return _all_keys(replace(call, documents=None), backend)
    if torch.compiler.is_compiling():
        raise InputError("segment_ids with causal=False decide the amount of work: call it outside of a graph.")
    registration.refuse_transforms(backend, call.q, call.k, call.v, call.documents)  # the numbers of documents
    rows = [_documents_of(row, backend) for row in _rows(call)]
    o = torch.cat([o for o, _ in rows])
    finals = [final for _, final in rows]
    stacked = {name: torch.cat([final.tensors[name] for final in finals]) for name in finals[0].tensors}
    return o, State(length=finals[0].length, **{**stacked, "log_decay": call.final_log_decay()})


def _all_keys(call: Call, backend: str) -> tuple[Tensor, State]:
    """One document: (q kᵀ) v if it is short, which the definition computes, else q (kᵀ v) by the kernel."""
    queries, features = call.q.shape[2:]
    keys, width = call.v.shape[2:]
    # a graph for any length takes the kernel, and is not held to the lengths on the example's side
    quadratic_is_less = queries * keys * (features + width) <= (queries + keys) * features * width
    if statically_known_true(quadratic_is_less):
        return reference_attention(call)
    return registration.operator(call, backend)


def _rows(call: Call) -> list[Call]:
    """One call for each row (`split`, whose backward is one concatenation)."""
    batch = call.q.shape[0]
    masks = [None] * batch if call.key_mask is None else call.key_mask.split(1)
    states = [None] * batch
    if call.state is not None:
        by_row = zip(*(tensor.split(1) for tensor in call.state.tensors.values()))
        states = [State(length=call.state.length, **dict(zip(call.state.tensors, row))) for row in by_row]
    return [
        replace(call, q=q, k=k, v=v, state=state, key_mask=mask, documents=documents)
        for q, k, v, state, mask, documents in zip(
            call.q.split(1), call.k.split(1), call.v.split(1), states, masks, call.documents.split(1)
        )
    ]


def _documents_of(row: Call, backend: str) -> tuple[Tensor, State]:
    """One row's documents, each at its position in the row; the past belongs to the first."""
    documents = row.documents[0].unique_consecutive(return_counts=True)[1].tolist()
    parts = _together(documents, first_alone=row.state is not None, last_alone=row.returns_state)
    lengths = [sum(part) for part in parts]
    masks = [None] * len(lengths) if row.key_mask is None else row.key_mask.split(lengths, dim=1)
    outputs, start, state = [], row.start, row.state
    for part, q, k, v, mask in zip(parts, *(x.split(lengths, dim=2) for x in (row.q, row.k, row.v)), masks):
        call = replace(row, q=q, k=k, v=v, key_mask=mask, documents=None, start=start, state=state)
        o, final = _all_keys(call, backend) if len(part) == 1 else _as_rows(call, part)
        outputs.append(o)
        start, state = start + sum(part), None
    return torch.cat(outputs, dim=2), replace(final, length=start)


def _together(lengths: list[int], first_alone: bool, last_alone: bool) -> list[list[int]]:
    """Lengths of documents, in parts of one or of several short ones."""
    parts: list[list[int]] = []
    for number, length in enumerate(lengths):
        part = parts[-1] if parts else []
        longest = max([*part, length])
        alone = (first_alone and number <= 1) or (last_alone and number == len(lengths) - 1)
        if alone or not part or longest > SHORT or (len(part) + 1) * longest > TOGETHER:
            parts.append([length])
        else:
            part.append(length)
    return parts


def _as_rows(call: Call, lengths: list[int]) -> tuple[Tensor, State]:
    """Outputs of short documents of one row, each a row of its own; the state is that of the last, from position 0.

    Rows are filled up with their last token. All begin at position 0: weights depend on distances alone.
    """
    tokens = torch.arange(max(lengths), device=call.q.device)
    counts = torch.tensor(lengths, device=call.q.device)[:, None]
    index = counts.cumsum(0) - counts + torch.minimum(tokens, counts - 1)  # (documents, tokens of the longest)
    inside = tokens < counts

    def rows(x: Tensor) -> Tensor:
        return x[0].index_select(1, index.flatten()).unflatten(1, index.shape).transpose(0, 1)

    q, k, v = rows(call.q), rows(call.k), rows(call.v)
    mask = inside if call.key_mask is None else inside & call.key_mask[0][index]
    o, states = reference_attention(replace(call, q=q, k=k, v=v, key_mask=mask, start=0))
    last = {name: tensor[-1:] for name, tensor in states.tensors.items()}
    return o.transpose(0, 1)[:, inside][None], replace(states, **last)
