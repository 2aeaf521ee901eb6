"""The encoder–decoder for translation: configuration, blocks, model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from linrope.data.tokenizers.base import tokenizer_from_serialized
from linrope.errors import InputError
from linrope.feature_maps import require_feature_map
from linrope.generation.translation import translate_texts
from linrope.layers.attention import Attention
from linrope.layers.cross_attention import CrossAttention, SourceMemory
from linrope.layers.linear import Linear
from linrope.layers.linear_attention import LinearAttention
from linrope.layers.norm import RMSNorm
from linrope.layers.softmax_attention import SoftmaxAttention
from linrope.layers.state import AttentionState, ModelState
from linrope.losses import check_targets, rows_of_slice, summed_cross_entropy_of
from linrope.models.base import ModelConfig, ModelWithOutput, check_tokens
from linrope.models.language_model import EMBEDDING_STD, GatedMLP, gated_width
from linrope.ops.checks import check_tensor
from linrope.positions.base import PositionsConfig
from linrope.positions.table import embedding_of
from linrope.rotary import RotaryConfig, check_config
from linrope.utils.options import check_types


@dataclass(frozen=True)
class EncoderDecoderConfig(ModelConfig):
    """An encoder–decoder's parameters and computation."""

    vocab_size: int = 8192
    """Number of different tokens, shared by source and target."""
    d_model: int = 256
    """Width of the model."""
    n_encoder_layers: int = 3
    """Number of encoder blocks, each with self-attention and a gated MLP."""
    n_decoder_layers: int = 3
    """Number of decoder blocks, each with causal self-attention, cross-attention and a gated MLP."""
    n_heads: int = 4
    """Attention heads in each layer."""
    attention: Literal["linear", "softmax"] = "linear"
    """Attention of all layers. With linear the state of decoding has a constant size."""
    rope: RotaryConfig | None = field(default_factory=RotaryConfig)
    """How queries and keys are rotated in self-attention and cross-attention; null for no rotation."""
    positions: PositionsConfig = field(default_factory=PositionsConfig)
    """The position encoding; one that is not rope takes the place of RoPE. Encodings in the attention weights act in
    self-attention."""
    feature_map: str = "elu1"
    """Feature map of linear attention."""
    d_ff: int | None = None
    """Hidden width of the MLP; null for 8/3 of d_model, rounded up to a multiple of 32."""
    dropout: float = 0.1
    """Dropout probability, on the embeddings and on the outputs of each part of a block."""
    tie_embeddings: bool = True
    """Use the token embedding also as the output layer."""
    norm_eps: float = 1e-5
    """ε of the RMSNorms."""

    def __post_init__(self):
        check_config(self.rope)
        check_types(self)
        self.require_positive("vocab_size", "d_model", "n_encoder_layers", "n_decoder_layers", "n_heads", "d_ff")
        require_feature_map(self.feature_map)
        self.require_dropout_and_eps()
        self.settle_positions([] if self.attention == "softmax" else [self.attention])

    @property
    def mlp_width(self) -> int:
        """`d_ff`, or its default."""
        return gated_width(self.d_model) if self.d_ff is None else self.d_ff

    def least_weight_bytes(self) -> int:
        of_encoder_block, of_decoder_block = (n * self.d_model + 3 * self.mlp_width for n in (4, 8))
        of_blocks = self.n_encoder_layers * of_encoder_block + self.n_decoder_layers * of_decoder_block
        return 4 * self.d_model * (self.vocab_size + of_blocks)

    def build(self) -> EncoderDecoder:
        """A new model of these options."""
        return EncoderDecoder(self)


def _self_attention(config: EncoderDecoderConfig, causal: bool) -> Attention:
    options = {"rope": config.rope, "positions": config.positions, "causal": causal}
    if config.attention == "softmax":
        return SoftmaxAttention(config.d_model, config.n_heads, **options)
    return LinearAttention(config.d_model, config.n_heads, feature_map=config.feature_map, **options)


def _norm(config: EncoderDecoderConfig) -> RMSNorm:
    return RMSNorm(config.d_model, eps=config.norm_eps)


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); every token sees the whole source."""

    def __init__(self, config: EncoderDecoderConfig):
        super().__init__()
        self.attention = _self_attention(config, causal=False)
        self.mlp = GatedMLP(config.d_model, config.mlp_width)
        self.attention_norm, self.mlp_norm = _norm(config), _norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(B, S, d_model) -> the same shape; mask (B, S) booleans is False for padding."""
        x = x + self.dropout(self.attention(self.attention_norm(x), key_mask=mask))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class DecoderBlock(nn.Module):
    """x + attention(norm(x)), x + cross_attention(norm(x), source), then x + mlp(norm(x))."""

    def __init__(self, config: EncoderDecoderConfig):
        super().__init__()
        self.attention = _self_attention(config, causal=True)
        cross = {"kind": config.attention, "rope": config.rope, "feature_map": config.feature_map}
        self.cross_attention = CrossAttention(config.d_model, config.n_heads, **cross)
        self.mlp = GatedMLP(config.d_model, config.mlp_width)
        self.attention_norm, self.cross_norm, self.mlp_norm = _norm(config), _norm(config), _norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, memory: SourceMemory, state: AttentionState | None) -> tuple[Tensor, AttentionState]:
        """(B, T, d_model) -> the same shape, and the state after the last token."""
        offset = 0 if state is None else state.past.length
        attended, state = self.attention(self.attention_norm(x), state, return_state=True)
        x = x + self.dropout(attended)
        x = x + self.dropout(self.cross_attention(self.cross_norm(x), memory, offset))
        return x + self.dropout(self.mlp(self.mlp_norm(x))), state


class SourceMemories(tuple[SourceMemory, ...]):
    """The encoded source: a tuple with the SourceMemory of each decoder block."""

    def select_rows(self, rows: Tensor) -> SourceMemories:
        """Row i of the result is row `rows[i]`; rows are (N,) integers."""
        return SourceMemories(memory.select_rows(rows) for memory in self)


class EncoderDecoder(ModelWithOutput):
    """A Transformer for translation (arXiv 1706.03762) with pre-norm blocks, RoPE, and linear or softmax attention.

    Source and target share the embedding. With linear attention neither the encoded source nor the state of decoding
    grows with the length.
    """

    config_class = EncoderDecoderConfig
    config: EncoderDecoderConfig

    def __init__(self, config: EncoderDecoderConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = embedding_of(config.positions, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.ModuleList(EncoderBlock(config) for _ in range(config.n_encoder_layers))
        self.decoder = nn.ModuleList(DecoderBlock(config) for _ in range(config.n_decoder_layers))
        self.encoder_norm, self.norm = _norm(config), _norm(config)
        self.output = Linear(config.d_model, config.vocab_size, bias=False)
        self.initialise()
        self.tie()

    @property
    def longest_row(self) -> int | None:
        """Tokens of the longest row that the model can read, by its tables of positions; None for any length."""
        return self.config.positions.longest_row

    forward_methods = ("encode", "step")

    @property
    def blocks_to_shard(self) -> list[nn.Module]:
        return [*self.encoder, *(block.cross_attention for block in self.decoder), *self.decoder]

    def initialise(self) -> None:
        """As in the language model: outputs that add to the residual stream are smaller, embeddings are small."""
        for blocks, parts in ((self.encoder, 2), (self.decoder, 3)):
            for block in blocks:
                cross = [block.cross_attention.out] if parts == 3 else []
                for layer in (block.attention.out, block.mlp.out, *cross):
                    nn.init.normal_(layer.weight, std=(3 * layer.in_features * parts * len(blocks)) ** -0.5)
        for weight in (self.embedding.weight, self.output.weight):
            nn.init.normal_(weight, std=EMBEDDING_STD)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_mask: Tensor | None = None,
        targets: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """The logits of the token after each target token, or with `targets` their summed loss.

        Args:
            source: (B, S) integers in [0, vocab_size).
            target: (B, T) integers, what the decoder reads: the beginning token, then the translation.
            source_mask: (B, S) booleans, False for padding.
            targets: (B, T) tokens, or IGNORE (-100) for none.
            label_smoothing: see `linrope.losses.summed_cross_entropy`.

        Returns:
            Logits (B, T, vocab_size), or the loss in nats, float32.

        Raises:
            InputError: tokens or a mask of the wrong shape or dtype or out of range.
        """
        self._check("target", target)
        x, _ = self._decode(target, self.encode(source, source_mask), None)
        if targets is None:
            return self.output(x)
        check_targets(targets, target, self.config.vocab_size, "target")
        rows = rows_of_slice(self.config.vocab_size, x.device.type)
        return summed_cross_entropy_of(self.output, x, targets, rows, label_smoothing)

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> SourceMemories:
        """What the decoder reads of a source (B, S), computed once; the arguments are those of `forward`."""
        self._check("source", source)
        if source_mask is not None:
            check_tensor("source_mask", source_mask, "booleans", "(B, S)", source.shape, source.device)
        x = self._embedded(source, 0)
        for block in self.encoder:
            x = block(x, source_mask)
        x = self.encoder_norm(x)
        return SourceMemories(block.cross_attention.memory(x, source_mask) for block in self.decoder)

    def step(
        self, tokens: Tensor, memory: SourceMemories, state: ModelState | None = None
    ) -> tuple[Tensor, ModelState]:
        """Logits (B, T, vocab_size) of the tokens after `tokens` (B, T), which follow `state`; and the next state.

        `memory` is what `encode` returned for the same rows; `state` is None at the start.
        """
        self._check("tokens", tokens)
        if not isinstance(memory, SourceMemories):
            raise InputError(f"memory is a {type(memory).__name__}: pass what encode returned for the same rows.")
        x, state = self._decode(tokens, memory, state)
        return self.output(x), state

    def translate(
        self, texts: Iterable[str], *, n_beams: int = 4, length_penalty: float = 0.6, extra_tokens: int = 50
    ) -> list[str]:
        """The translation of each text by beam search, all in one batch.

        Args:
            texts: sentences; the model is in evaluation mode, or dropout applies.
            n_beams, length_penalty: see `linrope.generation.beam_search.beam_search`.
            extra_tokens: a translation has at most as many tokens more than its source.

        Raises:
            InputError: an option out of range, or a model whose tokenizer is unknown.
        """
        options = {"n_beams": n_beams, "length_penalty": length_penalty, "extra_tokens": extra_tokens}
        tokenizer, device = tokenizer_from_serialized(self.tokenizer), self.embedding.weight.device
        return translate_texts(self, texts, tokenizer, device, longest_row=self.longest_row, **options)

    def _decode(self, tokens: Tensor, memory: SourceMemories, state: ModelState | None) -> tuple[Tensor, ModelState]:
        x, after = self._embedded(tokens, 0 if state is None else state[0].past.length), []
        for layer, block in enumerate(self.decoder):
            x, layer_state = block(x, memory[layer], None if state is None else state[layer])
            after.append(layer_state)
        return self.norm(x), ModelState(after)

    def _embedded(self, tokens: Tensor, offset: int) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            at = torch.arange(offset, offset + tokens.shape[1], device=x.device)
            x = x + self.positions.embed(at).to(x.dtype)
        return self.dropout(x)

    def _check(self, name: str, tokens: Tensor) -> None:
        check_tokens(name, tokens, "vocab_size", self.config.vocab_size, self)
