"""Where text comes from: the documents under a path, split into train, val and test, read as one run of tokens.

Nothing is loaded or cached: a corpus is a table of offsets, and reading tokens reads the bytes of those files that the
range touches. Files larger than memory therefore work. They are read rather than mapped, because a mapped file that
shrinks kills the process (SIGBUS) where a read can say which file it was.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from linrope.data.tokenizer import SEPARATOR
from linrope.errors import InputError, suggest

SPLITS = ("train", "val", "test")
BINARY_PROBE = 8192  # bytes looked at: a NUL among them marks a binary file, as git and grep decide it
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


class Corpus:
    """Documents laid end to end as tokens, each followed by a separator.

    Token `offsets[d] + i` is byte `i` of document `d`; token `offsets[d + 1] - 1` is the separator after it.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = list(documents)
        sizes = np.array([document.size + 1 for document in self.documents], dtype=np.int64)
        self.offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])

    def __len__(self) -> int:
        """Tokens: bytes and separators."""
        return int(self.offsets[-1])

    @property
    def n_bytes(self) -> int:
        """Bytes: tokens without the separators."""
        return len(self) - len(self.documents)

    def tokens(self, start: int, stop: int) -> Tensor:
        """Tokens `start … stop` as int64 (stop - start,).

        Raises:
            IndexError: the range leaves the corpus.
            DocumentChanged: a file in it changed its size.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens({start}, {stop}) leaves a corpus of {len(self)} tokens")
        out = np.full(stop - start, SEPARATOR, dtype=np.int64)
        index = int(np.searchsorted(self.offsets, start, side="right")) - 1
        while index < len(self.documents) and (origin := int(self.offsets[index])) < stop:
            document = self.documents[index]
            first, last = max(start - origin, 0), min(stop - origin, document.size)
            if first < last:
                out[origin + first - start : origin + last - start] = np.frombuffer(
                    document.read(first, last), dtype=np.uint8
                )
            index += 1
        return torch.from_numpy(out)


def find_sources(path: str | Path | None) -> Sources:
    """The documents under `path`.

    Args:
        path: a file, a folder (with all below it), a glob, or None for the Python standard library's own source.
            In folders, hidden, binary and empty files are left out; the latter two kinds are counted.

    Raises:
        InputError: nothing there, or nothing there that is text.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        origin = "the Python standard library's source"
        return _sources_of(_walk(root, suffix=".py", excluded=NOT_STANDARD_LIBRARY), root, origin)
    path = Path(path).expanduser()
    if path.is_dir():
        return _sources_of(_walk(path), path, str(path))
    if path.is_file():
        return _sources_of([path], path.parent, str(path))
    if glob.has_magic(str(path)):
        files = [Path(match) for match in glob.iglob(str(path), recursive=True)]
        return _sources_of(files, _fixed_part(path), str(path))
    siblings = os.listdir(path.parent) if path.parent.is_dir() else []
    raise InputError(
        f"data.path={str(path)!r} does not exist: give a file, a folder or a glob, or null for the built-in corpus."
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
    bounds = _split_bounds(fractions)
    if len(sources.documents) == 1:
        return dict(zip(SPLITS, _split_by_position(sources.documents[0], bounds), strict=True))
    dealt: list[list[Document]] = [[] for _ in SPLITS]
    for document in sources.documents:
        share = _unit_hash(document.name)
        dealt[next(split for split, bound in enumerate(bounds) if share < bound)].append(document)
    return {split: Corpus(documents) for split, documents in zip(SPLITS, dealt, strict=True)}


def _split_bounds(fractions: Sequence[float]) -> tuple[float, float, float]:
    values = [float(fraction) for fraction in fractions]
    if len(values) != len(SPLITS) or min(values) < 0 or values[0] == 0 or abs(sum(values) - 1) > 1e-6:
        raise InputError(
            f"data.fractions={list(fractions)} must be three numbers, of train, val and test, that sum to 1, "
            "train above 0 and none negative: for example [0.9, 0.05, 0.05]."
        )
    return values[0], values[0] + values[1], 1.0


def _split_by_position(document: Document, bounds: tuple[float, float, float]) -> Iterator[Corpus]:
    cuts = [0, *(round(bound * document.size) for bound in bounds)]
    for start, stop in itertools.pairwise(cuts):
        part = Document(document.name, document.path, document.file_size, document.start + start, stop - start)
        yield Corpus([part] if part.size else [])


def _unit_hash(name: str) -> float:
    """A number in [0, 1) that depends on `name` alone, the same on every machine."""
    digest = hashlib.blake2b(name.encode("utf-8", errors="surrogateescape"), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def _walk(root: Path, suffix: str = "", excluded: Iterable[str] = ()) -> Iterator[Path]:
    """The files below `root` whose names end in `suffix`, hidden ones and `excluded` folders left out."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in excluded and not name.startswith(".")]
        yield from (Path(folder, name) for name in files if name.endswith(suffix) and not name.startswith("."))


def _sources_of(files: Iterable[Path], root: Path, origin: str) -> Sources:
    documents, n_skipped = [], 0
    for file in files:
        if not file.is_file():
            continue  # a folder that a glob matched, a socket, a broken link
        if size := _text_size(file):
            documents.append(Document(file.relative_to(root).as_posix(), file, size, 0, size))
        else:
            n_skipped += 1
    if not documents:
        skipped = f" ({n_skipped} skipped: binary, empty or unreadable)" if n_skipped else ""
        raise InputError(f"data.path={origin!r} holds no text{skipped}: give a file, folder or glob of text files.")
    return Sources(sorted(documents, key=lambda document: document.name), n_skipped, origin)


def _text_size(file: Path) -> int:
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
