"""Corpora of tokens: folders that `linrope prepare` wrote, and flat `.bin` files (nanoGPT's format).

They are read range by range, and not mapped: see `linrope.data.corpus.files`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from linrope.data.corpus.sequences import DocumentSequence, TokenSequence, read_range
from linrope.data.tokenizers.base import Tokenizer
from linrope.errors import DamagedFile, InputError

TOKEN_DTYPES = ("uint16", "uint32")
HIGH_HALF = 16
"""The upper 16 bits of a uint32 token are below this, in vocabularies of up to a million."""
CHUNK = 1 << 22
"""Numbers of one read, where a whole file is read."""


@dataclass(frozen=True)
class NumberFile:
    """A file of `n` little-endian unsigned integers without a header, each below `limit` (None: no limit)."""

    path: Path
    dtype: str
    n: int
    modified: int
    """Modification time (ns) of the file when it was found."""
    limit: int | None = None

    @classmethod
    def of_size(cls, path: Path, dtype: str, limit: int | None = None) -> NumberFile:
        """The file with `n` from its size. Raises InputError if that is 0 or not a multiple of the dtype's."""
        status, width = path.stat(), np.dtype(dtype).itemsize
        size = status.st_size
        if size == 0 or size % width:
            raise InputError(
                f"{path} is damaged or not a file of {dtype} tokens: its size, {size:,} bytes, is not a multiple of "
                f"{width} above 0. Write it again, or set data.token_dtype."
            )
        return cls(path, dtype, size // width, status.st_mtime_ns, limit)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Numbers `start … stop`. Raises as `TokenSequence.tokens`."""
        dtype = np.dtype(self.dtype).newbyteorder("<")
        width = dtype.itemsize
        data = read_range(self.path, self.n * width, self.modified, start * width, stop * width)
        numbers = np.frombuffer(data, dtype)
        if self.limit is not None and len(numbers) and numbers.max() >= self.limit:
            at = int(np.argmax(numbers >= self.limit))
            raise DamagedFile(
                f"{self.path} is damaged or of another vocabulary: it holds {numbers[at]} at position {start + at:,}, "
                f"where tokens are below {self.limit:,}."
            )
        return numbers

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """The numbers `start … stop` in chunks, each with its position."""
        stop = self.n if stop is None else stop
        for first in range(start, stop, CHUNK):
            yield first, self.read(first, min(first + CHUNK, stop))


class PreparedCorpus(DocumentSequence):
    """Documents of a folder that `linrope prepare` wrote.

    Args:
        tokens, n_text_bytes: the files of all tokens and of their bytes of text (None if tokens are bytes).
        starts, sizes: first position and number of tokens, without the separator, of each document, int64 (n,).
        n_bytes: bytes of text of all documents.
        separator: the token after each document.
        source: the fingerprint of the folder.
    """

    def __init__(
        self,
        tokens: NumberFile,
        n_text_bytes: NumberFile | None,
        starts: np.ndarray,
        sizes: np.ndarray,
        n_bytes: int,
        separator: int,
        source: str,
    ) -> None:
        super().__init__(sizes, separator)
        self._file, self._n_text_bytes, self._starts, self._source = tokens, n_text_bytes, starts, source
        self.n_bytes = n_bytes

    def _tokens(self, start: int, stop: int) -> np.ndarray:
        return self._read(self._file, start, stop, self.separator)

    def text_bytes(self, start: int, stop: int) -> Tensor | None:
        if self._n_text_bytes is None:
            return None
        return torch.from_numpy(self._read(self._n_text_bytes, start, stop, 0))

    def _read(self, file: NumberFile, start: int, stop: int, separator: int) -> np.ndarray:
        """The numbers of tokens `start … stop`, int64 (stop - start,). Documents that follow each other in the file, as
        most do, are one read with the separators between them: there may be thousands in a row."""
        out = np.full(stop - start, separator, dtype=np.int64)
        first, last = np.searchsorted(self.offsets, start, side="right") - 1, np.searchsorted(self.offsets, stop)
        shifts = self._starts[first:last] - self.offsets[first:last]  # from positions here to those in the file
        ends = [*(first + 1 + np.flatnonzero(np.diff(shifts))), last]
        for begin, end in pairwise([first, *ends]):
            here, to = max(start, int(self.offsets[begin])), min(stop, int(self.offsets[end]) - 1)
            if here < to:
                shift = int(self._starts[begin] - self.offsets[begin])
                out[here - start : to - start] = file.read(here + shift, to + shift)
        return out

    def fingerprint(self) -> str:
        """A hash of the folder's fingerprint, which depends on all tokens, and of the documents' positions."""
        digest = hashlib.blake2b(self._source.encode(), digest_size=16)
        digest.update(self._starts.tobytes() + self.offsets.tobytes())
        return digest.hexdigest()


class TokenRun(TokenSequence):
    """Tokens `first … last` of a flat file, with any separators it has; `digest` is a hash of the whole file.

    Without the tokenizer of these tokens, their separator and bytes of text are unknown.
    """

    n_documents = None

    def __init__(self, file: NumberFile, first: int, last: int, tokenizer: Tokenizer | None, digest: str) -> None:
        self._file, self._first, self._last, self._digest = file, first, last, digest
        self.separator = None if tokenizer is None else tokenizer.separator
        self._bytes_of = self.n_bytes = None
        if tokenizer is not None:
            self._bytes_of = tokenizer.token_bytes()
            self.n_bytes = sum(int(self._bytes_of[tokens].sum()) for _, tokens in file.chunks(first, last))

    def __len__(self) -> int:
        return self._last - self._first

    def _tokens(self, start: int, stop: int) -> np.ndarray:
        return self._file.read(self._first + start, self._first + stop).astype(np.int64)

    def text_bytes(self, start: int, stop: int) -> Tensor:
        if self._bytes_of is None:
            return torch.zeros(stop - start, dtype=torch.int64)
        return torch.from_numpy(self._bytes_of[self._tokens(start, stop)])

    def fingerprint(self) -> str:
        """A hash of the whole file's contents and of the range."""
        return hashlib.blake2b(f"{self._digest} {self._first} {self._last}".encode(), digest_size=16).hexdigest()


def survey(file: NumberFile) -> tuple[str, int, int]:
    """A hash of a flat file's contents, its largest token, and the first position of that.

    The file is read once, to find a wrong token before any work. Raises InputError for a token that is not below the
    file's limit, or if the file seems to have another dtype.
    """
    digest, highest, position, odd = hashlib.blake2b(digest_size=16), -1, 0, 0
    for first, tokens in file.chunks():
        digest.update(tokens.tobytes())
        odd = max(odd, int(tokens[1::2].max(initial=0)))
        if tokens.max() > highest:
            highest, position = int(tokens.max()), first + int(tokens.argmax())
    if file.dtype == "uint16" and file.n > 1 and odd < HIGH_HALF <= highest:
        raise InputError(
            f"{file.path} holds less than {HIGH_HALF} at every other position, as uint32 tokens read as uint16 do: set "
            "data.token_dtype=uint32."
        )
    return digest.hexdigest(), highest, position
