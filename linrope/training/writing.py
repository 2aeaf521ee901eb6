"""`linrope generate` below its options: prompts read piece by piece, text written as it comes, conversations."""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from linrope.checkpoints import require_new
from linrope.context import Context, load_context, save_context
from linrope.data import StopStrings, Tokenizer, tokenizer_from_plain
from linrope.errors import InputError
from linrope.generation import SEGMENT_LENGTH, Sampler, Sampling, read, require_memory
from linrope.model import LanguageModel
from linrope.training.config import GenerateConfig

ECHO = 2000
"""Characters of the prompt that are shown again before what the model adds: its last ones."""

LARGEST_PIECE = 2**20
"""Bytes of a prompt that are tokenized at once where tokens are more than bytes."""

Write = Callable[[str], Any]


class TextWriter:
    """A text under way: `context` is what the model has read of it, what it wrote itself among that.

    It is whole after every token, so that writing may be broken off anywhere.

    Args:
        model: in evaluation mode.
        write: where text goes, piece by piece as it is made.
        context: a text to go on with; None begins a document.
        segment_length: tokens of a prompt that are read at once.
    """

    def __init__(
        self,
        model: LanguageModel,
        write: Write,
        context: Context | None = None,
        segment_length: int = SEGMENT_LENGTH,
    ) -> None:
        self.model, self.write, self.context, self.segment_length = model, write, context, segment_length
        self.device = next(model.parameters()).device
        self.tokenizer = require_tokenizer(model, "prompt")
        self.speed = Speed()

    def read(self, text: str) -> None:
        """Read on."""
        tokens = self.tokenizer.encode_prompt(text)
        if self.context is not None:  # the text goes on: no document begins
            tokens = tokens[1:]
        if len(tokens) == 0:
            return
        with self.speed.of("read", len(tokens)):
            tokens = tokens[None].to(self.device)
            self.context = read(self.model, tokens, self.context, segment_length=self.segment_length)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    def continue_text(self, max_new_tokens: int, sampler: Sampler, stops: Sequence[str] = ()) -> tuple[str, str]:
        """Write until the document ends, a stop string comes, or so many tokens are there.

        The token that ends a document counts as written, but is not read: what is read next goes on in the same one.

        Returns:
            The text that was shown, and that which was read: a stop string is in the latter only.
        """
        decoder, until = self.tokenizer.decoder(), StopStrings(stops)
        shown: list[str] = []
        kept: list[str] = []

        def show(text: str) -> None:
            shown.append(text)
            self.write(printable(text))

        for _ in range(max_new_tokens):
            with self.speed.of("written", 1):
                token = sampler.draw(self.context)
                if token.item() == self.tokenizer.separator:
                    break
                kept.append(decoder.feed(token))
                show(until.feed(kept[-1]))
                self.context = read(self.model, token[:, None], self.context)
            if until.found is not None:
                break
        kept.append(decoder.finish())
        show(until.finish(kept[-1]))
        return "".join(shown), "".join(kept)


class Speed:
    """Tokens and seconds by what was done with them."""

    def __init__(self) -> None:
        self.spent: dict[str, tuple[int, float]] = {}

    @contextmanager
    def of(self, what: str, tokens: int) -> Iterator[None]:
        """The time inside counts for so many tokens, unless it ends with an exception."""
        began = time.perf_counter()
        yield
        before, seconds = self.spent.get(what, (0, 0.0))
        self.spent[what] = before + tokens, seconds + time.perf_counter() - began

    def __str__(self) -> str:
        return ", ".join(
            f"{tokens:,} tokens {what} ({tokens / seconds:,.0f} per second)"
            for what, (tokens, seconds) in self.spent.items()
        )


def write_sample(write: Write, model: LanguageModel, prompt: str, *, max_new_tokens: int, **sampling: Any) -> None:
    """Writes `prompt` and what `model` adds to it, piece by piece as it is made, up to the end of the document.

    Args:
        write: where the pieces go.
        model: in evaluation mode.
        prompt: what the document begins with.
        max_new_tokens: how many to write at most.
        sampling: the fields of `linrope.generation.Sampling`.
    """
    writer = TextWriter(model, write)
    write(printable(prompt))
    writer.read(prompt)
    writer.continue_text(max_new_tokens, Sampler(Sampling(**sampling)))
    write("\n")


def require_tokenizer(model: LanguageModel, option: str) -> Tokenizer:
    """The tokenizer that a model was trained with; InputError, for what `option` asks, where nobody has told."""
    if (tokenizer := tokenizer_from_plain(model.tokenizer, "the model's tokenizer")) is None:
        raise InputError(
            f"{option} needs a tokenizer, and the model was trained on tokens without one: train it with "
            "data.tokenizer set (sample.prompt=null trains without)."
        )
    if model.config.vocab_size < tokenizer.vocab_size:
        raise InputError(
            f"{option} needs a model of text: this one knows {model.config.vocab_size:,} tokens, the tokenizer "
            f"{tokenizer.name} has {tokenizer.vocab_size:,}."
        )
    return tokenizer


_CONTROL_CHARACTERS = {code: "\ufffd" for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """`text` with U+FFFD for what would steer a terminal: a model may write any byte."""
    return text.encode("utf-8", errors="replace").decode("utf-8").translate(_CONTROL_CHARACTERS)


# --- the command -----------------------------------------------------------------------------------------------------


def run_generate(config: GenerateConfig, model: LanguageModel, write: Write, console: Console) -> None:
    """What `linrope generate` does with a model: all but parsing its options and finding the model.

    Args:
        config: the options.
        model: in evaluation mode, on its device.
        write: where text goes.
        console: where the progress bar and the speed go; not where the text goes.

    Raises:
        InputError: before any work: a file that is there or cannot be read, a prompt that is not UTF-8, a state of
            another model, a text whose keys and values do not fit.
    """
    if config.save_state is not None:
        require_new(Path(config.save_state), "--save_state", config.overwrite)
    context = None if config.load_state is None else load_context(config.load_state, model)
    prompt = Prompt(config)
    StopStrings(config.stop)  # now, and not after the prompt was read
    n_before = 0 if context is None else context.length
    require_memory(model, n_before + prompt.n_bytes + config.max_new_tokens)
    writer = TextWriter(model, write, context, config.segment_length)
    pieces = prompt.pieces() if writer.tokenizer.name == "bytes" else _after_lines(prompt.pieces(LARGEST_PIECE))
    write(printable(_read_prompt(writer, pieces, prompt.n_bytes, console)))
    if config.interactive:
        converse(writer, config, sys.stdin.buffer.readline, console)
    if config.save_state is not None:
        save_context(config.save_state, model, writer.context)
    if not config.interactive:
        _write_continuations(writer, config)
    if writer.speed.spent:
        console.print(str(writer.speed), highlight=False, soft_wrap=True)


def _write_continuations(writer: TextWriter, config: GenerateConfig) -> None:
    """All of them from what was read, by the draws of rows 0, 1, … of a batch."""
    context = writer.context
    for row in range(config.n_continuations):
        if config.n_continuations > 1:
            writer.write(f"\n--- continuation {row + 1} ---\n")
        writer.context = context
        writer.continue_text(config.max_new_tokens, Sampler(config, first_row=row), config.stop)
        writer.write("\n")


def converse(writer: TextWriter, config: GenerateConfig, readline: Callable[[], bytes], console: Console) -> None:
    """Turn by turn: a line is read, an answer written, all of it one text. Ctrl-C ends an answer, the end of the input
    (Ctrl-D) the conversation, and so does Ctrl-C where no answer is being written.

    A line that is not UTF-8 is refused, and asked for again.
    """
    sampler, line_is_open = Sampler(config), False  # whether the text that was read ends within a line
    while True:
        if console.is_terminal:
            console.file.write("> ")
            console.file.flush()
        try:
            line = readline()
        except KeyboardInterrupt:
            line = b""
        if not line:
            if console.is_terminal:
                console.print()
            return
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            console.print(f"that line is not UTF-8 ({error.reason} at byte {error.start}): type it again", markup=False)
            continue
        try:
            writer.read(f"\n{text}" if line_is_open else text)
            shown, kept = writer.continue_text(config.max_new_tokens, sampler, config.stop)
        except KeyboardInterrupt:
            shown = kept = "…"  # broken off, perhaps within a line
        line_is_open = bool(kept) and not kept.endswith("\n")
        writer.write("" if shown.endswith("\n") else "\n")


class Prompt:
    """The text that `--prompt` or `--prompt_file` gives, in pieces of about a segment.

    A file (no pipe) is looked through once before, so that a mistake in its last byte does not cost the reading of the
    others.

    Raises:
        InputError: both are given, a file cannot be read, a text is not UTF-8.
    """

    def __init__(self, config: GenerateConfig) -> None:
        self.text, self.piece = config.prompt, config.segment_length
        self.file = None if config.prompt_file is None else Path(config.prompt_file)
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
                for _ in self.pieces(2**20):
                    pass
        except OSError as error:
            raise InputError(f"--prompt_file={str(self.file)!r} cannot be read: {error.strerror}.") from error

    def pieces(self, size: int | None = None) -> Iterator[str]:
        """The text, piece by piece of so many bytes; None takes about a segment."""
        if self.file is None:
            yield self.text
            return
        decoder, place = codecs.getincrementaldecoder("utf-8")(), 0
        with open(self.file, "rb") as file:
            while block := file.read(size or self.piece):
                yield self._decoded(decoder, block, place)
                place += len(block)
        yield self._decoded(decoder, b"", place)

    def _decoded(self, decoder: codecs.IncrementalDecoder, block: bytes, place: int) -> str:
        waiting = len(decoder.getstate()[0])
        try:
            return decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise InputError(
                f"--prompt_file={str(self.file)!r} is not UTF-8: {error.reason} at byte "
                f"{place - waiting + error.start:,}. Convert it first, with iconv -t UTF-8 for example."
            ) from error


def _after_lines(pieces: Iterable[str]) -> Iterator[str]:
    """The same text, a long one cut after lines, as `linrope prepare` cuts it; what is short, or empty, as a whole."""
    waiting = ""
    for piece in pieces:
        waiting += piece
        if len(waiting) >= LARGEST_PIECE:
            end = waiting.rfind("\n") + 1 or len(waiting)
            yield waiting[:end]
            waiting = waiting[end:]
    yield waiting


def _read_prompt(writer: TextWriter, pieces: Iterable[str], n_bytes: int, console: Console) -> str:
    """Reads it under a bar; returns its end, to be shown."""
    shown = ""
    for piece in _with_bar(pieces, n_bytes, console):
        writer.read(piece)
        shown = (shown + piece)[-ECHO - 1 :]
    return shown if len(shown) <= ECHO else f"…{shown[1:]}"


def _with_bar(pieces: Iterable[str], n_bytes: int, console: Console) -> Iterator[str]:
    """The pieces, under a bar that counts their bytes; in a pipe there is none."""
    columns = TextColumn("prompt"), BarColumn(bar_width=None), TaskProgressColumn(), DownloadColumn()
    progress = Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal, transient=True
    )
    with progress:
        task = progress.add_task("", total=n_bytes or None)
        for piece in pieces:
            yield piece
            progress.advance(task, len(piece.encode()))
