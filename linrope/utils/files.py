"""Files written whole or not at all, and checks of paths before work starts."""

from __future__ import annotations

import fcntl
import os
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch

from linrope.errors import InputError, suggest


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` once all of it is on the disk.

    Whatever goes wrong before that, the process's own end among it, `path` is as it was. What is then left over, a
    `….partial` beside it, the next attempt overwrites.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a crash of the machine could leave the new name with nothing in it
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    _sync_folder(path.parent)


def require_writable(folder: Path, option: str) -> None:
    """Raise InputError, naming the option, unless files can be made in a folder, or the folder in one that exists."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise InputError(
            f"{option}={str(folder)!r}: cannot write there ({error.strerror}). Give another folder."
        ) from error


def require_new(path: Path, option: str, overwrite: bool) -> None:
    """Raise InputError, naming the option, unless a file may be written there."""
    if not path.parent.is_dir():
        raise InputError(f"{option}={str(path)!r} lies in a folder that does not exist: make it, or choose another.")
    if path.is_dir() or (path.exists() and not overwrite):
        what = "is a folder" if path.is_dir() else "exists"
        raise InputError(f"{option}={str(path)!r} {what}: choose another name, or replace a file with --overwrite.")
    require_writable(path.parent, option)


def _sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk, where its file system can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def load_plain(path: Path, what: str = "checkpoint") -> Any:
    """Tensors and plain values that `torch.save` wrote, the tensors still on disk.

    Raises:
        InputError: no such file, or a damaged one; the message calls it `what`.
    """
    if not path.is_file():
        siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(f"{what} {str(path)!r} does not exist.{suggest(path.name, siblings)}")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums that torch.save wrote
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch, pickle and zipfile each raise their own for a file that is something else
        others = sorted(file.name for file in path.parent.glob(f"*{path.suffix or '.ckpt'}") if file.name != path.name)
        raise InputError(
            f"{what} {str(path)!r} is damaged or no {what}: it cannot be read safely. Give another"
            + (f", perhaps one of those beside it: {', '.join(others)}." if others else ".")
        ) from error


def claim(file: IO[str]) -> bool:
    """Whether this process alone holds the open file, from now on until it is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
