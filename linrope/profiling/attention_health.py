"""Signs of how a run's attention does, taken from the training steps themselves, and a word where one goes wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from linrope.feature_maps import get_feature_map, skip_first
from linrope.ops.documents import number_documents
from linrope.profiling.hooks import Seen

N_QUERIES, N_KEYS = 16, 256
"""Denominators are taken at so many places of a row, signs of weights between them and so many keys."""


class LayerHealth:
    """What was seen of one layer in one step, as tensors on its device: reading them would wait for it.

    Of the first row of the batch; of a row in segments every one counts.
    """

    def __init__(self) -> None:
        self.denominators: list[Tensor] = []
        self.signs: list[Tensor] = []  # (2,): negative weights, and all
        self.decays: list[Tensor] = []  # (H,)
        self.outputs: list[Tensor] = []
        self.state_norm, self.state_length = torch.zeros(()), -1

    def note(self, seen: Seen) -> None:
        rope, log_decay, ids = (seen.options[name] for name in ("rope", "log_decay", "segment_ids"))
        length = seen.q.shape[2]
        queries, keys = (_spread(length, n, seen.q.device) for n in (N_QUERIES, N_KEYS))
        documents = None if ids is None else number_documents(ids[:1])[0]
        signed = 0 if rope is None else rope.signed_dim
        phi = skip_first(get_feature_map(seen.options["feature_map"]), signed).forward
        q, k = phi(seen.q[:1, :, queries].float()), phi(seen.k[:1].float())
        turned = (q, k[:, :, keys])
        if rope is not None:
            turned = rope.rotate(q, positions=queries), rope.rotate(k[:, :, keys], positions=keys)
        negative = (turned[0] @ turned[1].mT)[0] < 0
        pairs = _visible(queries, keys, documents)
        self.signs.append(torch.stack([(negative & pairs).sum(), pairs.sum() * len(negative)]))
        if seen.options["normalize"] == "plain":
            decay = None if log_decay is None else log_decay[0]
            past = None if seen.options["state"] is None else seen.options["state"].k_sum[0]
            self.denominators.append(
                denominators(q[0, :, :, signed:], k[0, :, :, signed:], queries, decay, documents, _from(past, signed))
            )
        if log_decay is not None:
            self.decays.append(log_decay[0].float().mean(-1))
        self.outputs.append(seen.o[0].abs().float().mean())
        if seen.final.length > self.state_length:
            self.state_norm, self.state_length = seen.final.kv[0].norm(), seen.final.length

    def values(self) -> dict[str, Tensor]:
        """By name, scalars: what there is to say of this kind of layer."""
        found = {"output": torch.stack(self.outputs).mean(), "state_norm": self.state_norm}
        negative, pairs = torch.stack(self.signs).sum(0)
        found["negative_weights"] = negative / pairs
        if self.denominators:
            found["smallest_denominator"] = torch.cat([d.flatten() for d in self.denominators]).min()
        if self.decays:
            reach = -1 / torch.stack(self.decays).mean(0)
            found |= {f"reach/head{head}": tokens for head, tokens in enumerate(reach)}
        return found


def denominators(
    q: Tensor, k: Tensor, queries: Tensor, log_decay: Tensor | None, documents: Tensor | None, past: Tensor | None
) -> Tensor:
    """Σ_j≤i e^(G_i - G_j) q_iᵀ k_j of features at some places i of a row.

    Args:
        q: (H, P, D), at the places `queries` (P,).
        k: (H, T, D), all keys.
        log_decay: (H, T), or None.
        documents: (T,) numbers, or None.
        past: (H, D), the sum of the keys before the row, or None.

    Returns:
        (H, P) float32.
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


def _from(past: Tensor | None, signed: int) -> Tensor | None:
    return None if past is None else past[:, signed:]


def _spread(length: int, n: int, device: torch.device) -> Tensor:
    """Up to n places of a row, from its first to its last."""
    return torch.linspace(0, length - 1, min(n, length), device=device).round().long()


def _visible(queries: Tensor, keys: Tensor, documents: Tensor | None) -> Tensor:
    """(P, S) booleans: which keys come no later than a query, in its own document."""
    visible = keys[None, :] <= queries[:, None]
    return visible if documents is None else visible & (documents[keys][None, :] == documents[queries][:, None])
