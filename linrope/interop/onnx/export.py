"""`export_onnx`: a language model as one ONNX graph, which reads prompts and decodes."""

from __future__ import annotations

import json
import tempfile
from copy import deepcopy
from dataclasses import MISSING, fields
from pathlib import Path

import numpy as np
import torch

from linrope.data.tokenizers.base import tokenizer_from_serialized, tokenizer_to_serialized
from linrope.errors import InputError
from linrope.feature_maps import MAP_MODULES
from linrope.interop.onnx.feature_maps import BY_NAME
from linrope.interop.onnx.graph import Graph, Value, onnx
from linrope.interop.onnx.layers import block, dense, rms_norm
from linrope.interop.onnx.operators import WITH_LINEAR_ATTENTION
from linrope.interop.onnx.runtime import CONFIG, MODEL_FILE, TOKENIZER, OnnxLanguageModel
from linrope.interop.onnx.tokens import Tokens
from linrope.models.base import Model
from linrope.models.language_model import LanguageModel, LanguageModelConfig
from linrope.models.saving import move_files
from linrope.positions.base import TABLE_STD
from linrope.positions.learned import Learned
from linrope.positions.table import IN_WEIGHTS
from linrope.rotary import frequencies
from linrope.utils.files import require_free_folder

LOWEST_OPSET = 23
"""The first opset with `Attention`, `RotaryEmbedding` and `RMSNormalization`."""
EXPORTED = {
    *("vocab_size", "d_model", "n_layers", "n_heads", "attention", "rope", "rope_layers", "positions", "feature_map"),
    *("temperature", "normalize", "short_conv", "conv_silu", "forget_gate", "gate_normalizer", "window"),
    *("output_norm", "output_gate", "d_ff", "tie_embeddings", "dropout", "norm_eps"),
}
"""Options of `LanguageModelConfig` that the graph has; another one must have its default."""
WEIGHTS_FILE = f"{MODEL_FILE}.data"
LARGEST_FILE = 2**30
"""Bytes of weights above which they have a file of their own: a protobuf ends at 2 GiB."""
TOLERANCE = 1e-3
"""Largest difference of logits that is rounding, for logits around 1."""


def export_onnx(
    model: Model, folder: str | Path, *, opset: int = WITH_LINEAR_ATTENTION, overwrite: bool = False
) -> float:
    """Write `model.onnx`, and run it with onnxruntime on a few tokens before it takes its place.

    The graph reads any number of tokens after a state, in float32: one for a decoding step, many for a prompt. It holds
    the model's configuration and tokenizer as metadata. See `linrope.interop.onnx.runtime` for its inputs and outputs.

    Args:
        model: a language model; weights of half precision are written in float32.
        folder: where to write; weights above 1 GiB have a second file, `model.onnx.data`.
        opset: version of the standard operators. From 27 on the recurrences are `LinearAttention` and
            `CausalConvWithState`; 23 to 26 have a decomposition, for runtimes that lack them.
        overwrite: replace what the folder holds.

    Returns:
        The largest difference between the logits of onnxruntime and of PyTorch on those tokens.

    Raises:
        InputError: a model or an option that has no such graph, an opset out of range, a folder with files without
            `overwrite`, or a graph that the installed onnxruntime cannot run.
    """
    require_exportable(model, opset)
    folder = Path(folder)
    require_free_folder(folder, overwrite)
    model = deepcopy(model).to("cpu", torch.float32).eval()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="model.partial-") as partial:
        file = Path(partial, MODEL_FILE)
        large = 4 * model.n_parameters > LARGEST_FILE
        onnx.save_model(language_model_graph(model, opset), file, save_as_external_data=large, location=WEIGHTS_FILE)
        onnx.checker.check_model(file, full_check=True)
        difference = largest_difference(model, OnnxLanguageModel(file))
        if not large:
            (folder / WEIGHTS_FILE).unlink(missing_ok=True)  # of another model
        move_files(Path(partial), folder)
    return difference


def require_exportable(model: Model, opset: int) -> None:
    """Raise InputError, naming what is in the way, unless the model has a graph of this opset."""
    newest = onnx.defs.onnx_opset_version()
    if not LOWEST_OPSET <= opset <= newest:
        raise InputError(
            f"opset={opset} must be {LOWEST_OPSET} … {newest}: lower ones lack operators that the graph needs, "
            f"and onnx {onnx.__version__} knows none above."
        )
    if type(model) is not LanguageModel:
        raise InputError(f"a {type(model).__name__} has no ONNX graph here: --format onnx writes language models only.")
    for name, module in model.named_modules():
        if not type(module).__module__.startswith(("linrope.", "torch.nn.")):
            raise InputError(
                f"{name} is a {type(module).__name__}, which is none of linrope's layers: merge adapters into the "
                "weights before the export."
            )
    config = model.config
    for option in fields(LanguageModelConfig):
        default = option.default if option.default is not MISSING else option.default_factory()
        if option.name not in EXPORTED and getattr(config, option.name) != default:
            raise InputError(
                f"{option.name}={getattr(config, option.name)!r} has no ONNX graph here: only {default!r} has one."
            )
    if config.feature_map not in {*BY_NAME, *MAP_MODULES} and "linear" in config.attention_types:
        raise InputError(
            f"feature_map={config.feature_map!r} is a map of your own, which has no ONNX graph: choose one of "
            f"{', '.join([*BY_NAME, *MAP_MODULES])}."
        )
    if config.positions.name in IN_WEIGHTS:
        raise InputError(
            f"positions.name={config.positions.name!r} changes the attention weights, which has no ONNX graph here: "
            "choose rope, none, sinusoidal or learned."
        )


def language_model_graph(model: LanguageModel, opset: int) -> onnx.ModelProto:
    """The graph of a model that `require_exportable` accepts, with its configuration and tokenizer as metadata."""
    g, config = Graph(opset), model.config
    tokens = Tokens(g)
    to_keep = g.input("logits_to_keep", np.int64, (1,))
    embedding = g.weight("embedding.weight", model.embedding.weight)
    x = _with_positions(g, model, g.op("Gather", embedding, tokens.ids), tokens)
    for number, layer in enumerate(model.blocks):
        with g.scope(f"blocks.{number}"):
            x = block(g, layer, x, tokens)
    x = rms_norm(g, model.norm, "norm", g.slice(x, 1, g.op("Neg", to_keep)))
    if config.tie_embeddings:
        logits = g.op("MatMul", x, g.op("Transpose", embedding, perm=[1, 0]))
    else:
        logits = dense(g, model.output, "output", x)
    g.output("logits", logits, np.float32, ("batch", "kept", config.vocab_size))
    tokenizer = tokenizer_to_serialized(tokenizer_from_serialized(model.tokenizer))
    return g.model("linrope", {CONFIG: json.dumps(config.to_dict()), TOKENIZER: json.dumps(tokenizer)})


def _with_positions(g: Graph, model: LanguageModel, x: Value, tokens: Tokens) -> Value:
    """Embedded tokens (B, T, d_model), with the encoding of positions that the model adds to them."""
    if model.positions is None:
        return x
    if isinstance(model.positions, Learned):
        encoding = g.op("Gather", g.weight("positions.table", model.positions.table), tokens.positions)
    else:
        rotation = tokens.rotation(frequencies(model.config.d_model, 10000.0).numpy())
        pairs = [g.op("Unsqueeze", part, np.array([3])) for part in (rotation.sin, rotation.cos)]
        sinusoids = g.reshape(g.op("Concat", *pairs, axis=3), 0, 0, -1)
        encoding = g.op("Mul", sinusoids, np.float32(TABLE_STD * 2**0.5))
    return g.op("Add", x, encoding)


@torch.no_grad()
def largest_difference(model: LanguageModel, exported: OnnxLanguageModel) -> float:
    """The largest difference of logits on a few tokens, most of them read as a prompt, then one by one.

    Raises:
        InputError: it is larger than rounding explains.
    """
    n_tokens = min(12, model.config.positions.longest_row or 12)
    tokens = torch.arange(1, 2 * n_tokens + 1).view(2, n_tokens) * 7 % model.config.vocab_size
    expected = model(tokens)
    at_once = max(n_tokens - 3, 1)
    logits, state = exported(tokens[:, :at_once].numpy())
    found = [logits]
    for t in range(at_once, n_tokens):
        logits, state = exported(tokens[:, t : t + 1].numpy(), state)
        found.append(logits)
    difference = (torch.from_numpy(np.concatenate(found, axis=1)) - expected).abs().max().item()
    if not difference <= TOLERANCE * max(1.0, expected.abs().max().item()):
        raise InputError(
            f"{exported.runtime} computes other logits than PyTorch (they differ by {difference:.2g}): try "
            "another opset, or another release of onnxruntime."
        )
    return difference
