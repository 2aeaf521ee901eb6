"""Health metrics of linear attention, computed from training steps."""

from __future__ import annotations

import torch
from torch import Tensor

from linrope.feature_maps import get_feature_map, skip_first
from linrope.ops.documents import number_documents
from linrope.profiling.hooks import OperatorCall

N_QUERIES, N_KEYS = 16, 256
"""Denominators are computed at 16 positions of a row, signs of weights between these and 256 keys."""


class LayerHealth:
    """Metrics of one layer in one step, from the first row of the batch and all of its segments.

    They stay tensors on the layer's device, so that collecting them does not wait for it.
    """

    def __init__(self) -> None:
        self.denominators: list[Tensor] = []
        self.signs: list[Tensor] = []  # (2,): number of negative weights, number of weights
        self.decays: list[Tensor] = []  # (H,)
        self.outputs: list[Tensor] = []
        self.state_norm, self.state_length = torch.zeros(()), -1

    def add(self, call: OperatorCall) -> None:
        """Collect the metrics of one call of the layer's operator."""
        rope, log_decay, ids = (call.options[name] for name in ("rope", "log_decay", "segment_ids"))
        length = call.q.shape[2]
        queries, keys = (_spread(length, n, call.q.device) for n in (N_QUERIES, N_KEYS))
        documents = None if ids is None else number_documents(ids[:1])[0]
        signed = 0 if rope is None else rope.signed_dim
        phi = skip_first(get_feature_map(call.options["feature_map"]), signed).forward
        q, k = phi(call.q[:1, :, queries].float()), phi(call.k[:1].float())
        rotated = (q, k[:, :, keys])
        if rope is not None:
            rotated = rope.rotate(q, positions=queries), rope.rotate(k[:, :, keys], positions=keys)
        negative = (rotated[0] @ rotated[1].mT)[0] < 0
        pairs = _visible(queries, keys, documents)
        self.signs.append(torch.stack([(negative & pairs).sum(), pairs.sum() * len(negative)]))
        if call.options["normalize"] == "plain":
            decay = None if log_decay is None else log_decay[0]
            state = call.options["state"]
            past = None if state is None else state.k_sum[0, :, signed:]
            self.denominators.append(
                _denominators(q[0, :, :, signed:], k[0, :, :, signed:], queries, decay, documents, past)
            )
        if log_decay is not None:
            self.decays.append(log_decay[0].float().mean(-1))
        self.outputs.append(call.o[0].abs().float().mean())
        if call.final.length > self.state_length:
            self.state_norm, self.state_length = call.final.kv[0].norm(), call.final.length

    def values(self) -> dict[str, Tensor]:
        """Scalars by name. Denominators and reach are omitted for layers without them."""
        found = {"output": torch.stack(self.outputs).mean(), "state_norm": self.state_norm}
        negative, pairs = torch.stack(self.signs).sum(0)
        found["negative_weights"] = negative / pairs
        if self.denominators:
            found["smallest_denominator"] = torch.cat([d.flatten() for d in self.denominators]).min()
        if self.decays:
            reach = -1 / torch.stack(self.decays).mean(0)
            found |= {f"reach/head{head}": tokens for head, tokens in enumerate(reach)}
        return found


def _denominators(
    q: Tensor, k: Tensor, queries: Tensor, log_decay: Tensor | None, documents: Tensor | None, past: Tensor | None
) -> Tensor:
    """Σ_j≤i e^(G_i - G_j) q_iᵀ k_j of features, (H, P) float32, at the positions `queries` (P,) of a row.

    q (H, P, D) are those at these positions, k (H, T, D) all keys, log_decay (H, T), documents (T,) their numbers, and
    past (H, D) the sum of the keys before the row.
    """
    every = torch.arange(k.shape[1], device=k.device)
    weights = q @ k.mT * _visible(queries, every, documents)
    reach = torch.ones((), device=q.device)
    if log_decay is not None:
        total = log_decay.double().cumsum(-1)
        exponent = total[:, queries, None] - total[:, None, :]
        weights = weights * exponent.clamp(max=0).exp().float()
        reach = total[:, queries].exp().float()
    found = weights.sum(-1)
    if past is not None:
        of_first = 1.0 if documents is None else (documents[queries] == 0).float()
        found = found + reach * of_first * torch.einsum("hpd,hd->hp", q, past.float())
    return found


def _spread(length: int, n: int, device: torch.device) -> Tensor:
    """Up to n positions of a row, evenly spaced from the first to the last."""
    return torch.linspace(0, length - 1, min(n, length), device=device).round().long()


def _visible(queries: Tensor, keys: Tensor, documents: Tensor | None) -> Tensor:
    """(P, S) booleans: keys at or before a query's position, in the same document."""
    visible = keys[None, :] <= queries[:, None]
    return visible if documents is None else visible & (documents[keys][None, :] == documents[queries][:, None])
