"""A corpus as one sequence of tokens, read range by range."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linrope.data.tokenizers.bytes import SEPARATOR
from linrope.errors import DocumentChanged, InputError

HASHED_BLOCK, HASHED_BLOCKS = 1 << 16, 1 << 10
"""Tokens of a block, and the most blocks, that `Corpus.identity` hashes: 64 MiB, a fraction of a second."""


@dataclass(frozen=True)
class Document:
    """`size` bytes of a file from byte `start` on. `name` determines its place in the order and its split."""

    name: str
    path: Path
    file_size: int
    modified: int
    """Size and modification time (ns) of the file when it was found."""
    start: int
    size: int

    def read(self, start: int, stop: int) -> bytes:
        """Bytes `start … stop` of the document; see `read_range`."""
        return read_range(self.path, self.file_size, self.modified, self.start + start, self.start + stop)


def read_range(path: Path, file_size: int, modified: int, start: int, stop: int) -> bytes:
    """Bytes `start … stop` of a file. Raises DocumentChanged if it is gone, or its size or modification time (ns) are
    not those of when it was found."""
    again = "do not change the corpus during a run, then start (or resume) the run again."
    try:
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if status.st_size != file_size:
                raise DocumentChanged(
                    f"{path} changed from {file_size} to {status.st_size} bytes while in use: {again}"
                )
            if status.st_mtime_ns != modified:
                raise DocumentChanged(f"{path} was modified while in use: {again}")
            file.seek(start)
            return file.read(stop - start)
    except OSError as error:
        raise DocumentChanged(f"{path} cannot be read any more ({error.strerror}): {again}") from error


class TokenSequence(ABC):
    """Tokens, read by position 0 … len - 1."""

    separator: int | None
    """The token that ends a document; None if unknown."""
    n_documents: int | None
    n_bytes: int | None
    """Bytes of the text; None if unknown."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of tokens, separators included."""

    def tokens(self, start: int, stop: int) -> Tensor:
        """Tokens `start … stop` as int64 (stop - start,).

        Raises IndexError beyond the corpus, DocumentChanged if a file has changed or is gone, DamagedFile for a token
        outside the vocabulary.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens({start}, {stop}) exceeds a corpus of {len(self)} tokens")
        return torch.from_numpy(self._tokens(start, stop))

    @abstractmethod
    def _tokens(self, start: int, stop: int) -> np.ndarray: ...

    def text_bytes(self, start: int, stop: int) -> Tensor | None:
        """Bytes of text of each token `start … stop`, int64 (stop - start,): 0 if unknown. None if tokens are bytes."""
        return None

    def require_documents(self) -> None:
        """Raise InputError unless the tokens tell where documents end, which a document mask needs to train."""
        self.require_separator()

    def require_separator(self) -> None:
        """Raise InputError unless it is known which token ends a document."""
        if self.separator is None:
            raise InputError(
                "data.document_mask=True needs to know which token ends a document: set data.tokenizer to the "
                "tokenizer of these tokens."
            )

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of the corpus."""

    def files(self) -> set[Path]:
        """The files that it reads, without links; none of text in memory."""
        return set()

    def identity(self) -> dict[str, Any]:
        """What a resumed run compares to know its training text again, as plain values."""
        return {"train_tokens": len(self), "train_documents": self.fingerprint()}


class DocumentSequence(TokenSequence):
    """Documents of `sizes` tokens, one after another, each followed by a separator.

    Token `offsets[d] + i` is token `i` of document `d`; token `offsets[d + 1] - 1` is the separator after it.
    """

    def __init__(self, sizes: np.ndarray, separator: int) -> None:
        self.separator, self.n_documents = separator, len(sizes)
        self.offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes + 1, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def _gather(self, start: int, stop: int, read: Callable[[int, int, int], np.ndarray], between: int) -> np.ndarray:
        """`read(document, first, last)` for tokens `start … stop`, `between` for separators: int64 (stop - start,)."""
        out = np.full(stop - start, between, dtype=np.int64)
        index = int(np.searchsorted(self.offsets, start, side="right")) - 1
        while index < self.n_documents and (origin := int(self.offsets[index])) < stop:
            first, last = max(start - origin, 0), min(stop, int(self.offsets[index + 1]) - 1) - origin
            if first < last:
                out[origin + first - start : origin + last - start] = read(index, first, last)
            index += 1
        return out


class Corpus(DocumentSequence):
    """Documents whose tokens are their bytes."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = list(documents)
        super().__init__(np.array([document.size for document in self.documents], dtype=np.int64), SEPARATOR)

    @property
    def n_bytes(self) -> int:
        """Bytes of text: the tokens without separators."""
        return len(self) - len(self.documents)

    def _tokens(self, start: int, stop: int) -> np.ndarray:
        def read(document: int, first: int, last: int) -> np.ndarray:
            return np.frombuffer(self.documents[document].read(first, last), dtype=np.uint8)

        return self._gather(start, stop, read, self.separator)

    def fingerprint(self) -> str:
        """A hash of the documents' names, sizes and places; no file is read."""
        lines = "".join(f"{document.name}\0{document.start}\0{document.size}\n" for document in self.documents)
        return hashlib.blake2b(lines.encode("utf-8", errors="surrogateescape"), digest_size=16).hexdigest()

    def files(self) -> set[Path]:
        return {document.path.resolve() for document in self.documents}

    def identity(self) -> dict[str, Any]:
        """See `TokenSequence`; also a hash of the contents, since an edit may keep sizes. Of a corpus too large to be
        read at every start it covers blocks at even distances, and the time of the newest file is added."""
        blocks, modified = range(0, len(self), HASHED_BLOCK), None
        if len(blocks) > HASHED_BLOCKS:
            last = len(self) - HASHED_BLOCK
            blocks = [last * number // (HASHED_BLOCKS - 1) for number in range(HASHED_BLOCKS)]
            newest = max(document.modified for document in self.documents)
            modified = datetime.fromtimestamp(newest / 1e9, timezone.utc).isoformat(" ", "milliseconds")
        digest = hashlib.blake2b(digest_size=16)
        for start in blocks:
            digest.update(self._tokens(start, min(start + HASHED_BLOCK, len(self))).astype("<u2").tobytes())
        return {**super().identity(), "text_hash": digest.hexdigest(), "text_modified": modified}
