"""A corpus as one sequence of tokens, read range by range."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from linrope.data.tokenizers.bytes import SEPARATOR
from linrope.errors import DocumentChanged


@dataclass(frozen=True)
class Document:
    """`size` bytes of a file from byte `start` on. `name` determines its place in the order and its split."""

    name: str
    path: Path
    file_size: int
    start: int
    size: int

    def read(self, start: int, stop: int) -> bytes:
        """Bytes `start … stop` of the document; see `read_range`."""
        return read_range(self.path, self.file_size, self.start + start, self.start + stop)


def read_range(path: Path, file_size: int, start: int, stop: int) -> bytes:
    """Bytes `start … stop` of a file. Raises DocumentChanged if its size is not `file_size`, as it was when found."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size != file_size:
            raise DocumentChanged(
                f"{path} changed from {file_size} to {size} bytes while in use: "
                "do not change the corpus during a run, then start (or resume) the run again."
            )
        file.seek(start)
        return file.read(stop - start)


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

        Raises IndexError beyond the corpus, DocumentChanged if the size of a file has changed, DamagedFile for a token
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

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of the corpus."""


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
