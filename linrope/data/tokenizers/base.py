"""Tokenizers: text to tokens and back. The default is bytes.

In checkpoints a tokenizer is a dictionary of strings (`tokenizer_to_serialized`, `tokenizer_from_serialized`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from linrope.data.tokenizers.bytes import BYTES, VOCAB_SIZE, ByteTokenizer
from linrope.data.tokenizers.subwords import SubwordTokenizer
from linrope.errors import InputError, suggest


class Decoder(Protocol):
    """Decodes a stream of tokens into valid text. A character is complete with its last byte."""

    def feed(self, tokens: Iterable[int] | Tensor) -> str:
        """The text that `tokens` (T,) complete; separators are skipped."""

    def finish(self) -> str:
        """U+FFFD for an incomplete character at the end, or nothing."""


class Tokenizer(Protocol):
    """Tokens 0 … vocab_size - 1. One of them, the separator, ends a document and stands for no text."""

    name: str
    """The name in messages."""
    vocab_size: int
    separator: int
    fingerprint: str | None
    """A hash that is the same for equal tokenizers; None for bytes."""

    def encode_document(self, data: bytes) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens (T,) of a text, without a separator, and their bytes of text (T,); None for one byte per token. Raises
        UnicodeDecodeError if the tokenizer needs UTF-8, and the text is not."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, without separators. Raises InputError for what the tokenizer has no token for,
        and for a text that holds the separator as a token."""

    def encode_prompt(self, text: str) -> Tensor:
        """int64 tokens (1 + T,) of a document that starts with `text`; the first is a separator, which starts it."""

    def decoder(self, after: Sequence[int] = ()) -> Decoder:
        """A decoder for one text, or for what continues the text of these tokens, of which the last few are enough:
        whether a token's text has a space before it may depend on the token before it."""

    def token_bytes(self) -> np.ndarray:
        """Bytes of text of each token, int64 (vocab_size,). 0 for special tokens, which stand for no text."""

    def token_id(self, text: str) -> int | None:
        """The number of the token with this name, "[MASK]" for example; None without it."""

    def word_parts(self) -> tuple[np.ndarray, np.ndarray]:
        """Two tables, booleans (vocab_size,): tokens that begin a word, and those that belong to none (spaces and the
        separator), after which another begins."""

    def to_serialized(self) -> dict[str, str]:
        """The serialized form, for `tokenizer_from_serialized`."""


def open_tokenizer(name: str, option: str) -> Tokenizer:
    """The tokenizer `name`: "bytes", or the path of a `tokenizer.json` of Hugging Face's `tokenizers` or of its folder.

    Raises InputError, naming the `option`, if there is no tokenizer, or the package `tokenizers` is missing.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    try:
        if (path / "tokenizer.json").is_file():  # a folder, as transformers saves one
            path /= "tokenizer.json"
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise InputError(f"{option}={name!r} is a pipe or a device: give the path of a tokenizer.json, or 'bytes'.")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(
            f"{option}={name!r} cannot be read ({reason}): give the path of a tokenizer.json, or 'bytes'."
            + suggest(path.name, ["bytes", *siblings])
        ) from error
    return tokenizer_from_serialized({"kind": "tokenizers", "json": text}, f"{option}={name!r}")


def tokenizer_from_serialized(values: dict[str, str] | None, where: str = "the tokenizer") -> Tokenizer | None:
    """The tokenizer of a serialized form, None if unknown. Without `values`, as in models made in Python, it is bytes.

    Raises InputError, naming `where` they come from, if they are no tokenizer, or the package `tokenizers` is missing.
    """
    kind = "bytes" if values is None else values.get("kind")
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "tokenizers":
        return SubwordTokenizer(values["json"], where)
    if kind == "unknown":
        return None
    raise InputError(f"{where} has type {kind!r}, which this version of linrope does not know: update linrope.")


def known_or_bytes(values: dict[str, str] | None, vocab_size: int) -> dict[str, str]:
    """The serialized tokenizer of a model of so many tokens. One that was made in Python has none: its tokens are bytes
    if there are no more than these, and unknown otherwise."""
    if values is not None:
        return values
    return dict(BYTES) if vocab_size <= VOCAB_SIZE else tokenizer_to_serialized(None)


def tokenizer_to_serialized(tokenizer: Tokenizer | None) -> dict[str, str]:
    """The inverse of `tokenizer_from_serialized`."""
    return {"kind": "unknown"} if tokenizer is None else tokenizer.to_serialized()
