"""The language model: configuration, gated MLP, block, model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Literal

import torch
from torch import Tensor, nn

from linrope.errors import InputError, require_choice
from linrope.feature_maps import require_feature_map
from linrope.generation.decoding import Prompts, generate, stream
from linrope.generation.prompt_state import PromptState
from linrope.generation.text import decode_text, encode_text, generate_texts
from linrope.layers.cosine_attention import CosineAttention
from linrope.layers.linear import Linear
from linrope.layers.linear_attention import LinearAttention
from linrope.layers.norm import RMSNorm
from linrope.layers.softmax_attention import SoftmaxAttention
from linrope.layers.state import AttentionState, ModelState, state_before, token_positions
from linrope.losses import check_targets, rows_of_slice, summed_cross_entropy_of, token_losses_of
from linrope.models.base import ModelConfig, ModelWithOutput, check_tokens
from linrope.ops.documents import check_segment_ids
from linrope.ops.swiglu import swiglu
from linrope.positions.base import TABLE_STD, PositionsConfig
from linrope.positions.table import embedding_of
from linrope.rotary import RotaryConfig, check_config
from linrope.utils.options import check_types, require_whole

MAX_LAYERS = 10_000
ATTENTION_TYPES = {
    "linear": (LinearAttention, ("feature_map", "temperature", "normalize", "forget_gate", "gate_normalizer")),
    "softmax": (SoftmaxAttention, ("window",)),
    "cosine": (CosineAttention, ()),
}
"""The layer of each type of attention, and its own options."""
SHARED_OPTIONS = ("head_dim", "n_kv_heads", "qkv_bias", "short_conv", "conv_silu", "output_norm", "output_gate")
"""Options of all attention layers. Layers and configuration use the same names."""
EMBEDDING_STD = TABLE_STD
"""Standard deviation of the token embeddings at the start: small, for logits close to 0."""
INITIAL_OUTPUT_NORM = 0.1
"""Weight of `output_norm` at the start. With 1, attention would add ten times the embeddings (in four layers)."""


@dataclass(frozen=True)
class LanguageModelConfig(ModelConfig):
    """A model's parameters and computation, in one record.

    A model of your own has a subclass of this one, a frozen dataclass with the options that it adds, whose `build`
    makes it.
    """

    vocab_size: int = 257
    """Number of different tokens; 256 bytes and a document separator are 257."""
    d_model: int = 128
    """Width of the model."""
    n_layers: int = 4
    """Number of blocks, each with attention and a gated MLP."""
    n_heads: int = 4
    """Attention heads in each layer."""
    n_kv_heads: int | None = None
    """Heads of keys and values, each shared by n_heads / n_kv_heads query heads (grouped queries); null for n_heads.
    Softmax layers then have a smaller cache, linear ones fewer weights."""
    head_dim: int | None = None
    """Size of each head; null for d_model / n_heads."""
    qkv_bias: bool = False
    """Biases of queries, keys and values, as in Qwen2."""
    qk_norm: bool = False
    """RMSNorm over each head's queries and keys before the rotation, as in Qwen3."""
    attention: str | list[str] = "linear"
    """Attention of the layers, linear, softmax or cosine (linear, with the similarity 1 + cos); a list gives the first
    layers' and repeats over the others."""
    rope: RotaryConfig | None = field(default_factory=RotaryConfig)
    """How queries and keys are rotated by their position, with `positions.name: rope`; null for no positions."""
    rope_layers: list[int] | None = None
    """Numbers of the layers with `rope`, from 0; null for all layers."""
    positions: PositionsConfig = field(default_factory=PositionsConfig)
    """The position encoding; one that is not rope takes the place of RoPE in all layers."""
    feature_map: str = "elu1"
    """Feature map of linear layers: elu1, relu, exp, identity or softmax; favor (random); hedgehog or taylor (learned,
    one for each head); or one of your own (`linrope.register_feature_map`)."""
    temperature: bool = False
    """Learn a scale for each head inside the feature map of linear layers."""
    normalize: Literal["plain", "none"] = "plain"
    """plain: linear layers divide by the denominator; none: they do not."""
    short_conv: int = 0
    """Width in tokens of a causal convolution on queries, keys and values (4 is usual); 0 for none."""
    conv_silu: str = "qkv"
    """Where SiLU follows that convolution: qkv, or v alone, which leaves queries and keys of either sign."""
    forget_gate: bool = False
    """Learn a decay of the past for each head and token of linear layers."""
    gate_normalizer: float | list[float] = 1.0
    """Divisor of the forget gate's log decay, at least 1, one number or one for each head; larger for longer memory."""
    window: int | None = None
    """Number of last tokens that softmax layers see, with the present one; null for all. Linear layers see all."""
    output_norm: bool = False
    """RMSNorm over each head's output, before the gate, with weight 0.1 at the start. In linear layers it cancels the
    division by the denominator."""
    output_gate: bool = False
    """Multiply the output of attention by a SiLU gate."""
    d_ff: int | None = None
    """Hidden width of the MLP; null for 8/3 of d_model, rounded up to a multiple of 32."""
    tie_embeddings: bool = True
    """Use the token embedding also as the output layer."""
    dropout: float = 0.0
    """Dropout probability, on the embeddings and on the two outputs of each block."""
    norm_eps: float = 1e-5
    """ε of the RMSNorms of the blocks and of `qk_norm`; `output_norm` always has 1e-5."""

    def __post_init__(self):
        check_config(self.rope)
        check_types(self)
        otherwise = {"d_ff": ", or null for 8/3 of d_model", "window": ", the token itself, or null for all"}
        sizes = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "window")
        self.require_positive(*sizes, **otherwise)
        if self.n_layers > MAX_LAYERS:
            raise InputError(f"n_layers={self.n_layers} must be at most {MAX_LAYERS:,}.")
        if not all(0 <= layer < self.n_layers for layer in self.rope_layers or []):
            raise InputError(
                f"rope_layers={self.rope_layers} must be in 0 … {self.n_layers - 1}, the numbers of the layers."
            )
        require_feature_map(self.feature_map)
        self.require_dropout_and_eps()
        if not (isinstance(self.attention, str) or 1 <= len(self.attention) <= self.n_layers):
            raise InputError(
                f"attention={self.attention} must have 1 to n_layers={self.n_layers} types: it repeats over the layers."
            )
        for attention in self.attention_types:
            require_choice("attention", attention, ATTENTION_TYPES)
        if self.positions.name != "rope" and self.rope_layers is not None:
            raise InputError(
                f"rope_layers={self.rope_layers} has no RoPE to place beside positions.name={self.positions.name!r}: "
                "remove one."
            )
        self.settle_positions([name for name in self.attention_types if name != "softmax"])

    @property
    def attention_types(self) -> list[str]:
        """The type of attention of each layer."""
        types = [self.attention] if isinstance(self.attention, str) else self.attention
        return list(islice(cycle(types), self.n_layers))

    @property
    def mlp_width(self) -> int:
        """`d_ff`, or its default."""
        return gated_width(self.d_model) if self.d_ff is None else self.d_ff

    def least_weight_bytes(self) -> int:
        of_a_layer = 2 * self.mlp_width + 3 * (self.short_conv or 0)
        return 4 * self.d_model * (self.vocab_size + self.n_layers * of_a_layer)

    def build(self) -> LanguageModel:
        """A new model of these options."""
        return LanguageModel(self)


ModelConfig.unnamed = LanguageModelConfig


def gated_width(d_model: int) -> int:
    """The default width of a gated MLP: 8/3 of d_model, rounded up to a multiple of 32."""
    return -(-8 * d_model // 3 // 32) * 32


class GatedMLP(nn.Module):
    """W_out (silu(W_gate x) ∘ W_up x)  (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, d_model: int, width: int):
        super().__init__()
        self.gate_up = Linear(d_model, 2 * width, bias=False)
        self.out = Linear(width, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., d_model)."""
        return self.out(swiglu(self.gate_up(x)))  # (..., 2 width) -> (..., width) -> (..., d_model)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LanguageModelConfig, layer: int):
        super().__init__()
        attention, own_options = ATTENTION_TYPES[config.attention_types[layer]]
        options = {name: getattr(config, name) for name in (*SHARED_OPTIONS, *own_options)}
        options |= {"positions": config.positions, "qk_norm": config.norm_eps if config.qk_norm else None}
        rope = config.rope if config.rope_layers is None or layer in config.rope_layers else None
        self.attention = attention(config.d_model, config.n_heads, rope=rope, **options)
        self.mlp = GatedMLP(config.d_model, config.mlp_width)
        self.attention_norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp_norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, state: AttentionState | None, segment_ids: Tensor | None, start: int = 0
    ) -> tuple[Tensor, AttentionState]:
        """(B, T, d_model) -> (B, T - start, d_model), outputs from token `start` on; and the state after the last."""
        normed = self.attention_norm(x)
        if start > 0:
            before = None if segment_ids is None else segment_ids[:, :start]
            state = self.attention.advance(normed[:, :start], state, before)
            state = state_before(start, segment_ids, state)
            x, normed = x[:, start:], normed[:, start:]
            segment_ids = None if segment_ids is None else segment_ids[:, start:]
        attended, state = self.attention(normed, state, segment_ids, return_state=True)
        x = x + self.dropout(attended)
        return x + self.dropout(self.mlp(self.mlp_norm(x))), state


def _positions_of(x: Tensor, state: ModelState | None, segment_ids: Tensor | None) -> Tensor:
    """The position of each token of x (B, T, ...), (T,) int64, or (B, T) in packed rows, where documents start at 0."""
    first = None if state is None else state[0]
    positions, _ = token_positions(x, first, segment_ids)
    if positions is None:
        offset = 0 if first is None else first.past.length
        positions = torch.arange(offset, offset + x.shape[1], device=x.device)
    return positions


class LanguageModel(ModelWithOutput):
    """A causal language model: embedding, pre-norm blocks, norm, output layer.

    With linear attention in every layer, the size of its state and the cost of a token do not depend on the number of
    tokens before it.
    """

    config_class = LanguageModelConfig
    config: LanguageModelConfig

    def __init__(self, config: LanguageModelConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = embedding_of(config.positions, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.output = Linear(config.d_model, config.vocab_size, bias=False)
        self.initialise()
        self.tie()

    @property
    def blocks_to_shard(self) -> list[nn.Module]:
        return list(self.blocks)

    def initialise(self) -> None:
        """Matrices keep PyTorch's default, with standard deviation (3 · fan-in)^-½ at any width.

        Those that add to the residual stream have a smaller one, because the sum grows with depth. Embeddings are
        small, and `output_norm` does not exceed them.
        """
        for block in self.blocks:
            if block.attention.norm is not None:
                nn.init.constant_(block.attention.norm.weight, INITIAL_OUTPUT_NORM)
            for layer in (block.attention.out, block.mlp.out):
                nn.init.normal_(layer.weight, std=(3 * layer.in_features * 2 * self.config.n_layers) ** -0.5)
        for weight in (self.embedding.weight, self.output.weight):
            nn.init.normal_(weight, std=EMBEDDING_STD)

    def forward(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        segment_ids: Tensor | None = None,
        return_state: bool = False,
        logits_to_keep: int | None = None,
        targets: Tensor | None = None,
        reduction: Literal["sum", "none"] = "sum",
    ) -> Tensor | tuple[Tensor, ModelState]:
        """The logits of the token after each token, or with `targets` their loss.

        Args:
            tokens: (B, T) integers in [0, vocab_size).
            state: returned by an earlier call on the same rows, which these tokens continue.
            segment_ids: (B, T) integers of packed rows: each run of equal numbers is a document, read by itself. The
                first one continues that of `state`: `state.reset_rows` where a new document begins.
            return_state: also return the state after the last token, one AttentionState for each layer.
            logits_to_keep: K ≥ 1 computes the last K logits only, and of the last block only what they and the state
                need (for prompts); None computes all.
            targets: (B, T) tokens, or IGNORE (-100) for none: the cross entropy is returned in place of the logits,
                which are computed in slices and not kept (see `linrope.losses.summed_cross_entropy_of`).
            reduction: "sum" adds the cross entropies of all targets; "none" gives each, (B, T), for evaluation.

        Returns:
            Logits (B, T, vocab_size) or (B, min(K, T), vocab_size), or the loss in nats, float32; or (it, state).

        Raises:
            InputError: tokens of the wrong shape or dtype or out of range, targets of another shape or with
                logits_to_keep, a state of another model.
        """
        self.check(tokens, state)
        if logits_to_keep is not None:
            require_whole("logits_to_keep", logits_to_keep, ", or None for all")
        if targets is not None:
            self._check_targets(tokens, targets, logits_to_keep, reduction)
        first = 0 if logits_to_keep is None else max(0, tokens.shape[1] - logits_to_keep)
        x, after = self.transform(self.embedding(tokens), state, segment_ids, first)
        result = self.output(x) if targets is None else self._loss(x, targets, reduction)  # (B, T - first, vocab_size)
        return (result, after) if return_state else result

    def transform(
        self,
        x: Tensor,
        state: ModelState | None = None,
        segment_ids: Tensor | None = None,
        first: int = 0,
        run: Callable[..., tuple[Tensor, AttentionState]] | None = None,
    ) -> tuple[Tensor, ModelState]:
        """Embedded tokens (B, T, d_model) -> what the output layer reads, (B, T - first, d_model), and the state.

        `state` and `segment_ids` are those of `forward`. `run(block, *arguments)` may be given to call the blocks, to
        record or to recompute what they return.
        """
        if self.positions is not None:
            x = x + self.positions.embed(_positions_of(x, state, segment_ids)).to(x.dtype)
        x = self.dropout(x)
        after = []
        for layer, block in enumerate(self.blocks):
            start = first if layer == len(self.blocks) - 1 else 0
            arguments = x, None if state is None else state[layer], segment_ids, start
            x, layer_state = block(*arguments) if run is None else run(block, *arguments)
            after.append(layer_state)
        return self.norm(x), ModelState(after)

    def _check_targets(self, tokens: Tensor, targets: Tensor, logits_to_keep: int | None, reduction: str) -> None:
        check_targets(targets, tokens, self.config.vocab_size)
        if logits_to_keep is not None:
            raise InputError(f"logits_to_keep={logits_to_keep} does not go with targets, whose logits are not kept.")
        require_choice("reduction", reduction, ("sum", "none"))

    def _loss(self, x: Tensor, targets: Tensor, reduction: str) -> Tensor:
        loss = summed_cross_entropy_of if reduction == "sum" else token_losses_of
        return loss(self.output, x, targets, rows_of_slice(self.config.vocab_size, x.device.type))

    def check(self, tokens: Tensor, state: ModelState | None = None, segment_ids: Tensor | None = None) -> None:
        """Raise InputError unless these can be arguments of `forward` (`segment_ids`: layers check them in a call)."""
        of_text = ", model.encode(text)[None] for a text" if isinstance(tokens, str) else ""
        check_tokens("tokens", tokens, "vocab_size", self.config.vocab_size, self, of_text)
        if segment_ids is not None:
            check_segment_ids(segment_ids, *tokens.shape, tokens.device)
        if state is None:
            return
        found = [type(layer) for layer in state] if isinstance(state, (tuple, list)) else [type(state)]
        if len(found) != len(self.blocks) or not all(issubclass(one, AttentionState) for one in found):
            names = ", ".join(one.__name__ for one in found)
            raise InputError(
                f"state holds {names}: pass the tuple of {len(self.blocks)} AttentionStates that the model returned."
            )

    def state_bytes(self, context: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the state of one row after `context` tokens, on which only the caches of softmax layers depend.

        `dtype` is that of the activations, and so of caches and convolution tails; linear states have float32.
        """
        return sum(block.attention.state_bytes(context, dtype) for block in self.blocks)

    def encode(self, text: str) -> Tensor:
        """The tokens of a document that starts with `text`, (T,) int64 on the model's device.

        The first one is the separator, after which documents start. A model that was not trained with another
        tokenizer reads bytes.

        Raises:
            InputError: `text` is no str, or the model was trained on tokens without a tokenizer.
        """
        return encode_text(self, text)

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """The text of tokens (T,); separators stand for nothing.

        Raises:
            InputError: not one row of integers, or the model was trained on tokens without a tokenizer.
        """
        return decode_text(self, tokens)

    def generate(
        self, tokens: str | Sequence[str] | Prompts | PromptState, max_new_tokens: int, **options
    ) -> str | list[str] | Tensor | list[Tensor]:
        """Continue each prompt by `max_new_tokens`; `linrope.generation.decoding.stream` describes the options.

        Prompts (B, T) give (B, T + max_new_tokens), a list of (T_b,) gives a list, and a PromptState gives the new
        tokens alone, (B, max_new_tokens). A text gives a text, and a list of texts a list: each is the beginning of a
        document, and may end before `max_new_tokens` with it, or before one of the texts `stop`, if given.
        """
        if isinstance(tokens, str):
            return generate_texts(self, [tokens], max_new_tokens, **options)[0]
        if isinstance(tokens, (list, tuple)) and tokens and all(isinstance(text, str) for text in tokens):
            return generate_texts(self, tokens, max_new_tokens, **options)
        return generate(self, tokens, max_new_tokens, **options)

    def stream(self, tokens: Prompts | PromptState, max_new_tokens: int, **options) -> Iterator[Tensor]:
        """The new tokens one by one, each (B,): `linrope.generation.decoding.stream` with this model."""
        return stream(self, tokens, max_new_tokens, **options)
