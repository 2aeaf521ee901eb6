"""The bidirectional encoder, RoFormer: configuration, post-norm block, model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linrope.errors import InputError, require_choice
from linrope.feature_maps import require_feature_map
from linrope.layers.initialisation import reset
from linrope.layers.linear import Linear
from linrope.layers.linear_attention import LinearAttention
from linrope.layers.softmax_attention import SoftmaxAttention
from linrope.layers.state import AttentionState, ModelState
from linrope.models.base import Model, ModelConfig, check_tokens, differences, flat_options
from linrope.ops.checks import check_tensor
from linrope.positions.base import PositionsConfig
from linrope.positions.table import embedding_of
from linrope.rotary import RotaryConfig, check_config
from linrope.utils.options import check_types

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}
"""By the names that configurations of transformers use."""
OF_HEAD = ("model.head", "model.n_labels", "model.tie_embeddings")
"""Options that decide the weights of the head."""
SEEN_IN_SHAPES = (*OF_HEAD, "model.d_ff", "model.embedding_size")
"""Options that decide which weights there are."""
WEIGHT_STD = 0.02
"""Standard deviation of all matrices at the start."""


@dataclass(frozen=True)
class EncoderConfig(ModelConfig):
    """An encoder's parameters and computation, with its head, in one record."""

    vocab_size: int = 261
    """Number of different tokens; 256 bytes, a document separator, [MASK], [CLS], [SEP] and [PAD] are 261."""
    d_model: int = 128
    """Width of the model."""
    n_layers: int = 4
    """Number of blocks, each with attention and an MLP."""
    n_heads: int = 4
    """Attention heads in each layer."""
    attention: Literal["linear", "softmax"] = "linear"
    """Attention of all layers."""
    rope: RotaryConfig | None = field(default_factory=RotaryConfig)
    """How queries and keys are rotated by their position, with `positions.name: rope`; null for no positions."""
    positions: PositionsConfig = field(default_factory=PositionsConfig)
    """The position encoding; one that is not rope takes the place of RoPE in all layers."""
    rotate_values: bool = False
    """Rotate the values too (`rotary_value` of transformers)."""
    feature_map: str = "elu1"
    """Feature map of linear attention, as in language models."""
    embedding_size: int | None = None
    """Width of the token embeddings, which a linear layer projects to d_model; null for d_model."""
    d_ff: int | None = None
    """Hidden width of the MLP; null for 4 · d_model."""
    activation: str = "gelu"
    """Activation of the MLP and of the heads: gelu, gelu_new, gelu_pytorch_tanh, relu, silu or tanh."""
    n_token_types: int = 2
    """Number of token types (segments A and B of a pair)."""
    dropout: float = 0.1
    """Dropout probability, on the embeddings, on the two outputs of each block, and in the heads."""
    norm_eps: float = 1e-12
    """ε of the LayerNorms."""
    tie_embeddings: bool = True
    """Use the token embedding also as the output layer of masked language modeling."""
    head: (
        Literal["masked_lm", "classification", "token_classification", "question_answering", "multiple_choice"] | None
    ) = None
    """What the model predicts; a task sets it. null gives the encoder alone."""
    n_labels: int = 2
    """Number of classes of classification (1 is regression) and token classification."""

    def __post_init__(self) -> None:
        check_config(self.rope)
        check_types(self)
        self.require_positive("vocab_size", "d_model", "n_layers", "n_heads", "embedding_size", "d_ff", "n_token_types")
        self.require_positive("n_labels")
        require_choice("activation", self.activation, ACTIVATIONS)
        require_feature_map(self.feature_map)
        self.require_dropout_and_eps()
        self.settle_positions([] if self.attention == "softmax" else [self.attention])

    @property
    def embedding_width(self) -> int:
        """`embedding_size`, or its default."""
        return self.d_model if self.embedding_size is None else self.embedding_size

    @property
    def mlp_width(self) -> int:
        """`d_ff`, or its default."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    def least_weight_bytes(self) -> int:
        of_a_layer = 4 * self.d_model + 2 * self.mlp_width
        return 4 * (self.vocab_size * self.embedding_width + self.n_layers * self.d_model * of_a_layer)

    def build(self) -> EncoderModel:
        """A new model of these options: the encoder, or the one with this head."""
        return _BUILT[self.head](self)


class EncoderBlock(nn.Module):
    """norm(x + attention(x)), then norm(x + mlp(x)): post-norm, as published."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        options = {"rope": config.rope, "positions": config.positions, "rotate_values": config.rotate_values}
        options |= {"causal": False, "bias": True}
        if config.attention == "linear":
            self.attention = LinearAttention(config.d_model, config.n_heads, feature_map=config.feature_map, **options)
        else:
            self.attention = SoftmaxAttention(config.d_model, config.n_heads, **options)
        self.attention_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.mlp_in = Linear(config.d_model, config.mlp_width)
        self.mlp_out = Linear(config.mlp_width, config.d_model)
        self.mlp_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, key_mask: Tensor | None = None, state: AttentionState | None = None) -> Tensor:
        """(B, T, d_model) -> (B, T, d_model)."""
        x = self.attention_norm(x + self.dropout(self.attention(x, state, key_mask=key_mask)))
        mlp = self.mlp_out(self.activation(self.mlp_in(x)))  # (B, T, d_model) -> (B, T, d_ff) -> (B, T, d_model)
        return self.mlp_norm(x + self.dropout(mlp))


class EncoderModel(Model):
    """Base of the encoder and of the models with a head on it."""

    config_class = EncoderConfig
    config: EncoderConfig

    def initialise(self) -> None:
        """Matrices and embeddings with standard deviation WEIGHT_STD, biases 0, norms 1."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=WEIGHT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def reset_parameters(self) -> None:
        """Initialise the model anew, after `to_empty` for example: with the same seed, as its constructor does."""
        for module in self.children():
            reset(module)
        self.initialise()

    @property
    def body(self) -> RoFormerEncoder:
        """The encoder."""
        return self.encoder

    @property
    def blocks_to_shard(self) -> list[nn.Module]:
        return list(self.body.blocks)

    def take(self, source: EncoderModel, name: str) -> list[str]:
        """Copy the encoder of another encoder model, and its head where that is the same.

        A softmax encoder can start a linear one: the weights have the same shapes, but the attention is another
        function of them, so it is an initialisation only.

        Returns:
            What is new or differs, in words.

        Raises:
            InputError: a model that is no encoder, weights of other shapes, or another number of attention heads; the
                message calls the source `name`.
        """
        if not isinstance(source, EncoderModel):
            raise InputError(f"{name} holds a {type(source).__name__}: an encoder starts from an encoder.")
        trained, own = source.body.state_dict(), self.body.state_dict()
        differing = differences(flat_options(source.config), flat_options(self.config))
        same_heads = source.config.n_heads == self.config.n_heads  # other numbers have weights of the same shapes
        if not same_heads or _shapes(trained) != _shapes(own):
            lines = [text for option, text in differing.items() if option not in OF_HEAD]
            raise InputError(
                f"{name} holds an encoder of other shapes: make those of these options equal that decide them:\n  "
                + "\n  ".join(lines)
            )
        self.body.load_state_dict(trained)
        self.tokenizer = source.tokenizer
        notes = [text for option, text in differing.items() if option not in SEEN_IN_SHAPES]
        if self.config.head is None:
            return notes
        weights = source.state_dict()
        if source.config.head == self.config.head and _shapes(weights) == _shapes(self.state_dict()):
            self.load_state_dict(weights)
            self.labels = source.labels
            return notes
        return [*notes, f"model.head: {self.config.head!r} is new"]


def _shapes(weights: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}


class RoFormerEncoder(EncoderModel):
    """RoFormer (arXiv 2104.09864): a bidirectional post-norm transformer with RoPE.

    With `attention: linear` RoPE stands in the numerator only (eq. 19), and time and memory are linear in the length.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        width = config.embedding_width
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.token_types = nn.Embedding(config.n_token_types, width)
        self.positions = embedding_of(config.positions, width)
        self.embedding_norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.projection = None if width == config.d_model else Linear(width, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.n_layers))
        self.initialise()

    @property
    def body(self) -> RoFormerEncoder:
        return self

    def forward(
        self,
        tokens: Tensor,
        key_mask: Tensor | None = None,
        token_types: Tensor | None = None,
        state: ModelState | None = None,
    ) -> Tensor:
        """Encode each token with all others of its row.

        Args:
            tokens: (B, T) integers in [0, vocab_size).
            key_mask: (B, T) booleans, False for padding, which no token sees. A row of padding alone gives finite
                values that mean nothing.
            token_types: (B, T) integers in [0, n_token_types); None for 0.
            state: stands for the tokens of the rows that other devices hold, see `linrope.distributed`; None if all are
                here.

        Returns:
            (B, T, d_model).

        Raises:
            InputError: arguments of the wrong shape, dtype or range.
        """
        self.check(tokens, key_mask, token_types)
        types = self.token_types.weight[0] if token_types is None else self.token_types(token_types)
        x = self.embedding(tokens) + types
        if self.positions is not None:
            start = 0 if state is None else state[0].past.length
            positions = torch.arange(start, start + tokens.shape[1], device=x.device)
            x = x + self.positions.embed(positions).to(x.dtype)
        x = self.dropout(self.embedding_norm(x))
        if self.projection is not None:
            x = self.projection(x)
        for layer, block in enumerate(self.blocks):
            x = block(x, key_mask, None if state is None else state[layer])
        return x

    def check(self, tokens: Tensor, key_mask: Tensor | None = None, token_types: Tensor | None = None) -> None:
        """Raise InputError unless these can be arguments of `forward`."""
        check_tokens("tokens", tokens, "vocab_size", self.config.vocab_size, self)
        if token_types is not None:
            check_tokens("token_types", token_types, "n_token_types", self.config.n_token_types, self)
            if token_types.shape != tokens.shape:
                raise InputError(
                    f"token_types is {tuple(token_types.shape)}, tokens {tuple(tokens.shape)}: pass one for each token."
                )
        if key_mask is not None:
            check_tensor("key_mask", key_mask, "booleans", "(B, T)", tokens.shape, tokens.device)


_BUILT: dict[str | None, type[EncoderModel]] = {None: RoFormerEncoder}
"""The model of each head; `linrope.models.heads` adds to it."""


def register_head(name: str, model: type[EncoderModel]) -> None:
    """Make `EncoderConfig(head=name).build()` give this model."""
    _BUILT[name] = model
