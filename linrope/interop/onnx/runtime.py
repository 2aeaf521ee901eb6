"""`OnnxLanguageModel`: a graph that `export_onnx` wrote, run by onnxruntime.

Inputs of the graph, with B rows of T tokens:

    tokens           int64 (B, T), T ≥ 1
    past.…           the state before them, float32 but for past.position (int64); all zeros before the first token
    logits_to_keep   int64 (1,), K ≥ 1: logits of the last K tokens are computed, of all if there are fewer

Outputs are `logits`, float32 (B, min(K, T), vocab_size), and `present.…`, the state after the tokens. Each row has
a position of its own, so that rows may be joined or parted between calls.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeAlias

import numpy as np

from linrope.data.tokenizers.base import Tokenizer, tokenizer_from_serialized
from linrope.errors import InputError
from linrope.interop.onnx.graph import PAST, PRESENT
from linrope.models.language_model import LanguageModelConfig

try:
    import onnxruntime
except ImportError as error:
    raise InputError(f'{error.name} is not installed: pip install "linrope[onnx]".') from error

MODEL_FILE = "model.onnx"
CONFIG, TOKENIZER = "linrope.config", "linrope.tokenizer"
"""Names of the metadata."""
OnnxState: TypeAlias = dict[str, np.ndarray]
"""The tensors of a state by the names of the inputs, `past.…`."""
DTYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64}


class OnnxLanguageModel:
    """The graph, with the configuration and the tokenizer of its model.

    Args:
        path: the file, or the folder of `linrope export --format onnx`.
        threads: of onnxruntime; None for its default.

    Raises:
        InputError: no such file, not such a graph, or one that the installed onnxruntime cannot run.
    """

    def __init__(self, path: str | Path, threads: int | None = None) -> None:
        path = Path(path)
        path = path / MODEL_FILE if path.is_dir() else path
        if not path.is_file():
            raise InputError(f"{str(path)!r} is not a file: write one with `linrope export --format onnx`.")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        try:
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has no public classes of errors
            reason = " ".join(str(error).split())
            raise InputError(
                f"{self.runtime} cannot run {path.name} ({reason}): update onnxruntime, or export with --opset 23."
            ) from error
        metadata = self.session.get_modelmeta().custom_metadata_map
        if not {CONFIG, TOKENIZER} <= metadata.keys():
            raise InputError(f"{str(path)!r} is no graph of linrope: write one with `linrope export --format onnx`.")
        self.config = LanguageModelConfig.from_dict(json.loads(metadata[CONFIG]))
        self._tokenizer = json.loads(metadata[TOKENIZER])
        self._past = [x for x in self.session.get_inputs() if x.name.startswith(PAST)]
        self._outputs = [x.name for x in self.session.get_outputs()]

    @property
    def runtime(self) -> str:
        """onnxruntime and its version."""
        return f"onnxruntime {onnxruntime.__version__}"

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if it is unknown."""
        return tokenizer_from_serialized(self._tokenizer)

    def initial_state(self, batch: int = 1) -> OnnxState:
        """The state before the first token: zeros, and caches without keys where they grow."""

        def size(axis: int | str) -> int:
            return batch if axis == "batch" else 0 if isinstance(axis, str) else axis

        return {x.name: np.zeros([size(axis) for axis in x.shape], DTYPES[x.type]) for x in self._past}

    def __call__(
        self, tokens: np.ndarray, state: OnnxState | None = None, logits_to_keep: int | None = None
    ) -> tuple[np.ndarray, OnnxState]:
        """The logits of the token after each token, and the state after the last.

        Args:
            tokens: (B, T) int64, B, T ≥ 1, in [0, vocab_size).
            state: returned by an earlier call on the same rows, which these tokens continue.
            logits_to_keep: K ≥ 1 computes those of the last K tokens only; None computes all.

        Returns:
            float32 (B, T, vocab_size) or (B, min(K, T), vocab_size), and the state.

        Raises:
            InputError: tokens of another shape or dtype or out of range, a `logits_to_keep` below 1, the state of
                another model or of other rows, or rows longer than the model's positions.
        """
        tokens = np.asarray(tokens)
        if tokens.ndim != 2 or not tokens.size or tokens.dtype != np.int64:
            raise InputError(f"tokens is {tokens.shape} {tokens.dtype}: pass int64 of shape (B, T), both at least 1.")
        if not (tokens.min() >= 0 and tokens.max() < self.config.vocab_size):
            raise InputError(
                f"tokens lie in [{tokens.min()}, {tokens.max()}], vocab_size is {self.config.vocab_size}: pass 0 … "
                f"{self.config.vocab_size - 1}."
            )
        if logits_to_keep is not None and logits_to_keep < 1:
            raise InputError(f"logits_to_keep={logits_to_keep} must be at least 1, or None for all.")
        state = self.initial_state(len(tokens)) if state is None else state
        self._check(state, len(tokens))
        longest, length = self.config.positions.longest_row, state[f"{PAST}position"].max() + tokens.shape[1]
        if longest is not None and length > longest:
            raise InputError(f"a row has {length} tokens with these, and the positions of this model end at {longest}.")
        to_keep = np.array([tokens.shape[1] if logits_to_keep is None else logits_to_keep])
        found = self.session.run(self._outputs, {"tokens": tokens, "logits_to_keep": to_keep, **state})
        outputs = dict(zip(self._outputs, found))
        logits = outputs.pop("logits")
        return logits, {PAST + name.removeprefix(PRESENT): value for name, value in outputs.items()}

    def _check(self, state: OnnxState, batch: int) -> None:
        for x in self._past:
            expected = tuple(batch if axis == "batch" else axis for axis in x.shape)
            found = np.shape(state[x.name]) if x.name in state else None
            fits = found is not None and len(found) == len(expected)
            if not fits or any(isinstance(b, int) and a != b for a, b in zip(found, expected)):
                raise InputError(
                    f"state[{x.name!r}] is {found}, this call needs {expected}: pass what this model returned for the "
                    "same rows."
                )
