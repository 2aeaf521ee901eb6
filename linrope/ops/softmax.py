"""Softmax attention with a key-value cache: the baseline, on PyTorch's `scaled_dot_product_attention`.

With a window each token sees the last few only. Queries then go in blocks of that many, each with its own and the
previous block of keys, so that time and memory are linear in the length: no (T, T) mask is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from linrope.errors import InputError
from linrope.ops.documents import number_documents

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class KeyValueCache:
    """The past of softmax attention: every key and value that a later token may see, so without a window it grows.

    Attributes:
        k, v: (B, H, S, D) rotated keys, and values; with grouped queries of their heads, which are fewer.
        visible: (B, S) False for masked keys, and for those of documents that have ended; None where all are visible.
        length: number of tokens seen, S or more; the next token stands at this position. None stands for S.
    """

    k: Tensor
    v: Tensor
    visible: Tensor | None = None
    length: int | None = None

    def __post_init__(self):
        if self.length is None:
            object.__setattr__(self, "length", self.k.shape[2])

    @property
    def mask(self) -> Tensor:
        """`visible` (B, S), True for all keys where it is None."""
        return all_visible(self.k) if self.visible is None else self.visible


def all_visible(k: Tensor) -> Tensor:
    """(B, S) booleans, True for each of the keys (B, H, S, D)."""
    return k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool)


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    key_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    cache: KeyValueCache | None = None,
    scale: float | None = None,
    attend: Attend | None = None,
) -> tuple[Tensor, KeyValueCache]:
    """softmax(scale · q kᵀ) v over the keys that each query sees.

    Args:
        q, k, v: (B, H, T, D), rotated where they are to be. Keys and values may have fewer heads, a number that divides
            H: as many query heads share each (grouped queries, arXiv 2305.13245), without a copy where no mask is
            needed.
        causal: see earlier tokens only.
        window: see the last `window` tokens only, the present one included; causal only.
        key_mask: (B, T) booleans, False for keys that only their own query sees; without causality none sees them, and
            a query that sees no key has the output 0.
        segment_ids: (B, T) integers, whose runs are documents that attend to themselves alone.
        cache: what came before.
        scale: None for D^-½.
        attend: computes the outputs of (q, k, v, mask) in place of softmax(scale · q kᵀ) v, with the keys of the cache
            and a mask (B or 1, T or 1, S), True where a query sees a key; without window and scale.

    Returns:
        o: (B, H, T, D), and the cache with this call's tokens in it.

    Raises:
        InputError: a cache of another batch, number of heads or head size.
    """
    keys = _Keys.of(k, v, key_mask, segment_ids, cache)
    if q.shape[2] == 0:
        o = q
    elif window is None or q.shape[2] <= window:
        o = _dense(q, keys, causal, window, scale, attend)
    else:
        o = _banded(q, keys, window, scale)
    return o, keys.cache(window)


def extend_cache(
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    key_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    cache: KeyValueCache | None = None,
) -> KeyValueCache:
    """The cache that `softmax_attention` returns, without the outputs; the arguments are the same."""
    return _Keys.of(k, v, key_mask, segment_ids, cache).cache(window)


@dataclass(frozen=True)
class _Keys:
    """The keys and values of a call, those of the cache first."""

    k: Tensor
    v: Tensor
    document: Tensor | None
    """(B, S) the number of each key's document; None without boundaries. The cache belongs to the first one."""
    visible: Tensor | None
    length: int

    @classmethod
    def of(
        cls,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        segment_ids: Tensor | None,
        cache: KeyValueCache | None,
    ) -> _Keys:
        new = k.shape[2]
        document = None if segment_ids is None or new == 0 else number_documents(segment_ids)
        if cache is None:
            return cls(k, v, document, key_mask, new)
        if cache.k.shape[:2] != k.shape[:2] or cache.k.shape[3] != k.shape[3]:
            raise InputError(f"state.past.k is {tuple(cache.k.shape)}, this call's keys are {tuple(k.shape)}.")
        document = None if document is None else F.pad(document, (cache.k.shape[2], 0))
        visible = None
        if cache.visible is not None or key_mask is not None:
            visible = torch.cat((cache.mask, all_visible(k) if key_mask is None else key_mask), dim=1)
        k, v = torch.cat((cache.k.to(k.dtype), k), dim=2), torch.cat((cache.v.to(v.dtype), v), dim=2)
        return cls(k, v, document, visible, cache.length + new)

    def until(self, n: int) -> _Keys:
        """The first n keys."""
        document, visible = (None if x is None else x[:, :n] for x in (self.document, self.visible))
        return _Keys(self.k[:, :, :n], self.v[:, :, :n], document, visible, self.length)

    def cache(self, window: int | None) -> KeyValueCache:
        """For the next call, which continues the last document: all keys, or those in its window."""
        k, v, visible = self.k, self.v, self.visible
        if self.document is not None:
            last = self.document == self.document[:, -1:]
            visible = last if visible is None else last & visible
        if window is None or k.shape[2] < window:
            # k and v may be views of all three projections, which a cache should not keep alive
            return KeyValueCache(k.contiguous(), v.contiguous(), visible, self.length)
        first = k.shape[2] - (window - 1)  # the first key that the next token sees
        k, v = (x[:, :, first:].clone(memory_format=torch.contiguous_format) for x in (k, v))
        return KeyValueCache(k, v, None if visible is None else visible[:, first:].clone(), self.length)


def _dense(
    q: Tensor, keys: _Keys, causal: bool, window: int | None, scale: float | None, attend: Attend | None = None
) -> Tensor:
    """One product for all pairs; its mask has T·S elements where what is hidden differs from query to query, and is not
    said by causality alone."""
    n_queries, n_keys = q.shape[2], keys.k.shape[2]
    n_past, document, visible = n_keys - n_queries, keys.document, keys.visible
    banded = window is not None and n_keys > window
    simple = document is None and visible is None and not banded and attend is None
    if simple and (n_past == 0 or n_queries == 1):
        if n_queries == 1:  # which sees all keys; a branch, since a graph of open length takes no expression here
            causal = False
        grouped = q.shape[1] != keys.k.shape[1]
        return F.scaled_dot_product_attention(q, keys.k, keys.v, is_causal=causal, scale=scale, enable_gqa=grouped)
    # without causality padding is hidden from all queries alike: one row of the mask for all of them
    mask = torch.ones(1, n_queries if causal else 1, n_keys, dtype=torch.bool, device=q.device)
    if causal:
        mask = mask.tril(n_past)
    if banded:
        mask = mask.triu(n_past - window + 1)
    if document is not None:
        mask = mask & (document[:, n_past:, None] == document[:, None, :])
    if visible is not None and not causal:
        mask = mask & visible[:, None, :]
        attend = attend or partial(masked_attention, scale=scale)
    elif visible is not None:
        own = torch.ones_like(mask).triu(n_past).tril(n_past)  # a query that saw no key would be NaN
        mask = mask & (visible[:, None, :] | own)
    k, v = (repeat_heads(x, q.shape[1]) for x in (keys.k, keys.v))
    if attend is not None:
        return attend(q, k, v, mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale)


def repeat_heads(x: Tensor, n_heads: int) -> Tensor:
    """Keys or values (B, n, T, D) for `n_heads` query heads, (B, n_heads, T, D): each head `n_heads / n` times in a
    row. x itself where there are as many."""
    if x.shape[1] == n_heads:
        return x
    return x[:, :, None].expand(-1, -1, n_heads // x.shape[1], -1, -1).flatten(1, 2)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """softmax(scale · q kᵀ) v over the keys where `mask` is True; a query that sees none has the output 0, not NaN.

    q is (B, H, T, D), k and v are (B, H, S, D), and the mask is (B or 1, T or 1, S).
    """
    sees_none = ~mask.any(-1, keepdim=True)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=(mask | sees_none)[:, None], scale=scale)
    return o.masked_fill(sees_none[:, None], 0)


def _banded(q: Tensor, keys: _Keys, window: int, scale: float | None) -> Tensor:
    """The first `window` queries see the past, and what is hidden there; then each block sees one block back."""
    n_past = keys.k.shape[2] - q.shape[2]
    first = _dense(q[:, :, :window], keys.until(n_past + window), True, window, scale)
    document, visible = (None if x is None else x[:, n_past:] for x in (keys.document, keys.visible))
    new = _Keys(keys.k[:, :, n_past:], keys.v[:, :, n_past:], document, visible, keys.length)
    rest = _blocks(q[:, :, window:], new, window, scale)
    return torch.cat((first, rest), dim=2)


def _blocks(q: Tensor, keys: _Keys, window: int, scale: float | None) -> Tensor:
    """Queries (B, H, T - window, D) against keys (B, n, T, D), the i-th query standing at the key `window + i`."""
    n_queries = q.shape[2]
    # a graph for rows of any length always pads, by a block where nothing is missing: else it is for one of the two
    missing = window - n_queries % window if torch.compiler.is_exporting() else -n_queries % window
    k, v = (repeat_heads(x, q.shape[1]) for x in (keys.k, keys.v))
    q, k, v = (F.pad(x, (0, 0, 0, missing)).unflatten(2, (-1, window)) for x in (q, k, v))
    k, v = (torch.cat((x[:, :, :-1], x[:, :, 1:]), dim=3) for x in (k, v))  # (B, H, blocks, 2W, D)

    def of_queries_and_keys(x: Tensor) -> tuple[Tensor, Tensor]:
        """Of each query (B, blocks, W, 1), and of each key in its reach (B, blocks, 1, 2W)."""
        padded = F.pad(x, (0, missing), value=-1).unflatten(1, (-1, window))  # a document of padding
        of_key = torch.cat((padded[:, :-1], padded[:, 1:]), dim=2)
        return padded[:, 1:, :, None], of_key[:, :, None, :]

    # query r of a block stands at its key W + r
    mask = torch.ones(1, 1, window, 2 * window, dtype=torch.bool, device=q.device)
    mask, own = mask.triu(1).tril(window), mask.triu(window).tril(window)
    if keys.document is not None:
        of_query, of_key = of_queries_and_keys(keys.document)
        mask = mask & (of_query == of_key)
    if keys.visible is not None:
        mask = mask & (of_queries_and_keys(keys.visible)[1] | own)
    mask = rearrange(mask, "b n w s -> (b n) 1 w s")
    # copied first: whether b and n are one dimension without a copy depends on b, and a graph would be for one of both
    q, k, v = (x.transpose(1, 2).contiguous().flatten(0, 1) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return rearrange(o, "(b n) h w d -> b h (n w) d", n=(n_queries + missing) // window)[:, :, :n_queries]
