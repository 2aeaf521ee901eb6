"""Training with Lightning: the module, the data module, the callbacks and the command line `linrope`."""

from linrope.training.callbacks import GracefulStop, LastCheckpoint, PrintSample, ProgressReport, RunSummary, Throughput
from linrope.training.data import TextDataModule
from linrope.training.module import (
    LanguageModelingModule,
    NonFiniteError,
    OptimizerConfig,
    learning_rate_factor,
)

__all__ = [
    "GracefulStop",
    "LanguageModelingModule",
    "LastCheckpoint",
    "NonFiniteError",
    "OptimizerConfig",
    "PrintSample",
    "ProgressReport",
    "RunSummary",
    "TextDataModule",
    "Throughput",
    "learning_rate_factor",
]
