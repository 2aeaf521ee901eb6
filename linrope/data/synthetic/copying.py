"""Two recall tasks of random tokens: copying a row, and one induction step.

Token 0 is the mark; all others are symbols without a meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from linrope.data.synthetic.recall_task import Case, at_depth, require_numbers
from linrope.errors import InputError
from linrope.losses import IGNORE

MARK = 0


def copy_rows(n_rows: int, length: int, vocab_size: int, seed: int | Sequence[int]) -> tuple[Tensor, Tensor]:
    """Rows to copy: n = length / 2 symbols, the mark, and the same symbols again, each of them a target.

    The information to remember grows with the row, so no state of fixed size can copy rows of any length ("Repeat After
    Me", arXiv 2402.01032).

    Args:
        n_rows: rows to make.
        length: tokens of a row, even.
        vocab_size: number of tokens, with the mark.
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
    """Rows with the mark at one place and again at the end; the target is the symbol after the first mark.

    The "induction heads" task of H3 (arXiv 2212.14052) and Mamba (arXiv 2312.00752).

    Args:
        n_rows: rows to make.
        length: tokens of a row, at least 3.
        vocab_size: number of tokens, with the mark.
        seed: one or more integers from 0.
        depth: place of the first mark, in percent of its possible places; None draws a place for each row.

    Returns:
        (inputs, targets), each int64 (n_rows, length); targets are IGNORE except at the last token.

    Raises:
        InputError: a row too short, fewer than two symbols, or a number out of range.
    """
    require_induction(length, vocab_size, depth)
    inputs = _symbols(n_rows, length, vocab_size, seed)
    last = length - 3  # a symbol follows the mark before the end
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
    """Raise InputError unless `length` and `vocab_size` are valid for `copy_rows`."""
    if length < 2 or length % 2:
        raise InputError(f"length={length} must be even, 2 or more: each symbol stands in it twice.")
    _require_symbols(vocab_size)


def require_induction(length: int, vocab_size: int, depth: int | None = None) -> None:
    """Raise InputError unless the arguments are valid for `induction_rows`."""
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
