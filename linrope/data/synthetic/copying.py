"""Two recall tasks of random tokens: copying a row, and one induction step.

Token 0 is the mark; all others are symbols without a meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from linrope.data.synthetic.recall_task import Case, RecallTask, depth_of, require_numbers
from linrope.errors import InputError
from linrope.losses import IGNORE

MARK = 0


@dataclass(frozen=True)
class Copy(RecallTask):
    """Copying, cases (length,): n = length / 2 symbols, the mark, and the same symbols again, each of them a target.

    Inputs are x_1 … x_n, the mark, x_1 … x_(n-1); targets are x_1 … x_n from the mark on, and IGNORE before it. The
    information to remember grows with the row, so no state of fixed size can copy rows of any length ("Repeat After
    Me", arXiv 2402.01032).
    """

    vocab_size: int
    """Number of tokens, with the mark."""

    def draw(self, n_rows: int, case: Case, seed: int | Sequence[int]) -> tuple[Tensor, Tensor]:
        symbols = _symbols(n_rows, case[0] // 2, self.vocab_size, seed)
        inputs = torch.cat((symbols, torch.full((n_rows, 1), MARK), symbols[:, :-1]), dim=1)
        return inputs, torch.cat((torch.full_like(symbols, IGNORE), symbols), dim=1)

    def require(self, case: Case) -> None:
        require_numbers(case, "length")
        if case[0] < 2 or case[0] % 2:
            raise InputError(f"length={case[0]} must be even, 2 or more: each symbol stands in it twice.")
        _require_symbols(self.vocab_size)


@dataclass(frozen=True)
class Induction(RecallTask):
    """One induction step: the mark at one place and again at the end; the target is the symbol after the first mark.

    Cases are (length,), where each row has the mark at a random place, or (length, depth in percent of its possible
    places). Targets are IGNORE except at the last token. The "induction heads" task of H3 (arXiv 2212.14052) and Mamba
    (arXiv 2312.00752).
    """

    vocab_size: int
    """Number of tokens, with the mark."""

    def draw(self, n_rows: int, case: Case, seed: int | Sequence[int]) -> tuple[Tensor, Tensor]:
        inputs, depth = _symbols(n_rows, case[0], self.vocab_size, seed), depth_of(case)
        last = case[0] - 3  # a symbol follows the mark before the end
        if depth is None:
            at = torch.from_numpy(np.random.default_rng(seed).spawn(2)[1].integers(last + 1, size=(n_rows, 1)))
        else:
            at = torch.full((n_rows, 1), round(depth / 100 * last))
        inputs.scatter_(1, at, MARK)
        inputs[:, -1] = MARK
        targets = torch.full_like(inputs, IGNORE)
        targets[:, -1:] = inputs.gather(1, at + 1)
        return inputs, targets

    def require(self, case: Case) -> None:
        if case[0] < 3:
            raise InputError(f"length={case[0]} must be 3 or more: a mark, the symbol after it, and the mark again.")
        depth_of(case)
        _require_symbols(self.vocab_size)


def _require_symbols(vocab_size: int) -> None:
    if vocab_size < 3:
        raise InputError(f"vocab_size={vocab_size} must be 3 or more: the mark and two symbols.")


def _symbols(n_rows: int, length: int, vocab_size: int, seed: int | Sequence[int]) -> Tensor:
    rng = np.random.default_rng(seed).spawn(2)[0]
    return torch.from_numpy(rng.integers(MARK + 1, vocab_size, size=(n_rows, length)))
