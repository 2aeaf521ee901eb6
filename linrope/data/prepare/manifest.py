"""The folder that a preparation writes: its files, and the manifest that describes them.

tokens.bin            tokens, uint16 or uint32, a separator after each document (nanoGPT's format)
documents.npy         int64 (n_documents, 4): start, tokens and bytes of each document, hash of its name
text_bytes.bin        bytes of text of each token; not for the tokenizer "bytes"
tokenizer.json        the tokenizer; not for "bytes"
linrope-corpus.json   the manifest; written last
parts/                until then: the result of each unit
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linrope.errors import InputError

FORMAT = 1
MANIFEST, PARTS, LOCK = "linrope-corpus.json", "parts", "linrope-lock"
TOKENS, TEXT_BYTES, DOCUMENTS, TOKENIZER = "tokens.bin", "text_bytes.bin", "documents.npy", "tokenizer.json"


@dataclass(frozen=True)
class Manifest:
    """The contents of `linrope-corpus.json`."""

    format: int
    origin: str
    """The source of the text, as people read it."""
    tokenizer: str
    """"bytes" or "tokenizer.json"."""
    vocab_size: int
    separator: int
    token_dtype: str
    text_bytes_dtype: str | None
    n_documents: int
    n_tokens: int
    """Without separators."""
    n_bytes: int
    """Bytes of text."""
    n_skipped_files: int
    """Files that are binary, empty or unreadable."""
    n_skipped_lines: int
    """Lines without text, skipped by `skip_bad_lines`."""
    n_empty: int
    """Documents without a token, which are skipped."""
    fingerprint: str
    """A hash of all tokens, of the documents and of the tokenizer; opening the folder compares it."""
    plan: dict[str, str]
    """All that determines the result, by option; `sources` is a hash of the units."""
    text_bytes_checksum: str | None = None
    """A hash of `text_bytes.bin`, which opening the folder compares too; None without that file."""

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a prepared folder. Raises InputError if it is damaged or has another format."""
        path = folder / MANIFEST
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            found = values.get("format") if isinstance(values, dict) else None
            if found != FORMAT:
                raise InputError(f"{path} has format {found!r}, this linrope reads {FORMAT}.")
            return cls(**values)
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
            raise InputError(f"{path} is damaged ({error}): remove the folder and prepare the corpus again.") from error


def document_sizes(folder: str | Path) -> np.ndarray:
    """The number of tokens of each document of a prepared folder, int64 (n_documents,)."""
    return np.array(np.load(Path(folder).expanduser() / DOCUMENTS, mmap_mode="r", allow_pickle=False)[:, 1])
