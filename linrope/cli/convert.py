"""`linrope convert`: write the hybrid that a softmax language model becomes, with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn

from linrope.cli.output import command_line, say
from linrope.cli.parser import parse_command
from linrope.errors import InputError
from linrope.evaluation.replacement_costs import replacement_costs, table_of
from linrope.evaluation.reports import name_of
from linrope.interop.llama import is_llama
from linrope.interop.roformer import load_trained
from linrope.models.conversion import convert, hybrid_config
from linrope.models.language_model import LanguageModel, LanguageModelConfig
from linrope.models.saving import TOKENIZER_FILE
from linrope.training.checkpoint import require_tokenizer_of_teacher
from linrope.training.data_modules.text import TextDataModule
from linrope.utils.files import require_free_folder, whole_file
from linrope.utils.terminal import progress_bar

MODEL_FILE = "model.yaml"
"""The section `model` of the hybrid, for `linrope fit --config`."""
OF_ALIGNED = ("placement", "feature_map", "forget_gate", "temperature")
"""Options that a model of --aligned has already."""


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """The teacher, the hybrid, and the text on which layers are compared."""

    teacher: str
    """Softmax language model: a checkpoint file, a folder of save_pretrained, or the folder of a Llama, Mistral or
    Qwen that transformers saved."""
    output: str
    """Folder to write, as save_pretrained does, with model.yaml beside it for `linrope fit --config`."""
    overwrite: bool = False
    """Replace a model that the folder holds."""
    layers: str | None = None
    """Attention of the layers, linear or softmax with commas between; it repeats. null is
    linear,linear,linear,softmax."""
    keep_softmax: int | None = None
    """In place of --layers: keep this many layers softmax, those whose replacement costs most on --text."""
    aligned: str | None = None
    """Model of the task attention_alignment whose linear layers are taken: costs are then those of aligned layers."""
    window: int | None = None
    """Last tokens that softmax layers see; null for as many as in the teacher."""
    placement: Literal["numerator", "signed"] = "signed"
    """RoPE of linear layers: signed rotates half of each head, which skips the feature map; numerator the features."""
    feature_map: str = "hedgehog"
    """Feature map of linear layers."""
    forget_gate: bool = True
    """Give linear layers a forget gate."""
    temperature: bool = False
    """Learn a scale for each head in linear layers."""
    costs: bool = False
    """Measure what each layer's replacement costs; --keep_softmax does."""
    text: str | None = None
    """Text of the costs: a file, a folder or a glob, or a folder of `linrope prepare`; null is the built-in corpus."""
    fractions: list[float] = field(default_factory=lambda: [0.9, 0.05, 0.05])
    """Fractions of the text for train, val and test; val is read. Give those of the teacher's training."""
    context: int = 1024
    """Tokens of the rows that are read."""
    rows: int = 64
    """Number of rows."""

    def __post_init__(self) -> None:
        if self.layers is not None and self.keep_softmax is not None:
            raise InputError(f"--layers={self.layers} and --keep_softmax={self.keep_softmax} exclude each other.")
        if self.window is not None and self.window < 1:
            raise InputError(f"--window={self.window} must be at least 1, the token itself.")
        if self.rows < 1:
            raise InputError(f"--rows={self.rows} must be at least 1.")
        if self.aligned is not None:
            given = [f for f in fields(self) if f.name in OF_ALIGNED and getattr(self, f.name) != f.default]
            for option in given:
                raise InputError(
                    f"--{option.name}={getattr(self, option.name)} is that of the model of --aligned: leave it out."
                )


def run(args: Sequence[str]) -> None:
    """Run `linrope convert` with the command line `args`."""
    usage = "--teacher MODEL --output FOLDER [--layers linear,softmax | --keep_softmax N] [options]"
    config = parse_command("convert", ConvertConfig, args, usage)
    require_free_folder(Path(config.output), config.overwrite)
    console = Console(highlight=False)
    teacher = _loaded("--teacher", config.teacher)
    linear = _all_linear(config, teacher)
    layers = _layers_of(config, teacher.config.n_layers)
    if config.keep_softmax is not None or config.costs:
        layers = _measured(config, teacher, linear, layers, console)
    hybrid = _assembled(config, teacher, linear, layers)
    hybrid.save_pretrained(config.output)
    with whole_file(Path(config.output, MODEL_FILE)) as file:
        file.write(yaml.safe_dump({"model": hybrid.config.to_dict()}, sort_keys=False).encode())
    say(f"wrote {config.output}: {_described(hybrid.config)}, {hybrid.n_parameters:,} parameters")
    _print_next(config, console)


def _loaded(option: str, path: str) -> LanguageModel:
    try:
        return load_trained(path, LanguageModelConfig)
    except InputError as error:
        raise InputError(f"{option}={path!r}: {error}") from error


def _all_linear(config: ConvertConfig, teacher: LanguageModel) -> LanguageModel:
    """The teacher with linear attention in every layer, aligned or just converted."""
    if config.aligned is None:
        options = {name: getattr(config, name) for name in ("feature_map", "forget_gate", "temperature")}
        wanted = hybrid_config(teacher.config, "linear", signed=config.placement == "signed", **options)
        return convert(teacher, wanted)
    model = _loaded("--aligned", config.aligned)
    if any(name != "linear" for name in model.config.attention_types):
        raise InputError(
            f"--aligned={config.aligned!r} has attention={model.config.attention}: align a model with --layers linear, "
            "whose layers can be chosen from."
        )
    convert(teacher, model.config)  # raises what differs
    return model


def _layers_of(config: ConvertConfig, n_layers: int) -> list[str]:
    """The attention of each layer by --layers."""
    if config.keep_softmax is not None and not 0 <= config.keep_softmax <= n_layers:
        raise InputError(f"--keep_softmax={config.keep_softmax} must be from 0 to {n_layers}, the number of layers.")
    layers = (config.layers or "linear,linear,linear,softmax").replace(" ", "").split(",")
    for name in layers:
        if name not in ("linear", "softmax"):
            raise InputError(f"--layers={config.layers}: {name!r} must be linear or softmax.")
    if len(layers) > n_layers:
        if config.layers is not None:
            raise InputError(f"--layers={config.layers} names {len(layers)} layers, and the teacher has {n_layers}.")
        layers = layers[-n_layers:]
    return [layers[layer % len(layers)] for layer in range(n_layers)]


def _measured(
    config: ConvertConfig, teacher: LanguageModel, linear: LanguageModel, layers: list[str], console: Console
) -> list[str]:
    """The attention of each layer, chosen by the costs of their replacement where that is asked for; the costs are
    printed."""
    batches = _batches(config, teacher)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher.to(device)
    linear.to(device)
    moved = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
    with progress_bar(console, BarColumn()) as bar:
        number = bar.add_task("replacing layers", total=1 + len(layers))
        found = replacement_costs(teacher, linear, moved, tick=lambda: bar.advance(number))
    teacher.cpu()
    linear.cpu()
    if config.keep_softmax is not None:
        kept = found.costliest(config.keep_softmax)
        layers = ["softmax" if layer in kept else "linear" for layer in range(len(layers))]
    kept = [layer for layer, name in enumerate(layers) if name == "softmax"]
    how = "converted" if config.aligned is None else "aligned"
    title = f"loss with one layer {how}, {name_of(config.teacher)}"
    console.print(table_of(found, kept, title))
    return layers


def _batches(config: ConvertConfig, teacher: LanguageModel) -> list[dict[str, torch.Tensor]]:
    """Rows of the validation split, one a batch. InputError if the teacher's vocabulary lacks its tokens."""
    data = TextDataModule(config.text, context=config.context, batch_size=1, fractions=config.fractions)
    data.setup("validate")
    data.require_vocabulary(teacher.config.vocab_size)
    text = "the built-in text" if config.text is None else config.text
    try:
        require_tokenizer_of_teacher(teacher, data.tokenizer, f"--teacher={config.teacher!r}")
    except InputError as error:
        raise InputError(f"--text: {text} does not serve: {error}") from error
    return list(islice(data.val_dataloader(), config.rows))


def _assembled(
    config: ConvertConfig, teacher: LanguageModel, linear: LanguageModel, layers: list[str]
) -> LanguageModel:
    """The teacher's hybrid with these layers, the linear ones from `linear`."""
    window = teacher.config.window if config.window is None else config.window
    hybrid = convert(teacher, replace(linear.config, attention=_shortened(layers), window=window))
    for layer, name in enumerate(layers):
        if name == "linear":
            hybrid.blocks[layer].attention.load_state_dict(linear.blocks[layer].attention.state_dict())
    return hybrid


def _shortened(layers: list[str]) -> str | list[str]:
    """As the configuration says it: one name, or the shortest list that repeats."""
    sizes = range(1, len(layers) + 1)
    n = next(n for n in sizes if all(name == layers[layer % n] for layer, name in enumerate(layers)))
    return layers[0] if n == 1 else layers[:n]


def _described(config: LanguageModelConfig) -> str:
    types = config.attention_types
    softmax = f"{types.count('softmax')} softmax" + ("" if config.window is None else f" (window {config.window})")
    return f"{types.count('linear')} linear layers, {softmax}"


def _print_next(config: ConvertConfig, console: Console) -> None:
    """The commands that train the hybrid."""
    stage = "align" if config.aligned is None else "distill"
    files: list[Any] = ["--config", f"configs/convert-{stage}.yaml", "--config", Path(config.output, MODEL_FILE)]
    options = ["--conversion.teacher", config.teacher, "--run.start_from", config.output]
    text, lines = config.text, []
    if text is None and is_llama(config.teacher) and Path(config.teacher, TOKENIZER_FILE).is_file():
        text, tokenizer = "prepared", ["--tokenizer", config.teacher, "--output", "prepared"]
        lines.append(command_line("prepare", ["--path", "TEXT", *tokenizer]))
    options += [] if text is None else ["--data.path", text]
    for line in [*lines, command_line("fit", [*files, *options])]:
        console.print("next", line, sep="  ", markup=False, soft_wrap=True)
