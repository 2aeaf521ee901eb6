"""The exceptions of linrope, and helpers for their messages."""

from __future__ import annotations

import difflib
import errno
import importlib
import signal
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk, the user's quota, or the largest size of one file."""


class InputError(ValueError):
    """An argument that linrope cannot use. The message names the argument, its value and the fix.

    `of_this_rank`: of the ranks of a run this one alone has the error, so it is the one to print it."""

    of_this_rank = False


class NonFiniteError(RuntimeError):
    """A loss, gradient or logit is infinite or NaN. For a gradient it is raised before the weights change.

    `of_this_rank`: see InputError."""

    of_this_rank = False


class DocumentChanged(RuntimeError):
    """A file of the corpus changed while a run was reading it."""


class DamagedFile(InputError):
    """A file of the corpus holds what it cannot hold. Found while reading, so perhaps on one rank only."""


class CheckpointError(RuntimeError):
    """A checkpoint, or the log of a run, could not be written; earlier checkpoints are unchanged."""


class NothingToDo(Exception):
    """A run that is asked to go on has ended already. The message says so."""


class RankLost(RuntimeError):
    """A run on several ranks that ends because of another rank, which failed, was killed, or hangs.

    `printed_by` is the rank that prints it; None: every rank does."""

    def __init__(self, message: str, printed_by: int | None = 0) -> None:
        super().__init__(message)
        self.printed_by = printed_by


class LeftToAnotherRank(Exception):
    """The error of this rank is one that another rank prints; `code` is the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


class WorkerKilled(RuntimeError):
    """A process that reads training data ahead was killed."""


class Interrupted(Exception):
    """A signal stopped training, after a whole step and with a checkpoint (None before the first step)."""

    def __init__(self, signum: int, step: int, checkpoint: Path | None) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}")
        self.signum, self.step, self.checkpoint = signum, step, checkpoint


def suggest(name: str, choices: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` with the choice closest to `name`, or `""` if none is close."""
    close = difflib.get_close_matches(str(name), [choice for choice in choices if choice != str(name)])
    nearest = next((choice for choice in close if choice.startswith(str(name))), close[0] if close else None)
    return "" if nearest is None else f" Did you mean {nearest!r}?"


def suggest_file(path: Path) -> str:
    """The same with the file that lies where `path` would, and has the closest name."""
    folder = path.parent
    return suggest(path.name, [file.name for file in folder.iterdir() if file.is_file()] if folder.is_dir() else [])


def require_not_empty(argument: str, path: object) -> None:
    """Raise InputError for an empty path, as of an unset variable of the shell: it would be the working folder."""
    if path == "":
        raise InputError(f"{argument} is empty: give a path, or leave the option out.")


def require_choice(argument: str, value: object, choices: Iterable[str]) -> None:
    """Raise InputError unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise InputError(f"{argument}={value!r} is unknown: choose one of {known}.{suggest(str(value), choices)}")


def require_package(name: str, needed_by: str, extra: str = "text") -> ModuleType:
    """The optional package `name`, of one of linrope's extras. Raises InputError, naming what it is `needed_by`, if it
    is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        message = f"{needed_by} needs the package {name}, which is not installed: pip install 'linrope[{extra}]'."
        raise InputError(message) from error
