"""The special tokens of encoders: [MASK], [CLS], [SEP] and [PAD]."""

from __future__ import annotations

from dataclasses import dataclass

from linrope.data.tokenizers.base import Tokenizer

NAMES = {"mask": "[MASK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]"}


@dataclass(frozen=True)
class SpecialTokens:
    """Numbers of the special tokens, and the size of the vocabulary with them."""

    mask: int
    """Stands for a token that is to be predicted."""
    cls: int
    """Begins a row that is classified."""
    sep: int
    """Ends each text of a row."""
    pad: int
    """Fills a row to the length of its batch."""
    vocab_size: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> SpecialTokens:
        """Those of a tokenizer; what it lacks is numbered from its vocab_size on, in this order (bytes: 257 … 260)."""
        numbers, following = {}, tokenizer.vocab_size
        for name, text in NAMES.items():
            number = tokenizer.token_id(text)
            if number is None:
                number, following = following, following + 1
            numbers[name] = number
        return cls(**numbers, vocab_size=following)
