"""Text files: the documents under a path.

Nothing is loaded or cached: a corpus is a table of offsets, and reading tokens reads the bytes of the files in that
range. Files may be larger than memory. They are read, not mapped: a mapped file that shrinks kills the process
(SIGBUS), while a read can name the file.
"""

from __future__ import annotations

import glob
import os
import shlex
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from linrope.data.corpus.sequences import Document
from linrope.errors import InputError, suggest

BINARY_PROBE = 8192
"""A file with a NUL among this many first bytes is binary, as for git and grep."""


JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Sources:
    """The documents found under a path, in the order of their names."""

    documents: list[Document]
    n_skipped: int
    """Number of skipped files: binary, empty or unreadable."""
    origin: str
    """Where the documents come from, as people read it."""


def find_sources(path: str | Path | None) -> Sources:
    """The documents under `path`.

    Args:
        path: a file, a folder (with its subfolders), a glob, or None for the source of the Python standard library.
            Hidden, binary and empty files of a folder are skipped; the last two types are counted.

    Raises:
        InputError: no file there, no text, or JSON lines, which must be prepared.
    """
    return _sources_of(find_files(path))


@dataclass(frozen=True)
class FoundFiles:
    """The files under a path, unordered. The name of a file is its path below `root`."""

    files: list[Path]
    root: Path
    origin: str


def find_files(path: str | Path | None, option: str = "data.path") -> FoundFiles:
    """The files under a path, whatever they contain.

    Args:
        path: see `find_sources`.
        option: the option with the path, for the error message.

    Raises:
        InputError: the path does not exist.
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


def _walk(root: Path, above: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The files below `root` that are not hidden. Links to folders are followed, except back to a folder in `above`."""
    above |= {os.path.realpath(root)}
    folder, subfolders, files = next(os.walk(root), (root, [], []))
    yield from (Path(folder, name) for name in files if not name.startswith("."))
    for name in subfolders:
        if not name.startswith(".") and os.path.realpath(inner := Path(folder, name)) not in above:
            yield from _walk(inner, above)


def _standard_library(root: Path) -> Iterator[Path]:
    """The modules of the standard library below `root`, without tests and installed packages."""
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
                f"data.path={found.origin!r} holds JSON lines ({file.relative_to(found.root)}), which must be "
                f"prepared first: linrope prepare --path {shlex.quote(found.origin)} --output FOLDER, then data.path: "
                "FOLDER. Or give a glob without them."
            )
        if size := text_size(file):
            documents.append(Document(file.relative_to(found.root).as_posix(), file, size, 0, size))
        else:
            n_skipped += 1
    if not documents:
        raise no_text("data.path", found.origin, n_skipped)
    return Sources(sorted(documents, key=lambda document: document.name), n_skipped, found.origin)


def no_text(option: str, origin: str, n_skipped: int) -> InputError:
    """The error for a path without text."""
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
