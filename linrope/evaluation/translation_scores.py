"""BLEU and chrF of translations, by sacrebleu."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from linrope.errors import require_package


def require_sacrebleu() -> ModuleType:
    """The package. InputError if it is not installed."""
    return require_package("sacrebleu", "`linrope test` of translations, for BLEU and chrF,", "translation")


def translation_scores(translations: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """`bleu` and `chrf` of a whole text, from 0 to 100, with one reference for each translation.

    They are sacrebleu's defaults (arXiv 1804.08771): BLEU of 13a tokens with case, and chrF2. Texts without a
    translation give 0.
    """
    sacrebleu = require_sacrebleu()
    if not translations:
        return {"bleu": 0.0, "chrf": 0.0}
    bleu = sacrebleu.corpus_bleu(list(translations), [list(references)])
    chrf = sacrebleu.corpus_chrf(list(translations), [list(references)])
    return {"bleu": bleu.score, "chrf": chrf.score}
