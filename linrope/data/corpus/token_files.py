"""Corpora of tokens: folders that `linrope prepare` wrote, and flat `.bin` files (nanoGPT's format).

They are read range by range, and not mapped: see `linrope.data.corpus.files`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from linrope.data.corpus.sequences import DocumentSequence, TokenSequence, read_range
from linrope.data.tokenizers.subwords import END_OF_DOCUMENT, LARGEST_VOCABULARY
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
        self.require_limit(start, numbers)
        return numbers

    def require_limit(self, start: int, numbers: np.ndarray) -> None:
        """Raise DamagedFile unless `numbers`, from position `start` on, are below the limit."""
        if self.limit is not None and len(numbers) and numbers.max() >= self.limit:
            at = int(np.argmax(numbers >= self.limit))
            raise DamagedFile(
                f"{self.path} is damaged or of another vocabulary: it holds {numbers[at]} at position {start + at:,}, "
                f"where tokens are below {self.limit:,}."
            )

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

    def files(self) -> set[Path]:
        return {self._file.path.resolve()}

    def fingerprint(self) -> str:
        """A hash of the folder's fingerprint, which depends on all tokens, and of the documents' positions."""
        digest = hashlib.blake2b(self._source.encode(), digest_size=16)
        digest.update(self._starts.tobytes() + self.offsets.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Survey:
    """What one reading of a flat file found."""

    digest: str
    """A hash of the contents."""
    highest: int
    position: int
    """The largest token, and its first position."""
    n_separators: int
    """How often the tokenizer's separator stands in the file; 0 without a tokenizer."""
    n_bytes: list[int]
    """Bytes of text of each range that was asked for; 0 without a tokenizer."""


class TokenRun(TokenSequence):
    """Tokens `first … last` of a flat file, with any separators it has; `found` is the survey of the whole file.

    Without the tokenizer of these tokens, their `separator`, `bytes_of` each token and `n_bytes` of all are unknown.
    """

    n_documents = None

    def __init__(
        self,
        file: NumberFile,
        first: int,
        last: int,
        found: Survey,
        separator: int | None,
        bytes_of: np.ndarray | None,
        n_bytes: int,
    ) -> None:
        self._file, self._first, self._last, self._found = file, first, last, found
        self.separator, self._bytes_of = separator, bytes_of
        self.n_bytes = None if bytes_of is None else n_bytes

    def __len__(self) -> int:
        return self._last - self._first

    def _tokens(self, start: int, stop: int) -> np.ndarray:
        return self._file.read(self._first + start, self._first + stop).astype(np.int64)

    def text_bytes(self, start: int, stop: int) -> Tensor:
        if self._bytes_of is None:
            return torch.zeros(stop - start, dtype=torch.int64)
        return torch.from_numpy(self._bytes_of[self._tokens(start, stop)])

    def require_documents(self) -> None:
        super().require_documents()
        if not self._found.n_separators:
            raise InputError(
                f"data.document_mask=True needs to know where documents end, and {self._file.path} holds no token "
                f"{self.separator}, the separator of data.tokenizer: write it after each document, or set "
                "data.document_mask=False. If another token ends documents, give it one of these names in "
                f"tokenizer.json: {', '.join(END_OF_DOCUMENT)}."
            )

    def files(self) -> set[Path]:
        return {self._file.path.resolve()}

    def fingerprint(self) -> str:
        """A hash of the whole file's contents and of the range."""
        parts = f"{self._found.digest} {self._first} {self._last}"
        return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


def survey(
    file: NumberFile,
    cuts: Sequence[tuple[int, int]] = (),
    separator: int | None = None,
    bytes_of: np.ndarray | None = None,
) -> Survey:
    """What one reading of a flat file finds, before any work: see `Survey`.

    Args:
        file: the file, with the vocabulary as limit if that is known.
        cuts: the ranges whose bytes of text are summed.
        separator, bytes_of: the tokenizer's separator and `token_bytes`.

    Raises InputError for a token that is not below the file's limit, or if the file seems to have another dtype.
    """
    digest, highest, position, odd = hashlib.blake2b(digest_size=16), -1, 0, 0
    n_separators, n_bytes = 0, [0] * len(cuts)
    for first, tokens in replace(file, limit=None).chunks():
        top = int(tokens.max())
        if file.dtype == "uint32" and top >= LARGEST_VOCABULARY:
            raise InputError(
                f"{file.path} holds {top:,}, beyond any vocabulary, as uint16 tokens read as uint32 do: set "
                "data.token_dtype=uint16."
            )
        file.require_limit(first, tokens)
        digest.update(tokens.tobytes())
        odd = max(odd, int(tokens[1::2].max(initial=0)))
        if top > highest:
            highest, position = top, first + int(tokens.argmax())
        if separator is not None:
            n_separators += int((tokens == separator).sum())
        if bytes_of is not None:
            for number, (start, stop) in enumerate(cuts):
                n_bytes[number] += int(bytes_of[tokens[max(start - first, 0) : max(stop - first, 0)]].sum())
    if file.dtype == "uint16" and file.n > 1 and odd < HIGH_HALF <= highest:
        raise InputError(
            f"{file.path} holds less than {HIGH_HALF} at every other position, as uint32 tokens read as uint16 do: set "
            "data.token_dtype=uint32."
        )
    return Survey(digest.hexdigest(), highest, position, n_separators, n_bytes)
