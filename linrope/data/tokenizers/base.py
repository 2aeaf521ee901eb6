"""How text becomes tokens and back: by default bytes, where 0 … 255 are those of UTF-8 text and 256 ends a document.

In checkpoints a `Tokenizer` is a dictionary of strings (`tokenizer_to_serialized`, `tokenizer_from_serialized`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from linrope.data.tokenizers.bytes import ByteTokenizer
from linrope.errors import InputError, suggest

UNKNOWN = {"kind": "unknown"}
"""The plain form of no tokenizer: tokens whose text nobody has told."""


class Decoder(Protocol):
    """Decodes tokens piece by piece into valid text: a character split over two pieces comes out with the second."""

    def feed(self, tokens: Iterable[int] | Tensor) -> str:
        """The text that `tokens` (T,) complete; separators are left out."""

    def finish(self) -> str:
        """What is left of an unfinished character: U+FFFD, or nothing."""


class Tokenizer(Protocol):
    """Tokens 0 … vocab_size - 1, one of which, the separator, ends a document and stands for no text."""

    name: str
    """For people to read."""
    vocab_size: int
    separator: int
    fingerprint: str | None
    """The same for equal tokenizers; None for bytes."""

    def encode_document(self, data: bytes) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens (T,) of text, without a separator, and how many of its bytes each stands for (None: one each).

        Raises:
            UnicodeDecodeError: the tokenizer needs UTF-8, and this is none.
        """

    def encode_prompt(self, text: str) -> Tensor:
        """int64 tokens (1 + T,) of a document that begins with `text`: the separator says that a document begins."""

    def decoder(self) -> Decoder:
        """A decoder of one text."""

    def token_bytes(self) -> np.ndarray:
        """How many bytes of text each token stands for, int64 (vocab_size,), in the text that tokens decode to."""

    def to_serialized(self) -> dict[str, str]:
        """What `tokenizer_from_serialized` makes this tokenizer of."""


def open_tokenizer(name: str, option: str) -> Tokenizer:
    """The tokenizer `name`: "bytes", or the path of a `tokenizer.json` of Hugging Face's `tokenizers`.

    Args:
        option: where the name comes from, for error messages.

    Raises:
        InputError: no such file, or one that is no such tokenizer; the package `tokenizers` is missing.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(
            f"{option}={name!r} cannot be read ({reason}): give the path of a tokenizer.json, or 'bytes'."
            + suggest(path.name, ["bytes", *siblings])
        ) from error
    return tokenizer_from_serialized({"kind": "tokenizers", "json": text}, f"{option}={name!r}")


def tokenizer_from_serialized(plain: dict[str, str] | None, where: str = "the tokenizer") -> Tokenizer | None:
    """The tokenizer of a plain form: bytes for None (of models from before there were others), None for UNKNOWN.

    Args:
        where: it comes from, for error messages.

    Raises:
        InputError: it is none, or the package `tokenizers` is missing.
    """
    kind = "bytes" if plain is None else plain.get("kind")
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "tokenizers":
        from linrope.data.tokenizers.subwords import SubwordTokenizer

        return SubwordTokenizer(plain["json"], where)
    if kind == "unknown":
        return None
    raise InputError(f"{where} is of kind {kind!r}, which this version of linrope does not know: update linrope.")


def tokenizer_to_serialized(tokenizer: Tokenizer | None) -> dict[str, str]:
    """The inverse of `tokenizer_from_serialized`."""
    return dict(UNKNOWN) if tokenizer is None else tokenizer.to_serialized()
