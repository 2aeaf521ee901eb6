"""`linrope export`: write a trained model for transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linrope.cli.output import _say
from linrope.cli.parser import PlainParser
from linrope.models.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Which model to write, and where."""

    ckpt_path: str
    """Checkpoint file of `linrope fit`, or a folder that save_pretrained wrote."""
    output: str
    """Folder to write, made where missing."""
    overwrite: bool = False
    """Replace a model that the folder holds."""


def export(args: Sequence[str]) -> None:
    """Write a trained model for transformers: safetensors, config.json, tokenizer."""
    parser = PlainParser(prog="linrope export", usage="linrope export --ckpt_path FILE --output FOLDER [--overwrite]")
    parser.description, parser.allow_abbrev = export.__doc__, False
    parser.add_class_arguments(ExportConfig)
    config = ExportConfig(**vars(parser.parse_args(args)))
    from linrope.interop import transformers as hf  # an extra

    hf.require_free(Path(config.output), config.overwrite)
    hf.export(LanguageModel.from_pretrained(config.ckpt_path), config.output, overwrite=config.overwrite)
    _say(f"wrote {config.output}")
