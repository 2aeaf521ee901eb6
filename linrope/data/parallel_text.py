"""Parallel text: two files, whose lines of the same number translate each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linrope.data.tokenizers.base import Tokenizer
from linrope.errors import InputError
from linrope.utils.files import text_lines

LINES_AT_ONCE = 10_000


@dataclass(frozen=True)
class ParallelText:
    """Pairs of lines without spaces at their ends. Neither side of a pair is empty."""

    source: list[str]
    target: list[str]
    n_empty: int = 0
    """Pairs that were left out because a side is empty."""

    def __len__(self) -> int:
        return len(self.source)


def read_parallel_text(source: Path, target: Path) -> ParallelText:
    """Read two text files in UTF-8, of as many lines; pairs with an empty side are left out and counted.

    Raises:
        InputError: a file that is missing or not UTF-8 (with its line), or files of different numbers of lines.
    """
    sides = [_lines(source), _lines(target)]
    if len(sides[0]) != len(sides[1]):
        raise InputError(
            f"{source} has {len(sides[0]):,} lines and {target} {len(sides[1]):,}: line n of one must be the "
            "translation of line n of the other."
        )
    pairs = [(one, other) for one, other in zip(*sides, strict=True) if one and other]
    return ParallelText([one for one, _ in pairs], [other for _, other in pairs], len(sides[0]) - len(pairs))


def _lines(path: Path) -> list[str]:
    lines = [line.strip() for line in text_lines(path, "set data.path to its folder")]
    return lines if lines[-1] else lines[:-1]  # the last line feed begins no line


class TokenRows:
    """Token rows of different lengths in one array: `rows[i]` is (T_i,) int64; `lengths` (N,) int64."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer) -> None:
        parts, lengths = [], []
        for start in range(0, len(texts), LINES_AT_ONCE):
            rows = tokenizer.encode_batch(texts[start : start + LINES_AT_ONCE])
            lengths += map(len, rows)
            parts += [np.array(row, dtype=np.int32) for row in rows]
        self.tokens = np.concatenate([np.zeros(0, dtype=np.int32), *parts])
        self.lengths = np.array(lengths, dtype=np.int64)
        self._ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.tokens[self._ends[i] - self.lengths[i] : self._ends[i]].astype(np.int64)
