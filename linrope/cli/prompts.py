"""The prompt that `--prompt` or `--prompt_file` gives, read in parts, so that a file may be larger than memory."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path

from linrope.errors import InputError

LARGEST_PART = 2**20
"""Bytes of a prompt that are tokenized together, where a tokenizer has tokens of more than one byte."""


class Prompt:
    """The text of a prompt: `text`, or the contents of `file`.

    A file, unless it is a pipe, is decoded once before it is used: a mistake in its last byte is found before the model
    reads the first. Raises InputError if both are given, the file cannot be read, or the text is not UTF-8.
    """

    def __init__(self, text: str, file: str | None) -> None:
        self.text, self.file = text, None if file is None else Path(file)
        if self.file is not None and self.text:
            raise InputError("--prompt and --prompt_file exclude each other: give one of them.")
        if self.file is None:
            try:
                self.n_bytes = len(self.text.encode("utf-8"))
            except UnicodeEncodeError as error:
                raise InputError(
                    f"--prompt is not UTF-8 from character {error.start} on: type it in a terminal that uses UTF-8."
                ) from error
            return
        try:
            self.n_bytes = self.file.stat().st_size
            if not self.file.is_fifo() and not self.file.is_char_device():
                for _ in self.parts(2**20):
                    pass
        except OSError as error:
            raise InputError(f"--prompt_file={str(self.file)!r} cannot be read: {error.strerror}.") from error

    def parts(self, n_bytes: int) -> Iterator[str]:
        """The text; that of a file in parts of `n_bytes`."""
        if self.file is None:
            yield self.text
            return
        decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
        with open(self.file, "rb") as file:
            while block := file.read(n_bytes):
                yield self._decoded(decoder, block, position)
                position += len(block)
        yield self._decoded(decoder, b"", position)

    def _decoded(self, decoder: codecs.IncrementalDecoder, block: bytes, position: int) -> str:
        pending = len(decoder.getstate()[0])
        try:
            return decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise InputError(
                f"--prompt_file={str(self.file)!r} is not UTF-8: {error.reason} at byte "
                f"{position - pending + error.start:,}. Convert it first, with iconv -t UTF-8 for example."
            ) from error


def cut_after_lines(parts: Iterable[str]) -> Iterator[str]:
    """The same text, cut after lines as `linrope prepare` cuts it; a text shorter than `LARGEST_PART` is one part."""
    pending = ""
    for part in parts:
        pending += part
        if len(pending) >= LARGEST_PART:
            end = pending.rfind("\n") + 1 or len(pending)
            yield pending[:end]
            pending = pending[end:]
    yield pending
