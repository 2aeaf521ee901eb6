"""Texts to translations, by beam search."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from linrope.data.batches.pairs import TranslationTokens
from linrope.data.tokenizers.base import Tokenizer
from linrope.generation.beam_search import TranslationModel, beam_search


def translate(
    model: TranslationModel,
    inputs: Tensor,
    source_mask: Tensor,
    tokenizer: Tokenizer,
    *,
    extra_tokens: int = 50,
    **options,
) -> list[str]:
    """The translation of each row.

    Args:
        model: in evaluation mode, or dropout applies.
        inputs: (B, S) tokens of sources with their ends, see `TranslationTokens.sources`.
        source_mask: (B, S) booleans, False for padding.
        tokenizer: of both languages.
        extra_tokens: a translation has at most as many tokens more than its source.
        options: `n_beams` and `length_penalty` of `beam_search`.

    Raises:
        InputError: an option out of range.
    """
    special = TranslationTokens.of(tokenizer)
    limits = source_mask.sum(1).cpu() + extra_tokens
    ends = {"begin": special.begin, "end": special.end, "max_new_tokens": limits}
    found = beam_search(model, inputs, source_mask, **ends, **options)
    return [decode(hypothesis.tokens.tolist(), tokenizer) for hypothesis in found]


def decode(tokens: Iterable[int], tokenizer: Tokenizer) -> str:
    """The text of tokens, without those of beginning, end and padding, and without spaces around it."""
    special = TranslationTokens.of(tokenizer)
    around = {special.begin, special.end, special.pad}
    decoder = tokenizer.decoder()
    return (decoder.feed([token for token in tokens if token not in around]) + decoder.finish()).strip()
