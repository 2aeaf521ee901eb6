"""Texts and pairs of texts with labels or values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

import torch

from linrope.data.finetune.encoding import Encoded, pad
from linrope.data.finetune.examples import Example
from linrope.data.finetune.excerpts import LINES, PACKAGES, read_excerpts
from linrope.data.finetune.glue import GLUE
from linrope.data.finetune.tsv import CLASSIFICATION, REGRESSION, TableFormat, read_examples, read_table
from linrope.errors import InputError, require_choice
from linrope.training.data_modules.finetune import FineTuningDataModule

TSV = "tsv"
DEFAULT_COLUMNS = ("text", None, "label")


class ClassificationDataModule(FineTuningDataModule):
    """Rows of TSV files: train.tsv, dev.tsv and test.tsv of a folder, or of a task of GLUE as its site gives them.

    Files have the names of the columns in their first line and no quoting. Batches have targets, int64 (B,) labels or
    float32 (B,) values, and `group`, the part of the split of each row ("matched" and "mismatched" in MNLI). See
    `FineTuningDataModule` for the rest.

    Without `path` the task is one of Python's standard library: which of four of its packages do five lines of source
    come from? It is split by file.

    Args:
        dataset: Format of the files: tsv, with the columns below, or a task of GLUE, which knows its own.
        text: Column of the text, or of the first text of a pair.
        pair: Column of the second text; null for single texts.
        label: Column of the label or value. test.tsv may be without it.
        regression: Labels are values.
        options: Those of `FineTuningDataModule`.

    Raises:
        InputError: as `FineTuningDataModule`; columns or `regression` for a task of GLUE; when set up: a missing
            column, a label that is empty or that train.tsv does not have, a value that is no number.
    """

    def __init__(
        self,
        dataset: Literal["tsv", "mrpc", "sst2", "qnli", "stsb", "qqp", "mnli"] = TSV,
        text: str = "text",
        pair: str | None = None,
        label: str = "label",
        regression: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        require_choice("data.dataset", dataset, [TSV, *GLUE])
        self.dataset, self.columns, self.regression = dataset, (text, pair, label), regression
        if dataset == TSV:
            return
        if (text, pair, label) != DEFAULT_COLUMNS or regression:
            raise InputError(
                f"data.dataset={dataset!r} has columns of its own: leave out data.text, data.pair, data.label and "
                "data.regression, or set data.dataset: tsv."
            )
        if self.path is None:
            raise InputError(f"data.path is missing: give the folder of data.dataset={dataset!r}, with its train.tsv.")

    @cached_property
    def form(self) -> TableFormat:
        """The format of the files; the labels of `dataset: tsv` are a checkpoint's, or those of train.tsv."""
        if self.dataset != TSV:
            return GLUE[self.dataset]
        form = TableFormat(*self.columns, id="id", metrics=REGRESSION if self.regression else CLASSIFICATION)
        if self.path is None or self.regression:
            return form if self.regression else replace(form, labels=PACKAGES)
        if self._trained_labels is not None:
            return replace(form, labels=self._trained_labels)
        table = read_table(self.file_of("train", {"train": ["train.tsv"]}), [form.label])
        for (line, _), label in zip(table.rows, table.column(form.label), strict=True):
            if not label.strip():
                raise InputError(f"{table.path}, line {line}: the label is empty: give it one, or leave out the row.")
        labels = tuple(sorted(set(table.column(form.label))))
        if len(labels) < 2:
            raise InputError(f"{table.path} has the label {labels[0]!r} only: give data.label with two or more.")
        return replace(form, labels=labels)

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.form.metrics

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The names of the labels by their numbers; None for values. It needs `open`."""
        return self.form.labels

    @property
    def n_labels(self) -> int:
        return 1 if self.labels is None else len(self.labels)

    @property
    def files(self) -> dict[str, list[str]]:
        return {"train": ["train.tsv"], "val": list(self.form.val.values()), "test": list(self.form.test.values())}

    @cached_property
    def _excerpts(self) -> dict[str, list[Example]]:
        return read_excerpts()

    def read(self, split: str) -> list[Example] | None:
        if self.path is None and not self.regression:
            return self._excerpts[split]
        files = {"train": {"": "train.tsv"}, "val": self.form.val, "test": self.form.test}[split]
        if split != "train" and self._measured_file is not None:
            files = {"": self._measured_file.name}
        examples, skipped = [], 0
        for group, name in files.items():
            names = {"train": ["train.tsv"], split: [name]}
            if (path := self.file_of(split, names)) is None:
                continue
            found, n_skipped = read_examples(path, self.form, group, labelled=split != "test")
            examples += found
            skipped += n_skipped
        if skipped:
            self._notes[split] = f"{skipped:,} damaged rows are left out"
        return examples or None

    def encode(self, example: Example) -> Encoded:
        return self.encoder(*example.texts)

    def truncated(self, encoded: Encoded) -> bool:
        return encoded.truncated

    @property
    def make_batch(self) -> Callable[[list[Any], list[Any]], dict[str, Any]]:
        dtype = torch.float32 if self.labels is None else torch.int64
        return partial(_batch, padding=self.encoder.special.pad, dtype=dtype)

    def order(self) -> dict[str, Any]:
        return {"dataset": self.dataset, **super().order()}

    @property
    def origin(self) -> str:
        if self.path is None:
            return f"excerpts of {LINES} lines of the Python standard library"
        return f"{self.given_path} ({self.dataset})"


def _batch(examples: list[Example], rows: list[Encoded], padding: int, dtype: torch.dtype) -> dict[str, Any]:
    batch = pad(rows, padding)
    if all(example.target is not None for example in examples):
        batch["targets"] = torch.tensor([example.target for example in examples], dtype=dtype)
    return {**batch, "id": [example.id for example in examples], "group": [example.group for example in examples]}
