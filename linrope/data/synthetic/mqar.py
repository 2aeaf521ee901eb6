"""Multi-query associative recall (MQAR): rows of key-value pairs, then each key again as a question for its value.

The task of "Zoology: Measuring and Improving Recall in Efficient Language Models" (Arora et al., arXiv 2312.04927).
The information to remember grows with the number of pairs, so it shows how much a state of fixed size can hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from linrope.data.synthetic.recall_task import Case, RecallTask, require_numbers
from linrope.errors import InputError
from linrope.losses import IGNORE

POWER = 0.01
"""Zoology's: 1 would spread the questions evenly, smaller values move them towards the pairs."""


@dataclass(frozen=True)
class MQAR(RecallTask):
    """MQAR, cases (length, n_pairs): `n_pairs` adjacent pairs (key, value), then every key again among random tokens.

    With V tokens, keys are in 1 … V/2 - 1 and values in V/2 … V - 1, all different within a row's pairs. After the
    pairs the row has slots of two positions; a question stands at the first position of a slot, and its target is the
    value. The probability of the slot with gap 1, 2, … from the pairs' end is proportional to gap^(POWER - 1); no slot
    has two questions. All other positions hold random tokens, which can be keys too. (As Zoology's `multiquery_ar` with
    `random_non_queries=True`.)

    Row `i` follows from the seed and `i`, whatever the number of rows is (with the same NumPy: its generators may
    change between versions). Rows take 2 · n_rows · V bytes of temporary memory.
    """

    vocab_size: int

    def draw(self, n_rows: int, case: Case, seed: int | Sequence[int]) -> tuple[Tensor, Tensor]:
        length, n_pairs = case
        # One generator for each type of number, so that a row does not depend on the number of rows.
        for_keys, for_values, for_slots, for_others = np.random.default_rng(seed).spawn(4)
        first_value = self.vocab_size // 2
        gaps = np.arange(1, (length - 2 * n_pairs) // 2 + 1)
        keys = 1 + _distinct(for_keys, np.ones(first_value - 1), n_rows, n_pairs)
        values = first_value + _distinct(for_values, np.ones(self.vocab_size - first_value), n_rows, n_pairs)
        asked = 2 * n_pairs + 2 * _distinct(for_slots, gaps ** (POWER - 1.0), n_rows, n_pairs)

        inputs = torch.from_numpy(for_others.integers(self.vocab_size, size=(n_rows, length)))
        inputs[:, 0 : 2 * n_pairs : 2] = keys
        inputs[:, 1 : 2 * n_pairs : 2] = values
        inputs.scatter_(1, asked, keys)
        return inputs, torch.full_like(inputs, IGNORE).scatter_(1, asked, values)

    def require(self, case: Case) -> None:
        require_numbers(case, "length", "n_pairs")
        length, n_pairs = case
        if n_pairs < 1:
            raise InputError(f"n_pairs={n_pairs} must be 1 or more.")
        if length % 2:
            raise InputError(f"length={length} must be even: pairs and questions take two tokens each.")
        if length < 4 * n_pairs:
            raise InputError(
                f"length={length} is too short for n_pairs={n_pairs}, each with two tokens and two for its question: "
                f"raise length to {4 * n_pairs} or more, or lower n_pairs."
            )
        if self.vocab_size < 2 * n_pairs + 2:
            raise InputError(
                f"vocab_size={self.vocab_size} has too few keys (1 … vocab_size/2 - 1) for n_pairs={n_pairs} that "
                f"differ: raise vocab_size to {2 * n_pairs + 2} or more, or lower n_pairs."
            )

    def name(self, case: Case) -> str:
        return "{}x{}".format(*case)


def _distinct(rng: np.random.Generator, weights: np.ndarray, n_rows: int, n: int) -> Tensor:
    """In each row `n` different indices of `weights`, drawn one after the other by weight: (n_rows, n) int64.

    By an exponential race, in the order of arrival (the Gumbel top-k trick, arXiv 1903.06059, after exp).
    """
    arrivals = rng.standard_exponential((n_rows, len(weights)), dtype=np.float32)
    arrivals /= weights.astype(np.float32)
    return torch.from_numpy(arrivals).topk(n, largest=False).indices
