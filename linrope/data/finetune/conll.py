"""Words with labels in columns, as in CoNLL-2003: one word a line, its label last; an empty line ends a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linrope.data.finetune.encoding import Encoded
from linrope.data.finetune.examples import label_number, read_lines
from linrope.data.tokenizers.base import Tokenizer
from linrope.errors import InputError

FILES = {
    "train": ("train.txt", "eng.train", "train.conll"),
    "val": ("valid.txt", "dev.txt", "eng.testa", "dev.conll"),
    "test": ("test.txt", "eng.testb", "test.conll"),
}
"""Names of the files of each split."""
DOCUMENT = "-DOCSTART-"
"""The first column of a line that begins a document, and is left out."""


@dataclass(frozen=True)
class Sentence:
    """The words of a sentence."""

    id: str
    """Its number in the file, from 0."""
    words: tuple[str, ...]
    labels: tuple[str, ...] | None
    """Of each word; None where the file has one column only."""
    line: int
    """Of its first word."""

    @property
    def text(self) -> str:
        """The words, with a space between them."""
        return " ".join(self.words)

    @property
    def target(self) -> tuple[str, ...] | None:
        return self.labels


def read_sentences(path: Path) -> list[Sentence]:
    """The sentences of a file. Spaces or tabs separate columns; the word is in the first, the label in the last.

    Raises:
        InputError: a file that cannot be read, a line with another number of columns than the first, no words.
    """
    found: list[Sentence] = []
    rows: list[list[str]] = []
    n_columns = None
    for line, text in enumerate([*read_lines(path), ""], 1):
        columns = text.replace("\t", " ").split(" ")  # not other spaces, which a word may hold
        columns = [column for column in columns if column]
        if columns and columns[0] != DOCUMENT:
            n_columns = n_columns or len(columns)
            if len(columns) != n_columns:
                raise InputError(
                    f"{path}, line {line}: it has {len(columns)} columns, and the lines before {n_columns}: give each "
                    "word the same columns."
                )
            rows.append(columns)
        elif rows:
            words, labels = (tuple(row[at] for row in rows) for at in (0, -1))
            found.append(Sentence(str(len(found)), words, labels if n_columns > 1 else None, line - len(rows)))
            rows = []
    if not found:
        raise InputError(f"{path} has no words: give a file with a word in each line.")
    return found


def label_numbers(sentence: Sentence, labels: Sequence[str], path: Path) -> list[int]:
    """The number of each word's label. InputError, naming file and line, for one that is not among `labels`."""
    return [label_number(label, labels, path, sentence.line + at) for at, label in enumerate(sentence.labels)]


def first_tokens(sentence: Sentence, row: Encoded, tokenizer: Tokenizer) -> list[int | None]:
    """The position of each word's first token in the row of `sentence.text`; None for words that were cut off, that the
    tokenizer drops, or that share their token with the next word."""
    lengths = np.array([len(word.encode()) for word in sentence.words])
    starts = np.cumsum(lengths + 1) - lengths - 1
    tokens = [int(token) for token in np.searchsorted(row.ends, starts, side="right")]
    n = len(tokens)  # without dropped words at the end, whose bytes are counted to the last token
    while n > 1 and tokens[n - 1] == tokens[n - 2] and not tokenizer.encode_batch([sentence.words[n - 1]])[0]:
        n -= 1
    found = [
        row.start_of_last + token if token < len(row.ends) and token != following else None
        for token, following in zip(tokens[:n], [*tokens[1:n], None])
    ]
    return found + [None] * (len(tokens) - n)


def entities(labels: Sequence[str]) -> set[tuple[int, int, str]]:
    """(first word, word after the last, type) of each entity, by the rules of CoNLL's script conlleval.

    Labels are O, B-TYPE and I-TYPE. An entity begins at B, after O, and where the type changes.
    """
    found, start, kind = set(), 0, None
    for at, label in enumerate([*labels, "O"]):
        prefix, _, kind_here = label.partition("-")
        inside = prefix != "O"
        goes_on = inside and prefix != "B" and kind_here == kind
        if kind is not None and not goes_on:
            found.add((start, at, kind))
            kind = None
        if inside and kind is None:
            start, kind = at, kind_here
    return found


def are_entities(labels: Sequence[str]) -> bool:
    """Whether these are labels that `entities` can read."""
    return all(label == "O" or label[:2] in ("B-", "I-") for label in labels)
