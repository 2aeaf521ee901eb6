"""Sentences with a label for each word."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch

from linrope.data.finetune.conll import FILES, Sentence, first_tokens, label_numbers, read_sentences
from linrope.data.finetune.encoding import Encoded, pad
from linrope.losses import IGNORE
from linrope.training.data_modules.finetune import FineTuningDataModule

Row = tuple[Encoded, list[int | None]]


class TokenClassificationDataModule(FineTuningDataModule):
    """Sentences in columns, as CoNLL-2003 has them: train.txt, valid.txt and test.txt (or eng.train, eng.testa,
    eng.testb) of a folder.

    A row is the words of a sentence with spaces between them. The label of a word stands at its first token. Batches
    have
        targets: int64 (B, T), the label of the word that begins at a token; IGNORE elsewhere.
        words: int64 (B, T), the number of the word that begins at a token; -1 elsewhere.
        n_words: the number of words of each row.
        n_positions: rows · data.max_length, the same in all training batches.
    See `FineTuningDataModule` for the rest. The labels are those of the training file, in the order of their names. A
    test file may have the words alone.

    Args:
        options: Those of `FineTuningDataModule`.

    Raises:
        InputError: as `FineTuningDataModule`; when set up: a line with another number of columns, a label that the
            training file does not have.
    """

    metrics = ("accuracy", "f1")
    files = FILES

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels by their numbers, a checkpoint's or those of the training file."""
        if self._trained_labels is not None:
            return self._trained_labels
        return tuple(sorted({label for sentence in self.examples("train") for label in sentence.labels or ()}))

    @property
    def n_labels(self) -> int:
        return len(self.labels)

    def read(self, split: str) -> list[Sentence] | None:
        path = self.file_of(split, FILES)
        return None if path is None else read_sentences(path)

    def _prepare(self, split: str, must_have_targets: bool) -> None:
        super()._prepare(split, must_have_targets)
        if split == "train":
            return  # the labels are its own
        path = self.file_of(split, FILES)
        for sentence in self.examples(split) if self.labelled(self.examples(split)) else ():
            label_numbers(sentence, self.labels, path)

    def encode(self, example: Sentence) -> Row:
        row = self.encoder(example.text)
        return row, first_tokens(example, row, self.encoder.tokenizer)

    def truncated(self, encoded: Row) -> bool:
        return encoded[0].truncated

    @property
    def make_batch(self) -> Callable[[list[Any], list[Any]], dict[str, Any]]:
        numbers = {label: number for number, label in enumerate(self.labels)}
        return partial(_batch, padding=self.encoder.special.pad, numbers=numbers, max_length=self.max_length)


def _batch(
    examples: list[Sentence], rows: list[Row], padding: int, numbers: dict[str, int], max_length: int
) -> dict[str, Any]:
    batch = pad([row for row, _ in rows], padding)
    words, targets = torch.full_like(batch["inputs"], -1), torch.full_like(batch["inputs"], IGNORE)
    labelled = all(example.labels is not None for example in examples)
    for row, (example, (_, tokens)) in enumerate(zip(examples, rows)):
        for word, token in enumerate(tokens):
            if token is None:
                continue
            words[row, token] = word
            if labelled:
                targets[row, token] = numbers[example.labels[word]]
    n_words = [len(example.words) for example in examples]
    batch |= {
        "words": words,
        "n_words": n_words,
        "n_positions": len(rows) * max_length,
        "id": [example.id for example in examples],
    }
    return {**batch, "targets": targets} if labelled else batch
