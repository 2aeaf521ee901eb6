"""JSON lines, plain or compressed (`.jsonl`, `.jsonl.gz`, `.jsonl.zst`): each line's text field is a document."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from linrope.errors import DocumentChanged, InputError

CHUNK = 1 << 20
"""Bytes read in one go."""


def read_lines(path: Path, start: int, stop: int, count: Callable[[int], None]) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, each with the offset of its first byte in the (decompressed) text.

    Args:
        start, stop: bytes of the file to read, whole lines; a compressed file is read whole.
        count: is told how many bytes of the file were read.

    Raises:
        InputError: a compressed file is damaged or cut short, naming the line; zstandard is missing.
        DocumentChanged: the file ends before `stop`.
    """
    chunks = _chunks(path, start, stop, count)
    compressed = path.suffix != ".jsonl"
    if path.suffix == ".gz":
        chunks = _decompressed(chunks, lambda: zlib.decompressobj(wbits=31), zlib.error, path)
    elif path.suffix == ".zst":
        zstandard = _zstandard(path)
        chunks = _decompressed(chunks, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError, path)
    offset, number, pending = 0 if compressed else start, 1, []
    try:
        for chunk in chunks:
            *lines, rest = chunk.split(b"\n")
            for line in lines:
                whole = b"".join((*pending, line)) if pending else line
                pending = []
                yield offset, whole
                offset, number = offset + len(whole) + 1, number + 1
            if rest:
                pending.append(rest)
    except DamagedArchive as error:
        raise InputError(f"{path} line {number} cannot be read: {error}. Get the file again.") from error
    if pending:
        yield offset, b"".join(pending)


class DamagedArchive(Exception):
    """A compressed file that is cut short or holds something else."""


def _chunks(path: Path, start: int, stop: int, count: Callable[[int], None]) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while start < stop:
            chunk = file.read(min(CHUNK, stop - start))
            if not chunk:
                raise DocumentChanged(f"{path} became shorter while it was read: leave it as it is, and prepare again.")
            start += len(chunk)
            count(len(chunk))
            yield chunk


def _decompressed(chunks: Iterator[bytes], start: Callable[[], Any], broken: type, path: Path) -> Iterator[bytes]:
    """What `chunks` say decompressed; several archives may follow each other, none may be cut short.

    `start` makes a decompressor as zlib's are: the readers of whole files take an archive that ends early for one that
    is complete (zstandard's does), or read on into what follows it.
    """
    decompressor, begun = start(), False
    for chunk in chunks:
        while chunk:
            if decompressor.eof:
                decompressor = start()
            try:
                yield decompressor.decompress(chunk)
            except broken as error:
                raise DamagedArchive(f"its compressed data is damaged ({error})") from error
            begun, chunk = True, decompressor.unused_data if decompressor.eof else b""
    if begun and not decompressor.eof:
        raise DamagedArchive("the compressed file ends in the middle")


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise InputError(
            f"{path} needs the package zstandard, which is not installed: pip install 'linrope[text]'."
        ) from error
    return zstandard


class BadLine(ValueError):
    """A line, or a row of a dataset, that holds no text where it should."""


def text_of_line(line: bytes, field: str) -> bytes | None:
    """The UTF-8 of the text in a line; None for a blank one.

    Raises:
        BadLine: not UTF-8, not JSON, or `text_of_row`'s reasons.
    """
    if not line.strip():
        return None
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadLine(f"is not UTF-8 (byte {error.start + 1} of the line)") from error
    except (ValueError, RecursionError) as error:  # among them a number of more digits than Python reads
        raise BadLine(f"is not JSON that can be read ({error})") from error
    return text_of_row(row, field)


def text_of_row(row: Any, field: str) -> bytes:
    """The UTF-8 of the text in the field of a row.

    Raises:
        BadLine: the row has no such field, or something else than text there.
    """
    if not isinstance(row, dict):
        raise BadLine(f"holds a {type(row).__name__} where an object with the field {field!r} was expected")
    if field not in row:
        known = ", ".join(repr(name) for name in list(row)[:10]) or "none"
        raise BadLine(f"has no field {field!r} (set --text_field to one it has: {known})")
    if not isinstance(row[field], str):
        raise BadLine(f"has a {type(row[field]).__name__} in the field {field!r}, where text was expected")
    try:
        return row[field].encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadLine(f"has half a surrogate pair in the field {field!r}") from error


def line_number(path: Path, offset: int) -> int:
    """The number, from 1, of the line that begins at byte `offset` of the decompressed text."""
    lines = read_lines(path, 0, path.stat().st_size, lambda n: None)
    return 1 + sum(1 for _ in takewhile(lambda line: line[0] < offset, lines))
