"""Corpora that are tokens already: folders that `linrope prepare` wrote, and flat `.bin` files (nanoGPT's format).

Tokens are read where they lie, range by range, so that a corpus may be larger than memory. They are not mapped: see
`corpus`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from linrope.data.corpus.sequences import DocumentSequence, TokenSequence
from linrope.data.corpus.splits import HASH_BITS
from linrope.data.tokenizers.base import Tokenizer
from linrope.errors import DamagedFile, DocumentChanged, InputError

TOKEN_DTYPES = ("uint16", "uint32")


HIGH_HALF = 16
"""The upper two bytes of a token of four are less, in vocabularies of up to a million."""


CHUNK = 1 << 22
"""Numbers looked at in one go where a whole file is read."""


@dataclass(frozen=True)
class NumberFile:
    """A file of `n` little-endian unsigned integers, no header, each below `limit` (None: any)."""

    path: Path
    dtype: str
    n: int
    limit: int | None = None

    @classmethod
    def of_size(cls, path: Path, dtype: str, limit: int | None = None) -> NumberFile:
        """As many numbers as the file has room for.

        Raises:
            InputError: that is no whole number, or none.
        """
        size, width = path.stat().st_size, np.dtype(dtype).itemsize
        if size == 0 or size % width:
            raise InputError(
                f"{path} is damaged or no file of {dtype} tokens: its size, {size:,} bytes, is no multiple of {width} "
                "above 0. Write it again, or set data.token_dtype."
            )
        return cls(path, dtype, size // width, limit)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Numbers `start … stop`.

        Raises:
            DocumentChanged: the file no longer has the size it had.
            DamagedFile: a number is not below the limit.
        """
        dtype = np.dtype(self.dtype).newbyteorder("<")
        with open(self.path, "rb", buffering=0) as file:
            size, expected = os.fstat(file.fileno()).st_size, self.n * dtype.itemsize
            if size != expected:
                raise DocumentChanged(
                    f"{self.path} has {size} bytes instead of {expected}: it changed while in use. Leave it as it is "
                    "during a run, then start (or resume) the run again."
                )
            file.seek(start * dtype.itemsize)
            numbers = np.fromfile(file, dtype, stop - start)
        if self.limit is not None and len(numbers) and numbers.max() >= self.limit:
            at = int(np.argmax(numbers >= self.limit))
            raise DamagedFile(
                f"{self.path} is damaged or of another vocabulary: it holds {numbers[at]} at position {start + at:,}, "
                f"where tokens are below {self.limit:,}."
            )
        return numbers

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """All numbers `start … stop` in pieces, each with its position."""
        stop = self.n if stop is None else stop
        for first in range(start, stop, CHUNK):
            yield first, self.read(first, min(first + CHUNK, stop))


class PreparedCorpus(DocumentSequence):
    """Documents of a folder that `linrope prepare` wrote.

    Args:
        tokens: the file of them all.
        n_text_bytes: how many bytes each token stands for; None where tokens are bytes.
        starts, sizes: where each document's tokens lie in these files, separators apart: int64 (n_documents,).
        n_bytes: of text, in all.
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

    def _read(self, document: int, first: int, last: int) -> np.ndarray:
        start = int(self._starts[document])
        return self._file.read(start + first, start + last)

    def text_bytes(self, start: int, stop: int) -> Tensor | None:
        if self._n_text_bytes is None:
            return None

        def read(document: int, first: int, last: int) -> np.ndarray:
            begin = int(self._starts[document])
            return self._n_text_bytes.read(begin + first, begin + last)

        return torch.from_numpy(self._gather(start, stop, read, 0))

    def fingerprint(self) -> str:
        """A hash of the folder's fingerprint, which follows from all its tokens, and of the documents' places."""
        digest = hashlib.blake2b(self._source.encode(), digest_size=16)
        digest.update(self._starts.tobytes() + self.offsets.tobytes())
        return digest.hexdigest()


class TokenRun(TokenSequence):
    """Tokens `first … last` of a flat file, separators among them where it has them.

    Args:
        file: where they lie.
        tokenizer: theirs; None where nobody has told.
        digest: a hash of the file's contents.
    """

    n_documents = None

    def __init__(self, file: NumberFile, first: int, last: int, tokenizer: Tokenizer | None, digest: str) -> None:
        self._file, self._first, self._last, self._digest = file, first, last, digest
        self.separator = None if tokenizer is None else tokenizer.separator
        self._bytes_of = None if tokenizer is None else tokenizer.token_bytes()
        known = self._bytes_of is not None
        chunks = file.chunks(first, last) if known else ()
        self.n_bytes = sum(int(self._bytes_of[tokens].sum()) for _, tokens in chunks) if known else None

    def __len__(self) -> int:
        return self._last - self._first

    def _tokens(self, start: int, stop: int) -> np.ndarray:
        return self._file.read(self._first + start, self._first + stop).astype(np.int64)

    def text_bytes(self, start: int, stop: int) -> Tensor:
        """See `TokenSequence`: by the tokenizer's `token_bytes`."""
        if self._bytes_of is None:
            return torch.zeros(stop - start, dtype=torch.int64)
        return torch.from_numpy(self._bytes_of[self._tokens(start, stop)])

    def fingerprint(self) -> str:
        """A hash of the whole file's contents and of the place in it."""
        return hashlib.blake2b(f"{self._digest} {self._first} {self._last}".encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Survey:
    """What reading a flat file once has found."""

    digest: str
    """A hash of its contents."""
    highest: int
    """The largest token, and the first position that has it."""
    position: int


def survey(file: NumberFile) -> Survey:
    """Reads a flat file once, so that a token that is none is found before any work.

    Raises:
        InputError: a token is not below the file's limit, or the file is of another dtype.
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
    return Survey(digest.hexdigest(), highest, position)


def deal_documents(shares: np.ndarray, bounds: tuple[float, float, float]) -> list[np.ndarray]:
    """The numbers of the documents of each split, by the hashes of their names: see `corpus.split_corpus`."""
    split = np.searchsorted(np.array(bounds), shares.astype(np.float64) / 2**HASH_BITS, side="right")
    return [np.flatnonzero(split == number) for number in range(len(bounds))]


def sum_of(file: NumberFile, start: int, stop: int) -> int:
    """The sum of numbers `start … stop`."""
    return sum(int(numbers.sum(dtype=np.int64)) for _, numbers in file.chunks(start, stop))
