"""`linrope export`: write a trained model for transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linrope.cli.checkpoint import named_checkpoint
from linrope.cli.output import say
from linrope.cli.parser import parse_command
from linrope.interop.roformer import export_roformer
from linrope.models.base import load_model
from linrope.models.encoder import EncoderConfig
from linrope.models.language_model import LanguageModel
from linrope.models.saving import read_model
from linrope.utils.files import require_free_folder
from linrope.utils.options import class_path_of


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
    require_free_folder(Path(config.output), config.overwrite)
    path = named_checkpoint(config.ckpt_path)
    values, *_ = read_model(Path(path))
    if values.get("class_path") == class_path_of(EncoderConfig):
        export_roformer(load_model(path, EncoderConfig), config.output, overwrite=config.overwrite)
        return say(f"wrote {config.output}")
    from linrope.interop import transformers as hf  # an optional package

    model = LanguageModel.from_pretrained(path)
    hf.export(model, config.output, overwrite=config.overwrite)
    say(f"wrote {config.output}")
