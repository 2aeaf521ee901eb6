"""`linrope export`: write a trained model for transformers, or for linrope where transformers has no such model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linrope.cli.checkpoint import named_checkpoint
from linrope.cli.output import say
from linrope.cli.parser import parse_command
from linrope.interop.roformer import export_roformer, load_trained, what_transformers_lacks
from linrope.models.base import ModelConfig
from linrope.models.encoder import EncoderModel
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
    require_free_folder(Path(config.output), config.overwrite)
    path = named_checkpoint(config.ckpt_path)
    model = load_trained(path, ModelConfig)
    if isinstance(model, LanguageModel):
        from linrope.interop import transformers as hf  # an optional package

        hf.export(model, config.output, overwrite=config.overwrite)
    elif isinstance(model, EncoderModel) and not what_transformers_lacks(model.config):
        export_roformer(model, config.output, overwrite=config.overwrite)
    else:
        model.save_pretrained(config.output)
        say(f"transformers has no model like this {type(model).__name__}; linrope.models.base.load_model reads it")
    say(f"wrote {config.output}")
