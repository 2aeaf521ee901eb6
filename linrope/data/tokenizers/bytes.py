"""Bytes as tokens: 0 … 255 are those of UTF-8 text, 256 ends a document."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from linrope.losses import IGNORE

SEPARATOR = 256
"""The token after every document of bytes; no byte."""


VOCAB_SIZE = 257


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
    """The `Decoder` of bytes. Tokens that are neither byte nor separator, of a larger vocabulary, show as U+FFFD."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, tokens: Iterable[int] | Tensor) -> str:
        """The characters that `tokens` (T,) complete; separators are left out."""
        values = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        # 0xFF is a byte of no UTF-8 text
        return self._utf8.decode(bytes(min(token, 0xFF) for token in values if token != SEPARATOR))

    def finish(self) -> str:
        """What is left of an unfinished character: U+FFFD, or nothing."""
        return self._utf8.decode(b"", final=True)


class ByteTokenizer:
    """Bytes and a separator, as a `Tokenizer`."""

    name, vocab_size, separator, fingerprint = "bytes", VOCAB_SIZE, SEPARATOR, None

    def encode_document(self, data: bytes) -> tuple[np.ndarray, None]:
        return np.frombuffer(data, dtype=np.uint8), None

    def encode_prompt(self, text: str) -> Tensor:
        return encode_prompt(text)

    def decoder(self) -> TextDecoder:
        return TextDecoder()

    def token_bytes(self) -> np.ndarray:
        return (np.arange(VOCAB_SIZE) != SEPARATOR).astype(np.int64)

    def to_serialized(self) -> dict[str, str]:
        return {"kind": "bytes"}


def bytes_of(targets: Tensor, n_bytes: Tensor | None = None) -> Tensor:
    """How many bytes each target stands for: `n_bytes` where given; else targets are bytes, separators and IGNORE."""
    return (targets != IGNORE) & (targets != SEPARATOR) if n_bytes is None else n_bytes
