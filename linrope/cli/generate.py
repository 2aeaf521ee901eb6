"""`linrope generate` below its options: prompts read piece by piece, text written as it comes, conversations."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from linrope.cli.device import _pick_device
from linrope.cli.options import SamplingConfig
from linrope.cli.output import _write
from linrope.cli.parser import PlainParser
from linrope.errors import InputError
from linrope.generation.decoding import SEGMENT_LENGTH, require_memory
from linrope.generation.prompt_state import load_prompt_state, save_prompt_state
from linrope.generation.sampling import Sampler
from linrope.generation.stop_strings import StopStrings
from linrope.generation.text import TextWriter, Write, printable
from linrope.models.language_model import LanguageModel
from linrope.utils.files import require_new


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(SamplingConfig):
    """Which model writes, from which prompt on, and how it draws."""

    ckpt_path: str
    """Checkpoint file, or a folder that save_pretrained or `linrope export` wrote."""
    prompt: str = ""
    """What the text begins with."""
    prompt_file: str | None = None
    """A file of any size to take the prompt from, instead of --prompt; it is read piece by piece."""
    segment_length: int = SEGMENT_LENGTH
    """Tokens of the prompt that are read at once."""
    stop: list[str] = field(default_factory=list)
    """Strings that end the text, themselves left out."""
    n_continuations: int = 1
    """Texts to write from the prompt, which is read once; with a seed, text i has seed + i - 1."""
    load_state: str | None = None
    """Go on from a state that --save_state wrote with this model; the prompt continues its text."""
    save_state: str | None = None
    """Write the state to this file: that after the prompt, or at the end of an interactive session."""
    overwrite: bool = False
    """Let --save_state replace a file."""
    interactive: bool = False
    """Read lines from the standard input and answer each, keeping the state; Ctrl-C ends an answer, Ctrl-D all."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes a CUDA GPU if there is one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.segment_length < 1:
            raise InputError(f"--segment_length={self.segment_length} must be at least 1.")
        if self.n_continuations < 1:
            raise InputError(f"--n_continuations={self.n_continuations} must be at least 1.")
        if self.interactive and self.n_continuations > 1:
            raise InputError(f"--n_continuations={self.n_continuations} and --interactive exclude each other.")


STOP_HELP = "End the text where this string comes, which is left out; may be given several times."


def generate(args: Sequence[str]) -> None:
    """Write text with a trained model."""
    parser = PlainParser(prog="linrope generate", usage="linrope generate --ckpt_path FILE --prompt TEXT [options]")
    parser.description, parser.allow_abbrev = generate.__doc__, False
    parser.add_class_arguments(GenerateConfig, skip={"stop"})
    parser.add_argument("--stop", action="append", default=[], help=STOP_HELP)
    config = GenerateConfig(**vars(parser.parse_args(args)))
    model = LanguageModel.from_pretrained(config.ckpt_path).to(_pick_device(config.device)).eval()
    run_generate(config, model, _write, Console(stderr=True))


ECHO = 2000
"""Characters of the prompt that are shown again before what the model adds: its last ones."""


LARGEST_PIECE = 2**20
"""Bytes of a prompt that are tokenized at once where tokens are more than bytes."""


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
    state = None if config.load_state is None else load_prompt_state(config.load_state, model)
    prompt = Prompt(config)
    StopStrings(config.stop)  # now, and not after the prompt was read
    n_before = 0 if state is None else state.length
    require_memory(model, n_before + prompt.n_bytes + config.max_new_tokens)
    writer = TextWriter(model, write, state, config.segment_length)
    pieces = prompt.pieces() if writer.tokenizer.name == "bytes" else _after_lines(prompt.pieces(LARGEST_PIECE))
    write(printable(_read_prompt(writer, pieces, prompt.n_bytes, console)))
    if config.interactive:
        converse(writer, config, sys.stdin.buffer.readline, console)
    if config.save_state is not None:
        save_prompt_state(config.save_state, model, writer.state)
    if not config.interactive:
        _write_continuations(writer, config)
    if writer.speed.spent:
        console.print(str(writer.speed), highlight=False, soft_wrap=True)


def _write_continuations(writer: TextWriter, config: GenerateConfig) -> None:
    """All of them from what was read, by the draws of rows 0, 1, … of a batch."""
    state = writer.state
    for row in range(config.n_continuations):
        if config.n_continuations > 1:
            writer.write(f"\n--- continuation {row + 1} ---\n")
        writer.state = state
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
