"""Training with Lightning: the module, the data module, the callbacks and the command line `linrope`.

And recall as a task: `RecallModule` on `MQARDataModule`, `CopyDataModule`, `InductionDataModule`, `PasskeyDataModule`.
"""

from linrope.errors import NonFiniteError
from linrope.training.callbacks import GracefulStop, LastCheckpoint, PrintSample, ProgressReport, RunSummary
from linrope.training.checkpoints import CheckpointError, WholeCheckpointIO
from linrope.training.data import TextDataModule
from linrope.training.module import (
    LanguageModelingModule,
    OptimizerConfig,
    learning_rate_factor,
)
from linrope.training.passkey import PasskeyDataModule
from linrope.training.recall import (
    CopyDataModule,
    InductionDataModule,
    MQARDataModule,
    RecallBatches,
    RecallDataModule,
    RecallModule,
)
from linrope.training.throughput import Throughput
from linrope.training.trial import TryLargestStages

__all__ = [
    "CheckpointError",
    "CopyDataModule",
    "GracefulStop",
    "InductionDataModule",
    "LanguageModelingModule",
    "LastCheckpoint",
    "MQARDataModule",
    "NonFiniteError",
    "OptimizerConfig",
    "PasskeyDataModule",
    "PrintSample",
    "ProgressReport",
    "RecallBatches",
    "RecallDataModule",
    "RecallModule",
    "RunSummary",
    "TextDataModule",
    "Throughput",
    "TryLargestStages",
    "WholeCheckpointIO",
    "learning_rate_factor",
]
