"""Questions whose answers are parts of a text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from linrope.data.finetune.encoding import Encoded, pad
from linrope.data.finetune.squad import FILES, Question, answer_tokens, read_questions, token_spans
from linrope.losses import IGNORE
from linrope.training.data_modules.base import require_least
from linrope.training.data_modules.finetune import FineTuningDataModule


class QuestionAnsweringDataModule(FineTuningDataModule):
    """Questions of SQuAD 1.1: train-v1.1.json and dev-v1.1.json (or train.json, dev.json, test.json) of a folder.

    A row is [CLS] question [SEP] context [SEP]; a context that is too long loses its end. Batches have
        targets: int64 (B, 2), the positions of the first and the last token of the first answer; IGNORE where it was
            cut off.
        spans: int64 (B, T, 2), the bytes of the context, from … to, of each token; (0, 0) outside of it.
        context, answers: the texts of each row.
    See `FineTuningDataModule` for the rest. A test file may be without answers.

    Args:
        max_answer_length: Tokens of a predicted answer at most.
        options: Those of `FineTuningDataModule`.

    Raises:
        InputError: as `FineTuningDataModule`; when set up: an answer that does not stand in its context.
    """

    metrics = ("exact_match", "f1")
    files = FILES

    def __init__(self, max_answer_length: int = 64, **options: Any) -> None:
        super().__init__(**options)
        require_least("max_answer_length", max_answer_length, 1)
        self.max_answer_length = max_answer_length

    def read(self, split: str) -> list[Question] | None:
        path = self.file_of(split, FILES)
        return None if path is None else read_questions(path)

    def encode(self, example: Question) -> tuple[Encoded, tuple[int, int] | None]:
        row = self.encoder(example.question, example.context)
        return row, answer_tokens(example, row) if example.answers else None

    def truncated(self, encoded: tuple[Encoded, tuple[int, int] | None]) -> bool:
        return encoded[0].truncated

    @property
    def make_batch(self) -> Callable[[list[Any], list[Any]], dict[str, Any]]:
        return partial(_batch, padding=self.encoder.special.pad)

    def _described(self, split: str) -> str:
        n_lost = sum(answer is None for _, answer in self._rows[split].encoded)
        lost = f", {n_lost:,} of these without their answer" if n_lost else ""
        return f"{super()._described(split)}{lost}"


def _batch(examples: list[Question], rows: list[tuple[Encoded, Any]], padding: int) -> dict[str, Any]:
    batch = pad([row for row, _ in rows], padding)
    batch["spans"] = torch.zeros(*batch["inputs"].shape, 2, dtype=torch.int64)
    for number, (row, _) in enumerate(rows):
        batch["spans"][number, : len(row.tokens)] = torch.from_numpy(token_spans(row))
    if all(example.answers for example in examples):
        batch["targets"] = torch.tensor([(IGNORE, IGNORE) if answer is None else answer for _, answer in rows])
        batch["answers"] = [list(example.answers) for example in examples]
    return {**batch, "context": [example.context for example in examples], "id": [example.id for example in examples]}
