"""What commands print, which rank of a run prints it, and the command lines they suggest."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from lightning_utilities.core.rank_zero import rank_zero_only  # Lightning sets its rank; importing it loads no torch

import linrope
from linrope.cli.imports import IMPORT, imported
from linrope.utils.printable import printable

HEAD_START = 2.0
"""Seconds that rank 0 has to print an error that all ranks meet, before the other ranks exit."""


def rank() -> int:
    """The rank of this process in its run; 0 in a process that has not started others."""
    launched = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))  # until Lightning is imported
    return getattr(rank_zero_only, "rank", int(launched))


def leave_error_to_first_rank() -> bool:
    """True on all ranks but the first, for an error that all ranks meet, so that one of them prints it.

    It waits `HEAD_START` there: a launcher ends all processes once one has failed, and rank 0 must have printed before.
    """
    if rank() != 0:
        time.sleep(HEAD_START)
    return rank() != 0


def say(text: str) -> None:
    """Print a line to the standard error, with the rank of this process if it is not 0. It may name files of others."""
    print(f"linrope: {f'rank {rank()}: ' if rank() else ''}{printable(text)}", file=sys.stderr)


def say_once(text: str) -> None:
    """`say` it in the process of rank 0 alone."""
    if rank() == 0:
        say(text)


_with_its_place = warnings.formatwarning


def format_warning(
    message: Warning | str, category: type[Warning], file: str, line: int, text: str | None = None
) -> str:
    """A warning of linrope is one line, as an error is. Those of other packages keep their place in the code."""
    if Path(linrope.__file__).parent in Path(file).parents:
        return f"linrope: warning: {printable(str(message))}\n"
    return _with_its_place(message, category, file, line, text)


def discard(stream: TextIO) -> None:
    """Let what is written to a standard stream from now on go nowhere: its reader has closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def write(text: str) -> None:
    """Write text to the standard output without delay."""
    sys.stdout.write(text)
    sys.stdout.flush()


def command_line(command: str, args: Sequence[Any], *more: Any) -> str:
    """A command line to copy. It names this program as it was typed, where its bare name would not be found."""
    program, typed = ["linrope"], Path(sys.argv[0])
    if shutil.which("linrope") is None and typed.name == "linrope":
        program = [sys.argv[0]]
    elif shutil.which("linrope") is None and typed.parts[-2:] == ("linrope", "__main__.py"):
        program = [sys.executable, "-m", "linrope"]
    imports = [word for source in imported for word in (IMPORT, source)]
    return shlex.join([*program, command, *imports, *map(str, args), *map(str, more)])
