"""What an encoder predicts: masked tokens, classes of rows or tokens, spans, the right one of several choices.

The heads are those of RoFormer in transformers, so that its checkpoints load.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from linrope.errors import InputError
from linrope.layers.linear import Linear
from linrope.layers.state import ModelState
from linrope.losses import IGNORE, check_targets, summed_cross_entropy
from linrope.models.encoder import ACTIVATIONS, EncoderConfig, EncoderModel, RoFormerEncoder, register_head
from linrope.ops.checks import check_tensor


class EncoderWithHead(EncoderModel):
    """Base: an encoder, dropout, and what a subclass adds in `make_head`."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.encoder = RoFormerEncoder(config)
        self.dropout = nn.Dropout(config.dropout)
        self.activation = ACTIVATIONS[config.activation]
        self.make_head(config)
        self.initialise()

    def make_head(self, config: EncoderConfig) -> None:
        """The modules of the head."""
        raise NotImplementedError


class MaskedLM(EncoderWithHead):
    """Logits of each token: a dense layer, activation, LayerNorm, and the token embedding transposed."""

    forward_methods = ("logits_at",)

    def make_head(self, config: EncoderConfig) -> None:
        self.dense = Linear(config.d_model, config.embedding_width)
        self.norm = nn.LayerNorm(config.embedding_width, eps=config.norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.output = None if config.tie_embeddings else Linear(config.embedding_width, config.vocab_size, bias=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.bias)

    def forward(
        self,
        tokens: Tensor,
        key_mask: Tensor | None = None,
        token_types: Tensor | None = None,
        targets: Tensor | None = None,
        state: ModelState | None = None,
    ) -> Tensor:
        """Logits (B, T, vocab_size); with targets (B, T), IGNORE where nothing is asked, the sum of their cross
        entropies in nats, for which only the logits at targets are computed. See `RoFormerEncoder` for the others.

        Raises:
            InputError: targets of another shape or dtype, or out of range.
        """
        x = self.encoder(tokens, key_mask, token_types, state)
        if targets is None:
            return self.logits_of(x)
        check_targets(targets, tokens, self.encoder.config.vocab_size)
        asked = targets != IGNORE
        return summed_cross_entropy(self.logits_of(x[asked]), targets[asked])

    def logits_at(self, asked: Tensor, tokens: Tensor, state: ModelState | None = None) -> Tensor:
        """Logits (n, vocab_size) of tokens (B, T) at the n positions where `asked`, (B, T) booleans, is True."""
        return self.logits_of(self.encoder(tokens, state=state)[asked])

    def logits_of(self, x: Tensor) -> Tensor:
        """Logits (..., vocab_size) of what the encoder gives, (..., d_model)."""
        x = self.norm(self.activation(self.dense(x)))
        if self.output is None:
            return F.linear(x, self.encoder.embedding.weight, self.bias)
        logits = self.output(x)
        return logits + self.bias.to(logits.dtype)  # under autocast that of the product


class SequenceClassifier(EncoderWithHead):
    """Logits of a row's classes, from its first token; with one label its value (regression)."""

    def make_head(self, config: EncoderConfig) -> None:
        self.dense = Linear(config.d_model, config.d_model)
        self.output = Linear(config.d_model, config.n_labels)

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None, token_types: Tensor | None = None) -> Tensor:
        """(B, n_labels); see `RoFormerEncoder` for the arguments."""
        x = self.encoder(tokens, key_mask, token_types)
        if x.shape[1] == 0:
            raise InputError(f"tokens is {tuple(tokens.shape)}: the classes of a row are those of its first token.")
        first = self.dropout(x[:, 0])
        return self.output(self.dropout(self.activation(self.dense(first))))


class TokenClassifier(EncoderWithHead):
    """Logits of each token's classes."""

    def make_head(self, config: EncoderConfig) -> None:
        self.output = Linear(config.d_model, config.n_labels)

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None, token_types: Tensor | None = None) -> Tensor:
        """(B, T, n_labels); see `RoFormerEncoder` for the arguments."""
        return self.output(self.dropout(self.encoder(tokens, key_mask, token_types)))


class QuestionAnswering(EncoderWithHead):
    """Logits of each token as the first and as the last of the answer."""

    def make_head(self, config: EncoderConfig) -> None:
        self.output = Linear(config.d_model, 2)

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None, token_types: Tensor | None = None) -> Tensor:
        """(B, T, 2); see `RoFormerEncoder` for the arguments."""
        return self.output(self.encoder(tokens, key_mask, token_types))


class MultipleChoice(EncoderWithHead):
    """A logit for each of several choices, from the last position of its row.

    As in transformers that is the position T - 1, which may be padding: it sees all tokens of the row.
    """

    def make_head(self, config: EncoderConfig) -> None:
        self.output = Linear(config.d_model, 1)

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None, token_types: Tensor | None = None) -> Tensor:
        """(B, C, T) tokens, key_mask and token_types of C choices -> (B, C)."""
        if not isinstance(tokens, Tensor) or tokens.ndim != 3 or 0 in tokens.shape[1:]:
            got = tuple(tokens.shape) if isinstance(tokens, Tensor) else f"a {type(tokens).__name__}"
            raise InputError(f"tokens is {got}: pass (B, C, T), C choices for each row, each of one token or more.")
        for name, x, types in (("key_mask", key_mask, "booleans"), ("token_types", token_types, "integers")):
            if x is not None:
                check_tensor(name, x, types, "(B, C, T)", tokens.shape, tokens.device)
        inputs = (None if x is None else rearrange(x, "b c t -> (b c) t") for x in (tokens, key_mask, token_types))
        last = self.encoder(*inputs)[:, -1]
        return rearrange(self.output(last), "(b c) 1 -> b c", c=tokens.shape[1])


register_head("masked_lm", MaskedLM)
register_head("classification", SequenceClassifier)
register_head("token_classification", TokenClassifier)
register_head("question_answering", QuestionAnswering)
register_head("multiple_choice", MultipleChoice)
