"""Bytes as tokens: 0 … 255 are the bytes of UTF-8 text, 256 ends a document."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

import torch
from torch import Tensor

SEPARATOR = 256
"""The token after every document; no byte."""

VOCAB_SIZE = 257

IGNORE = -100
"""The target where nothing is asked of a model; no token."""


def encode(text: str | bytes) -> Tensor:
    """The bytes of `text` (a str as UTF-8) as int64 tokens (T,)."""
    data = text.encode("utf-8", errors="surrogateescape") if isinstance(text, str) else text
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long() if data else torch.empty(0, dtype=torch.int64)


def encode_prompt(text: str | bytes) -> Tensor:
    """Tokens (1 + T,) of a document that begins with `text`: the separator before it stands for "a document begins"."""
    return torch.cat([torch.tensor([SEPARATOR]), encode(text)])


def decode(tokens: Iterable[int] | Tensor) -> str:
    """Text of `tokens` (T,): separators left out, bytes that are no valid UTF-8 shown as U+FFFD."""
    decoder = TextDecoder()
    return decoder.feed(tokens) + decoder.finish()


class TextDecoder:
    """Decodes tokens piece by piece: a character split over two pieces comes out whole, with the second."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, tokens: Iterable[int] | Tensor) -> str:
        """The characters that `tokens` (T,) complete; separators are left out."""
        values = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        return self._utf8.decode(bytes(token for token in values if token != SEPARATOR))

    def finish(self) -> str:
        """What is left of an unfinished character: U+FFFD, or nothing."""
        return self._utf8.decode(b"", final=True)
