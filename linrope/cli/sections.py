"""The configuration of a run: the sections of its YAML file, and the help that lists their options."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jsonargparse import ActionConfigFile, ArgumentParser

from linrope.cli.generate import SamplingConfig
from linrope.errors import InputError
from linrope.models.language_model import LanguageModelConfig
from linrope.training.data_modules.text import TextDataModule
from linrope.training.optimizer import OptimizerConfig


@dataclass(frozen=True)
class RunConfig:
    """Logs and checkpoints of a run; they are in FOLDER/NAME/version_N."""

    name: str = "default"
    """Name of the run."""
    folder: str = "runs"
    """Folder of all runs."""
    start_from: str | None = None
    """Checkpoint file, or folder of save_pretrained or `linrope export`, whose weights a new run starts with, at step
    0. The new model may differ in options without weights (window, dropout, gate_normalizer, rope.base, rope.scaling),
    so that rows can be longer. Keep data.fractions, or the run is validated on text that the model was trained on. null
    starts with random weights. A resumed run ignores this option."""
    checkpoint_every_n_steps: int = 500
    """Steps between two checkpoints (last.ckpt; it is also written at the end and on Ctrl-C)."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the weights, 0.999 for example. The averaged weights are validated,
    sampled from and saved in place of the last weights; null does not average."""
    health_every_n_steps: int = 100
    """Steps between two measurements of linear attention's health (columns health/… of metrics.csv); 0 for none."""
    spike_factor: float = 3.0
    """Warn when the loss or the gradient norm exceeds this factor × its median over the last 100 steps, and name the
    samples of that step; 0 for no warnings."""

    def __post_init__(self) -> None:
        if self.checkpoint_every_n_steps < 1:
            raise InputError(f"run.checkpoint_every_n_steps={self.checkpoint_every_n_steps} must be 1 or more.")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise InputError(f"run.ema_decay={self.ema_decay} must lie between 0 and 1, or be null for no average.")
        if self.health_every_n_steps < 0:
            raise InputError(f"run.health_every_n_steps={self.health_every_n_steps} must be 0 (never) or more.")
        if self.spike_factor != 0 and not 1 < self.spike_factor < math.inf:
            raise InputError(f"run.spike_factor={self.spike_factor} must be above 1, or 0 for no warnings.")


@dataclass(frozen=True, kw_only=True)
class SampleConfig(SamplingConfig):
    """A text that the model generates when training ends."""

    prompt: str | None = None
    """Text to continue; null generates none."""


@dataclass(frozen=True)
class TrainerOptions:
    """Lightning's Trainer: its usual options. Every other one can be set too, see https://lightning.ai/docs/pytorch"""

    max_steps: int = -1
    """Optimizer steps to train for; must be set."""
    accelerator: str = "auto"
    """Where to run: "cpu", "gpu" or "auto"."""
    devices: int | str | list[int] = "auto"
    """Number of devices, a list of their indices, or "auto" for all."""
    precision: str | None = None
    """Number format: "32-true", or "bf16-mixed" on a GPU."""
    accumulate_grad_batches: int = 1
    """Batches whose gradients are averaged for one step."""
    val_check_interval: int | float | None = 500
    """Training batches between two validations."""
    limit_val_batches: int | float | None = None
    """Batches of a validation: a number, or a fraction of the split (1.0 is all of it)."""
    limit_test_batches: int | float | None = None
    """Batches of `linrope test`: a number, or a fraction of the split."""
    log_every_n_steps: int = 10
    """Steps between two rows of metrics.csv."""
    max_time: str | None = None
    """Stop after this time, as DD:HH:MM:SS."""


TRAINER_DEFAULTS = {
    **vars(TrainerOptions()),
    "max_epochs": -1,  # training is one endless epoch
    "check_val_every_n_epoch": None,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,  # our data loaders shard samples themselves
    "enable_model_summary": False,  # RunSummary prints what matters
}
SECTIONS = {
    "model": LanguageModelConfig,
    "optimizer": OptimizerConfig,
    "data": TextDataModule,
    "run": RunConfig,
    "sample": SampleConfig,
}
"""The class of each section but `trainer`, whose options are those of Lightning's Trainer."""


def add_sections(parser: ArgumentParser) -> None:
    """Add the sections of a run but `trainer`."""
    for name, section in SECTIONS.items():
        parser.add_class_arguments(section, name)


def add_general_options(parser: ArgumentParser) -> None:
    """Add the options of a run that stand in no section."""
    parser.add_argument("--seed_everything", type=int, default=1, help="Seed of the initial weights and of dropout.")
    parser.add_argument(
        "--segment_length",
        type=int | None,
        default=None,
        help="Train on sequences in segments of this many tokens: gradients are exact, and memory does not grow with "
        "data.context. null uses whole sequences.",
    )


def print_help(parser: ArgumentParser) -> None:
    """Print the help of a command that takes a run's configuration: the options of `parser`, which is used for nothing
    else, those of the sections, and the Trainer's usual ones."""
    add_general_options(parser)
    parser.add_argument("-c", "--config", action=ActionConfigFile, help="YAML file with any of these options.")
    add_sections(parser)
    parser.add_class_arguments(TrainerOptions, "trainer")
    parser.print_help()
