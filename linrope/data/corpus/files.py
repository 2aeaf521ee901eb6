"""Where text comes from: the documents under a path, split into train, val and test, read as one run of tokens.

Here they are bytes of files; `token_files` has those that were tokenized before.

Nothing is loaded or cached: a corpus is a table of offsets, and reading tokens reads the bytes of those files that the
range touches. Files larger than memory therefore work. They are read rather than mapped, because a mapped file that
shrinks kills the process (SIGBUS) where a read can say which file it was.
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

BINARY_PROBE = 8192  # bytes looked at: a NUL among them marks a binary file, as git and grep decide it


JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Sources:
    """The documents found under a path, in the order of their names."""

    documents: list[Document]
    n_skipped: int
    """Files left out: binary, empty or unreadable."""
    origin: str
    """Where they come from, for people to read."""


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
