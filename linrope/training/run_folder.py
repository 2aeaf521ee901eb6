"""The folder of a run: FOLDER/NAME/version_N, claimed by one process, and cleaned of what killed processes left."""

from __future__ import annotations

import errno
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from linrope.errors import InputError
from linrope.models.saving import open_checkpoint
from linrope.utils.files import lock, remove_partial_files, versions

LOCK = ".lock"
CHECKPOINTS = "checkpoints"
OPENED = "events.out.tfevents."
"""TensorBoard's logger makes this file before a run has begun."""
PATIENCE = 1.0
"""Seconds to wait for another process that looks into a folder."""


class RunFolder:
    """The folder of a run, `path`, locked until this process ends or `release` is called.

    Processes that a run starts, such as its data loaders' workers, do not hold the lock. File systems without locks are
    not locked. `problem` says why this process may not write there; None if it may.
    """

    def __init__(self, path: Path, problem: str | None = None) -> None:
        self.path = path
        self.problem = problem
        self._lock: IO[str] | None = None

    def lock(self, patience: float = PATIENCE) -> bool:
        """Lock the folder and remove its partial files; False if another process has it.

        Without locks they stay: another process may be writing them."""
        file = open(self.path / LOCK, "w")  # noqa: SIM115 (closing it unlocks)
        is_locked = _lock(file, patience)
        if is_locked is False:
            file.close()
            return False
        self._lock = file
        for folder in (self.path, self.path / CHECKPOINTS) if is_locked else ():
            remove_partial_files(folder)
        return True

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def release(self) -> None:
        """Unlock the folder at the end of its run; remove it if the run left nothing in it."""
        if self._lock is not None:
            with suppress(OSError):
                files = list(self.path.iterdir())
                if all(file.name == LOCK or file.name.startswith(OPENED) for file in files):
                    for file in files:
                        file.unlink()
                    self.path.rmdir()
                    self.path.parent.rmdir()  # if there are no other runs of that name
            self.unlock()


def _lock(file: IO[str], patience: float) -> bool | None:
    """Lock a file; False if another process has it, None if this file system has no locks."""
    until = time.monotonic() + patience
    while True:
        try:
            lock(file, inherited=False)
            return True
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return None
            if time.monotonic() >= until:
                return False
        time.sleep(0.05)


def new_run_folder(runs: Path) -> RunFolder:
    """Make and lock the next folder version_N in `runs`; what killed runs left partly written there is removed."""
    runs.mkdir(parents=True, exist_ok=True)
    others = versions(runs)
    number = 1 + max(others, default=-1)
    for folder in others.values():
        other = RunFolder(folder)
        if not (folder / LOCK).is_file():
            continue
        with suppress(OSError):  # perhaps it may only be read
            if other.lock(patience=0):
                other.unlock()
    while True:
        folder = RunFolder(runs / f"version_{number}")
        with suppress(FileExistsError):  # another run was faster
            folder.path.mkdir()
            folder.lock()
            return folder
        number += 1


def folder_of(checkpoint: Path) -> RunFolder | None:
    """The folder of the run that wrote a checkpoint; None if the file lies elsewhere."""
    place = checkpoint.absolute().parent
    return RunFolder(place.parent) if place.name == CHECKPOINTS else None


def resumed_run_folder(runs: Path, checkpoint: Path, step: int) -> RunFolder | None:
    """Lock the folder of the run of a checkpoint at `step`, to go on in it.

    None if it is not in `runs`, or if the run has a later checkpoint, which must not be overwritten. It has a `problem`
    if another process trains that run.
    """
    folder = folder_of(checkpoint)
    if folder is None or folder.path.parent.resolve() != runs.resolve():
        return None
    last = checkpoint.with_name("last.ckpt")
    if checkpoint.name != last.name and last.exists():
        with suppress(InputError):  # a damaged one may be overwritten
            if open_checkpoint(last)["global_step"] > step:
                return None
    option = f"--ckpt_path={str(checkpoint)!r}"
    try:
        if not folder.lock():
            folder.problem = (
                f"{option}: its run is being trained by another process: wait for it or stop it, or set another "
                "run.name."
            )
    except OSError as error:
        folder.problem = f"{option}: its run cannot be continued there ({error.strerror}): set another run.name."
    return folder
