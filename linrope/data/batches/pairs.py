"""Batches of pairs for translation: pairs of similar lengths, in an order that follows from the seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from linrope.data.batches.shuffling import mix, permute
from linrope.data.parallel_text import ParallelText, TokenRows
from linrope.data.tokenizers.base import Tokenizer
from linrope.errors import InputError
from linrope.losses import IGNORE

BEGIN = ("<s>", "<bos>", "[CLS]", "<|startoftext|>")
"""Names of the token that a decoder reads first. The first one that a tokenizer has is taken; without any, the end."""
PAD = ("<pad>", "[PAD]")
OF_SOURCES = ("inputs", "source_mask", "sources")
"""What a batch has of its sources."""


@dataclass(frozen=True)
class TranslationTokens:
    """The tokens around a sentence: what a decoder reads first, what ends source and target, and padding."""

    begin: int
    end: int
    pad: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TranslationTokens:
        """Those of a tokenizer; its separator is the end, and serves where it has no other special token."""

        def first(names: Sequence[str]) -> int:
            known = [tokenizer.token_id(name) for name in names]
            return next((number for number in known if number is not None), tokenizer.separator)

        return cls(first(BEGIN), tokenizer.separator, first(PAD))

    def sources(self, rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """`inputs` (B, S) int64, each row with its end, and `source_mask` (B, S) booleans, False for padding."""
        lengths = torch.tensor([len(row) + 1 for row in rows])
        inputs = _padded([np.append(row, self.end) for row in rows], self.pad)
        return inputs, torch.arange(inputs.shape[1]) < lengths[:, None]

    def targets(self, rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """`decoder_inputs` and `targets`, (B, T) int64: each row after the beginning, and before the end."""
        inputs = _padded([np.insert(row, 0, self.begin) for row in rows], self.pad)
        return inputs, _padded([np.append(row, self.end) for row in rows], IGNORE)


def _padded(rows: Sequence[np.ndarray], fill: int) -> Tensor:
    padded = np.full((len(rows), max(map(len, rows))), fill, dtype=np.int64)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(padded)


class TokenPairs:
    """The pairs of a parallel text in tokens.

    Args:
        text: the pairs.
        tokenizer: of both sides.
        max_length: tokens of a side at most, the end counted; longer pairs are left out, and `n_long` counts them. None
            keeps all.
        keep_text: keep the lines too, for batches that are translated.
    """

    def __init__(
        self, text: ParallelText, tokenizer: Tokenizer, max_length: int | None = None, keep_text: bool = False
    ) -> None:
        self.special = TranslationTokens.of(tokenizer)
        self._source, self._target = TokenRows(text.source, tokenizer), TokenRows(text.target, tokenizer)
        lengths = np.stack([self._source.lengths, self._target.lengths]) + 1  # with the end
        kept = np.arange(len(text))
        if max_length is not None:
            kept = kept[lengths.max(axis=0) <= max_length]
        self._kept, self.lengths = kept, np.ascontiguousarray(lengths[:, kept])
        self.n_long, self._text = len(text) - len(kept), text if keep_text else None

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """All tokens of both sides, also of pairs that were left out."""
        return self._source.tokens, self._target.tokens

    def batch(self, numbers: Sequence[int]) -> dict[str, Any]:
        """The batch of the pairs with these numbers: see `TranslationDataModule`."""
        numbers = self._kept[numbers]
        inputs, mask = self.special.sources([self._source[i] for i in numbers])
        decoder_inputs, targets = self.special.targets([self._target[i] for i in numbers])
        found = {"inputs": inputs, "source_mask": mask, "decoder_inputs": decoder_inputs, "targets": targets}
        if self._text is not None:
            found["sources"] = [self._text.source[i] for i in numbers]
            found["references"] = [self._text.target[i] for i in numbers]
        return found


def by_length(lengths: np.ndarray, *key: int) -> np.ndarray:
    """The numbers of all pairs, sorted by length, those of equal lengths in an order that `key` decides.

    `lengths` are (2, N), of sources and targets. So the lengths in this order are the same for every key.
    """
    order = np.arange(lengths.shape[1], dtype=np.uint64) + np.uint64(mix(*key))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # as in `mix`
        order = (order ^ (order >> np.uint64(shift))) * np.uint64(factor)
    return np.lexsort((order ^ (order >> np.uint64(31)), *lengths))


def cut(lengths: np.ndarray, tokens_per_batch: int) -> np.ndarray:
    """Where to cut pairs of these `lengths` (2, N), in their order, into batches: int64 (n_batches + 1,).

    Of a batch, rows · longest side is at most `tokens_per_batch`; a longer pair is a batch of its own.
    """
    cuts, longest = [0], 0
    for number, length in enumerate(lengths.max(axis=0).tolist()):
        longest = max(longest, length)
        if number > cuts[-1] and (number + 1 - cuts[-1]) * longest > tokens_per_batch:
            cuts.append(number)
            longest = length
    return np.array([*cuts, lengths.shape[1]], dtype=np.int64)


class TrainingPairs(Dataset[dict[str, Any]]):
    """The endless training batches: batch `i` for every `i ≥ 0`, in epochs of `n_batches`.

    Each epoch has all pairs, the batches in a new order, and within the batches pairs of equal lengths exchanged. A
    batch follows from the pairs, the seed and `i`.
    """

    def __init__(self, pairs: TokenPairs, tokens_per_batch: int, seed: int) -> None:
        if not len(pairs):
            raise InputError("the training text has no pair that is neither empty nor longer than data.max_length.")
        self.pairs, self.tokens_per_batch, self.seed = pairs, tokens_per_batch, seed
        self._cuts = cut(pairs.lengths[:, by_length(pairs.lengths)], tokens_per_batch)
        self.n_batches = len(self._cuts) - 1
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)  # of the last batch that was asked for

    def numbers_of(self, i: int) -> np.ndarray:
        """The numbers of the pairs of batch `i`."""
        epoch, index = divmod(i, self.n_batches)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, by_length(self.pairs.lengths, self.seed, epoch)
        batch = permute(index, self.n_batches, self.seed, epoch)
        return self._order[self._cuts[batch] : self._cuts[batch + 1]]

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {**self.pairs.batch(self.numbers_of(i)), "n_positions": self.tokens_per_batch}


class EvaluationPairs(Dataset[dict[str, Any]]):
    """The batches of validation or test of one rank: every pair of `rank`, `rank` + `world_size`, … once.

    Batches have pairs of similar lengths and come in a fixed random order, so that the first ones are like the others;
    with `in_order` the pairs keep the order of the file, and batches have their sources alone.
    """

    def __init__(
        self, pairs: TokenPairs, tokens_per_batch: int, rank: int = 0, world_size: int = 1, in_order: bool = False
    ) -> None:
        mine = np.arange(len(pairs)) if in_order else by_length(pairs.lengths)
        self.pairs, self._order = pairs, mine[rank::world_size]
        self._cuts, self._in_order = cut(pairs.lengths[:, self._order], tokens_per_batch), in_order

    def __len__(self) -> int:
        return len(self._cuts) - 1

    def __getitem__(self, i: int) -> dict[str, Any]:
        batch = i if self._in_order else permute(i, len(self))
        found = self.pairs.batch(self._order[self._cuts[batch] : self._cuts[batch + 1]])
        return {name: found[name] for name in OF_SOURCES} if self._in_order else found
