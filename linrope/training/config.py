"""The command line's own sections: where a run leaves its files, and how text is sampled."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from linrope.errors import InputError
from linrope.generation import SEGMENT_LENGTH, Sampling, check_max_new_tokens


@dataclass(frozen=True)
class RunConfig:
    """Where a run leaves its logs and checkpoints: FOLDER/NAME/version_N."""

    name: str = "default"
    """Name of the run."""
    folder: str = "runs"
    """Folder of all runs."""
    checkpoint_every_n_steps: int = 500
    """Steps between two checkpoints (last.ckpt; it is also written at the end and on Ctrl-C)."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights with this decay, 0.999 for example, and validate, sample and
    save it in the place of the last weights; null for none."""

    def __post_init__(self) -> None:
        if self.checkpoint_every_n_steps < 1:
            raise InputError(f"run.checkpoint_every_n_steps={self.checkpoint_every_n_steps} must be 1 or more.")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise InputError(f"run.ema_decay={self.ema_decay} must lie between 0 and 1, or be null for no average.")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Sampling):
    """How to draw tokens, and how many."""

    max_new_tokens: int = 400
    """Tokens (bytes) to add to the prompt; fewer where the model ends the document."""
    temperature: float = 0.8
    """Below 1 the model writes more predictably, above 1 more wildly; 0 always takes the likeliest token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_max_new_tokens(self.max_new_tokens)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `linrope.generation.stream`, and how many tokens to draw."""
        return {option.name: getattr(self, option.name) for option in fields(SamplingConfig)}


@dataclass(frozen=True, kw_only=True)
class SampleConfig(SamplingConfig):
    """A text that the model writes when training ends."""

    prompt: str | None = None
    """What the text begins with; null prints none."""


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


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Which model to write, and where."""

    ckpt_path: str
    """Checkpoint file of `linrope fit`, or a folder that save_pretrained wrote."""
    output: str
    """Folder to write, made where missing."""
    overwrite: bool = False
    """Replace a model that the folder holds."""
