"""CAIL2019-SCM (arXiv 1911.08962): which of two legal cases, B or C, is more like case A?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from linrope.data.finetune.examples import label_number
from linrope.data.finetune.jsonlines import read_json_lines, require_text

LABELS = ("B", "C")
FILES = {
    "train": ("train.json", "train.jsonl"),
    "val": ("valid.json", "dev.json", "val.json", "valid.jsonl", "dev.jsonl", "val.jsonl"),
    "test": ("test.json", "test.jsonl"),
}
"""Names of the files of each split."""


@dataclass(frozen=True)
class Choice:
    """A row with a pair of texts for each choice."""

    id: str
    """The number of its row, from 0."""
    pairs: tuple[tuple[str, str], ...]
    target: int | None
    """Number of the right choice; None where the file has no labels."""


def read_triplets(path: Path) -> list[Choice]:
    """The rows of a file of JSON lines {"A": ..., "B": ..., "C": ..., "label": "B" or "C"}, as the choices (A, B) and
    (A, C). A file may have no labels.

    Raises:
        InputError: a line that is not such an object, or with another label; the message has file and line.
    """
    found = []
    for number, (line, values) in enumerate(read_json_lines(path)):
        where = f"{path}, line {line}"
        case, *others = (require_text(values, name, where) for name in ("A", *LABELS))
        target = None
        if "label" in values:
            target = label_number(require_text(values, "label", where), LABELS, path, line)
        found.append(Choice(str(number), tuple((case, other) for other in others), target))
    return found
