"""Atomic writes, safe reads, and checks of paths before work starts."""

from __future__ import annotations

import fcntl
import os
import secrets
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
    with suppress(OSError):  # the new name, if the file system can sync folders
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
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


def require_new(path: Path, option: str, overwrite: bool) -> None:
    """Raise InputError, naming the option, unless a file may be written there."""
    if not path.parent.is_dir():
        raise InputError(f"{option}={str(path)!r} lies in a folder that does not exist: make it, or choose another.")
    if path.is_dir() or (path.exists() and not overwrite):
        what = "is a folder" if path.is_dir() else "exists"
        raise InputError(f"{option}={str(path)!r} {what}: choose another name, or replace a file with --overwrite.")
    require_writable(path.parent, option)


def load_plain(path: Path, what: str = "checkpoint") -> Any:
    """Tensors and plain values that `torch.save` wrote; the tensors are memory-mapped.

    InputError, which calls the file `what`, if there is none or it is damaged.
    """
    if not path.is_file():
        siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(f"{what} {str(path)!r} does not exist.{suggest(path.name, siblings)}")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not check the checksums of torch.save
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch, pickle and zipfile have many for other files
        others = sorted(file.name for file in path.parent.glob(f"*{path.suffix or '.ckpt'}") if file.name != path.name)
        raise InputError(
            f"{what} {str(path)!r} is damaged or no {what}: it cannot be read safely. Give another"
            + (f", perhaps one of those beside it: {', '.join(others)}." if others else ".")
        ) from error


def claim(file: IO[str]) -> bool:
    """Lock an open file until it is closed; False if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
