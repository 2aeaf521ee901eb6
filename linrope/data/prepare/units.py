"""Units of text that one process tokenizes: files, ranges of files, shards of a dataset.

The units and their documents depend on the sources alone, not on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from linrope.data.corpus.files import compression_of, find_sources, is_json_lines, is_saved_dataset
from linrope.data.prepare.jsonlines import LONGEST_LINE, BadLine, line_name, read_lines, text_of_line, text_of_row
from linrope.errors import DocumentChanged, InputError, require_choice, require_package

UNIT_BYTES = 1 << 23
"""About the bytes of a unit: small files are grouped, large files are cut into ranges."""
CHUNK_BYTES = 1 << 20
"""A longer document is tokenized in chunks of about this many bytes, cut after a line."""
LINE_REACH = 1 << 16
"""A cut is made after the first end of a line within this many bytes, or else between two characters."""


@dataclass(frozen=True)
class FileRange:
    """Bytes `start … stop` of a text file, or of whole JSON lines."""

    name: str
    path: Path
    size: int
    modified: int
    """Size and modification time (ns) of the file when it was found."""
    start: int
    stop: int
    json_lines: bool


@dataclass(frozen=True)
class DatasetShard:
    """Shard `index` of `n` of a dataset of Hugging Face's `datasets`; it is read as a stream."""

    name: str
    config: str | None
    split: str
    index: int
    n: int


Unit = list[FileRange] | list[DatasetShard]


@dataclass(frozen=True)
class TextChunk:
    """A chunk of a document's text; most documents are one chunk."""

    name: str
    """Name of the document; its hash determines the split."""
    data: bytes
    ends: bool
    """Whether the document ends with this chunk."""
    where: str
    """Place of the chunk in its source, for error messages."""


Count = Callable[[int], None]
"""Called with the number of bytes read, while reading."""
OnBadLine = Callable[[Callable[[], str], BadLine], None]
"""Called for a line without text, with a function that names the line (which takes time); it may raise."""


def unit_bytes(unit: Unit) -> int:
    """Bytes of a unit's files; 0 for a dataset, whose size is unknown."""
    return sum(source.stop - source.start for source in unit if isinstance(source, FileRange))


def file_units(path: str | None) -> tuple[list[Unit], str, int]:
    """The units of the documents that `find_sources` finds; their origin and the number of skipped files."""
    found = find_sources(path, "--path", json_lines=True)
    files = [
        FileRange(file.name, file.path, file.size, file.modified, 0, file.size, is_json_lines(file.path))
        for file in found.documents
    ]
    return list(_grouped(part for file in files for part in _parts(file))), found.origin, found.n_skipped


def _parts(source: FileRange) -> Iterator[FileRange]:
    """A file in ranges of about UNIT_BYTES, cut after lines; a compressed file is one range."""
    start = 0
    if not (source.json_lines and compression_of(source.path)):
        with open(source.path, "rb") as file:
            while source.size - start > UNIT_BYTES:
                stop = start + UNIT_BYTES
                file.seek(stop)
                stop += len(file.readline(LONGEST_LINE + 1)) if source.json_lines else cut(file.read(LINE_REACH), 0)
                yield replace(source, start=start, stop=stop)
                start = stop
    if start < source.size:
        yield replace(source, start=start)


def _grouped(ranges: Iterable[FileRange]) -> Iterator[Unit]:
    """Ranges in groups of at most UNIT_BYTES; a longer range is a group of its own."""
    unit, n_bytes = [], 0
    for source in ranges:
        if unit and n_bytes + source.stop - source.start > UNIT_BYTES:
            yield unit
            unit, n_bytes = [], 0
        unit.append(source)
        n_bytes += source.stop - source.start
    if unit:
        yield unit


def cut(data: bytes, at: int) -> int:
    """Where to cut text at byte `at` or later: after the next line within LINE_REACH, else after a character."""
    newline = data.find(b"\n", at, at + LINE_REACH)
    if newline >= 0:
        return newline + 1
    while at < len(data) and data[at] & 0xC0 == 0x80:  # a byte that continues a character
        at += 1
    return at


def dataset_units(name: str, config: str | None, split: str) -> list[Unit]:
    """The units of a dataset: its shards. Raises as `open_dataset`."""
    n = open_dataset(name, config, split).num_shards
    return [[DatasetShard(name, config, split, index, n)] for index in range(n)]


def open_dataset(name: str, config: str | None, split: str) -> Any:
    """The dataset as a stream. Raises InputError if it cannot be opened, or the package `datasets` is missing."""
    datasets, folder = require_package("datasets", f"--dataset={name!r}"), Path(name).expanduser()
    try:
        if is_saved_dataset(folder):
            return _open_saved(datasets, folder, config, split)
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except InputError:
        raise
    except Exception as error:  # the package raises its own, and those of what it reads with
        raise InputError(
            f"--dataset={name!r} (--dataset_config={config!r}, --dataset_split={split!r}) cannot be opened: {error}."
        ) from error


def _open_saved(datasets: Any, folder: Path, config: str | None, split: str) -> Any:
    """The same for a folder of `save_to_disk`, with a shard for each of its files."""
    if config is not None:
        raise InputError(f"--dataset_config={config!r}: {folder} was saved without configurations: leave it out.")
    found = datasets.load_from_disk(folder)
    if not isinstance(found, datasets.DatasetDict):
        found = {str(found.split or "train"): found}
    require_choice("--dataset_split", split, found)
    rows = found[split]
    return rows.to_iterable_dataset(num_shards=max(1, min(len(rows), len(rows.cache_files))))


def read_unit(unit: Unit, field: str, count: Count, bad_line: OnBadLine) -> Iterator[TextChunk]:
    """The documents of a unit, in order; `field` holds the text of JSON lines and datasets.

    Raises DocumentChanged if a file has changed since it was found, InputError for a damaged archive or dataset.
    """
    for part in unit:
        if isinstance(part, DatasetShard):
            yield from _rows(part, field, count, bad_line)
            continue
        _require_unchanged(part)
        if part.json_lines:
            yield from _lines(part, field, count, bad_line)
        else:
            yield from _text(part, count)
        _require_unchanged(part)


def _require_unchanged(source: FileRange) -> None:
    status = source.path.stat() if source.path.exists() else None
    if status is None or (status.st_size, status.st_mtime_ns) != (source.size, source.modified):
        raise DocumentChanged(
            f"{source.path} changed while the corpus was being prepared: remove the output, do not change the sources, "
            "and prepare it again."
        )


def _text(source: FileRange, count: Count) -> Iterator[TextChunk]:
    with open(source.path, "rb") as file:
        file.seek(source.start)
        data = file.read(source.stop - source.start)
    count(len(data))
    yield from _chunks(source.name, data, str(source.path), source.start, ends=source.stop == source.size)


def _lines(source: FileRange, field: str, count: Count, bad_line: OnBadLine) -> Iterator[TextChunk]:
    for offset, line in read_lines(source.path, source.start, source.stop, count):
        try:
            text = text_of_line(line, field)
        except BadLine as error:
            bad_line(partial(line_name, source.path, offset), error)
            continue
        if text is not None:
            yield from _chunks(f"{source.name}:{offset}", text, f"{source.path}, the line at byte {offset},")


def _rows(shard: DatasetShard, field: str, count: Count, bad_line: OnBadLine) -> Iterator[TextChunk]:
    rows = open_dataset(shard.name, shard.config, shard.split).shard(shard.n, shard.index)
    for number, row in enumerate(_read_rows(rows, shard)):
        where = f"dataset {shard.name!r} shard {shard.index} row {number}"
        try:
            text = text_of_row(row, field)
        except BadLine as error:
            bad_line(lambda: where, error)  # noqa: B023 (called at once)
            continue
        count(len(text))
        yield from _chunks(f"{shard.index}:{number}", text, where)


def _read_rows(rows: Any, shard: DatasetShard) -> Iterator[Any]:
    try:
        yield from rows
    except Exception as error:  # see open_dataset
        raise InputError(
            f"--dataset={shard.name!r} stopped in shard {shard.index}: {error}. Run the same command again to continue."
        ) from error


def _chunks(name: str, data: bytes, where: str, offset: int = 0, ends: bool = True) -> Iterator[TextChunk]:
    """Text in chunks of about CHUNK_BYTES; `offset` is the text's first byte in its source."""
    start = 0
    while True:
        stop = cut(data, start + CHUNK_BYTES) if len(data) - start > CHUNK_BYTES else len(data)
        last = stop == len(data)
        yield TextChunk(name, data[start:stop], ends and last, f"{where} from byte {offset + start}")
        if last:
            return
        start = stop
