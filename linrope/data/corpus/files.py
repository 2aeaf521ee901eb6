"""Text files: the documents under a path.

Files may be larger than memory: tokens are read range by range. They are not mapped, because a mapped file that shrinks
kills the process (SIGBUS), while a read can name the file.
"""

from __future__ import annotations

import glob
import os
import shlex
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
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


def find_sources(path: str | Path | None, option: str = "data.path", json_lines: bool = False) -> Sources:
    """The documents under `path`, each a file.

    Args:
        path: a file, a folder (with its subfolders), a glob, or None for the source of the Python standard library.
            Hidden, binary and empty files of a folder are skipped; the last two types are counted.
        option: the option with the path, for error messages.
        json_lines: accept files of JSON lines too.

    Raises InputError for no file there, no text, or JSON lines, which must be prepared.
    """
    files, root, origin = _find_files(path, option)
    documents, n_skipped = [], 0
    for file in files:
        if not file.is_file():
            continue  # a folder that a glob matched, a socket, a broken link
        name = file.relative_to(root).as_posix()
        if name.endswith(JSON_LINES) and not json_lines:
            raise InputError(
                f"{option}={origin!r} holds JSON lines ({name}), which must be prepared first: linrope prepare --path "
                f"{shlex.quote(origin)} --output FOLDER, then data.path: FOLDER. Or give a glob without them."
            )
        if size := _text_size(file):
            documents.append(Document(name, file, size, 0, size))
        else:
            n_skipped += 1
    if not documents:
        skipped = f" ({n_skipped} skipped: binary, empty or unreadable)" if n_skipped else ""
        raise InputError(f"{option}={origin!r} holds no text{skipped}: give a file, folder or glob of text files.")
    return Sources(sorted(documents, key=lambda document: document.name), n_skipped, origin)


def _find_files(path: str | Path | None, option: str) -> tuple[Iterable[Path], Path, str]:
    """The files under a path, the folder that their names are relative to, and the `origin` of `Sources`."""
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        modules = (file for file in _walk(root, NOT_STANDARD_LIBRARY) if file.suffix == ".py")
        return modules, root, "the Python standard library's source"
    path = Path(path).expanduser()
    if path.is_dir():
        return _walk(path), path, str(path)
    if path.is_file():
        return [path], path.parent, str(path)
    if glob.has_magic(str(path)):
        root = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))
        return map(Path, glob.iglob(str(path), recursive=True)), root, str(path)
    siblings = os.listdir(path.parent) if path.parent.is_dir() else []
    raise InputError(
        f"{option}={str(path)!r} does not exist: give a file, a folder or a glob, or null for the built-in corpus."
        + suggest(path.name, siblings)
    )


def _walk(root: Path, left_out: Collection[str] = (), above: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The files below `root`, neither hidden nor in folders `left_out`; links are followed, never in a circle."""
    above |= {os.path.realpath(root)}
    folder, subfolders, files = next(os.walk(root), (root, [], []))
    yield from (Path(folder, name) for name in files if not name.startswith("."))
    for name in subfolders:
        if name.startswith(".") or name in left_out:
            continue
        if os.path.realpath(inner := Path(folder, name)) not in above:
            yield from _walk(inner, left_out, above)


def _text_size(file: Path) -> int:
    """Bytes of a file with text; 0 for one that is empty, binary or unreadable."""
    try:
        with open(file, "rb", buffering=0) as opened:
            binary = not file.name.endswith(JSON_LINES) and b"\0" in opened.read(BINARY_PROBE)
            return 0 if binary else os.fstat(opened.fileno()).st_size
    except OSError:
        return 0
