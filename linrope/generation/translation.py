"""Texts to translations, by beam search."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from linrope.data.batches.pairs import TranslationTokens
from linrope.data.tokenizers.base import Tokenizer
from linrope.errors import InputError
from linrope.generation.beam_search import TranslationModel, beam_search


def translate_texts(
    model: TranslationModel, texts: Iterable[str], tokenizer: Tokenizer | None, device: torch.device, **options
) -> list[str]:
    """The translation of each text, all in one batch; the options and errors are those of `translate`.

    Raises:
        InputError: also for one text in place of a list, or a tokenizer that is unknown (None).
    """
    if isinstance(texts, str):
        raise InputError(f"texts={texts!r} is one text: pass a list, [text].")
    texts = list(texts)
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise InputError(f"texts has {wrong[0]!r}: pass a list of texts.")
    if tokenizer is None:
        raise InputError("the model's tokenizer is unknown, so no text can be translated: set model.tokenizer.")
    if not texts:
        return []
    rows = [np.array(row, dtype=np.int64) for row in tokenizer.encode_batch(texts)]
    inputs, mask = TranslationTokens.of(tokenizer).sources(rows)
    return translate(model, inputs.to(device), mask.to(device), tokenizer, **options)


def translate(
    model: TranslationModel,
    inputs: Tensor,
    source_mask: Tensor,
    tokenizer: Tokenizer,
    *,
    extra_tokens: int = 50,
    longest_row: int | None = None,
    **options,
) -> list[str]:
    """The translation of each row.

    Args:
        model: in evaluation mode, or dropout applies.
        inputs: (B, S) tokens of sources with their ends, see `TranslationTokens.sources`.
        source_mask: (B, S) booleans, False for padding.
        tokenizer: of both languages.
        extra_tokens: a translation has at most as many tokens more than its source.
        longest_row: tokens that the model can read in a row, which bounds translations too; None for any number.
        options: `n_beams` and `length_penalty` of `beam_search`.

    Raises:
        InputError: an option out of range.
    """
    if not isinstance(extra_tokens, Integral) or extra_tokens < 0:
        raise InputError(f"extra_tokens={extra_tokens!r} must be 0 or more, a whole number.")
    special = TranslationTokens.of(tokenizer)
    limits = source_mask.sum(1).cpu() + extra_tokens
    if longest_row is not None:
        limits = limits.clamp(max=longest_row)
    ends = {"begin": special.begin, "end": special.end, "max_new_tokens": limits}
    found = beam_search(model, inputs, source_mask, **ends, **options)
    return [decode(hypothesis.tokens.tolist(), tokenizer) for hypothesis in found]


def decode(tokens: Iterable[int], tokenizer: Tokenizer) -> str:
    """The text of tokens, without those of beginning, end and padding, and without spaces around it."""
    special = TranslationTokens.of(tokenizer)
    around = {special.begin, special.end, special.pad}
    decoder = tokenizer.decoder()
    return (decoder.feed([token for token in tokens if token not in around]) + decoder.finish()).strip()
