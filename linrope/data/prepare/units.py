"""What `linrope prepare` reads, in units that one process takes at a time: files, spans of files, shards of a dataset.

Which documents there are, and how they are cut, follows from the sources alone, not from the number of processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from linrope.data.corpus.files import JSON_LINES, find_files, no_text, text_size
from linrope.data.prepare.jsonlines import BadLine, line_number, read_lines, text_of_line, text_of_row
from linrope.errors import DocumentChanged, InputError

UNIT_BYTES = 1 << 23
"""Bytes of a unit, about: small files are taken together, large ones in spans."""


PIECE_BYTES = 1 << 20
"""A document longer than this is tokenized in pieces of about so many bytes, cut after a line."""


LINE_REACH = 1 << 16
"""How far to look for the end of a line where text is cut; without one it is cut between two characters."""


@dataclass(frozen=True)
class Span:
    """Bytes `start … stop` of a file: of its text, or whole lines of JSON lines."""

    name: str
    path: Path
    size: int
    modified: int
    """Size and time of last change (ns) of the file when it was found."""
    start: int
    stop: int


@dataclass(frozen=True)
class DatasetShard:
    """Shard `index` of `n` of a dataset of Hugging Face's `datasets`, read as a stream."""

    name: str
    config: str | None
    split: str
    index: int
    n: int


Unit = list[Span] | list[DatasetShard]


@dataclass(frozen=True)
class Piece:
    """Text of a document: a whole one, or as much of it as comes at once."""

    name: str
    """The document's; its hash decides the split."""
    data: bytes
    ends: bool
    where: str
    """It comes from, for error messages."""


@dataclass(frozen=True)
class Reading:
    """How units are read."""

    field: str
    """The field of the text in rows."""
    count: Callable[[int], None]
    """Is told how many bytes were read, as they are."""
    bad: Callable[[Callable[[], str], BadLine], None]
    """Is told about a line that holds no text, with what says its name (which takes time); it may raise."""


def file_units(path: str | None) -> tuple[list[Unit], str, int]:
    """The units of the text files and JSON lines under a path, in the order of their names.

    Returns:
        The units, where they come from, for people to read, and how many files were left out.

    Raises:
        InputError: nothing there, or nothing there that is text.
    """
    found = find_files(path, "--path")
    spans, n_skipped = [], 0
    for file in found.files:
        if not file.is_file():
            continue
        if size := _size(file):
            name = file.relative_to(found.root).as_posix()
            spans.append(Span(name, file, size, file.stat().st_mtime_ns, 0, size))
        else:
            n_skipped += 1
    if not spans:
        raise no_text("--path", found.origin, n_skipped)
    spans.sort(key=lambda span: span.name)
    return list(_grouped(part for span in spans for part in _parts(span))), found.origin, n_skipped


def _size(file: Path) -> int:
    """Bytes of a file with text; 0 for one to leave out."""
    if not file.name.endswith(JSON_LINES):
        return text_size(file)
    return file.stat().st_size if os.access(file, os.R_OK) else 0


def _parts(span: Span) -> Iterator[Span]:
    """A file in spans of about UNIT_BYTES, cut where a line ends; compressed ones as a whole."""
    start = 0
    if not span.name.endswith(JSON_LINES[1:]):
        whole_lines = span.name.endswith(JSON_LINES)
        with open(span.path, "rb") as file:
            while span.size - start > UNIT_BYTES:
                stop = start + UNIT_BYTES
                file.seek(stop)
                stop += len(file.readline()) if whole_lines else cut(file.read(LINE_REACH), 0)
                yield Span(span.name, span.path, span.size, span.modified, start, stop)
                start = stop
    if start < span.size:
        yield Span(span.name, span.path, span.size, span.modified, start, span.size)


def _grouped(spans: Iterable[Span]) -> Iterator[Unit]:
    """Spans in runs of at most UNIT_BYTES, or of one."""
    unit, n_bytes = [], 0
    for span in spans:
        if unit and n_bytes + span.stop - span.start > UNIT_BYTES:
            yield unit
            unit, n_bytes = [], 0
        unit.append(span)
        n_bytes += span.stop - span.start
    if unit:
        yield unit


def cut(data: bytes, at: int) -> int:
    """The first good place to cut text at byte `at` or later: after the end of a line that is near, or a character."""
    newline = data.find(b"\n", at, at + LINE_REACH)
    if newline >= 0:
        return newline + 1
    while at < len(data) and data[at] & 0xC0 == 0x80:  # a byte that continues a character
        at += 1
    return at


def dataset_units(name: str, config: str | None, split: str) -> list[Unit]:
    """The units of a dataset: its shards.

    Raises:
        InputError: there is none, or the package `datasets` is missing.
    """
    n = open_dataset(name, config, split).num_shards
    return [[DatasetShard(name, config, split, index, n)] for index in range(n)]


def open_dataset(name: str, config: str | None, split: str) -> Any:
    """The dataset as a stream.

    Raises:
        InputError: there is none, or the package `datasets` is missing.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise InputError(
            f"--dataset={name!r} needs the package datasets, which is not installed: pip install 'linrope[text]'."
        ) from error
    try:
        return load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # the package raises its own, and those of what it reads with
        raise InputError(
            f"--dataset={name!r} (--dataset_config={config!r}, --dataset_split={split!r}) cannot be opened: {error}."
        ) from error


def read_unit(unit: Unit, reading: Reading) -> Iterator[Piece]:
    """The documents of a unit, in order.

    Raises:
        DocumentChanged: a file is not what it was when it was found.
        InputError: a damaged archive; a dataset that cannot be read.
    """
    for part in unit:
        if isinstance(part, DatasetShard):
            yield from _rows(part, reading)
            continue
        _require_unchanged(part)
        yield from _lines(part, reading) if part.name.endswith(JSON_LINES) else _text(part, reading)
        _require_unchanged(part)


def _require_unchanged(span: Span) -> None:
    status = span.path.stat() if span.path.exists() else None
    if status is None or (status.st_size, status.st_mtime_ns) != (span.size, span.modified):
        raise DocumentChanged(
            f"{span.path} changed while the corpus was being prepared: remove the output, leave the sources as they "
            "are, and prepare it again."
        )


def _text(span: Span, reading: Reading) -> Iterator[Piece]:
    with open(span.path, "rb") as file:
        file.seek(span.start)
        data = file.read(span.stop - span.start)
    reading.count(len(data))
    yield from _pieces(span.name, data, str(span.path), span.start, ends=span.stop == span.size)


def _lines(span: Span, reading: Reading) -> Iterator[Piece]:
    for offset, line in read_lines(span.path, span.start, span.stop, reading.count):
        try:
            text = text_of_line(line, reading.field)
        except BadLine as bad:
            reading.bad(partial(_line_name, span.path, offset), bad)
            continue
        if text is not None:
            yield from _pieces(f"{span.name}:{offset}", text, f"{span.path}, the line at byte {offset},")


def _line_name(path: Path, offset: int) -> str:
    return f"{path} line {line_number(path, offset)}"


def _rows(shard: DatasetShard, reading: Reading) -> Iterator[Piece]:
    rows = open_dataset(shard.name, shard.config, shard.split).shard(shard.n, shard.index)
    for number, row in enumerate(_read_rows(rows, shard)):
        where = f"dataset {shard.name!r} shard {shard.index} row {number}"
        try:
            text = text_of_row(row, reading.field)
        except BadLine as bad:
            reading.bad(lambda: where, bad)  # noqa: B023 (called at once)
            continue
        reading.count(len(text))
        yield from _pieces(f"{shard.index}:{number}", text, where)


def _read_rows(rows: Any, shard: DatasetShard) -> Iterator[Any]:
    try:
        yield from rows
    except Exception as error:  # see open_dataset
        raise InputError(
            f"--dataset={shard.name!r} stopped in shard {shard.index}: {error}. Run the same line again to go on."
        ) from error


def _pieces(name: str, data: bytes, where: str, offset: int = 0, ends: bool = True) -> Iterator[Piece]:
    """Text in pieces of about PIECE_BYTES; `offset` is where it begins in its source."""
    start = 0
    while True:
        stop = cut(data, start + PIECE_BYTES) if len(data) - start > PIECE_BYTES else len(data)
        last = stop == len(data)
        yield Piece(name, data[start:stop], ends and last, f"{where} from byte {offset + start}")
        if last:
            return
        start = stop
