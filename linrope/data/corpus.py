"""Where text comes from: the documents under a path, split into train, val and test, read as one run of tokens.

Here they are bytes of files; `token_files` has those that were tokenized before.

Nothing is loaded or cached: a corpus is a table of offsets, and reading tokens reads the bytes of those files that the
range touches. Files larger than memory therefore work. They are read rather than mapped, because a mapped file that
shrinks kills the process (SIGBUS) where a read can say which file it was.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import shlex
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from linrope.data.tokenizer import SEPARATOR
from linrope.errors import InputError, suggest

SPLITS = ("train", "val", "test")
BINARY_PROBE = 8192  # bytes looked at: a NUL among them marks a binary file, as git and grep decide it
HASH_BITS = 48
JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class DocumentChanged(RuntimeError):
    """A file changed its size while a run was reading it."""


@dataclass(frozen=True)
class Document:
    """`size` bytes of a file from byte `start` on; `name` decides its place in the order and its split."""

    name: str
    path: Path
    file_size: int
    start: int
    size: int

    def read(self, start: int, stop: int) -> bytes:
        """Bytes `start … stop` of the document.

        Raises:
            DocumentChanged: the file no longer has the size it had when the corpus was made.
        """
        with open(self.path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != self.file_size:
                raise DocumentChanged(
                    f"{self.path} changed from {self.file_size} to {size} bytes while in use: "
                    "leave the corpus as it is during a run, then start (or resume) the run again."
                )
            file.seek(self.start + start)
            return file.read(stop - start)


@dataclass(frozen=True)
class Sources:
    """The documents found under a path, in the order of their names."""

    documents: list[Document]
    n_skipped: int
    """Files left out: binary, empty or unreadable."""
    origin: str
    """Where they come from, for people to read."""


class TokenSequence(ABC):
    """Tokens that training reads by their positions, 0 … len - 1."""

    separator: int | None
    """The token that ends a document; None where nobody has told."""
    n_documents: int | None
    n_bytes: int | None
    """Bytes of text that the tokens stand for; None where nobody has told."""

    @abstractmethod
    def __len__(self) -> int:
        """Tokens, separators among them."""

    def tokens(self, start: int, stop: int) -> Tensor:
        """Tokens `start … stop` as int64 (stop - start,).

        Raises:
            IndexError: the range leaves the corpus.
            DocumentChanged: a file in it changed its size.
            InputError: a file holds a token that the vocabulary does not.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens({start}, {stop}) leaves a corpus of {len(self)} tokens")
        return torch.from_numpy(self._tokens(start, stop))

    @abstractmethod
    def _tokens(self, start: int, stop: int) -> np.ndarray: ...

    def text_bytes(self, start: int, stop: int) -> Tensor | None:
        """How many bytes of text each token `start … stop` stands for, int64 (stop - start,); 0 where nobody knows, and
        None where tokens are bytes."""
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of what the corpus consists of."""


class DocumentSequence(TokenSequence):
    """Documents of `sizes` tokens laid end to end, each followed by a separator.

    Token `offsets[d] + i` is token `i` of document `d`; token `offsets[d + 1] - 1` is the separator after it.
    """

    def __init__(self, sizes: np.ndarray, separator: int) -> None:
        self.separator, self.n_documents = separator, len(sizes)
        self.offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes + 1, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def _tokens(self, start: int, stop: int) -> np.ndarray:
        return self._gather(start, stop, self._read, self.separator)

    @abstractmethod
    def _read(self, document: int, first: int, last: int) -> np.ndarray:
        """Tokens `first … last` of a document."""

    def _gather(self, start: int, stop: int, read: Callable[[int, int, int], np.ndarray], between: int) -> np.ndarray:
        """What `read` has for the tokens `start … stop`, and `between` for separators: int64 (stop - start,)."""
        out = np.full(stop - start, between, dtype=np.int64)
        index = int(np.searchsorted(self.offsets, start, side="right")) - 1
        while index < self.n_documents and (origin := int(self.offsets[index])) < stop:
            first, last = max(start - origin, 0), min(stop, int(self.offsets[index + 1]) - 1) - origin
            if first < last:
                out[origin + first - start : origin + last - start] = read(index, first, last)
            index += 1
        return out


class Corpus(DocumentSequence):
    """Documents of bytes, which are their tokens."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = list(documents)
        super().__init__(np.array([document.size for document in self.documents], dtype=np.int64), SEPARATOR)

    @property
    def n_bytes(self) -> int:
        """Bytes: tokens without the separators."""
        return len(self) - len(self.documents)

    def _read(self, document: int, first: int, last: int) -> np.ndarray:
        return np.frombuffer(self.documents[document].read(first, last), dtype=np.uint8)

    def fingerprint(self) -> str:
        """A hash of the documents' names, sizes and places; no file is read."""
        lines = "".join(f"{document.name}\0{document.start}\0{document.size}\n" for document in self.documents)
        return hashlib.blake2b(lines.encode("utf-8", errors="surrogateescape"), digest_size=16).hexdigest()


def find_sources(path: str | Path | None) -> Sources:
    """The documents under `path`.

    Args:
        path: a file, a folder (with all below it), a glob, or None for the Python standard library's own source.
            In folders, hidden, binary and empty files are left out; the latter two kinds are counted.

    Raises:
        InputError: nothing there, nothing there that is text, or JSON lines, whose text must be prepared.
    """
    return _sources_of(find_files(path))


@dataclass(frozen=True)
class FoundFiles:
    """The files under a path, in no order; their names are their paths below `root`."""

    files: list[Path]
    root: Path
    origin: str


def find_files(path: str | Path | None, option: str = "data.path") -> FoundFiles:
    """The files that `path` means, see `find_sources`; what is in them is not looked at.

    Args:
        option: where the path comes from, for the error message.

    Raises:
        InputError: nothing there.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        origin = "the Python standard library's source"
        return FoundFiles(list(_standard_library(root)), root, origin)
    path = Path(path).expanduser()
    if path.is_dir():
        return FoundFiles(list(_walk(path)), path, str(path))
    if path.is_file():
        return FoundFiles([path], path.parent, str(path))
    if glob.has_magic(str(path)):
        files = [Path(match) for match in glob.iglob(str(path), recursive=True)]
        return FoundFiles(files, _fixed_part(path), str(path))
    siblings = os.listdir(path.parent) if path.parent.is_dir() else []
    raise InputError(
        f"{option}={str(path)!r} does not exist: give a file, a folder or a glob, or null for the built-in corpus."
        + suggest(path.name, siblings)
    )


def split_corpus(sources: Sources, fractions: Sequence[float]) -> dict[str, Corpus]:
    """The train, val and test corpora.

    Several documents are dealt out whole, each by a hash of its name: adding a file moves no other. A single
    document is cut by position, train first, as the usual splits of enwik8 and text8 are ([0.9, 0.05, 0.05]).

    Args:
        fractions: of train, val and test: three numbers, none negative, that sum to 1.

    Raises:
        InputError: fractions that are none.
    """
    bounds = split_bounds(fractions)
    if len(sources.documents) == 1:
        return dict(zip(SPLITS, _split_by_position(sources.documents[0], bounds), strict=True))
    dealt: list[list[Document]] = [[] for _ in SPLITS]
    for document in sources.documents:
        share = name_hash(document.name) / 2**HASH_BITS
        dealt[next(split for split, bound in enumerate(bounds) if share < bound)].append(document)
    return {split: Corpus(documents) for split, documents in zip(SPLITS, dealt, strict=True)}


def split_bounds(fractions: Sequence[float]) -> tuple[float, float, float]:
    """The shares at which train, val and test end. Raises InputError for fractions that are none."""
    values = [float(fraction) for fraction in fractions]
    if len(values) != len(SPLITS) or not min(values) >= 0 or values[0] == 0 or not abs(sum(values) - 1) <= 1e-6:
        raise InputError(
            f"data.fractions={list(fractions)} must be three numbers, of train, val and test, that sum to 1, "
            "train above 0 and none negative: for example [0.9, 0.05, 0.05]."
        )
    return values[0], values[0] + values[1], 1.0


def _split_by_position(document: Document, bounds: tuple[float, float, float]) -> Iterator[Corpus]:
    for start, stop in cut_by_position(document.size, bounds):
        part = Document(document.name, document.path, document.file_size, document.start + start, stop - start)
        yield Corpus([part] if part.size else [])


def cut_by_position(size: int, bounds: tuple[float, float, float]) -> Iterator[tuple[int, int]]:
    """Where each split of `size` tokens starts and stops."""
    return itertools.pairwise([0, *(round(bound * size) for bound in bounds)])


def name_hash(name: str) -> int:
    """A number of HASH_BITS bits that depends on `name` alone, the same on every machine."""
    digest = hashlib.blake2b(name.encode("utf-8", errors="surrogateescape"), digest_size=HASH_BITS // 8).digest()
    return int.from_bytes(digest, "big")


def _walk(root: Path, above: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The files below `root` but hidden ones. Links to folders are followed, but not back to one of those `above`."""
    above |= {os.path.realpath(root)}
    folder, subfolders, files = next(os.walk(root), (root, [], []))
    yield from (Path(folder, name) for name in files if not name.startswith("."))
    for name in subfolders:
        if not name.startswith(".") and os.path.realpath(inner := Path(folder, name)) not in above:
            yield from _walk(inner, above)


def _standard_library(root: Path) -> Iterator[Path]:
    """The modules below `root`, without what others put there."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_STANDARD_LIBRARY and not name.startswith(".")]
        yield from (Path(folder, name) for name in files if name.endswith(".py") and not name.startswith("."))


def _sources_of(found: FoundFiles) -> Sources:
    documents, n_skipped = [], 0
    for file in found.files:
        if not file.is_file():
            continue  # a folder that a glob matched, a socket, a broken link
        if file.name.endswith(JSON_LINES):
            raise InputError(
                f"data.path={found.origin!r} holds JSON lines ({file.relative_to(found.root)}), whose text is read "
                f"once: linrope prepare --path {shlex.quote(found.origin)} --output FOLDER, then data.path: FOLDER. Or "
                "give a glob that leaves them out."
            )
        if size := text_size(file):
            documents.append(Document(file.relative_to(found.root).as_posix(), file, size, 0, size))
        else:
            n_skipped += 1
    if not documents:
        raise no_text("data.path", found.origin, n_skipped)
    return Sources(sorted(documents, key=lambda document: document.name), n_skipped, found.origin)


def no_text(option: str, origin: str, n_skipped: int) -> InputError:
    """What to raise where nothing that was found is text."""
    skipped = f" ({n_skipped} skipped: binary, empty or unreadable)" if n_skipped else ""
    return InputError(f"{option}={origin!r} holds no text{skipped}: give a file, folder or glob of text files.")


def text_size(file: Path) -> int:
    """Bytes of a text file; 0 for one that is empty, binary or unreadable."""
    try:
        with open(file, "rb", buffering=0) as opened:
            return 0 if b"\0" in opened.read(BINARY_PROBE) else os.fstat(opened.fileno()).st_size
    except OSError:
        return 0


def _fixed_part(pattern: Path) -> Path:
    """The folders of a glob before its first wildcard."""
    fixed = Path(pattern.anchor)
    for part in pattern.parts[len(fixed.parts) :]:
        if glob.has_magic(part):
            break
        fixed /= part
    return fixed
