"""Losses of text read in rows of any length, and where in a row they fall.

Rows are read piece by piece, the model's state going on from one to the next, so that memory depends on the length only
as the state does: with linear attention not at all.
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
"""Long rows are read in pieces of so many tokens, short rows so many together that they hold twice as many."""


def in_pieces(rows: Tensor) -> Iterator[tuple[slice, slice]]:
    """How to read rows (B, T) that may be long: some of them at a time, each from its first piece to its last."""
    n_rows, length = rows.shape
    at_once = max(1, 2 * SEGMENT // length)
    for first in range(0, n_rows, at_once):
        for start in range(0, length, SEGMENT):
            yield slice(first, min(first + at_once, n_rows)), slice(start, min(start + SEGMENT, length))


@torch.no_grad()
def piece_logits(
    model: LanguageModel, rows: Tensor, segment_ids: Tensor | None = None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows, places, logits of them) for each piece of rows (B, T), on the model's device.

    With `segment_ids` (B, T) each run of equal numbers is a document that is read by itself.
    """
    device = next(model.parameters()).device
    segment_ids = None if segment_ids is None else segment_ids.to(device)
    state = None
    for these, places in in_pieces(rows):
        ids = None if segment_ids is None else segment_ids[these]
        state = state_before(places.start, ids, state if places.start else None)
        of_piece = None if ids is None else ids[:, places]
        logits, state = model(rows[these, places].to(device), state, of_piece, return_state=True)
        yield these, places, logits


def row_losses(model: LanguageModel, text: Tensor, context: int, tick: Callable[[], None] = lambda: None) -> Tensor:
    """Nats of each token of the text (N + 1,) but its first, read in rows of `context`: float64 (N / context, context).

    `tick` is called after each piece.
    """
    inputs, targets = text[:-1].view(-1, context), text[1:].view(-1, context)
    losses = torch.empty(inputs.shape, dtype=torch.float64)
    for rows, places, logits in piece_logits(model, inputs):
        losses[rows, places] = token_losses(logits, targets[rows, places].to(logits.device)).double().cpu()
        tick()
    return losses


@dataclass(frozen=True)
class LengthReading:
    """What a text costs when it is read in rows of one length, the model starting anew at each."""

    length: int
    multiple: float
    """Of the length that the model was trained at."""
    rows: int
    by_position: LossByPosition
    shortest: LossByPosition
    """The same tokens, at the same positions of these rows, as they cost in rows of the shortest length: so that what
    text stands where is not taken for what its position costs."""
    later_half: float | None = None
    """Bits per byte of the tokens that stand in the later half of these rows, and of the shortest too."""
    later_half_of_the_shortest: float | None = None
    """Of the same tokens, in the shortest rows: what the past beyond those is worth is the difference."""

    @classmethod
    def of_rows(cls, context: int, by_position: LossByPosition) -> LengthReading:
        """A validation in rows of the training length, each with a target at every place."""
        return cls(context, 1.0, round(by_position.totals[2].item() / context), by_position, by_position)


def parse_lengths(lengths: list[str], context: int) -> list[int]:
    """Lengths in tokens of "4x", which is four times the context, and of numbers, sorted.

    Raises:
        InputError: neither, or one that does not divide the longest: all are to read the same text.
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
                f"--lengths: {length} does not divide the longest, {longest}, so they could not read the same text: "
                "give lengths that do, 1x 4x 16x for example."
            )
    return sorted(found)


@dataclass(frozen=True)
class Excerpt:
    """Text to read in rows of several lengths."""

    tokens: Tensor
    """int64 (N + 1,)"""
    n_bytes: Tensor | None
    """int64 (N,), how many bytes each token but the first stands for; None where tokens are bytes."""
    separator: int | None = None
    """The token that ends a document, where each is to be read by itself."""

    def rows(self, length: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs, targets and the targets' bytes, each (N / length, length)."""
        n_bytes = None if self.n_bytes is None else self.n_bytes.view(-1, length)
        return self.tokens[:-1].view(-1, length), self.tokens[1:].view(-1, length), n_bytes


def excerpt_for(corpus: TokenSequence, lengths: list[int], tokens: int, document_mask: bool = False) -> Excerpt:
    """The beginning of a corpus: about `tokens`, a multiple of the longest length and no less.

    Args:
        document_mask: whether tokens see their own document only.

    Raises:
        InputError: there is not text enough for one row.
    """
    longest = max(lengths)
    if len(corpus) <= longest:
        raise InputError(
            f"--lengths: {longest} tokens are more than the validation split has, {len(corpus) - 1:,} with a target "
            "each: leave the longest out, or give more text."
        )
    n = min(max(tokens, longest), len(corpus) - 1) // longest * longest
    separator = corpus.separator if document_mask else None
    return Excerpt(corpus.tokens(0, n + 1), corpus.text_bytes(1, n + 1), separator)


def read_at_lengths(
    model: LanguageModel, text: Excerpt, lengths: list[int], context: int, tick: Callable[[int], None] = lambda _: None
) -> Iterator[LengthReading]:
    """The same text in rows of each length, the shortest first; `tick` is told of the tokens of each piece."""
    losses = torch.empty(2, len(text.tokens) - 1)  # in rows of the shortest length, and of this one
    for number, length in enumerate(sorted(lengths)):
        inputs, targets, n_bytes = text.rows(length)
        now = losses[1].view(-1, length)
        ids = None if text.separator is None else segment_ids_of(inputs, text.separator)
        for rows, places, logits in piece_logits(model, inputs, ids):
            now[rows, places] = token_losses(logits, targets[rows, places].to(logits.device)).cpu()
            tick(targets[rows, places].numel())
        if number == 0:
            losses[0] = losses[1]
        by_position, shortest = LossByPosition(), LossByPosition()
        by_position.add(now, targets, n_bytes)
        shortest.add(losses[0].view(-1, length), targets, n_bytes)
        later = _in_later_half(targets.numel(), length) & _in_later_half(targets.numel(), min(lengths))
        there = bytes_of(targets, n_bytes).flatten()[later].sum().item()
        in_shortest, here = (bits_per_byte(nats, there) for nats in losses[:, later].double().sum(1).tolist())
        yield LengthReading(length, length / context, len(inputs), by_position, shortest, here, in_shortest)


def _in_later_half(n_tokens: int, length: int) -> Tensor:
    """(n_tokens,) bool: whether a token of a text stands in the later half of a row of that length."""
    return torch.arange(n_tokens) % length >= length / 2
