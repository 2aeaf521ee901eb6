"""`linrope export`: write a trained model for transformers (for linrope where that has no such model), or as ONNX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from linrope.cli.checkpoint import named_checkpoint
from linrope.cli.output import say
from linrope.cli.parser import parse_command
from linrope.errors import InputError
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
    format: Literal["transformers", "onnx"] = "transformers"
    """transformers: the folder that transformers reads; onnx: model.onnx, a language model's graph for onnxruntime."""
    opset: int | None = None
    """With onnx, version of the standard operators, at least 23; null for 27, the first with LinearAttention."""


def run(args: Sequence[str]) -> None:
    """Run `linrope export` with the command line `args`."""
    config = parse_command("export", ExportConfig, args, "--ckpt_path FILE --output FOLDER [--format onnx]")
    if config.opset is not None and config.format != "onnx":
        raise InputError(f"--opset={config.opset} is an option of --format onnx: add that, or remove it.")
    require_free_folder(Path(config.output), config.overwrite)
    path = named_checkpoint(config.ckpt_path)
    model = load_trained(path, ModelConfig)
    if config.format == "onnx":
        from linrope.interop.onnx import export as onnx  # an optional package

        options = {} if config.opset is None else {"opset": config.opset}
        difference = onnx.export_onnx(model, config.output, overwrite=config.overwrite, **options)
        say(f"onnxruntime's logits differ from PyTorch's by at most {difference:.1g} on a few tokens")
    elif isinstance(model, LanguageModel):
        from linrope.interop import transformers as hf  # an optional package

        hf.without_progress_bars()
        hf.export(model, config.output, overwrite=config.overwrite)
    elif isinstance(model, EncoderModel) and not what_transformers_lacks(model.config):
        export_roformer(model, config.output, overwrite=config.overwrite)
    else:
        model.save_pretrained(config.output)
        say(f"transformers has no model like this {type(model).__name__}; linrope.models.base.load_model reads it")
    say(f"wrote {config.output}")
