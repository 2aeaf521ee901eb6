"""`linrope generate`: text from a prompt, continuations of one prompt, conversations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskProgressColumn, TimeRemainingColumn

from linrope.cli.checkpoint import ModelOptions
from linrope.cli.output import write as write_to_stdout
from linrope.cli.parser import parse_command
from linrope.cli.prompts import LARGEST_PART, Prompt, cut_after_lines
from linrope.errors import InputError
from linrope.generation.decoding import SEGMENT_LENGTH, require_memory, require_row
from linrope.generation.prompt_state import load_prompt_state, save_prompt_state
from linrope.generation.sampling import Sampler, Sampling
from linrope.generation.text import StopStrings, TextWriter, Write, printable
from linrope.models.language_model import LanguageModel
from linrope.utils.files import require_new
from linrope.utils.options import require_whole
from linrope.utils.terminal import progress_bar

ECHO = 2000
"""Characters of the prompt that are printed before the generated text: its last ones."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Sampling):
    """How to sample tokens, and how many."""

    max_new_tokens: int = 400
    """Tokens (bytes) to add to the prompt; fewer if the model ends the document."""
    temperature: float = 0.8
    """Below 1 the text is more predictable, above 1 more random; 0 always takes the likeliest token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("max_new_tokens", self.max_new_tokens, least=0)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `linrope.generation.decoding.stream`, `max_new_tokens` among them."""
        return {option.name: getattr(self, option.name) for option in fields(SamplingConfig)}


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(ModelOptions, SamplingConfig):
    """The model, the prompt, and how tokens are sampled."""

    prompt: str = ""
    """Text to continue."""
    prompt_file: str | None = None
    """File with the prompt, instead of --prompt. It may have any size: it is read in segments."""
    segment_length: int = SEGMENT_LENGTH
    """Tokens of the prompt that the model reads in one step."""
    stop: list[str] = field(default_factory=list)
    """Strings that end the text; they are not printed."""
    n_continuations: int = 1
    """Number of texts to generate. The prompt is read once; with a seed, text i has seed + i - 1."""
    load_state: str | None = None
    """State file that --save_state wrote with this model; the prompt continues its text."""
    save_state: str | None = None
    """File for the model's state after the prompt; with --interactive, at the end of the conversation."""
    overwrite: bool = False
    """Allow --save_state to replace a file."""
    interactive: bool = False
    """Answer each line of the standard input and keep the state. Ctrl-C ends an answer, Ctrl-D the conversation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("segment_length", "n_continuations"):
            if (value := getattr(self, name)) < 1:
                raise InputError(f"--{name}={value} must be at least 1.")
        if self.interactive and self.n_continuations > 1:
            raise InputError(f"--n_continuations={self.n_continuations} and --interactive exclude each other.")


def run(args: Sequence[str]) -> None:
    """Run `linrope generate` with the command line `args`."""
    stop_help = "End the text before this string; the option may be given several times."
    stop = {"action": "append", "default": [], "help": stop_help}
    config = parse_command("generate", GenerateConfig, args, "--ckpt_path FILE --prompt TEXT [options]", stop=stop)
    generate(config, config.load(), write_to_stdout, Console(stderr=True))


def generate(config: GenerateConfig, model: LanguageModel, write: Write, console: Console) -> None:
    """Read the prompt and write text, part by part; the progress bar and the speed go to the console.

    Raises:
        InputError: before any work: a file that exists or cannot be read, a prompt that is not UTF-8, a state of
            another model; a text whose keys and values do not fit into memory, with bytes before it is read, with other
            tokens as soon as it has too many.
    """
    if config.save_state is not None:
        require_new(Path(config.save_state), "--save_state", config.overwrite)
    state = None if config.load_state is None else load_prompt_state(config.load_state, model)
    if state is not None and len(state.logits) != 1:
        raise InputError(
            f"--load_state={config.load_state!r} holds {len(state.logits)} texts: save one of them, "
            "state.select_rows([0]), and give that file."
        )
    prompt = Prompt(config.prompt, config.prompt_file)
    StopStrings(config.stop)  # checks them before the prompt is read
    n_before = 0 if state is None else state.length
    writer = TextWriter(model, write, state, config.segment_length)
    in_bytes = writer.tokenizer.name == "bytes"
    if in_bytes:  # other tokens are counted as they are read
        require_memory(model, n_before + prompt.n_bytes + config.max_new_tokens)
    parts = prompt.parts(config.segment_length) if in_bytes else cut_after_lines(prompt.parts(LARGEST_PART))
    write(printable(_read_prompt(writer, parts, prompt.n_bytes, config.max_new_tokens, console)))
    if config.interactive:
        converse(writer, config, sys.stdin.buffer.readline, console)
    if config.save_state is not None:
        save_prompt_state(config.save_state, model, writer.state)
    if not config.interactive:
        _write_continuations(writer, config)
    if writer.speed.spent:
        console.print(str(writer.speed), highlight=False, soft_wrap=True)


def _write_continuations(writer: TextWriter, config: GenerateConfig) -> None:
    """Write every continuation from the same state; continuation i samples as row i of a batch."""
    state = writer.state
    for row in range(config.n_continuations):
        if config.n_continuations > 1:
            writer.write(f"\n--- continuation {row + 1} ---\n")
        writer.state = state
        writer.continue_text(config.max_new_tokens, Sampler(config, first_row=row), config.stop)
        writer.write("\n")


def converse(writer: TextWriter, config: GenerateConfig, readline: Callable[[], bytes], console: Console) -> None:
    """Read a line, write an answer, and so on; all of it is one text, whose state is kept.

    Ctrl-C ends an answer; between answers it ends the conversation, as Ctrl-D does. A line that is no UTF-8 is refused.
    """
    sampler, line_is_open = Sampler(config), False  # whether the text so far ends within a line
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
            shown = kept = "…"  # interrupted, perhaps within a line
        line_is_open = bool(kept) and not kept.endswith("\n")
        writer.write("" if shown.endswith("\n") else "\n")


def _read_prompt(writer: TextWriter, parts: Iterable[str], n_bytes: int, max_new_tokens: int, console: Console) -> str:
    """Read the prompt behind a bar that counts its bytes; return its end, to be printed. InputError once it has so many
    tokens that memory does not hold them, or the model has no positions for them."""
    shown = ""
    columns = BarColumn(bar_width=None), TaskProgressColumn(), DownloadColumn(), TimeRemainingColumn()
    with progress_bar(console, *columns) as bar:
        task = bar.add_task("prompt", total=n_bytes or None)
        for part in parts:
            writer.read(part)
            if writer.state is not None:
                require_row(writer.model, writer.state.length, max_new_tokens, "--max_new_tokens")
                require_memory(writer.model, writer.state.length + max_new_tokens)
            shown = (shown + part)[-ECHO - 1 :]
            bar.advance(task, len(part.encode()))
    return shown if len(shown) <= ECHO else f"…{shown[1:]}"
