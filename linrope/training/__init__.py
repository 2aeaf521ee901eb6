"""Training with Lightning: the module, the data module, the callbacks and the command line `linrope`.

And associative recall as a task: `RecallModule` on `MQARDataModule`.
"""

from linrope.training.callbacks import GracefulStop, LastCheckpoint, PrintSample, ProgressReport, RunSummary, Throughput
from linrope.training.checkpoints import CheckpointError, WholeCheckpointIO
from linrope.training.data import TextDataModule
from linrope.training.module import (
    LanguageModelingModule,
    NonFiniteError,
    OptimizerConfig,
    learning_rate_factor,
)
from linrope.training.recall import MQARBatches, MQARDataModule, RecallModule
from linrope.training.trial import TryLargestStages

__all__ = [
    "CheckpointError",
    "GracefulStop",
    "LanguageModelingModule",
    "LastCheckpoint",
    "MQARBatches",
    "MQARDataModule",
    "NonFiniteError",
    "OptimizerConfig",
    "PrintSample",
    "ProgressReport",
    "RecallModule",
    "RunSummary",
    "TextDataModule",
    "Throughput",
    "TryLargestStages",
    "WholeCheckpointIO",
    "learning_rate_factor",
]
