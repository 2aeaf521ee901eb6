"""RoFormer encoders of transformers: read and write their folders, without transformers.

What differs: queries, keys and values are one matrix here, and the table of sinusoids is not read (angles are computed,
in float64). A model that is read computes the same logits.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from linrope.errors import InputError, require_choice
from linrope.interop.llama import is_llama, load_llama, put_together
from linrope.models.base import Model, ModelConfig, load_model
from linrope.models.encoder import ACTIVATIONS, EncoderConfig, EncoderModel
from linrope.models.language_model import LanguageModelConfig
from linrope.models.saving import (
    CONFIG_FILE,
    EXPORTED_TOKENIZER_FILE,
    SAFETENSORS_FILE,
    load_safetensors,
    model_type_of,
    read_config,
    replace_model,
    save_safetensors,
    tokenizer_in,
    write_tokenizer,
)
from linrope.utils.checksums import verify_checksums, write_checksums
from linrope.utils.files import load_plain, require_free_folder

PICKLED_FILE = "pytorch_model.bin"
ARCHITECTURES = {
    None: "RoFormerModel",
    "masked_lm": "RoFormerForMaskedLM",
    "classification": "RoFormerForSequenceClassification",
    "token_classification": "RoFormerForTokenClassification",
    "question_answering": "RoFormerForQuestionAnswering",
    "multiple_choice": "RoFormerForMultipleChoice",
}
"""The class of transformers by head."""
WITH_LABELS = ("classification", "token_classification")
"""Heads whose labels have names there."""
OPTIONS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "d_ff",
    "embedding_size": "embedding_size",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "type_vocab_size": "n_token_types",
    "layer_norm_eps": "norm_eps",
    "rotary_value": "rotate_values",
    "tie_word_embeddings": "tie_embeddings",
}
"""Our names of the options of transformers."""
WITHOUT_WEIGHTS = ("dropout", "feature_map")
"""Options that `load_roformer` may change."""
DEFAULTS = {"vocab_size": 50_000, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
DEFAULTS |= {"intermediate_size": 3072, "type_vocab_size": 2, "rotary_value": False, "tie_word_embeddings": True}
"""Of transformers, whose config.json may omit them."""
MODULES = {
    "embedding": "roformer.embeddings.word_embeddings",
    "token_types": "roformer.embeddings.token_type_embeddings",
    "embedding_norm": "roformer.embeddings.LayerNorm",
    "projection": "roformer.embeddings_project",
}
"""Modules of the encoder and their names there."""
BLOCK_MODULES = {
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp_in": "intermediate.dense",
    "mlp_out": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
HEAD_MODULES = {
    None: {},
    "masked_lm": {"dense": "cls.predictions.transform.dense", "norm": "cls.predictions.transform.LayerNorm"},
    "classification": {"dense": "classifier.dense", "output": "classifier.out_proj"},
    "token_classification": {"output": "classifier"},
    "question_answering": {"output": "qa_outputs"},
    "multiple_choice": {"output": "classifier"},
}
HEAD_WEIGHTS = {
    "cls.predictions.": "masked_lm",
    "classifier.out_proj.": "classification",
    "qa_outputs.": "question_answering",
}
"""Weights that only one head has, for a config.json that names no architecture."""
DECODER = "cls.predictions.decoder.weight"
BIASES = ("cls.predictions.bias", "cls.predictions.decoder.bias")
"""One bias under two names; older files have the first alone."""
IGNORED = ("roformer.encoder.embed_positions.weight", "roformer.pooler.", "cls.seq_relationship.")
"""Beginnings of names that the model has no use for: sinusoids, and heads of other frameworks' checkpoints."""


def load_roformer(
    path: str | Path, *, attention: Literal["softmax", "linear"] = "softmax", **options: Any
) -> EncoderModel:
    """The RoFormer that transformers saved, with its head, in evaluation mode on the CPU.

    Args:
        path: folder with config.json and model.safetensors or pytorch_model.bin, or one of these two files.
        attention: "linear" puts the weights into linear attention with RoPE in the numerator only. It computes another
            function, so it is a start for training only.
        options: other options of `EncoderConfig` that have no weights: dropout, feature_map.

    Returns:
        `model(tokens, key_mask=None, token_types=None)`, with tokens (B, T) and key_mask (B, T) booleans: a
        `RoFormerEncoder`, or the model with the head that config.json names.

    Raises:
        InputError: no such files, a model of another architecture, a decoder, multiple choice by another position than
            the last, weights that are missing, unexpected or of another shape (all are named), a file that needs more
            than plain tensors to be read.
    """
    for name in options:
        require_choice("load_roformer: the option", name, WITHOUT_WEIGHTS)
    folder, file = _weights_file(Path(path))
    verify_checksums(folder)
    values = _config_of(folder / CONFIG_FILE)
    weights = load_safetensors(file) if file.suffix == ".safetensors" else load_plain(file)
    if not isinstance(weights, dict) or not all(isinstance(x, Tensor) for x in weights.values()):
        raise InputError(f"{str(file)!r} is no dictionary of tensors: save the model again, with save_pretrained.")
    head = _head_of(values, weights, file)
    if head == "multiple_choice":
        _require_last_position(values, folder / CONFIG_FILE)
    config = replace(encoder_config_of(values, head, weights), attention=attention, **options)
    model = config.build()
    model.load_weights(_converted(config, _named(weights, head), file), file)
    model.to(next(model.parameters()).dtype)  # one for all, as transformers has it
    kind, tokenizer_file = values.get("linrope_tokenizer"), folder / EXPORTED_TOKENIZER_FILE
    if kind != "tokenizers" or tokenizer_file.is_file():  # transformers saves config.json again, without the file
        model.tokenizer = tokenizer_in(tokenizer_file, kind)
    if head in WITH_LABELS:
        model.labels = _labels_of(values, config.n_labels)
    return model.eval()


def is_roformer(path: str | Path) -> bool:
    """Whether `path` is a folder with a config.json of transformers' RoFormer."""
    return model_type_of(path) == "roformer"


def load_trained(path: str | Path, config_class: type[ModelConfig]) -> Model:
    """The trained model at `path`: a folder of transformers (RoFormer or what `load_llama` reads), or what `load_model`
    reads."""
    if issubclass(EncoderConfig, config_class) and is_roformer(path):
        return load_roformer(path)
    if issubclass(LanguageModelConfig, config_class) and is_llama(path):
        return load_llama(path)
    return load_model(path, config_class)


def what_transformers_lacks(config: EncoderConfig) -> list[str]:
    """The options with which transformers' RoFormer computes something else."""
    needed = {"attention": "softmax", "rope": EncoderConfig().rope}
    return [f"{name}={getattr(config, name)!r}" for name, value in needed.items() if getattr(config, name) != value]


def export_roformer(model: EncoderModel, folder: str | Path, *, overwrite: bool = False) -> None:
    """Write a softmax encoder as transformers reads it, config.json and model.safetensors, and the tokenizer of its
    training, which `load_roformer` reads again.

    Raises:
        InputError: linear attention or other options that transformers' RoFormer does not have, a folder with a model
            without `overwrite`.
    """
    config, folder = model.config, Path(folder)
    if wrong := what_transformers_lacks(config):
        raise InputError(f"transformers' RoFormer has no {', '.join(wrong)}: it has softmax attention and plain RoPE.")
    require_free_folder(folder, overwrite)
    values = {hf_name: getattr(config, name) for hf_name, name in OPTIONS.items()}
    values |= {"intermediate_size": config.mlp_width, "embedding_size": config.embedding_width}
    values |= {"model_type": "roformer", "architectures": [ARCHITECTURES[config.head]], "num_labels": config.n_labels}
    known = config.head in WITH_LABELS and model.labels is not None
    labels = model.labels if known else _unknown(config.n_labels)
    values |= {"pad_token_id": None, "id2label": {str(n): label for n, label in enumerate(labels)}}
    values["label2id"] = {label: n for n, label in enumerate(labels)}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="model.partial-") as partial:
        new = Path(partial)
        save_safetensors(dict(_exported(model)), new / SAFETENSORS_FILE)
        values["linrope_tokenizer"] = write_tokenizer(model.tokenizer, new / EXPORTED_TOKENIZER_FILE)
        (new / CONFIG_FILE).write_text(f"{json.dumps(values, indent=2)}\n")
        write_checksums(new, [file.name for file in new.iterdir()])
        replace_model(new, folder)


def _weights_file(path: Path) -> tuple[Path, Path]:
    """The folder and the file of the weights."""
    if path.is_file() and path.name != CONFIG_FILE:
        return path.parent, path
    folder = path.parent if path.is_file() else path
    for name in (SAFETENSORS_FILE, PICKLED_FILE):
        if (folder / name).is_file():
            return folder, folder / name
    raise InputError(f"{str(path)!r} has no {SAFETENSORS_FILE} and no {PICKLED_FILE}: name the folder of a RoFormer.")


def _config_of(file: Path) -> dict[str, Any]:
    values = read_config(file)
    if (found := values.get("model_type")) != "roformer":
        raise InputError(f"{file} is of model_type={found!r}: give the folder of a RoFormer ('roformer').")
    for name in ("is_decoder", "add_cross_attention"):
        if values.get(name):
            raise InputError(f"{file} has {name}=true: only bidirectional RoFormers can be read.")
    if (activation := values.get("hidden_act", "gelu")) not in ACTIVATIONS and activation != "swish":
        raise InputError(f"{file} has hidden_act={activation!r}: known are {', '.join(ACTIVATIONS)}.")
    return values


def _head_of(values: dict[str, Any], weights: Mapping[str, Tensor], file: Path) -> str | None:
    named = (values.get("architectures") or [None])[0]
    if named not in ARCHITECTURES.values():  # none, or RoFormerForPreTraining and the like
        for beginning, head in HEAD_WEIGHTS.items():
            if any(name.startswith(beginning) for name in weights):
                return head
        if named is None and not any(name.startswith("classifier.") for name in weights):
            return None
        raise InputError(
            f"{file} has architectures={values.get('architectures')} in its config.json, and its head is not known by "
            f"its weights: set it to one of {', '.join(ARCHITECTURES.values())}."
        )
    return next(head for head, name in ARCHITECTURES.items() if name == named)


def _require_last_position(values: dict[str, Any], file: Path) -> None:
    """Raise InputError unless a model of multiple choice scores the last position of a row, as ours does."""
    if (position := values.get("summary_type", "last")) not in ("last", "cls_index"):  # without an index it is the last
        raise InputError(
            f"{file} has summary_type={position!r}: only models of multiple choice that read the last position "
            "('last') can be read."
        )
    if activation := values.get("summary_activation"):
        raise InputError(f"{file} has summary_activation={activation!r}: only models without it (null) can be read.")


def _unknown(n_labels: int) -> list[str]:
    """What transformers calls labels without names."""
    return [f"LABEL_{n}" for n in range(n_labels)]


def _labels_of(values: dict[str, Any], n_labels: int) -> list[str] | None:
    """The names of the labels in a config.json of transformers; None if they are not known."""
    names = values.get("id2label") or {}
    labels = [names.get(str(n)) for n in range(n_labels)]
    return None if None in labels or labels == _unknown(n_labels) else labels


def encoder_config_of(values: dict[str, Any], head: str | None, weights: Mapping[str, Tensor]) -> EncoderConfig:
    """The options of a config.json of transformers; the number of labels is that of the weights."""
    values = {**DEFAULTS, **values}
    if values.get("hidden_act") == "swish":
        values["hidden_act"] = "silu"
    options = {name: values[hf_name] for hf_name, name in OPTIONS.items() if values.get(hf_name) is not None}
    output = HEAD_MODULES[head].get("output", "")
    n_labels = len(weights[f"{output}.bias"]) if f"{output}.bias" in weights else 2
    return EncoderConfig(**options, head=head, attention="softmax", n_labels=n_labels if head in WITH_LABELS else 2)


def _named(weights: Mapping[str, Tensor], head: str | None) -> dict[str, Tensor]:
    """The weights by the names that a model with a head gives them; files of the encoder alone omit `roformer.`."""
    if head is None and not any(name.startswith("roformer.") for name in weights):
        weights = {f"roformer.{name}": tensor for name, tensor in weights.items()}
    old = {"gamma": "weight", "beta": "bias"}  # what TensorFlow calls those of LayerNorm
    renamed = {}
    for name, tensor in weights.items():
        parent, _, last = name.rpartition(".")
        renamed[f"{parent}.{old.get(last, last)}" if "LayerNorm" in parent else name] = tensor
    return renamed


def _names(config: EncoderConfig) -> Iterator[tuple[str, list[str]]]:
    """Each of our weights with those there, several of which are put together along the first axis."""
    encoder = "" if config.head is None else "encoder."
    modules = {f"{encoder}{name}": [hf_name] for name, hf_name in MODULES.items()}
    if config.embedding_width == config.d_model:
        del modules[f"{encoder}projection"]
    for layer in range(config.n_layers):
        block, hf_block = f"{encoder}blocks.{layer}.", f"roformer.encoder.layer.{layer}."
        modules[f"{block}attention.qkv"] = [f"{hf_block}attention.self.{part}" for part in ("query", "key", "value")]
        modules |= {f"{block}{name}": [f"{hf_block}{hf_name}"] for name, hf_name in BLOCK_MODULES.items()}
    modules |= {name: [hf_name] for name, hf_name in HEAD_MODULES[config.head].items()}
    for name, hf_names in modules.items():
        parts = ("weight",) if name.endswith(("embedding", "token_types")) else ("weight", "bias")
        yield from ((f"{name}.{part}", [f"{hf_name}.{part}" for hf_name in hf_names]) for part in parts)
    if config.head == "masked_lm":
        yield "bias", [BIASES[0]]
        if not config.tie_embeddings:
            yield "output.weight", [DECODER]


def _converted(config: EncoderConfig, weights: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    weights = dict(weights)
    if config.head == "masked_lm" and BIASES[1] in weights:  # the one that transformers adds
        weights[BIASES[0]] = weights[BIASES[1]]
    may_be = {*BIASES, DECODER} if config.head == "masked_lm" else set()
    read = {name for name in weights.keys() - may_be if not name.startswith(IGNORED)}
    if config.head is None:  # the encoder of a model with a head
        read = {name for name in read if name.startswith("roformer.")}
    return put_together(dict(_names(config)), weights, read, file)


def _exported(model: EncoderModel) -> Iterator[tuple[str, Tensor]]:
    """The weights by the names there."""
    weights = model.state_dict()
    for name, hf_names in _names(model.config):
        yield from zip(hf_names, (part.clone() for part in weights[name].chunk(len(hf_names))), strict=True)
    if model.config.head == "masked_lm":
        yield BIASES[1], model.bias.detach().clone()
        if model.config.tie_embeddings:
            yield DECODER, weights["encoder.embedding.weight"].clone()
