"""Atomic writes, safe reads, and checks of paths before work starts."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch

from linrope.errors import InputError, suggest_file

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which replaces `path` once all of it is on the disk.

    If anything fails before, even if the process is killed, `path` stays as it was. A killed process leaves a file
    `….partial` beside it: see `remove_partial_files`. Processes that write the same path do not disturb each other.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a crash of the machine could leave an empty file under the new name
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    with suppress(OSError):  # the new name; Windows opens no folders
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if path.is_file():  # some file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


def remove_partial_files(folder: Path) -> None:
    """Remove what processes that were killed left of `whole_file` in a folder; no process may be writing there."""
    for partial in folder.glob("*.partial"):
        with suppress(OSError):
            partial.unlink()


def require_writable(folder: Path, option: str) -> None:
    """Raise InputError, naming the option, unless files can be made in a folder, or the folder itself can be made."""
    try:
        # a link that leads nowhere exists too: no folder can be made in its place
        existing = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise InputError(
            f"{option}={str(folder)!r}: cannot write there ({error.strerror}). Give another folder."
        ) from error


def require_free_folder(folder: Path, overwrite: bool) -> None:
    """Raise InputError unless the folder is new or empty, or may be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output={str(folder)!r} is a file: choose a folder.")
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"--output={str(folder)!r} exists and is not empty: choose another, or pass --overwrite.")
    require_writable(folder, "--output")


def require_new(path: Path, option: str, overwrite: bool) -> Path:
    """The file to write for a path, links followed. Raises InputError, naming the option, unless it may be written."""
    target = target_of(path, option)
    if not target.parent.is_dir():
        raise InputError(f"{option}={str(path)!r} lies in a folder that does not exist: make it, or choose another.")
    if target.exists() and not overwrite:
        raise InputError(f"{option}={str(path)!r} exists: choose another name, or replace a file with --overwrite.")
    require_writable(target.parent, option)
    return target


def target_of(path: Path, option: str) -> Path:
    """The file to write for a path, links followed. Raises InputError, naming the option, if something else is there:
    to replace a folder, a device or a pipe would remove it."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise InputError(f"{option}={str(path)!r} is a link that leads back to itself: choose another name.")
    if target.exists() and not target.is_file():
        what = "is a folder" if target.is_dir() else "is a device or a pipe, not a file"
        raise InputError(f"{option}={str(path)!r} {what}: choose another name.")
    return target


def text_lines(path: Path, fix: str) -> list[str]:
    """The lines of a text file in UTF-8, without a byte order mark; the last one is what follows the last line feed.

    Lines end at "\\n" only, as in the tools that align or label lines: other characters that separate lines, a form
    feed or U+2028, may stand within one.

    Raises:
        InputError: no such file (with the `fix` in words), or a file that is not UTF-8 (with the line).
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): {fix}.{suggest_file(path)}") from error
    try:
        return data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}, line {line:,}: it is not UTF-8: save the file in that encoding.") from error


MOST_OTHERS = 5
"""Files that an error names beside the one that is damaged."""


def load_plain(path: Path, what: str = "checkpoint", name_others: bool = True) -> Any:
    """Tensors and plain values that `torch.save` wrote; the tensors are memory-mapped.

    InputError, which calls the file `what`, if there is none, it is damaged, or another program packed it again.
    `name_others`: it names others in the folder then.
    """
    if path.is_dir():
        raise InputError(f"{what} {str(path)!r} is a folder: give a file.")
    if not path.is_file():
        raise InputError(f"{what} {str(path)!r} does not exist.{suggest_file(path)}")
    try:
        records = _records_of(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if _sizes_of_storages(content) != records:
            raise zipfile.BadZipFile("the sizes of the records are not those of the tensors")
        return content
    except _CompressedError as error:
        raise InputError(
            f"{what} {str(path)!r} was unpacked and packed again, with compression ({error}): its tensors cannot be "
            "read. Give the file as it was written, or pack it again without compression (zip -0)."
        ) from error
    except Exception as error:  # torch, pickle and zipfile have many for other files
        raise InputError(
            f"{what} {str(path)!r} is damaged or no {what}: it cannot be read safely."
            + (f" Give another{_others_beside(path, what)}." if name_others else "")
        ) from error


def _others_beside(path: Path, what: str) -> str:
    """Names of files that may have been meant, as the end of a sentence; "" without any."""
    own = "" if what == "checkpoint" and path.suffix != ".pt" else path.suffix  # a text's neighbours are texts
    others = sorted(file.name for file in path.parent.glob(f"*{own or '.ckpt'}") if file.name != path.name)
    more = f" and {len(others) - MOST_OTHERS} more" if len(others) > MOST_OTHERS else ""
    return f", perhaps one of those beside it: {', '.join(others[:MOST_OTHERS])}{more}" if others else ""


class _CompressedError(Exception):
    """An entry of an archive is compressed."""


def _records_of(path: Path) -> list[int]:
    """Checks an archive of `torch.save`; the sizes of its records in the order of the file, without empty ones."""
    with zipfile.ZipFile(path) as archive:  # torch.load checks neither compression nor checksums nor sizes
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED:
                raise _CompressedError(entry.filename)
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
    records = [entry for entry in entries if entry.filename.partition("/")[2].startswith("data/")]
    return [entry.file_size for entry in records if entry.file_size]


def _sizes_of_storages(content: Any) -> list[int]:
    """Bytes of each storage under nested containers, in the order of memory, without empty ones.

    Memory-mapped storages are in the order of their records.
    """
    sizes: dict[int, int] = {}

    def note(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            note(list(value.values()))
        elif isinstance(value, (list, tuple, set)):
            for part in value:
                note(part)

    note(content)
    return [sizes[start] for start in sorted(sizes) if sizes[start]]


def versions(folder: Path) -> dict[int, Path]:
    """The folders version_N in a folder, by N."""
    found = ((place.name.removeprefix("version_"), place) for place in folder.glob("version_*"))
    return {int(number): place for number, place in found if number.isdecimal()}


def in_newest_version(folder: Path, name: str) -> Path | None:
    """The file of that name in the newest folder version_N in `folder` that has it; None if none has."""
    found = {number: place / name for number, place in versions(folder).items() if (place / name).exists()}
    return found[max(found)] if found else None


def claim(file: IO[str]) -> bool:
    """Lock an open file until it is closed; False if another process has locked it."""
    try:
        lock(file)
    except OSError:
        return False
    return True


def lock(file: IO[str], inherited: bool = True) -> None:
    """Lock an open file until it is closed, by forked processes too if `inherited`. OSError if that is not possible."""
    if sys.platform == "win32":
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        (fcntl.flock if inherited else fcntl.lockf)(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
