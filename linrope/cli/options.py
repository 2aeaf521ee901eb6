"""The command line's own sections: where a run leaves its files, and how text is sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from jsonargparse import ArgumentParser

from linrope.data.corpus.sequences import TokenSequence
from linrope.data.tokenizers.base import Tokenizer
from linrope.errors import InputError
from linrope.evaluation.row_lengths import Excerpt, excerpt_for, parse_lengths
from linrope.generation.decoding import check_max_new_tokens
from linrope.generation.sampling import Sampling


@dataclass(frozen=True)
class RunConfig:
    """Where a run leaves its logs and checkpoints: FOLDER/NAME/version_N."""

    name: str = "default"
    """Name of the run."""
    folder: str = "runs"
    """Folder of all runs."""
    start_from: str | None = None
    """Begin with the weights of this checkpoint file or folder of save_pretrained or `linrope export`: a new run from
    step 0, whose model may differ in what has no weights (window, dropout, gate_normalizer, rope.base, rope.scaling),
    so that rows can be made longer. Keep data.fractions, or it is validated on what it has learned. null begins with
    random weights; a run that is resumed does not look at it."""
    checkpoint_every_n_steps: int = 500
    """Steps between two checkpoints (last.ckpt; it is also written at the end and on Ctrl-C)."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights with this decay, 0.999 for example, and validate, sample and
    save it in the place of the last weights; null for none."""
    health_every_n_steps: int = 100
    """Steps between two looks at the health of linear attention (columns health/… of metrics.csv); 0 for none."""
    spike_factor: float = 3.0
    """Say where the loss or the gradient's norm is more than so many times the median of the 100 steps before, with the
    samples of that step; 0 says nothing."""

    def __post_init__(self) -> None:
        if self.checkpoint_every_n_steps < 1:
            raise InputError(f"run.checkpoint_every_n_steps={self.checkpoint_every_n_steps} must be 1 or more.")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise InputError(f"run.ema_decay={self.ema_decay} must lie between 0 and 1, or be null for no average.")
        if self.health_every_n_steps < 0:
            raise InputError(f"run.health_every_n_steps={self.health_every_n_steps} must be 0 (never) or more.")
        if self.spike_factor != 0 and not 1 < self.spike_factor < math.inf:
            raise InputError(f"run.spike_factor={self.spike_factor} must be above 1, or 0 to say nothing.")


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
        """The keyword arguments of `linrope.generation.decoding.stream`, and how many tokens to draw."""
        return {option.name: getattr(self, option.name) for option in fields(SamplingConfig)}


@dataclass(frozen=True, kw_only=True)
class SampleConfig(SamplingConfig):
    """A text that the model writes when training ends."""

    prompt: str | None = None
    """What the text begins with; null prints none."""


@dataclass(frozen=True)
class PlanConfig:
    """What `linrope plan` is to compare the run with."""

    memory: str | None = None
    tokens_per_second: float | None = None
    measure: bool = False

    def __post_init__(self) -> None:
        if self.tokens_per_second is not None and not 0 < self.tokens_per_second < math.inf:
            raise InputError(f"--tokens_per_second={self.tokens_per_second} must be above 0.")
        if self.measure and self.tokens_per_second is not None:
            raise InputError("--measure and --tokens_per_second exclude each other: give one of them.")


def add_plan_options(parser: ArgumentParser) -> None:
    """The options of `PlanConfig`, `--measure` as a flag."""
    parser.add_argument(
        "--memory",
        type=str | None,
        default=None,
        help="A device's memory, 24GiB for example: say which length of rows fits.",
    )
    parser.add_argument(
        "--tokens_per_second",
        type=float | None,
        default=None,
        help="A rate known from elsewhere: say how long the run takes.",
    )
    parser.add_argument(
        "--measure", action="store_true", help="Measure the rate in a few training steps here, on random tokens."
    )


@dataclass(frozen=True)
class ReportConfig:
    """What `linrope validate` measures beside rows of `data.context`, and where it leaves what it found."""

    lengths: list[str] | None = None
    report: str | None = None
    report_tokens: int = 262_144

    def __post_init__(self) -> None:
        if self.report_tokens < 1:
            raise InputError(f"--report_tokens={self.report_tokens} must be 1 or more.")

    def require_bytes(self, tokenizer: Tokenizer | None) -> None:
        """Raise InputError where nobody has told how many bytes tokens stand for."""
        if tokenizer is None:
            option = "--lengths" if self.lengths else "--report"
            raise InputError(
                f"{option} counts bits per byte, and how many bytes tokens stand for is unknown: set data.tokenizer."
            )

    def text_of(
        self, corpus: TokenSequence, context: int, document_mask: bool, world_size: int
    ) -> tuple[list[int], Excerpt]:
        """The lengths in tokens, and the text to read in rows of each, its documents as validation reads them.

        Raises:
            InputError: lengths that are none or longer than the corpus, or more devices than one.
        """
        lengths = parse_lengths(self.lengths, context)
        if world_size > 1:
            raise InputError(f"--lengths reads on one device, not on {world_size}: set trainer.devices=1.")
        return lengths, excerpt_for(corpus, lengths, self.report_tokens, document_mask)


def add_report_options(parser: ArgumentParser) -> None:
    """The options of `ReportConfig`; lengths as words one after the other, which a dataclass's would not be."""
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=str,
        default=None,
        help="Read the beginning of the validation split in rows of these lengths too, in tokens or as multiples of "
        "data.context: 1x 4x 16x 64x. Rows are read in pieces, so any length fits in memory.",
    )
    parser.add_argument(
        "--report",
        type=str | None,
        default=None,
        help="Folder for the tables as CSV and JSON and, with matplotlib, a picture.",
    )
    parser.add_argument(
        "--report_tokens",
        type=int,
        default=ReportConfig.report_tokens,
        help="How much text --lengths reads, the longest length at least.",
    )
