"""Losses of the same text in rows of several lengths.

Long rows are read in segments, and the model's state passes from one to the next. So with linear attention memory does
not grow with the length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from linrope.data.batches.windows import segment_ids_of
from linrope.data.corpus.sequences import TokenSequence
from linrope.data.tokenizers.bytes import bytes_of
from linrope.errors import InputError
from linrope.evaluation.loss_by_position import LossByPosition
from linrope.layers.state import state_before
from linrope.losses import bits_per_byte, token_losses
from linrope.models.language_model import LanguageModel

SEGMENT = 4096
"""Tokens of a segment of long rows. Short rows are batched up to twice as many tokens."""


@torch.no_grad()
def segment_logits(
    model: LanguageModel, rows: Tensor, segment_ids: Tensor | None = None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows, positions, their logits) for each segment of rows (B, T), on the model's device.

    With `segment_ids` (B, T) each run of equal numbers is a document that is read by itself.
    """
    device, length = next(model.parameters()).device, rows.shape[1]
    at_once = max(1, 2 * SEGMENT // length)
    for first in range(0, len(rows), at_once):
        batch, state = slice(first, min(first + at_once, len(rows))), None
        ids = None if segment_ids is None else segment_ids[batch].to(device)
        for start in range(0, length, SEGMENT):
            positions = slice(start, min(start + SEGMENT, length))
            state = state_before(start, ids, state)
            ids_here = None if ids is None else ids[:, positions]
            logits, state = model(rows[batch, positions].to(device), state, ids_here, return_state=True)
            yield batch, positions, logits


def _losses(
    model: LanguageModel, inputs: Tensor, targets: Tensor, ids: Tensor | None, tick: Callable[[int], None]
) -> Tensor:
    """Losses in nats, float32, of rows (B, T); `tick` gets the number of tokens of each segment."""
    losses = torch.empty(inputs.shape)
    for rows, positions, logits in segment_logits(model, inputs, ids):
        asked = targets[rows, positions]
        losses[rows, positions] = token_losses(logits, asked.to(logits.device)).cpu()
        tick(asked.numel())
    return losses


def row_losses(model: LanguageModel, text: Tensor, context: int, tick: Callable[[], None] = lambda: None) -> Tensor:
    """Losses in nats, float64 (N / context, context), of a text (N + 1,) in rows of `context` tokens.

    `tick` is called after each segment.
    """
    inputs, targets = text[:-1].view(-1, context), text[1:].view(-1, context)
    return _losses(model, inputs, targets, None, lambda _: tick()).double()


@dataclass(frozen=True)
class LengthReading:
    """The losses of a text in rows of one length; each row starts without a past."""

    length: int
    multiple: float
    """The length as a multiple of the training length."""
    rows: int
    by_position: LossByPosition
    shortest: LossByPosition
    """The losses of the same tokens in the shortest rows, by their positions in these rows: the comparison separates
    the effect of a position from that of the text that happens to be there."""
    later_half: float | None = None
    """Bits per byte of the tokens that are in the later half of these rows and of the shortest rows."""
    later_half_of_the_shortest: float | None = None
    """Bits per byte of the same tokens in the shortest rows. The difference is the gain from the longer past."""

    @classmethod
    def of_rows(cls, context: int, by_position: LossByPosition) -> LengthReading:
        """A validation in rows of the training length, with a target at every position."""
        return cls(context, 1.0, round(by_position.totals[2].item() / context), by_position, by_position)


def parse_lengths(lengths: list[str], context: int) -> list[int]:
    """Sorted lengths in tokens from texts such as "256", or "4x" for four times the context.

    Raises:
        InputError: another text, or a length that does not divide the longest, so that it cannot read the same text.
    """
    found = set()
    for text in map(str, lengths):
        number = text.removesuffix("x")
        if not number.isdecimal() or int(number) < 1:
            raise InputError(
                f"--lengths {text}: give numbers of tokens, or multiples of data.context={context} such as 4x."
            )
        found.add(int(number) * (context if text.endswith("x") else 1))
    longest = max(found)
    for length in sorted(found):
        if longest % length:
            raise InputError(
                f"--lengths: {length} does not divide the longest, {longest}, so it cannot read the same text: give "
                "divisors, 1x 4x 16x for example."
            )
    return sorted(found)


@dataclass(frozen=True)
class Excerpt:
    """A text to read in rows of several lengths."""

    tokens: Tensor
    """int64 (N + 1,)"""
    n_bytes: Tensor | None
    """int64 (N,), byte counts of all tokens except the first; None if tokens are bytes."""
    separator: int | None = None
    """The token that ends a document, if each document is read by itself; None otherwise."""

    def rows(self, length: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs, targets and the targets' byte counts, each (N / length, length)."""
        n_bytes = None if self.n_bytes is None else self.n_bytes.view(-1, length)
        return self.tokens[:-1].view(-1, length), self.tokens[1:].view(-1, length), n_bytes


def excerpt_for(corpus: TokenSequence, lengths: list[int], tokens: int, document_mask: bool = False) -> Excerpt:
    """The beginning of a corpus: about `tokens` tokens, a multiple of the longest length.

    With `document_mask`, tokens see their own document only. InputError if the corpus is shorter than one row.
    """
    longest = max(lengths)
    if len(corpus) < 2:
        raise InputError("--lengths: the validation split has no token with a target: give it a share of the text.")
    if len(corpus) <= longest:
        raise InputError(
            f"--lengths: {longest} tokens are more than the validation split has ({len(corpus) - 1:,} with a "
            "target): remove the longest, or give more text."
        )
    n = min(max(tokens, longest), len(corpus) - 1) // longest * longest
    separator = corpus.separator if document_mask else None
    return Excerpt(corpus.tokens(0, n + 1), corpus.text_bytes(1, n + 1), separator)


def read_at_lengths(
    model: LanguageModel, text: Excerpt, lengths: list[int], context: int, tick: Callable[[int], None] = lambda _: None
) -> Iterator[LengthReading]:
    """Read the same text in rows of each length, the shortest first; `tick` gets the number of tokens of a segment."""
    of_shortest = None
    for length in sorted(lengths):
        inputs, targets, n_bytes = text.rows(length)
        ids = None if text.separator is None else segment_ids_of(inputs, text.separator)
        losses = _losses(model, inputs, targets, ids, tick)
        of_shortest = (losses if of_shortest is None else of_shortest).view(-1, length)
        by_position, shortest = LossByPosition(), LossByPosition()
        by_position.add(losses, targets, n_bytes)
        shortest.add(of_shortest, targets, n_bytes)
        later = _in_later_half(targets.numel(), length) & _in_later_half(targets.numel(), min(lengths))
        later_bytes = bytes_of(targets, n_bytes).flatten()[later].sum().item()
        nats = torch.stack([of_shortest.flatten()[later], losses.flatten()[later]]).double().sum(1)
        in_shortest, here = (bits_per_byte(n, later_bytes) for n in nats.tolist())
        yield LengthReading(length, length / context, len(inputs), by_position, shortest, here, in_shortest)


def _in_later_half(n_tokens: int, length: int) -> Tensor:
    """(n_tokens,) bool: whether a token of a text is in the later half of a row of that length."""
    return torch.arange(n_tokens) % length >= length / 2
