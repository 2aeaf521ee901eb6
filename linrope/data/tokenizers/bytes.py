"""Bytes as tokens: 0 … 255 are the bytes of UTF-8 text, 256 ends a document."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from linrope.errors import InputError
from linrope.losses import IGNORE

SEPARATOR = 256
"""The token after each document."""
VOCAB_SIZE = 257
BYTES = {"kind": "bytes"}
"""The serialized tokenizer."""


def encode(text: str | bytes) -> Tensor:
    """The bytes of `text` (a str as UTF-8) as int64 tokens (T,). InputError for half a surrogate pair."""
    data = _utf8(text) if isinstance(text, str) else text
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long() if data else torch.empty(0, dtype=torch.int64)


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise InputError(
            f"text has {half!r} at character {error.start}, half a surrogate pair, which has no bytes in UTF-8: "
            "replace or remove it."
        ) from error


def encode_prompt(text: str | bytes) -> Tensor:
    """Tokens (1 + T,) of a document that starts with `text`; the first is a separator, which starts it."""
    return torch.cat([torch.tensor([SEPARATOR], device="cpu"), encode(text)])


class TextDecoder:
    """The `Decoder` of bytes. Tokens above the separator, of a larger vocabulary, become U+FFFD."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, tokens: Iterable[int] | Tensor) -> str:
        values = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        # 0xFF is never a byte of UTF-8 text
        return self._utf8.decode(bytes(min(token, 0xFF) for token in values if token != SEPARATOR))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class ByteTokenizer:
    """The `Tokenizer` of bytes and a separator."""

    name, vocab_size, separator, fingerprint = "bytes", VOCAB_SIZE, SEPARATOR, None

    def encode_document(self, data: bytes) -> tuple[np.ndarray, None]:
        return np.frombuffer(data, dtype=np.uint8), None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(_utf8(text)) for text in texts]

    def encode_prompt(self, text: str) -> Tensor:
        return encode_prompt(text)

    def decoder(self, after: Sequence[int] = ()) -> TextDecoder:
        return TextDecoder()

    def token_bytes(self) -> np.ndarray:
        return (np.arange(VOCAB_SIZE) != SEPARATOR).astype(np.int64)

    def token_id(self, text: str) -> None:
        return None

    def word_parts(self) -> tuple[np.ndarray, np.ndarray]:
        between = np.array([chr(token).isspace() for token in range(128)] + [False] * 128 + [True])
        return np.zeros(VOCAB_SIZE, dtype=bool), between

    def to_serialized(self) -> dict[str, str]:
        return dict(BYTES)


def bytes_of(targets: Tensor, n_bytes: Tensor | None = None) -> Tensor:
    """Bytes of each target: 0 for IGNORE; else `n_bytes` if given, or 1, and 0 for separators."""
    counted = targets != IGNORE
    return counted & (targets != SEPARATOR) if n_bytes is None else n_bytes * counted
