"""Attention to all keys, earlier and later ones alike, in time and memory linear in the length.

Without a causal order there are no pair weights, so the definition is one free product of q, k and v, and opt_einsum
orders it as the sizes ask: `q (kᵀ v)` for long sequences, `(q kᵀ) v` for short ones. Packed documents are taken out of
their rows and attended one after the other.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from linrope.ops.inputs import Inputs
from linrope.ops.reference import reference_attention
from linrope.ops.state import State


def noncausal_attention(inputs: Inputs) -> tuple[Tensor, State]:
    """(o, final state) of one call with `causal=False`."""
    if inputs.settings.documents is None or inputs.q.shape[0] == 0:
        return reference_attention(inputs)
    rows = [_documents_apart(row) for row in _rows(inputs)]
    o = torch.cat([o for o, _ in rows])
    finals = [final for _, final in rows]
    stacked = {name: torch.cat([final.tensors[name] for final in finals]) for name in finals[0].tensors}
    return o, State(length=finals[0].length, **{**stacked, "log_decay": inputs.final_log_decay()})


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


def _documents_apart(row: Inputs) -> tuple[Tensor, State]:
    """One row's documents, each attended by itself at its place in the row; the past belongs to the first."""
    settings = row.settings
    lengths = settings.documents[0].unique_consecutive(return_counts=True)[1].tolist()
    masks = [None] * len(lengths) if settings.key_mask is None else settings.key_mask.split(lengths, dim=1)
    outputs, start, state = [], settings.start, row.state
    pieces = zip(*(x.split(lengths, dim=2) for x in (row.q, row.k, row.v)), masks)
    for q, k, v, mask in pieces:
        alone = replace(settings, key_mask=mask, documents=None, start=start)
        o, final = reference_attention(replace(row, q=q, k=k, v=v, state=state, settings=alone))
        outputs.append(o)
        start, state = final.length, None
    return torch.cat(outputs, dim=2), final
