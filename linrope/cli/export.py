"""`linrope export`: write a trained model for transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linrope.cli.checkpoint import named_checkpoint
from linrope.cli.output import say
from linrope.cli.parser import parse_command
from linrope.models.language_model import LanguageModel
from linrope.utils.files import require_free_folder


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """The model and the folder to write."""

    ckpt_path: str
    """Checkpoint file of `linrope fit`, or a folder that save_pretrained wrote; last: the newest last.ckpt in runs."""
    output: str
    """Folder to write; it is created if it does not exist."""
    overwrite: bool = False
    """Replace a model that the folder holds."""


def run(args: Sequence[str]) -> None:
    """Run `linrope export` with the command line `args`."""
    config = parse_command("export", ExportConfig, args, "--ckpt_path FILE --output FOLDER [--overwrite]")
    from linrope.interop import transformers as hf  # an optional package

    require_free_folder(Path(config.output), config.overwrite)
    model = LanguageModel.from_pretrained(named_checkpoint(config.ckpt_path))
    hf.export(model, config.output, overwrite=config.overwrite)
    say(f"wrote {config.output}")
