"""`linrope average`: write the mean of the weights of several checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linrope.cli.output import say
from linrope.cli.parser import parse_command
from linrope.models.averaging import average_models
from linrope.utils.files import require_free_folder


@dataclass(frozen=True, kw_only=True)
class AverageConfig:
    """The checkpoints, and the folder to write."""

    checkpoints: list[str]
    output: str
    """Folder to write, as save_pretrained does; it is created if it does not exist."""
    overwrite: bool = False
    """Replace a model that the folder holds."""


CHECKPOINTS = {
    "positional": True,
    "nargs": "+",
    "type": str,
    "metavar": "CHECKPOINT",
    "help": "Checkpoint file of `linrope fit`, or a folder that save_pretrained or `linrope export` wrote. "
    "run.keep_checkpoints keeps those of a run.",
}


def run(args: Sequence[str]) -> None:
    """Run `linrope average` with the command line `args`."""
    usage = "CHECKPOINT [CHECKPOINT ...] --output FOLDER [--overwrite]"
    config = parse_command("average", AverageConfig, args, usage, checkpoints=CHECKPOINTS)
    require_free_folder(Path(config.output), config.overwrite)
    average_models(config.checkpoints).save_pretrained(config.output)
    say(f"wrote {config.output}, the mean of {len(config.checkpoints)} checkpoints")
