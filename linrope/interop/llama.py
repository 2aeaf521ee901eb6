"""Decoders of transformers in the style of Llama, Mistral and Qwen: read their folders, without transformers.

What differs: queries, keys and values are one matrix here, and so are the gate and the other half of the MLP. RoPE
pairs the halves of a head (`rope.interleaved=False`). A model that is read computes the same logits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linrope.data.tokenizers.base import Tokenizer, open_tokenizer, tokenizer_to_serialized
from linrope.errors import InputError
from linrope.models.language_model import LanguageModel, LanguageModelConfig
from linrope.models.saving import CONFIG_FILE, TOKENIZER_FILE, load_exported, model_type_of, read_config
from linrope.rotary import BY_PARTS, RotaryConfig, RotaryScaling

SHARED_DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
QWEN = {"vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32}
DEFAULTS = {
    "llama": {"vocab_size": 32_000, "intermediate_size": 11_008},
    "mistral": {"vocab_size": 32_000, "intermediate_size": 14_336, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": QWEN,
    "qwen3": {**QWEN, "head_dim": 128},
}
"""What each type of model has where its config.json says nothing: older versions of transformers omit defaults."""
OPTIONS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "d_ff",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
"""Our names of the options of transformers."""
REFUSED = ("attention_bias", "mlp_bias", "use_sliding_window")
"""Options that must not be set: no model here computes the same."""
IGNORED = "rotary_emb.inv_freq"
"""End of the names of tables of frequencies in older files; angles are computed here."""


def load_llama(path: str | Path) -> LanguageModel:
    """The decoder that transformers saved (`LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM`,
    `Qwen3ForCausalLM`), with softmax attention, in evaluation mode on the CPU, in the dtype of its weights.

    Grouped queries, tied and untied output layers, the scaled RoPE of Llama 3, the window of Mistral, the biases of
    Qwen2 and the norms of Qwen3 are read, and the tokenizer if the folder has a tokenizer.json; without one the model
    takes tokens and no text. A warning says why a tokenizer that is there is not taken.

    Args:
        path: folder with config.json and model.safetensors, or several safetensors files with their index.

    Raises:
        InputError: no such files, another type of model, options that the model here lacks (RoPE scaled by other rules,
            windows in some layers, biases of other layers, another activation), weights that are missing, unexpected or
            of another shape (all are named).
    """
    folder = Path(path)
    file = folder / CONFIG_FILE
    values = read_config(file)
    if (found := values.get("model_type")) not in DEFAULTS:
        raise InputError(f"{file} is of model_type={found!r}: decoders of {', '.join(DEFAULTS)} can be read.")
    model = _untrained(values, file)
    model.load_weights(_converted(model.config, load_exported(folder), folder), folder)
    model.to(model.embedding.weight.dtype)  # one for all, as transformers has it
    model.tokenizer = tokenizer_to_serialized(_tokenizer_of(folder, model.config.vocab_size))
    return model.eval()


def _tokenizer_of(folder: Path, vocab_size: int) -> Tokenizer | None:
    """The tokenizer of the folder's tokenizer.json; None if there is none, or, with a warning, if the model cannot use
    it."""
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        return None
    try:
        tokenizer = open_tokenizer(str(file), "the tokenizer")
    except InputError as error:
        why = str(error)
    else:
        if tokenizer.vocab_size <= vocab_size:
            return tokenizer
        why = f"it has {tokenizer.vocab_size:,} tokens with its separator, and the model has {vocab_size:,}"
    warnings.warn(f"{file} is not taken, so that the model takes tokens and no text: {why}", stacklevel=3)
    return None


def is_llama(path: str | Path) -> bool:
    """Whether `path` is a folder with a config.json of a model that `load_llama` reads."""
    return model_type_of(path) in DEFAULTS


def _untrained(values: Mapping[str, Any], file: Path) -> LanguageModel:
    """The model of a config.json of transformers. InputError, naming `file`, for what the model here lacks."""
    kind = values["model_type"]
    values = {**SHARED_DEFAULTS, **DEFAULTS[kind], **values}
    for name in REFUSED:
        if values.get(name):
            raise InputError(f"{file} has {name}={values[name]!r}: only models without it can be read.")
    if values["hidden_act"] != "silu":
        raise InputError(f"{file} has hidden_act={values['hidden_act']!r}: only silu can be read.")
    options = {name: values[hf_name] for hf_name, name in OPTIONS.items() if values.get(hf_name) is not None}
    if kind == "mistral":
        options["window"] = values["sliding_window"]
    rope = _rope_of(values, file)
    try:
        return LanguageModelConfig(
            **options, attention="softmax", rope=rope, qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3"
        ).build()
    except InputError as error:
        raise InputError(f"{file}: {error}") from error


def _rope_of(values: Mapping[str, Any], file: Path) -> RotaryConfig:
    """RoPE's base and scaling: transformers had them in `rope_theta` and `rope_scaling`, now in `rope_parameters`."""
    parameters = {"rope_theta": values.get("rope_theta", 10_000.0)}
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(given := values.get(name) or {}, dict):
            raise InputError(f"{file} has {name}={given!r}: it must be null or an object.")
        parameters |= given
    if (part := parameters.get("partial_rotary_factor", values.get("partial_rotary_factor", 1))) != 1:
        raise InputError(f"{file} has partial_rotary_factor={part!r}: only models that rotate whole heads can be read.")
    if not isinstance(base := parameters["rope_theta"], (int, float)):
        raise InputError(f"{file} has rope_theta={base!r}: it must be a number.")
    return RotaryConfig(base=float(base), interleaved=False, scaling=_scaling_of(parameters, file))


def _scaling_of(parameters: Mapping[str, Any], file: Path) -> RotaryScaling | None:
    """How RoPE's frequencies are scaled; None if they are not."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RotaryScaling(kind, parameters.get("factor"))
    if kind != "llama3":  # "yarn" there goes by the numbers of pairs, here by their rotations
        raise InputError(
            f"{file} has RoPE of the type {kind!r}: only default, linear and llama3 can be read. A model that was "
            "trained without scaling has none of them."
        )
    if (rotations := tuple(parameters.get(f"{name}_freq_factor") for name in ("low", "high"))) != BY_PARTS[kind]:
        raise InputError(
            f"{file} has low_freq_factor={rotations[0]} and high_freq_factor={rotations[1]}: only 1 and 4, those of "
            "Llama 3, can be read."
        )
    return RotaryScaling(kind, parameters.get("factor"), parameters.get("original_max_position_embeddings"))


def _names(config: LanguageModelConfig) -> Iterator[tuple[str, list[str]]]:
    """Each of our weights with those there, several of which are put together along the first axis."""
    yield "embedding.weight", ["model.embed_tokens.weight"]
    yield "norm.weight", ["model.norm.weight"]
    yield "output.weight", ["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
    for layer in range(config.n_layers):
        block, there = f"blocks.{layer}.", f"model.layers.{layer}."
        projections = [f"{there}self_attn.{name}_proj" for name in "qkv"]
        yield f"{block}attention.qkv.weight", [f"{name}.weight" for name in projections]
        if config.qkv_bias:
            yield f"{block}attention.qkv.bias", [f"{name}.bias" for name in projections]
        if config.qk_norm:
            yield from ((f"{block}attention.{x}_norm.weight", [f"{there}self_attn.{x}_norm.weight"]) for x in "qk")
        yield f"{block}attention.out.weight", [f"{there}self_attn.o_proj.weight"]
        yield f"{block}mlp.gate_up.weight", [f"{there}mlp.{name}_proj.weight" for name in ("gate", "up")]
        yield f"{block}mlp.out.weight", [f"{there}mlp.down_proj.weight"]
        yield f"{block}attention_norm.weight", [f"{there}input_layernorm.weight"]
        yield f"{block}mlp_norm.weight", [f"{there}post_attention_layernorm.weight"]


def _converted(config: LanguageModelConfig, weights: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    read = {name for name in weights if not name.endswith(IGNORED)}
    if config.tie_embeddings:
        read.discard("lm_head.weight")
    return put_together(dict(_names(config)), weights, read, folder)


def put_together(
    names: Mapping[str, Sequence[str]], weights: Mapping[str, Tensor], read: Iterable[str], path: Path
) -> dict[str, Tensor]:
    """Our weights by name, each of those there that `names` has for it, along the first axis.

    Raises:
        InputError: with the names of all that are missing among the `weights` of a path, and of all that are to be
            `read` and are not among `names`.
    """
    known = {name for there in names.values() for name in there}
    found = {"missing": sorted(known - weights.keys()), "unexpected": sorted(set(read) - known)}
    if wrong := [f"{what}: {', '.join(of_it)}" for what, of_it in found.items() if of_it]:
        raise InputError(f"{str(path)!r} does not hold the weights of its config.json; {'; '.join(wrong)}.")
    return {name: torch.cat([weights[one] for one in there]) for name, there in names.items()}
