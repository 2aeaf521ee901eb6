"""A byte-level BPE tokenizer from text, by Hugging Face's `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterable

from linrope.data.tokenizers.subwords import SubwordTokenizer
from linrope.errors import InputError, require_package

SPECIAL = ("<pad>", "<s>", "</s>")
SMALLEST_VOCABULARY = 256 + len(SPECIAL)
"""All bytes, so that every text has tokens, and the special tokens."""


def train_bpe(texts: Iterable[str], vocab_size: int, option: str) -> SubwordTokenizer:
    """A tokenizer of at most `vocab_size` tokens, fewer if the text is too small for so many.

    It has SPECIAL tokens of padding, beginning and end. The same texts give the same tokenizer.

    Raises:
        InputError: fewer tokens than SMALLEST_VOCABULARY, naming the `option`, or `tokenizers` is not installed.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise InputError(f"{option}={vocab_size} must be {SMALLEST_VOCABULARY} or more: bytes and special tokens.")
    tokenizers = require_package("tokenizers", option)
    bytes_of_text = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = bytes_of_text, tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(bytes_of_text.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return SubwordTokenizer(tokenizer.to_str())
