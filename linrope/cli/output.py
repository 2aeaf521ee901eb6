"""What commands print, and the command lines they suggest."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linrope.utils.ranks import rank


def say(text: str) -> None:
    """Print a line to the standard error, with the rank of this process if it is not 0."""
    print(f"linrope: {f'rank {rank()}: ' if rank() else ''}{text}", file=sys.stderr)


def write(text: str) -> None:
    """Write text to the standard output without delay."""
    sys.stdout.write(text)
    sys.stdout.flush()


def command_line(command: str, args: Sequence[Any], *more: Any) -> str:
    """A command line to copy. It names this program as it was typed, where its bare name would not be found."""
    typed = sys.argv[0] if Path(sys.argv[0]).name == "linrope" and shutil.which("linrope") is None else "linrope"
    return shlex.join([typed, command, *map(str, args), *map(str, more)])
