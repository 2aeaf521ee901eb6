"""Masked tokens: which tokens of a row are hidden, and what stands in their place (BERT, arXiv 1810.04805)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from linrope.data.batches.shuffling import mix
from linrope.data.batches.windows import EvaluationWindows, TrainingWindows
from linrope.data.tokenizers.base import Tokenizer
from linrope.data.tokenizers.special_tokens import SpecialTokens
from linrope.losses import IGNORE

HIDDEN, REPLACED = 0.8, 0.1
"""Shares of the chosen tokens that [MASK] hides and that another token replaces; the others stay."""
EVALUATION_SEED = 0x6D61736B
"""Of the masks in validation and test: the same in every run."""


@dataclass(frozen=True)
class Masking:
    """How rows are masked.

    Attributes:
        tokenizer: of the rows.
        share: of the tokens that are chosen, on average; spaces and separators are never chosen.
        whole_words: choose all tokens of a word or none.
    """

    tokenizer: Tokenizer
    share: float
    whole_words: bool

    @cached_property
    def special(self) -> SpecialTokens:
        """[MASK] and the others."""
        return SpecialTokens.of(self.tokenizer)

    @cached_property
    def _word_parts(self) -> tuple[np.ndarray, np.ndarray]:
        return self.tokenizer.word_parts()

    @cached_property
    def _others(self) -> np.ndarray:
        """What may stand in the place of a token."""
        return np.flatnonzero(~self._word_parts[1])

    def __call__(self, tokens: Tensor, *key: int) -> dict[str, Tensor]:
        """`inputs` and `targets`, int64 (T,), of tokens (T,): targets are IGNORE where nothing is asked.

        They follow from the tokens and the integers of `key` alone. At least one token is chosen, if one can be.
        """
        random, row = np.random.default_rng(mix(*key)), tokens.numpy()
        begins, between = (table[row] for table in self._word_parts)
        if self.whole_words:
            starts = begins | between
            starts[1:] |= between[:-1]
            word = starts.cumsum()
        else:
            word = np.arange(len(row))
        drawn = random.random(word.max(initial=0) + 1)
        words = word[~between]
        if len(words):  # the smallest draw of a word is chosen in any case
            drawn[words[drawn[words].argmin()]] = 0.0
        chosen = (drawn[word] < self.share) & ~between
        other = random.choice(self._others, size=len(row))
        draw = random.random(len(row))
        replaced = np.where(draw < HIDDEN, self.special.mask, np.where(draw < HIDDEN + REPLACED, other, row))
        inputs, targets = np.where(chosen, replaced, row), np.where(chosen, row, IGNORE)
        return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}


class MaskedTrainingWindows(TrainingWindows):
    """`TrainingWindows` whose sample `i` is masked, in another way in each epoch."""

    masking: Masking

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        start = self.start_of(i)
        return self.masking(self.corpus.tokens(start, start + self.context), self.seed, self.context, i)


class MaskedEvaluationWindows(EvaluationWindows):
    """`EvaluationWindows` that are masked, always in the same way."""

    masking: Masking

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        start = self.start_of(i)
        return self.masking(self.corpus.tokens(start, start + self.context), EVALUATION_SEED, self.context, i)
