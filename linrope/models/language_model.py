"""The language model: configuration, block, model. It reads top to bottom."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from linrope.errors import InputError, require_choice
from linrope.feature_maps import FEATURE_MAP_NAMES
from linrope.layers.attention import document_positions
from linrope.layers.linear_attention import LinearAttention
from linrope.layers.softmax_attention import SoftmaxAttention
from linrope.layers.state import AttentionState
from linrope.models.saving import read_model, write_folder
from linrope.ops.documents import check_segment_ids
from linrope.rotary import RotaryConfig, check_config
from linrope.utils.options import check_keys, check_types

if TYPE_CHECKING:
    from linrope.generation.prompt_state import PromptState
from linrope.layers.mlp import GatedMLP
from linrope.positions.sinusoidal import sinusoids

ATTENTION_TYPES = ("linear", "softmax")


EMBEDDING_STD = 0.02
"""Of the token embeddings at the start: small, for logits near 0."""


OUTPUT_NORM_START = 0.1
"""Weight of the norms of heads at the start: at 1, what attention adds is ten times the embeddings (in four layers)."""


@dataclass(frozen=True)
class LanguageModelConfig:
    """Everything that decides a model's parameters and what it computes."""

    vocab_size: int = 257
    """Number of tokens; bytes and a document separator make 257."""
    d_model: int = 128
    """Width of the model."""
    n_layers: int = 4
    """Number of blocks, each an attention and a gated MLP."""
    n_heads: int = 4
    """Attention heads in each layer."""
    attention: str | list[str] = "linear"
    """"linear" or "softmax", or a list of them: the layers' kinds in turn, from its first again where it ends."""
    rope: RotaryConfig | None = field(default_factory=RotaryConfig)
    """How queries and keys turn with their position; null for no positions."""
    rope_layers: list[int] | None = None
    """The layers, counted from 0, whose attention turns by `rope`; null for all."""
    sinusoidal: bool = False
    """Add sines and cosines of the position to the token embeddings; `rope: null` makes them the only positions."""
    feature_map: str = "elu1"
    """Feature map of linear layers: elu1, relu, exp, identity or softmax; favor (random), hedgehog or taylor (learned
    for each head)."""
    temperature: bool = False
    """Let linear layers learn a scale for each head inside the feature map; softmax layers have none."""
    normalize: Literal["plain", "none"] = "plain"
    """Whether linear layers divide by a denominator (plain), or not (none)."""
    short_conv: int = 0
    """Tokens seen by a causal convolution on queries, keys and values (4 is usual); 0 for none."""
    conv_silu: str = "qkv"
    """Where SiLU follows that convolution: qkv, or v alone, so that queries and keys take either sign."""
    forget_gate: bool = False
    """Let linear layers learn to forget, by head and token; softmax layers have no such gate."""
    gate_normalizer: float | list[float] = 1.0
    """What the forget gate's log decay is divided by, for all heads or one for each: larger for longer memories."""
    window: int | None = None
    """Tokens that softmax layers see, the present one included; null for all. Linear layers always see all."""
    output_norm: bool = False
    """RMSNorm over each head's output, before the gate, its weights 0.1 at the start. In linear layers it undoes the
    division by the denominator."""
    output_gate: bool = False
    """Multiply each attention's output by a SiLU gate."""
    d_ff: int | None = None
    """Hidden width of the MLP; null for 8/3 of d_model, rounded up to a multiple of 32."""
    tie_embeddings: bool = True
    """Use the token embedding as the output layer too."""
    dropout: float = 0.0
    """Dropout on the embeddings and on each block's two outputs."""
    norm_eps: float = 1e-5
    """ε of the blocks' RMSNorms; `output_norm` has 1e-5."""

    def __post_init__(self):
        check_config(self.rope)
        check_types(self)
        for name in ("vocab_size", "d_model", "n_layers", "n_heads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.d_ff is not None and self.d_ff < 1:
            raise InputError(f"d_ff={self.d_ff} must be at least 1, or null for 8/3 of d_model.")
        if self.window is not None and self.window < 1:
            raise InputError(f"window={self.window} must be at least 1, the token itself, or null for all.")
        if not all(0 <= layer < self.n_layers for layer in self.rope_layers or []):
            raise InputError(
                f"rope_layers={self.rope_layers} must lie in 0 … {self.n_layers - 1}, the layers' numbers."
            )
        if self.sinusoidal and self.d_model % 2:
            raise InputError(
                f"sinusoidal=True needs an even d_model, not {self.d_model}: a sine and a cosine for each θ."
            )
        require_choice("feature_map", self.feature_map, FEATURE_MAP_NAMES)
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout={self.dropout} must be at least 0 and below 1.")
        if not 0 <= self.norm_eps < math.inf:
            raise InputError(f"norm_eps={self.norm_eps} must be a finite number, at least 0.")
        if not (isinstance(self.attention, str) or 1 <= len(self.attention) <= self.n_layers):
            raise InputError(
                f"attention={self.attention} must have 1 to n_layers={self.n_layers} kinds: it repeats over the layers."
            )
        for kind in self.attention_types:
            require_choice("attention", kind, ATTENTION_TYPES)

    @property
    def attention_types(self) -> list[str]:
        """The kind of each layer's attention."""
        kinds = [self.attention] if isinstance(self.attention, str) else self.attention
        return list(islice(cycle(kinds), self.n_layers))

    @property
    def mlp_width(self) -> int:
        """`d_ff`, or what stands in for it."""
        return self.d_ff if self.d_ff is not None else -(-8 * self.d_model // 3 // 32) * 32

    def to_dict(self) -> dict[str, Any]:
        """Plain scalars, lists and dicts, for JSON and checkpoints."""
        # a tuple, where a list was meant, is a list then, and a number of NumPy's one of Python's
        return json.loads(json.dumps(asdict(self), default=lambda number: number.item()))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LanguageModelConfig:
        """The inverse of `to_dict`.

        Raises:
            InputError: a key that no option has, with the nearest right one.
        """
        check_keys(values, cls)
        try:
            if isinstance(values.get("rope"), dict):
                values = {**values, "rope": RotaryConfig.from_dict(values["rope"])}
            return cls(**values)
        except TypeError as error:
            raise InputError(f"a value of the model's configuration is of the wrong kind: {error}.") from error


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LanguageModelConfig, layer: int):
        super().__init__()
        shared = {
            "rope": config.rope if config.rope_layers is None or layer in config.rope_layers else None,
            "short_conv": config.short_conv,
            "conv_silu": config.conv_silu,
            "output_norm": config.output_norm,
            "output_gate": config.output_gate,
        }
        if config.attention_types[layer] == "linear":
            self.attention = LinearAttention(
                config.d_model,
                config.n_heads,
                feature_map=config.feature_map,
                temperature=config.temperature,
                normalize=config.normalize,
                forget_gate=config.forget_gate,
                gate_normalizer=config.gate_normalizer,
                **shared,
            )
        else:
            self.attention = SoftmaxAttention(config.d_model, config.n_heads, window=config.window, **shared)
        self.mlp = GatedMLP(config.d_model, config.mlp_width)
        self.attention_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, state: AttentionState | None, segment_ids: Tensor | None
    ) -> tuple[Tensor, AttentionState]:
        """(B, T, d_model) -> the same, and the attention's state after the last token."""
        attended, state = self.attention(self.attention_norm(x), state, segment_ids, return_state=True)
        x = x + self.dropout(attended)
        return x + self.dropout(self.mlp(self.mlp_norm(x))), state


class LanguageModel(nn.Module):
    """A causal language model: embedding, pre-norm blocks, norm, output layer.

    With linear attention in every layer its state has a fixed size: text is read in pieces, and written, at a cost
    for each token that does not depend on how much came before.
    """

    def __init__(self, config: LanguageModelConfig):
        super().__init__()
        self.config = config
        self.tokenizer: dict[str, str] | None = None  # carried along for those who read and write text
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self._initialise()
        if config.tie_embeddings:
            self.output.weight = self.embedding.weight

    def _initialise(self) -> None:
        """PyTorch's own for the matrices (deviation (3 · fan-in)^-½, so that width does not matter), less for those
        that add to the residual stream, whose sum grows with depth; small embeddings, for logits near 0, and norms of
        heads that do not drown them."""
        for block in self.blocks:
            if block.attention.norm is not None:
                nn.init.constant_(block.attention.norm.weight, OUTPUT_NORM_START)
            for layer in (block.attention.out, block.mlp.out):
                nn.init.normal_(layer.weight, std=(3 * layer.in_features * 2 * self.config.n_layers) ** -0.5)
        for weight in (self.embedding.weight, self.output.weight):
            nn.init.normal_(weight, std=EMBEDDING_STD)

    def forward(
        self,
        tokens: Tensor,
        state: tuple[AttentionState, ...] | None = None,
        segment_ids: Tensor | None = None,
        return_state: bool = False,
        logits_to_keep: int | None = None,
    ) -> Tensor | tuple[Tensor, tuple[AttentionState, ...]]:
        """Predict the token after each.

        Args:
            tokens: (B, T) integers in [0, vocab_size).
            state: what an earlier call on the same rows returned: these tokens continue them.
            segment_ids: (B, T) integers: each run of equal numbers is a document of a packed row, read by itself.
            return_state: also return the state after the last token, one AttentionState a layer.
            logits_to_keep: make the logits of the last so many tokens only, at least 1; None makes all.

        Returns:
            Logits (B, T, vocab_size), or (logits, state).

        Raises:
            InputError: tokens of another shape or dtype or out of range, a state of another model.
        """
        self.check(tokens, state, segment_ids)
        x = self.embedding(tokens)
        if self.config.sinusoidal:
            x = x + self._position_embedding(tokens, state, segment_ids).to(x.dtype)
        x = self.dropout(x)
        after = []
        for block, before in zip(self.blocks, state or [None] * len(self.blocks)):
            x, layer_state = block(x, before, segment_ids)
            after.append(layer_state)
        if logits_to_keep is not None:
            if logits_to_keep < 1:
                raise InputError(f"logits_to_keep={logits_to_keep} must be at least 1, or None for all.")
            x = x[:, -logits_to_keep:]
        logits = self.output(self.norm(x))
        return (logits, tuple(after)) if return_state else logits

    def _position_embedding(self, tokens: Tensor, state, segment_ids: Tensor | None) -> Tensor:
        """(T, d_model), or (B, T, d_model) of packed rows, whose documents each start at 0.

        As large as the token embeddings at the start: a sine's mean square is ½.
        """
        first = None if state is None else state[0]
        positions, _ = document_positions(tokens, first, segment_ids)
        if positions is None:
            offset = 0 if first is None else first.past.length
            positions = torch.arange(offset, offset + tokens.shape[1], device=tokens.device)
        return EMBEDDING_STD * 2**0.5 * sinusoids(positions, self.config.d_model)

    def check(self, tokens: Tensor, state=None, segment_ids: Tensor | None = None) -> None:
        """Raise InputError unless these fit the model, as its arguments."""
        if not isinstance(tokens, Tensor):
            raise InputError(f"tokens is a {type(tokens).__name__}: pass int64 of shape (B, T).")
        if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise InputError(f"tokens is {tuple(tokens.shape)} {tokens.dtype}: pass int64 of shape (B, T).")
        if tokens.device.type == "cpu" and tokens.numel() and not torch.compiler.is_compiling():
            lowest, highest = (bound.item() for bound in tokens.aminmax())  # a GPU asserts this by itself
            if lowest < 0 or highest >= self.config.vocab_size:
                raise InputError(f"tokens lie in [{lowest}, {highest}], vocab_size is {self.config.vocab_size}.")
        if segment_ids is not None:
            check_segment_ids(segment_ids, *tokens.shape, tokens.device)
        if state is None:
            return
        if not isinstance(state, (tuple, list)) or len(state) != len(self.blocks):
            got = f"has {len(state)} layers" if isinstance(state, (tuple, list)) else f"is a {type(state).__name__}"
            raise InputError(f"state {got}, the model has {len(self.blocks)} layers: pass its own state.")
        if not all(isinstance(layer, AttentionState) for layer in state):
            kinds = ", ".join(type(layer).__name__ for layer in state)
            raise InputError(f"state holds {kinds}: pass the AttentionStates that the model returned.")

    @property
    def n_parameters(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def state_bytes(self, context: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of one sequence's state after `context` tokens.

        Args:
            context: tokens read; only softmax layers' caches depend on it.
            dtype: that of the activations: caches and convolution tails are kept in it, linear states in float32.
        """
        return sum(block.attention.state_bytes(context, dtype) for block in self.blocks)

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        """Write `config.json`, `model.pt` and, where it has one, `tokenizer.json` into the directory.

        The directory is made where missing; each file is replaced whole.

        Raises:
            InputError: a directory of `linrope export`, whose weights have another name and would stay.
        """
        write_folder(Path(directory), self.config.to_dict(), self.state_dict(), self.tokenizer)

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike) -> LanguageModel:
        """The model that `save_pretrained` or `linrope export` wrote into a folder, or that a `linrope fit` checkpoint
        file holds.

        The model is on the CPU, in the dtype that its weights were saved in, in evaluation mode. Only tensors and plain
        values are unpickled.

        Raises:
            InputError: nothing there, or something else than a linrope model.
        """
        config, weights, tokenizer = read_model(Path(path))
        try:
            model = cls(LanguageModelConfig.from_dict(config))
        except InputError as error:
            raise InputError(f"checkpoint {str(path)!r}: {error}") from error
        embedding = weights.get("embedding.weight") if isinstance(weights, dict) else None
        if isinstance(embedding, Tensor) and embedding.is_floating_point():
            model.to(embedding.dtype)
            if model.config.tie_embeddings:
                weights = {"output.weight": embedding, **weights}  # safetensors holds a tensor once
        try:
            model.load_state_dict(weights)
        except (RuntimeError, TypeError) as error:
            raise InputError(f"checkpoint {str(path)!r}: weights do not fit its configuration: {error}") from error
        model.tokenizer = tokenizer
        return model.eval()

    def generate(
        self, tokens: Tensor | Sequence[Tensor] | PromptState, max_new_tokens: int, **options
    ) -> Tensor | list[Tensor]:
        """Continue each prompt: (B, T) -> (B, T + max_new_tokens), or a list of (T_b,) -> a list, each longer by that
        many; or a context -> (B, max_new_tokens). See `linrope.generation.decoding.stream` for the options."""
        from linrope.generation.decoding import generate

        return generate(self, tokens, max_new_tokens, **options)

    def stream(
        self, tokens: Tensor | Sequence[Tensor] | PromptState, max_new_tokens: int, **options
    ) -> Iterator[Tensor]:
        """`linrope.generation.decoding.stream` on this model: one (B,) of new tokens at a time."""
        from linrope.generation.decoding import stream

        return stream(self, tokens, max_new_tokens, **options)
