"""Pass keys in real text, for training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linrope.data.corpus.files import find_sources
from linrope.data.corpus.splits import SPLITS, split_corpus
from linrope.data.synthetic.passkey import Passkey
from linrope.data.synthetic.recall_task import Case, Stage
from linrope.data.tokenizers.bytes import ByteTokenizer
from linrope.errors import InputError
from linrope.training.data_modules.recall import RecallDataModule


class PasskeyDataModule(RecallDataModule):
    """A pass key in real text: see `passkey_rows` and `RecallDataModule`.

    Args:
        path: Text around the keys: a file, a folder or a glob. null is the built-in corpus.
        stages: Training cases (length, rows), where `rows` is a share of all rows; keys have a random place.
        cases: Cases (length,) or (length, depth in percent) of validation and test.
        fractions: Shares of the text for train, val and test, as in `TextDataModule`.
        tokens_per_batch, test_rows, seed, num_workers: As in `RecallDataModule`.

    Raises:
        InputError: as in `RecallDataModule`; no text at `path`, or less than a row in one of the splits.
    """

    def __init__(
        self,
        path: str | None = None,
        stages: Sequence[Stage] = ((128, 4), (256, 2), (512, 1)),
        cases: Sequence[Case] = ((128,), (512,), (2048,)),
        fractions: Sequence[float] = (0.9, 0.05, 0.05),
        tokens_per_batch: int = 4096,
        test_rows: int = 100,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        sources = find_sources(None if path is None else Path(path))
        self.tasks = {split: Passkey(corpus) for split, corpus in split_corpus(sources, fractions).items()}
        self.origin, self.fractions = sources.origin, list(fractions)
        super().__init__(self.tasks["train"], stages, cases, tokens_per_batch, test_rows, seed, num_workers)
        for split in SPLITS[1:]:
            for case in map(tuple, cases):
                try:
                    self.tasks[split].require(case)
                except InputError as error:
                    raise InputError(f"data.cases in the {split} split: {error}") from error

    @property
    def tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer()

    def task_of(self, split: str) -> Passkey:
        return self.tasks[split]

    def order(self) -> dict[str, Any]:
        return {
            "stages": [list(stage) for stage in self.stages],
            "fractions": self.fractions,
            "train_tokens": len(self.tasks["train"].text),
            "train_documents": self.tasks["train"].text.fingerprint(),
            "tokens_per_batch": self.tokens_per_batch,
            "seed": self.seed,
        }
