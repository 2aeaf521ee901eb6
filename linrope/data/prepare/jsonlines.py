"""JSON lines, plain or compressed (`.gz`, `.zst`): the text field of each line is a document."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from linrope.data.corpus.files import compression_of, zstd
from linrope.errors import DocumentChanged, InputError

READ_BYTES = 1 << 20
"""Bytes of one read."""
COMPRESSED_BYTES = 1 << 12
"""Bytes of one read of a compressed file. They are at most 128 MiB of text: a block of zstandard is 128 KiB of text and
at least 4 bytes."""
LONGEST_LINE = 1 << 28
"""Bytes of the longest line that is read: a line is in memory as a whole."""


def read_lines(path: Path, start: int, stop: int, count: Callable[[int], None]) -> Iterator[tuple[int, bytes]]:
    """The lines of a file between two bytes, each with the offset of its first byte in the (decompressed) text.

    A compressed file is read as a whole. `count` is called with the number of bytes read. Raises InputError, naming the
    line, for a damaged or incomplete archive, or a line longer than LONGEST_LINE; without zstandard; DocumentChanged if
    the file ends before `stop`.
    """
    compressed = compression_of(path)
    chunks = _chunks(path, start, stop, count, COMPRESSED_BYTES if compressed else READ_BYTES)
    if compressed == ".gz":
        chunks = _decompressed(chunks, lambda: zlib.decompressobj(wbits=31), zlib.error, path)
    elif compressed == ".zst":
        decompressor, broken = zstd(path)
        chunks = _decompressed(chunks, decompressor.decompressobj, broken, path)
    offset, number, pending, n_pending = 0 if compressed else start, 1, [], 0
    try:
        for chunk in chunks:
            *lines, rest = chunk.split(b"\n")
            for line in lines:
                whole = b"".join((*pending, line)) if pending else line
                pending, n_pending = [], 0
                yield offset, whole
                offset, number = offset + len(whole) + 1, number + 1
            if rest:
                pending.append(rest)
                n_pending += len(rest)
            if n_pending > LONGEST_LINE:
                raise InputError(f"{path} line {number} is longer than {LONGEST_LINE:,} bytes: split its text.")
    except DamagedArchive as error:
        raise InputError(f"{path} line {number} cannot be read: {error}. Get the file again.") from error
    if pending:
        yield offset, b"".join(pending)


class DamagedArchive(Exception):
    """A compressed file is incomplete or damaged."""


def _chunks(path: Path, start: int, stop: int, count: Callable[[int], None], n_bytes: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        file.seek(start)
        while start < stop:
            chunk = file.read(min(n_bytes, stop - start))
            if not chunk:
                raise DocumentChanged(f"{path} became shorter while it was read: do not change it, and prepare again.")
            start += len(chunk)
            count(len(chunk))
            yield chunk


def _decompressed(chunks: Iterator[bytes], start: Callable[[], Any], broken: type, path: Path) -> Iterator[bytes]:
    """The decompressed text in chunks of at most READ_BYTES. Several archives may follow each other; each must be
    complete.

    `start` makes a decompressor with zlib's interface. The packages' readers of whole files do not serve: zstandard's
    takes an incomplete archive for a complete one, and others read beyond the archive's end.
    """
    decompressor, begun = start(), False
    for chunk in chunks:
        while chunk:
            if decompressor.eof:
                chunk = chunk.lstrip(b"\0")  # padding, which some tools add
                if not chunk:
                    break
                decompressor = start()
            try:
                text = decompressor.decompress(chunk)
            except broken as error:
                raise DamagedArchive(f"its compressed data is damaged ({error})") from error
            yield from (text[first : first + READ_BYTES] for first in range(0, len(text), READ_BYTES))
            begun, chunk = True, decompressor.unused_data if decompressor.eof else b""
    if begun and not decompressor.eof:
        raise DamagedArchive("the compressed file ends in the middle")


class BadLine(ValueError):
    """A line, or a row of a dataset, without text in its text field."""


def text_of_line(line: bytes, field: str) -> bytes | None:
    """The text of a line as UTF-8; None for a blank line. Raises BadLine."""
    if not line.strip():
        return None
    try:
        row = json.loads(line.decode("utf-8-sig"))  # a file may begin with a byte order mark
    except UnicodeDecodeError as error:
        raise BadLine(f"is not UTF-8 (byte {error.start + 1} of the line)") from error
    except (ValueError, RecursionError) as error:  # ValueError also for a number with more digits than Python reads
        raise BadLine(f"is not JSON that can be read ({error})") from error
    return text_of_row(row, field)


def text_of_row(row: Any, field: str) -> bytes:
    """The text in the field of a row, as UTF-8. Raises BadLine."""
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


def line_name(path: Path, offset: int) -> str:
    """The file and the number, from 1, of the line that starts at byte `offset` of the decompressed text."""
    lines = read_lines(path, 0, path.stat().st_size, lambda n: None)
    number = 1 + sum(1 for _ in takewhile(lambda line: line[0] < offset, lines))
    return f"{path} line {number}"
