"""Labelled examples, and how their files are found and read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from linrope.errors import InputError
from linrope.utils.files import text_lines


@dataclass(frozen=True)
class Example:
    """A text or a pair of texts, and what is to be predicted."""

    id: str
    """Of the file, or the number of its row, from 0."""
    texts: tuple[str, ...]
    """One text, or a pair."""
    target: int | float | None
    """Number of its label, or its value (regression); None where the file has no labels."""
    group: str = ""
    """Its part of a split whose parts are measured by themselves, "matched" for example."""


def read_lines(path: Path) -> list[str]:
    """The lines of a text file in UTF-8, also of one with "\\r\\n", without empty lines at its end.

    InputError as `text_lines`, and for an empty file.
    """
    lines = [line.removesuffix("\r") for line in text_lines(path, "give the file of this name")]
    while lines and not lines[-1].strip(" "):
        lines.pop()
    if not lines:
        raise InputError(f"{path} is empty: give a file with examples.")
    return lines


def label_number(label: str, labels: Sequence[str], path: Path, line: int) -> int:
    """The number of a label. InputError, naming file and line, for one that is not among `labels`."""
    try:
        return labels.index(label)
    except ValueError:
        raise InputError(
            f"{path}, line {line}: the label {label!r} is unknown: the labels are {', '.join(map(repr, labels))}."
        ) from None


def find_file(path: Path, split: str, names: Mapping[str, Sequence[str]]) -> Path | None:
    """The file of a split, under the first of its `names` that is there; None without one.

    Args:
        path: a folder, or the training file; then the others are looked for beside it.
        split: "train", "val" or "test".
        names: names of the files of each split.

    Raises:
        InputError: no such folder or file, or no file of the split "train" in it.
    """
    if path.is_file():
        if split == "train":
            return path
        path = path.parent
    if not path.is_dir():
        raise InputError(
            f"data.path={str(path)!r} does not exist: give the folder with {names['train'][0]}, or the training file."
        )
    found = next((path / name for name in names[split] if (path / name).is_file()), None)
    if found is None and split == "train":
        raise InputError(f"data.path={str(path)!r} has no {' or '.join(names[split])}: give the folder that has it.")
    return found
