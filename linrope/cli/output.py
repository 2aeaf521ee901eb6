"""What commands print, and the command lines they suggest."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from linrope.training.ranks import is_first_rank


def _say(text: str) -> None:
    rank = "" if is_first_rank() else f"rank {rank_zero_only.rank}: "
    print(f"linrope: {rank}{text}", file=sys.stderr)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _command_line(command: str, args: Sequence[Any], *more: Any) -> str:
    """A line to copy: with the path to this program as it was typed, where its name alone would not be found."""
    typed = sys.argv[0] if Path(sys.argv[0]).name == "linrope" and shutil.which("linrope") is None else "linrope"
    return shlex.join([typed, command, *map(str, args), *map(str, more)])
