"""What a position encoding is: the options, the places where it can enter, and the pairs of a call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from linrope.errors import InputError
from linrope.ops.call import without_autocast
from linrope.utils.options import check_types
from linrope.utils.values import extremes

TABLE_STD = 0.02
"""Standard deviation of tables at the start that add to embeddings, keys, values or logits: that of embeddings."""

WITH_A_TABLE = ("learned", "tupe")
"""Encodings with a row for each position."""


@dataclass(frozen=True)
class PositionsConfig:
    """Which position encoding a model has, and its sizes."""

    name: Literal[
        "rope", "none", "sinusoidal", "learned", "shaw", "transformer_xl", "t5", "tupe", "deberta", "alibi"
    ] = "rope"
    """rope: as the option rope says; none; sinusoidal or learned: added to the embeddings; shaw, transformer_xl, t5,
    tupe, deberta or alibi: in the attention weights, for softmax attention only. See docs/positions.md."""
    length: int = 1024
    """Number of positions in the tables of learned and tupe: no row may be longer."""
    max_distance: int = 128
    """Distance at which shaw and deberta clip, and beyond which t5 and tupe have one bucket."""
    n_buckets: int = 32
    """Number of distances, by logarithmic size, that t5 and tupe tell apart."""

    def __post_init__(self) -> None:
        check_types(self, section="positions.")
        for name, least in (("length", 1), ("max_distance", 2), ("n_buckets", 4)):
            if (value := getattr(self, name)) < least:
                raise InputError(f"positions.{name}={value} must be at least {least}.")
        if self.n_buckets >= 2 * self.max_distance:
            raise InputError(
                f"positions.n_buckets={self.n_buckets} must be below twice positions.max_distance={self.max_distance}."
            )

    @property
    def longest_row(self) -> int | None:
        """Tokens of the longest row that can be read; None for any length."""
        return self.length if self.name in WITH_A_TABLE else None

    def require_row(self, option: str, length: int) -> None:
        """Raise InputError, naming the option of data that asks for it, if no row of so many tokens can be read."""
        if self.longest_row is not None and length > self.longest_row:
            raise InputError(
                f"{option}={length} is longer than the rows of model.positions.length={self.length}: lower the one or "
                "raise the other (and train anew)."
            )


@dataclass(frozen=True)
class Sizes:
    """What an encoding must know of the layer or model that it serves."""

    d_model: int
    n_heads: int = 1
    head_dim: int = 1
    causal: bool = True


@dataclass(frozen=True)
class Pairs:
    """The queries and keys of a call: T queries at the end of S keys, of which the first S - T come from a cache.

    Attributes:
        n_queries, n_keys: T and S.
        positions: (B, T) int64, the position of each query in its document; None if that is the one in the row.
        dtype, device: of the results.
    """

    n_queries: int
    n_keys: int
    positions: Tensor | None
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def distance(self) -> Tensor:
        """i - j of query i and key j, (T, S) int64. Pairs of two documents, which no one sees, have some distance."""
        j = torch.arange(self.n_keys, device=self.device)
        return j[self.n_keys - self.n_queries :, None] - j

    @cached_property
    def within_documents(self) -> tuple[Tensor, Tensor]:
        """The positions of queries (B or 1, T) and of keys (B or 1, S) in their documents, int64."""
        row = torch.arange(self.n_keys, device=self.device)[None]
        n_past = self.n_keys - self.n_queries
        if self.positions is None:
            return row[:, n_past:], row
        start = n_past - self.positions[:, :1]  # of the document that is open in the cache; earlier ones are hidden
        return self.positions, torch.cat(((row[:, :n_past] - start).clamp(min=0), self.positions), dim=1)


class PositionEncoding(nn.Module):
    """Base of the position encodings, and the one that adds nothing ("none", and "rope", where layers rotate).

    A position can enter in four places: in the embedding (`embed`), by rotation of queries and keys (RoPE, in
    `linrope.rotary`), as a bias that the content does not change (`bias`), or in a score with the content (`score`):

        weights = softmax((q kᵀ + score) / √(terms · D) + bias)        o = weights v + values

    These methods return None where an encoding has no part. Their tensors are float32, or float64 if the inputs are.

    Args:
        config: the options.
        sizes: of the layer, or of the model for what is added to the embeddings.
    """

    terms = 1
    """Number of products of a query and a key in a logit, by which the scale is divided."""

    def __init__(self, config: PositionsConfig, sizes: Sizes) -> None:
        super().__init__()
        self.config, self.sizes = config, sizes

    def reset_parameters(self) -> None:
        """Initialise the encoding anew."""

    def embed(self, positions: Tensor) -> Tensor | None:
        """What is added to the token embeddings at `positions`, (T,) or (B, T) int64: (T or B, T, d_model)."""
        return None

    def score(self, q: Tensor, k: Tensor, pairs: Pairs) -> Tensor | None:
        """Added to q kᵀ, before the scale: (B, H, T, S) of queries (B, H, T, D) and keys (B, H, S, D)."""
        return None

    def bias(self, pairs: Pairs) -> Tensor | None:
        """Added to the scaled logits: (B or 1, H, T, S)."""
        return None

    def values(self, weights: Tensor, pairs: Pairs) -> Tensor | None:
        """Added to the outputs: (B, H, T, D) of weights (B, H, T, S)."""
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, positions: Tensor | None = None) -> Tensor:
        """Softmax attention with this encoding, by the matrix of all weights.

        Args:
            q: (B, H, T, D) queries, which stand at the end of the keys.
            k, v: (B, H, S, D).
            mask: (B or 1, T or 1, S) booleans, True where a query sees a key. One that sees none has the output 0.
            positions: (B, T) int64, the positions of the queries in their documents; None for those in the row.

        Returns:
            (B, H, T, D) of v's dtype.
        """
        with without_autocast(q):
            q, k, values = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
            pairs = Pairs(q.shape[2], k.shape[2], positions, q.dtype, q.device)
            score, bias = self.score(q, k, pairs), self.bias(pairs)
            logits = q @ k.mT if score is None else q @ k.mT + score
            logits = logits * (self.terms * q.shape[3]) ** -0.5
            if bias is not None:
                logits = logits + bias
            sees_none = ~mask.any(-1, keepdim=True)
            weights = logits.masked_fill(~(mask | sees_none)[:, None], -torch.inf).softmax(-1)
            weights = weights.masked_fill(sees_none[:, None], 0)
            added = self.values(weights, pairs)
            o = weights @ values if added is None else weights @ values + added
        return o.to(v.dtype)

    def extra_repr(self) -> str:
        return f"name={self.config.name}"


def require_within(positions: Tensor, length: int, name: str) -> None:
    """Raise InputError if a position has no row in a table of `length`."""
    ends = extremes(positions)  # without values an index out of range is an error too
    if ends is not None and (last := ends[1]) >= length:
        raise InputError(
            f"positions.length={length} is too short for the {name} positions of {last + 1} tokens: set it to that or "
            "more (and train anew), or read shorter rows. RoPE has no such limit."
        )


def by_distance(of_each: Tensor, index: Tensor) -> Tensor:
    """The value of each pair: (B, H, T, n) and index (T, S) in 0 … n - 1 -> (B, H, T, S)."""
    return of_each.gather(-1, index.expand(*of_each.shape[:2], *index.shape))
