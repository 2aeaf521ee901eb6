"""Passkey retrieval: a number stands once in a long real text, and a question for it at the end.

The test of "Landmark Attention" (arXiv 2305.16300), with the text of a corpus around the number instead of a repeated
sentence. It shows across which distance a model remembers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from linrope.data.corpus.sequences import Corpus
from linrope.data.synthetic.copying import require_depth
from linrope.data.synthetic.recall_task import Case, at_depth
from linrope.data.tokenizers.bytes import VOCAB_SIZE, encode
from linrope.errors import InputError
from linrope.losses import IGNORE

DIGITS = 5


TOLD = "\nThe pass key is {key}. Remember it.\n"


ASKED = "\nWhat is the pass key? The pass key is "


SHORTEST = len(TOLD.format(key="0" * DIGITS)) + len(ASKED) + DIGITS - 1
"""Tokens of a row without text around the key."""


def passkey_rows(
    n_rows: int, length: int, text: Corpus, seed: int | Sequence[int], depth: int | None = None
) -> tuple[Tensor, Tensor]:
    """Rows of text with a pass key of five digits in it, the question, and the key without its last digit.

    Args:
        n_rows: rows to make.
        length: tokens (bytes) of a row.
        text: the corpus of the text around the key, taken at random places.
        seed: one or more integers from 0.
        depth: share of the text before the key, in percent; None draws it for each row.

    Returns:
        (inputs, targets), each int64 (n_rows, length). Targets are the key's digits at the last five positions, and
        IGNORE everywhere else. A row is answered if all five are right, as greedy generation would give them.

    Raises:
        InputError: a row too short for the key and the question, or longer than the text.
    """
    require_passkey(length, len(text), depth)
    if n_rows < 0 or np.min(seed) < 0:
        raise InputError(f"n_rows={n_rows} and seed={seed} must be 0 or more.")
    around = length - SHORTEST
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(n_rows):
        key = f"{rng.integers(10**DIGITS):0{DIGITS}d}"
        start = int(rng.integers(len(text) - around + 1))
        before = int(rng.integers(around + 1)) if depth is None else round(depth / 100 * around)
        filler = text.tokens(start, start + around)
        rows.append(torch.cat((filler[:before], encode(TOLD.format(key=key)), filler[before:], encode(ASKED + key))))
    tokens = torch.stack(rows) if rows else torch.empty(0, length + 1, dtype=torch.int64)
    targets = tokens[:, 1:].clone()
    targets[:, :-DIGITS] = IGNORE
    return tokens[:, :-1], targets


def require_passkey(length: int, text_tokens: int, depth: int | None = None) -> None:
    """Raise InputError unless the arguments are valid for `passkey_rows`."""
    require_depth(depth)
    if length < SHORTEST:
        raise InputError(
            f"length={length} is too short for a pass key and the question: raise it to {SHORTEST} or more."
        )
    if length - SHORTEST > text_tokens:
        raise InputError(
            f"length={length} needs {length - SHORTEST:,} tokens of text around the key, and there are "
            f"{text_tokens:,}: lower it, or give more text."
        )


@dataclass(frozen=True)
class Passkey:
    """A pass key in text, cases (length,) or (length, depth in percent): see `passkey_rows`."""

    text: Corpus

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    def rows(self, n_rows: int, case: Case, seed: int | Sequence[int]) -> tuple[Tensor, Tensor]:
        return passkey_rows(n_rows, case[0], self.text, seed, *case[1:])

    def require(self, case: Case) -> None:
        require_passkey(case[0], len(self.text), *case[1:])

    def name(self, case: Case) -> str:
        return at_depth(case)
