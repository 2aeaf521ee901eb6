"""Text with masked tokens."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from linrope.data.batches.masking import MaskedEvaluationWindows, MaskedTrainingWindows, Masking
from linrope.data.batches.windows import CurriculumWindows, EvaluationWindows
from linrope.errors import InputError
from linrope.training.data_modules.base import require_size
from linrope.training.data_modules.text import TextDataModule


class MaskedTextDataModule(TextDataModule):
    """The text to train on, with masked tokens.

    Batches have `inputs` and `targets`, int64 (B, T); targets are IGNORE where nothing is asked. Rows are windows of
    the text as in `TextDataModule`, and their masks follow from `seed` and the sample's number too; those of validation
    and test are always the same.

    Args:
        mask_share: Share of the tokens that are to be predicted; of these 80 % are replaced by [MASK], 10 % by another
            token, and 10 % stay.
        whole_words: Choose all tokens of a word, or none; false chooses each token by itself.
        options: Those of `TextDataModule`.

    Raises:
        InputError: as `TextDataModule`; a share outside 0 … 1, contiguous rows or a document mask; when set up: tokens
            without a known tokenizer.
    """

    training_windows, evaluation_windows_of = MaskedTrainingWindows, MaskedEvaluationWindows

    def __init__(self, mask_share: float = 0.15, whole_words: bool = True, **options: Any) -> None:
        super().__init__(**options)
        if not 0 < mask_share <= 1:
            raise InputError(f"data.mask_share={mask_share} must be above 0 and at most 1.")
        for name in ("contiguous", "document_mask"):
            if getattr(self, name):
                raise InputError(f"data.{name}=True is for language models: masked rows are read by themselves.")
        if self.test_stride is not None:
            raise InputError(
                f"data.test_stride={self.test_stride} is for language models: masked rows are read by themselves."
            )
        self.mask_share, self.whole_words = mask_share, whole_words

    @cached_property
    def masking(self) -> Masking:
        """How rows are masked; it needs `open`."""
        if self.tokenizer is None:
            raise InputError("masks need the tokenizer of these tokens: set data.tokenizer.")
        return Masking(self.tokenizer, self.mask_share, self.whole_words)

    def require_vocabulary(self, vocab_size: int) -> None:
        super().require_vocabulary(vocab_size)
        require_size(vocab_size, self.masking.special.vocab_size, "the text and its special tokens")

    def _training_windows(self) -> CurriculumWindows:
        windows, masking = super()._training_windows(), self.masking
        for one in windows.by_length.values():
            one.masking = masking
        return windows

    def evaluation_windows(self, split: str) -> EvaluationWindows:
        windows = super().evaluation_windows(split)
        windows.masking = self.masking
        return windows

    def order(self) -> dict[str, Any]:
        return {**super().order(), "mask_share": self.mask_share, "whole_words": self.whole_words}
