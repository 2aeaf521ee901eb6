"""Labelled texts as tab-separated values, without quoting, with the names of the columns in the first line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from linrope.data.finetune.examples import Example, label_number, read_lines
from linrope.errors import InputError, suggest

CLASSIFICATION, REGRESSION = ("accuracy", "f1"), ("pearson", "spearman")
"""Metrics of tasks with labels and with values."""


@dataclass(frozen=True)
class TableFormat:
    """The columns and files of a task."""

    text: str
    """Column of the text, or of the first of a pair."""
    pair: str | None
    """Column of the second text of a pair; None for single texts."""
    label: str
    """Column of the label, or of the value."""
    labels: tuple[str, ...] | None = None
    """Names of the labels, in the order of their numbers; None for values (regression)."""
    metrics: tuple[str, ...] = CLASSIFICATION
    id: str | None = None
    """Column that names a row; without it in a file its rows are numbered from 0."""
    val: Mapping[str, str] = field(default_factory=lambda: {"": "dev.tsv"})
    """Files of the validation split by group."""
    test: Mapping[str, str] = field(default_factory=lambda: {"": "test.tsv"})
    skips_damaged_rows: bool = False
    """Skip and count rows with a wrong number of fields. Otherwise they are errors."""

    @property
    def text_columns(self) -> list[str]:
        return [self.text] if self.pair is None else [self.text, self.pair]


@dataclass(frozen=True)
class Table:
    """The rows of a file."""

    path: Path
    columns: list[str]
    rows: list[tuple[int, list[str]]]
    """(line, fields) of each row."""
    n_skipped: int
    """Rows that were left out because their number of fields is wrong."""

    def position(self, name: str | None) -> int | None:
        """The number of a column; None without it. InputError for two of this name."""
        if (n := self.columns.count(name)) > 1:
            raise InputError(f"{self.path} has {n} columns {name!r}: give each a name of its own.")
        return self.columns.index(name) if n else None

    def column(self, name: str) -> list[str]:
        """The fields of a column, which is there."""
        at = self.position(name)
        return [fields[at] for _, fields in self.rows]


def read_table(path: Path, columns: Sequence[str], skips_damaged_rows: bool = False) -> Table:
    """Read a file that must have these columns.

    Raises:
        InputError: a file that cannot be read, a missing column, a row with another number of fields than the first
            line has, no rows.
    """
    first, *others = read_lines(path)
    names = first.split("\t")
    for name in columns:
        if name not in names:
            fix = suggest(name, names) if len(names) > 1 else " It has no tab: separate columns by tabs."
            raise InputError(f"{path} has no column {name!r}: its first line names {', '.join(map(repr, names))}.{fix}")
    rows = []
    for line, text in enumerate(others, 2):
        fields = text.split("\t")
        if len(fields) == len(names):
            rows.append((line, fields))
        elif not skips_damaged_rows:
            raise InputError(
                f"{path}, line {line}: it has {len(fields)} fields, and the first line {len(names)}: separate fields "
                "by one tab each."
            )
    if not rows:
        raise InputError(f"{path} has no rows below the names of its columns: give a file with examples.")
    return Table(path, names, rows, len(others) - len(rows))


def read_examples(path: Path, form: TableFormat, group: str = "", labelled: bool = True) -> tuple[list[Example], int]:
    """The examples of a file, and the number of rows that were skipped. A file that need not be `labelled` may lack the
    column `form.label`, or fields in it; those examples have no target.

    Raises:
        InputError: as `read_table`; two columns of one name; a label that is not in `form.labels`, or a value that is
            no finite number in float32.
    """
    columns = [*form.text_columns, form.label] if labelled else form.text_columns
    table = read_table(path, columns, form.skips_damaged_rows)
    at = [table.position(name) for name in form.text_columns]
    label, id_ = table.position(form.label), table.position(form.id)
    examples = []
    for number, (line, fields) in enumerate(table.rows):
        known = label is not None and (labelled or fields[label].strip())
        target = _target(fields[label], form, path, line) if known else None
        name = str(number) if id_ is None else fields[id_]
        examples.append(Example(name, tuple(fields[i] for i in at), target, group))
    return examples, table.n_skipped


def _target(text: str, form: TableFormat, path: Path, line: int) -> int | float:
    if form.labels is not None:
        return label_number(text, form.labels, path, line)
    try:
        value = float(text) if text.isascii() and "_" not in text else math.nan  # float reads more than files mean
    except ValueError:
        value = math.nan
    if not abs(value) <= float(np.finfo(np.float32).max):
        raise InputError(
            f"{path}, line {line}: the value {text!r} of the column {form.label!r} is no finite number in float32."
        )
    return value
