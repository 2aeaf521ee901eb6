"""Text files: the documents under a path.

Files may be larger than memory: tokens are read range by range. They are not mapped, because a mapped file that shrinks
kills the process (SIGBUS), while a read can name the file.
"""

from __future__ import annotations

import errno
import glob
import gzip
import io
import json
import os
import re
import shlex
import stat
import sysconfig
import warnings
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

from linrope.data.corpus.sequences import Document
from linrope.data.prepare.manifest import LOCK, MANIFEST, PARTS, TOKENIZER
from linrope.errors import InputError, require_not_empty, require_package, suggest

BINARY_PROBE = 8192
"""A file with a NUL among this many first bytes is binary, as for git and grep."""
COMPRESSED = (".gz", ".zst")
ZSTD_WINDOW = 1 << 31
"""Bytes of the largest window that zstd has. The package's default refuses what `zstd --long` writes; memory is taken
for the window that an archive names."""
JSON_LINES = tuple(f"{name}{end}" for name in (".jsonl", ".ndjson") for end in ("", *COMPRESSED))
JSON = tuple(f".json{end}" for end in ("", *COMPRESSED))
"""Files of these names are JSON lines if their first two lines are an object each."""
JSON_PROBE = 1 << 24
"""Bytes of the longest such line, and of a `state.json` of `save_to_disk`."""
TABLES = (".parquet", ".arrow")
"""Files that `datasets` reads."""
UNREADABLE = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Why a folder may be skipped: no permission, removed or replaced meanwhile, or too deep."""
OF_DATA = (MANIFEST, TOKENIZER, "state.json", "dataset_info.json", "dataset_dict.json")
"""The files of a prepared folder and of a saved dataset that could be taken for text."""
NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Sources:
    """The documents found under a path, in the order of their names."""

    documents: list[Document]
    n_skipped: int
    """Number of skipped files (binary, empty or unreadable) and of folders that cannot be read."""
    origin: str
    """Where the documents come from, as people read it."""


def find_sources(path: str | Path | None, option: str = "data.path", json_lines: bool = False) -> Sources:
    """The documents under `path`, each a file.

    Args:
        path: a file, a folder (with its subfolders), a glob, or None for the source of the Python standard library.
            Hidden, binary and empty files of a folder are skipped; the last two types are counted. Skipped too are
            folders that hold no text of their own: of runs below it, of `linrope prepare`, and of the `save_to_disk` of
            `datasets`. A file that is found by several links counts once.
        option: the option with the path, for error messages.
        json_lines: accept files of JSON lines too.

    Raises InputError for no file there, no text, JSON lines, which must be prepared, or an error of the disk. Warns of
    folders that may not be read.
    """
    require_not_empty(option, path)
    unreadable: list[Path] = []
    files, root, origin = _find_files(path, option, unreadable)
    found, n_skipped = _distinct(files, root)
    if unreadable:
        n_skipped += len(unreadable)
        number = f"{len(unreadable):,}, the first {unreadable[0]}"
        warnings.warn(f"{option}={origin!r}: folders that cannot be read are skipped ({number}).", stacklevel=2)
    data_folders = {folder: _data_folder(folder) for folder in {file.parent for file in found}}
    walked = path is None or Path(path).expanduser().is_dir() or "**" in Path(path).parts
    found = [file for file in found if data_folders[file.parent] is None or not (walked or _is_of_data(file))]
    documents = []
    for file in found:
        name, of_json_lines = file.relative_to(root).as_posix(), is_json_lines(file, look_into_zst=json_lines)
        if of_json_lines and not json_lines:
            raise InputError(
                f"{option}={origin!r} holds JSON lines ({name}), which must be prepared first: linrope prepare --path "
                f"{shlex.quote(origin)} --output FOLDER, then data.path: FOLDER. Or give a glob without them."
            )
        size, modified = _size_and_time(file, of_json_lines)
        if size:
            documents.append(Document(name, file, size, modified, 0, size))
        else:
            n_skipped += 1
    if not documents:
        skipped = f" ({n_skipped} skipped: binary, empty or unreadable)" if n_skipped else ""
        hint = _hint(found, next((folder for folder in data_folders.values() if folder is not None), None))
        raise InputError(
            f"{option}={origin!r} holds no text{skipped}: give a file, folder or glob of text files. JSON lines are "
            f"named .jsonl or .ndjson, with .gz or .zst if they are compressed.{hint}"
        )
    return Sources(sorted(documents, key=lambda document: document.name), n_skipped, origin)


def _hint(files: Iterable[Path], data_folder: Path | None) -> str:
    """What to do with files that are no text: these, and those of a folder that `_data_folder` names."""
    hints = []
    if data_folder is not None and is_saved_dataset(data_folder):
        quoted = shlex.quote(str(data_folder))
        hints.append(
            f"{data_folder} is of save_to_disk: read it with linrope prepare --dataset {quoted} --output FOLDER."
        )
    elif data_folder is not None:
        hints.append(f"{data_folder} holds tokens of `linrope prepare`: give it as data.path of a language model.")
    if any(compression_of(file) for file in files):
        hints.append("Only JSON lines may be compressed: decompress other text.")
    if any(file.suffix.lower() in TABLES for file in files):
        hints.append(f"Read {' and '.join(TABLES)} with linrope prepare --dataset FOLDER --output OTHER.")
    return "".join(f" {hint}" for hint in hints)


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` of Hugging Face's `datasets` wrote a folder, for a dataset or for all its splits."""
    if os.path.isfile(folder / "dataset_dict.json"):
        return True
    try:
        with open(folder / "state.json", "rb") as opened:
            state = json.loads(opened.read(JSON_PROBE))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(state, dict) and "_data_files" in state


def _is_of_data(file: Path) -> bool:
    """Whether a file in a folder that `_data_folder` names belongs to the data; others may be asked for by name."""
    return file.parent.name == PARTS or file.name in OF_DATA or file.suffix in (".bin", ".npy", ".arrow")


def _data_folder(folder: Path) -> Path | None:
    """The prepared folder or the saved dataset that the files in `folder` are a part of; None if they are not."""
    for place in (folder, folder.parent) if folder.name == PARTS else (folder,):
        prepared = os.path.isfile(place / MANIFEST) or os.path.isfile(place / PARTS / LOCK)
        if prepared or is_saved_dataset(place):
            return place
    return None


def is_json_lines(file: Path, look_into_zst: bool = True) -> bool:
    """Whether a file holds JSON lines: by its name, and by its first lines if it may also be one JSON value. A
    .json.zst is opened, with an optional package, only if asked."""
    name = file.name.lower()
    if not name.endswith(JSON):
        return name.endswith(JSON_LINES)
    damaged: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, ValueError, RecursionError)  # or not JSON
    if compression_of(file) == ".zst":
        if not look_into_zst:
            return False
        damaged += (zstd(file)[1],)
    try:
        with _decompressing(file) as opened:
            return all(isinstance(json.loads(opened.readline(JSON_PROBE)), dict) for _ in range(2))
    except damaged:
        return False


def compression_of(file: Path) -> str | None:
    """The ending in COMPRESSED that a file has, in small letters; None without one."""
    ending = file.suffix.lower()
    return ending if ending in COMPRESSED else None


def zstd(file: Path) -> tuple[Any, type[Exception]]:
    """A decompressor for an archive, and its error. InputError without the package, which names the file."""
    zstandard = require_package("zstandard", str(file))
    return zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW), zstandard.ZstdError


def _decompressing(file: Path) -> BinaryIO:
    """The bytes of a file, those in it for an archive."""
    if compression_of(file) == ".gz":
        return gzip.open(file)
    if compression_of(file) == ".zst":
        return io.BufferedReader(zstd(file)[0].stream_reader(open(file, "rb"), read_across_frames=True))
    return open(file, "rb")


def _find_files(path: str | Path | None, option: str, unreadable: list[Path]) -> tuple[Iterable[Path], Path, str]:
    """The files under a path, the folder that their names are relative to, and the `origin` of `Sources`. For
    `unreadable` see `_folders`."""
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        modules = (file for file in _files(root, unreadable, NOT_STANDARD_LIBRARY) if file.suffix == ".py")
        return modules, root, "the Python standard library's source"
    path = Path(path).expanduser()
    require_short(path, option)
    if path.is_dir():
        return _files(path, unreadable), path, str(path)
    if path.is_file():
        return [path], path.parent, str(path)
    if glob.has_magic(str(path)):
        root = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))
        return _matches(path, unreadable), root, str(path)
    if path.exists():
        raise InputError(f"{option}={str(path)!r} is a pipe or a device: write its text to a file, and give that.")
    siblings = os.listdir(path.parent) if path.parent.is_dir() else []
    raise InputError(
        f"{option}={str(path)!r} does not exist: give a file, a folder or a glob, or null for the built-in corpus."
        + suggest(path.name, siblings)
    )


def require_short(path: Path, option: str) -> None:
    """Raise InputError, naming the option, for a path that the system refuses to look up: one with a long name."""
    try:
        path.exists()
    except OSError as error:
        raise InputError(f"{option}={str(path)!r} cannot be opened: {error.strerror}.") from error


def _matches(pattern: Path, unreadable: list[Path]) -> Iterator[Path]:
    """The files of a glob. `**` stands for folders as `_folders` finds them: glob's own visits a folder once for every
    chain of links to it."""
    if "**" not in pattern.parts:
        yield from map(Path, glob.iglob(str(pattern)))
        return
    at = pattern.parts.index("**")
    above, below = Path(*pattern.parts[:at]), pattern.parts[at + 1 :] or ("*",)
    for root in filter(os.path.isdir, glob.iglob(str(above))):
        for folder, _ in _folders(Path(root), unreadable):
            yield from _matches(Path(glob.escape(str(folder)), *below), unreadable)


def _files(root: Path, unreadable: list[Path], left_out: Collection[str] = ()) -> Iterator[Path]:
    """The files below `root`, neither hidden nor in folders `left_out`."""
    return (Path(folder, name) for folder, names in _folders(root, unreadable, left_out) for name in names)


def _folders(root: Path, unreadable: list[Path], left_out: Collection[str] = ()) -> Iterator[tuple[Path, list[str]]]:
    """`root` and the folders below it, neither hidden nor `left_out`, with the names of their files.

    Links to folders are followed. Each real folder is visited once, by a path without links if there is one. Folders
    that may not be read are added to `unreadable`. Raises InputError for an error of the disk.
    """
    seen, pending, linked = set(), [root], deque()
    while pending or linked:
        folder = pending.pop() if pending else linked.popleft()
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise InputError(
                    f"{folder} cannot be listed ({error.strerror}), so that its text would be missing: try again, or "
                    "give another path."
                ) from error
            unreadable.append(folder)
            continue
        names = []
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if not _is_folder(entry):
                names.append(entry.name)
            elif entry.name not in left_out and not _is_of_a_run(entry):
                (linked if entry.is_symlink() else pending).append(Path(folder, entry.name))
        yield folder, names


def _is_of_a_run(entry: os.DirEntry) -> bool:
    """Whether a folder holds the logs and checkpoints of a run, which grow while it trains."""
    return re.fullmatch(r"version_\d+", entry.name) is not None and os.path.isfile(Path(entry.path, "config.yaml"))


def _distinct(files: Iterable[Path], root: Path) -> tuple[list[Path], int]:
    """The regular files among `files`, each once, and the number of those that cannot be reached (dangling links, paths
    that are too long). Of several names of a file one of JSON lines counts, or else one without links, or the first:
    the cache of a Hugging Face dataset has the text under a hash, and a link to it with the name."""
    found: dict[tuple[int, int], Path] = {}
    n_unreadable, real_root = 0, os.path.realpath(root)
    for file in files:
        if (status := _status(file)) is None:
            n_unreadable += 1
        elif stat.S_ISREG(status.st_mode):  # not a folder that a glob matched, a socket, a pipe or a device
            key = status.st_dev, status.st_ino
            other = found.setdefault(key, file)
            if other != file:
                found[key] = min(other, file, key=lambda name: _rank_of_name(name, root, real_root))
    return list(found.values()), n_unreadable


def _rank_of_name(file: Path, root: Path, real_root: str) -> tuple[bool, bool, Path]:
    return not file.name.lower().endswith(JSON_LINES + JSON), _has_link(file, root, real_root), file


def _has_link(file: Path, root: Path, real_root: str) -> bool:
    """Whether the path of a file has a link below `root`."""
    return os.path.realpath(file) != os.path.join(real_root, file.relative_to(root))


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links in a circle
        return False


def _size_and_time(file: Path, of_json_lines: bool) -> tuple[int, int]:
    """Bytes and modification time (ns) of a file with text; size 0 for one that is empty, binary or unreadable."""
    try:
        with open(file, "rb", buffering=0) as opened:
            binary = not of_json_lines and b"\0" in opened.read(BINARY_PROBE)
            status = os.fstat(opened.fileno())
            return 0 if binary else status.st_size, status.st_mtime_ns
    except OSError:
        return 0, 0
