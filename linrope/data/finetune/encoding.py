"""Texts and pairs of texts as tokens: [CLS] a [SEP], or [CLS] a [SEP] b [SEP] with the token types 0 and 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from linrope.data.tokenizers.base import Tokenizer
from linrope.data.tokenizers.special_tokens import SpecialTokens
from linrope.errors import InputError


@dataclass(frozen=True)
class Encoded:
    """The tokens of one row."""

    tokens: np.ndarray
    """int32 (T,)."""
    n_first: int
    """Tokens of the first text with [CLS] and [SEP]; those after them are of the second text, and have the type 1."""
    ends: np.ndarray
    """Of the last text: the byte at which each of its tokens ends, int32 (tokens that were kept,)."""
    truncated: bool
    """Whether tokens were left out."""

    @property
    def start_of_last(self) -> int:
        """Where the last text begins in the row."""
        return len(self.tokens) - 1 - len(self.ends)


class TextEncoder:
    """Makes rows of at most `max_length` tokens; of a pair that is too long the longer text loses its last tokens.

    Args:
        tokenizer: its [CLS], [SEP] and [PAD] are used, or numbers above its vocabulary (see `SpecialTokens`).
        max_length: tokens of a row, with the special ones, at least 5.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        self.tokenizer, self.max_length, self.special = tokenizer, max_length, SpecialTokens.of(tokenizer)

    def __call__(self, *texts: str) -> Encoded:
        """The row of a text or of a pair. InputError for a text that the tokenizer cannot read."""
        parts = [self._tokens(text) for text in texts]
        lengths = kept_lengths([len(tokens) for tokens, _ in parts], self.max_length - 1 - len(parts))
        row, sep = [[self.special.cls]], [self.special.sep]
        for (tokens, _), length in zip(parts, lengths):
            row += [tokens[:length], sep]
        ends = parts[-1][1][: lengths[-1]].astype(np.int32)  # a copy, or each row would keep its whole text's
        truncated = sum(lengths) < sum(len(tokens) for tokens, _ in parts)
        return Encoded(np.concatenate(row).astype(np.int32), lengths[0] + 2, ends, truncated)

    def _tokens(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a text, and the byte at which each of them ends."""
        try:
            tokens, n_bytes = self.tokenizer.encode_document(text.encode("utf-8"))
        except ValueError as error:  # UnicodeEncodeError is one
            shown = text if len(text) <= 60 else f"{text[:60]}…"
            raise InputError(f"the tokenizer cannot read the text {shown!r}: {error}.") from error
        return tokens, np.cumsum(np.ones(len(tokens), dtype=np.int64) if n_bytes is None else n_bytes)


def kept_lengths(lengths: Sequence[int], room: int) -> list[int]:
    """The tokens that remain of each of one or two texts, at most `room` together: one after another is taken from the
    longer text, and from the second where both are equal."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    first, second = lengths
    second = min(second, max(room // 2, room - first))
    return [min(first, room - second), second]


def pad(rows: Sequence[Encoded], padding: int) -> dict[str, Tensor]:
    """A batch of rows, filled with the token `padding` to the longest.

    Returns:
        inputs: int64 (B, T), the tokens.
        key_mask: booleans (B, T), False for padding.
        token_types: int64 (B, T), 1 for the second text.
    """
    length = max(len(row.tokens) for row in rows)
    inputs = torch.full((len(rows), length), padding)
    lengths = torch.tensor([len(row.tokens) for row in rows])[:, None]
    for number, row in enumerate(rows):
        inputs[number, : len(row.tokens)] = torch.from_numpy(row.tokens)
    key_mask = torch.arange(length) < lengths
    second = torch.arange(length) >= torch.tensor([row.n_first for row in rows])[:, None]
    return {"inputs": inputs, "key_mask": key_mask, "token_types": (second & key_mask).long()}


def pad_choices(rows: Sequence[Sequence[Encoded]], padding: int) -> dict[str, Tensor]:
    """As `pad`, of B rows with C choices each: (B, C, T)."""
    flat = pad([choice for choices in rows for choice in choices], padding)
    return {name: rearrange(x, "(b c) t -> b c t", b=len(rows)) for name, x in flat.items()}
