"""Rows with several choices, of which one is right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from linrope.data.finetune.cail import FILES, LABELS, Choice, read_triplets
from linrope.data.finetune.encoding import Encoded, pad_choices
from linrope.training.data_modules.finetune import FineTuningDataModule


class MultipleChoiceDataModule(FineTuningDataModule):
    """Triplets of CAIL2019-SCM: train.json, valid.json and test.json, each JSON lines with A, B, C and the label.

    A row has two choices, the pairs (A, B) and (A, C). Batches have inputs, key_mask and token_types of shape (B, 2, T)
    and targets, int64 (B,): 0 where B is more like A, 1 where C is. See `FineTuningDataModule` for the rest. In
    test.json the label may be missing.

    Args:
        options: Those of `FineTuningDataModule`.

    Raises:
        InputError: as `FineTuningDataModule`.
    """

    metrics = ("accuracy",)
    files = FILES
    labels = LABELS

    def read(self, split: str) -> list[Choice] | None:
        path = self.file_of(split, FILES)
        return None if path is None else read_triplets(path)

    def encode(self, example: Choice) -> list[Encoded]:
        return [self.encoder(*pair) for pair in example.pairs]

    def truncated(self, encoded: list[Encoded]) -> bool:
        return any(choice.truncated for choice in encoded)

    @property
    def make_batch(self) -> Callable[[list[Any], list[Any]], dict[str, Any]]:
        return partial(_batch, padding=self.encoder.special.pad)


def _batch(examples: list[Choice], rows: list[list[Encoded]], padding: int) -> dict[str, Any]:
    batch = pad_choices(rows, padding)
    if all(example.target is not None for example in examples):
        batch["targets"] = torch.tensor([example.target for example in examples])
    return {**batch, "id": [example.id for example in examples]}
