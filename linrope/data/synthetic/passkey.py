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
from linrope.data.synthetic.recall_task import Case, RecallTask, depth_of
from linrope.data.tokenizers.bytes import VOCAB_SIZE, encode
from linrope.errors import InputError
from linrope.losses import IGNORE

DIGITS = 5
TOLD = "\nThe pass key is {key}. Remember it.\n"
ASKED = "\nWhat is the pass key? The pass key is "
SHORTEST = len(TOLD.format(key="0" * DIGITS)) + len(ASKED) + DIGITS - 1
"""Tokens of a row without text around the key."""


@dataclass(frozen=True)
class Passkey(RecallTask):
    """Rows of text with a pass key of five digits in it, the question, and the key without its last digit.

    Cases are (length,), where each row has the key at a random place, or (length, share of the text before the key in
    percent); tokens are bytes. Targets are the key's digits at the last five positions, and IGNORE everywhere else. A
    row is answered if all five are right, as greedy generation would give them.
    """

    text: Corpus
    """The text around the key, taken at random places."""
    vocab_size = VOCAB_SIZE

    def draw(self, n_rows: int, case: Case, seed: int | Sequence[int]) -> tuple[Tensor, Tensor]:
        length, depth = case[0], depth_of(case)
        around = length - SHORTEST
        rng = np.random.default_rng(seed)
        tokens = torch.empty(n_rows, length + 1, dtype=torch.int64)
        for row in tokens:
            key = f"{rng.integers(10**DIGITS):0{DIGITS}d}"
            start = int(rng.integers(len(self.text) - around + 1))
            before = int(rng.integers(around + 1)) if depth is None else round(depth / 100 * around)
            filler = self.text.tokens(start, start + around)
            row[:] = torch.cat((filler[:before], encode(TOLD.format(key=key)), filler[before:], encode(ASKED + key)))
        targets = tokens[:, 1:].clone()
        targets[:, :-DIGITS] = IGNORE
        return tokens[:, :-1], targets

    def require(self, case: Case) -> None:
        depth_of(case)
        length, n_text = case[0], len(self.text)
        if length < SHORTEST:
            raise InputError(
                f"length={length} is too short for a pass key and the question: raise it to {SHORTEST} or more."
            )
        if length - SHORTEST > n_text:
            raise InputError(
                f"length={length} needs {length - SHORTEST:,} tokens of text around the key, and there are "
                f"{n_text:,}: lower it, or give more text."
            )
