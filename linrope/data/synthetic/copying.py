"""Two tasks of random tokens that show what a model's state keeps: copying a whole row, and one induction step.

Token 0 is the mark, all others are symbols that mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from linrope.data.synthetic.task import Case, at_depth, require_numbers
from linrope.errors import InputError
from linrope.losses import IGNORE

MARK = 0


def copy_rows(n_rows: int, length: int, vocab_size: int, seed: int | Sequence[int]) -> tuple[Tensor, Tensor]:
    """Rows to repeat: n = length / 2 symbols, the mark, and the same symbols again, each asked for in turn.

    What is to be remembered grows with the row, so no state of fixed size can copy rows of any length ("Repeat After
    Me", arXiv 2402.01032).

    Args:
        n_rows: rows to make.
        length: tokens of a row, even.
        vocab_size: number of tokens, the mark among them.
        seed: one or more integers from 0.

    Returns:
        (inputs, targets), each int64 (n_rows, length). Inputs are x_1 … x_n, the mark, x_1 … x_(n-1); targets are x_1 …
        x_n from the mark on, and IGNORE before it.

    Raises:
        InputError: an odd length, fewer than two symbols, or a number out of range.
    """
    require_copying(length, vocab_size)
    symbols = _symbols(n_rows, length // 2, vocab_size, seed)
    mark = torch.full((n_rows, 1), MARK)
    return torch.cat((symbols, mark, symbols[:, :-1]), dim=1), torch.cat((torch.full_like(symbols, IGNORE), symbols), 1)


def induction_rows(
    n_rows: int, length: int, vocab_size: int, seed: int | Sequence[int], depth: int | None = None
) -> tuple[Tensor, Tensor]:
    """Rows with the mark at one place and again at the end, asking for the symbol that followed it.

    The "induction heads" task of H3 (arXiv 2212.14052) and Mamba (arXiv 2312.00752).

    Args:
        n_rows: rows to make.
        length: tokens of a row, at least 3.
        vocab_size: number of tokens, the mark among them.
        seed: one or more integers from 0.
        depth: where the first mark stands, in percent of the places it can have; None draws one for each row.

    Returns:
        (inputs, targets), each int64 (n_rows, length); targets are IGNORE but for the last token's.

    Raises:
        InputError: a row too short, fewer than two symbols, or a number out of range.
    """
    require_induction(length, vocab_size, depth)
    inputs = _symbols(n_rows, length, vocab_size, seed)
    last = length - 3  # where a mark can stand: a symbol follows it before the end
    if depth is None:
        at = torch.from_numpy(np.random.default_rng(seed).spawn(2)[1].integers(last + 1, size=(n_rows, 1)))
    else:
        at = torch.full((n_rows, 1), round(depth / 100 * last))
    inputs.scatter_(1, at, MARK)
    inputs[:, -1] = MARK
    targets = torch.full_like(inputs, IGNORE)
    targets[:, -1:] = inputs.gather(1, at + 1)
    return inputs, targets


def require_copying(length: int, vocab_size: int) -> None:
    """Raise InputError unless rows of `length` of so many different tokens can be copied."""
    if length < 2 or length % 2:
        raise InputError(f"length={length} must be even, 2 or more: what is copied comes twice.")
    _require_symbols(vocab_size)


def require_induction(length: int, vocab_size: int, depth: int | None = None) -> None:
    """Raise InputError unless rows of `length` have room for a mark, a symbol and the mark again."""
    if length < 3:
        raise InputError(f"length={length} must be 3 or more: a mark, the symbol after it, and the mark again.")
    require_depth(depth)
    _require_symbols(vocab_size)


def require_depth(depth: int | None) -> None:
    """Raise InputError unless `depth` is None or a percentage."""
    if depth is not None and not (isinstance(depth, int) and 0 <= depth <= 100):
        raise InputError(f"depth={depth!r} must be a whole number of percent, 0 (the row's start) to 100 (its end).")


def _require_symbols(vocab_size: int) -> None:
    if vocab_size < 3:
        raise InputError(f"vocab_size={vocab_size} must be 3 or more: the mark and two symbols.")


def _symbols(n_rows: int, length: int, vocab_size: int, seed: int | Sequence[int]) -> Tensor:
    if n_rows < 0 or np.min(seed) < 0:
        raise InputError(f"n_rows={n_rows} and seed={seed} must be 0 or more.")
    rng = np.random.default_rng(seed).spawn(2)[0]
    return torch.from_numpy(rng.integers(MARK + 1, vocab_size, size=(n_rows, length)))


@dataclass(frozen=True)
class Copy:
    """Copying, cases (length,): see `copy_rows`."""

    vocab_size: int

    def rows(self, n_rows: int, case: Case, seed: int | Sequence[int]) -> tuple[Tensor, Tensor]:
        return copy_rows(n_rows, *case, self.vocab_size, seed)

    def require(self, case: Case) -> None:
        require_numbers(case, "length")
        require_copying(*case, self.vocab_size)

    def name(self, case: Case) -> str:
        return str(case[0])


@dataclass(frozen=True)
class Induction:
    """One induction step, cases (length,) or (length, depth in percent): see `induction_rows`."""

    vocab_size: int

    def rows(self, n_rows: int, case: Case, seed: int | Sequence[int]) -> tuple[Tensor, Tensor]:
        return induction_rows(n_rows, case[0], self.vocab_size, seed, *case[1:])

    def require(self, case: Case) -> None:
        require_induction(case[0], self.vocab_size, *case[1:])

    def name(self, case: Case) -> str:
        return at_depth(case)
