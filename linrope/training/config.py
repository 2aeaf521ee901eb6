"""The command line's own sections: where a run leaves its files, and how text is sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from linrope.errors import InputError
from linrope.generation import check_sampling


@dataclass(frozen=True)
class RunConfig:
    """Where a run leaves its logs and checkpoints: FOLDER/NAME/version_N."""

    name: str = "default"
    """Name of the run."""
    folder: str = "runs"
    """Folder of all runs."""
    checkpoint_every_n_steps: int = 500
    """Steps between two checkpoints (last.ckpt; it is also written at the end and on Ctrl-C)."""

    def __post_init__(self) -> None:
        if self.checkpoint_every_n_steps < 1:
            raise InputError(f"run.checkpoint_every_n_steps={self.checkpoint_every_n_steps} must be 1 or more.")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How to draw tokens."""

    max_new_tokens: int = 400
    """Tokens (bytes) to add to the prompt; fewer where the model ends the document."""
    temperature: float = 0.8
    """Below 1 the model writes more predictably, above 1 more wildly; 0 always takes the likeliest byte."""
    top_k: int | None = None
    """Choose among the k likeliest bytes only."""
    top_p: float | None = None
    """Choose among the likeliest bytes that together have this probability."""
    seed: int | None = None
    """Names the draw: the same seed gives the same text. null draws anew each time."""

    def __post_init__(self) -> None:
        check_sampling(self.max_new_tokens, self.temperature, self.top_k, self.top_p)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `linrope.generation.stream`, and how many tokens to draw."""
        return {name: getattr(self, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")}


@dataclass(frozen=True, kw_only=True)
class SampleConfig(SamplingConfig):
    """A text that the model writes when training ends."""

    prompt: str | None = None
    """What the text begins with; null prints none."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(SamplingConfig):
    """Which model writes, from which prompt on, and how it draws."""

    ckpt_path: str
    """Checkpoint file, or a folder that save_pretrained wrote."""
    prompt: str = ""
    """What the text begins with."""
    prompt_file: str | None = None
    """A file to take the prompt from, instead of --prompt."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes a CUDA GPU if there is one."""
