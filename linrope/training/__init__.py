"""Training with Lightning: tasks, data modules and callbacks.

Tasks: `LanguageModelingModule` trains on a `TextDataModule`; `RecallModule` trains on an `MQARDataModule`,
`CopyDataModule`, `InductionDataModule` or `PasskeyDataModule`; `TranslationModule` trains on a `TranslationDataModule`.
`linrope.cli.tasks.TASKS` has all tasks of the command line. A new task derives from `TrainingTask`.
"""

from linrope.data.corpus.memory import text_of_documents
from linrope.data.corpus.opening import OpenedText
from linrope.data.synthetic.recall_task import RecallBatches
from linrope.errors import CheckpointError, NonFiniteError
from linrope.training.callbacks.busy_cores import BusyCores
from linrope.training.callbacks.memory_preflight import MemoryPreflight
from linrope.training.callbacks.progress import ProgressReport
from linrope.training.callbacks.saving import GracefulStop, LastCheckpoint
from linrope.training.callbacks.summary import PrintSample, RunSummary
from linrope.training.callbacks.throughput import Throughput
from linrope.training.checkpoint import WholeCheckpointIO
from linrope.training.data_modules.base import RankSampler, ResumableDataModule
from linrope.training.data_modules.recall import (
    CopyDataModule,
    InductionDataModule,
    MQARDataModule,
    PasskeyDataModule,
    RecallDataModule,
)
from linrope.training.data_modules.text import TextDataModule
from linrope.training.data_modules.translation import TranslationDataModule
from linrope.training.optimizer import OptimizerConfig, learning_rate_factor
from linrope.training.sharding import ShardedStrategy
from linrope.training.task import BatchLoss, TrainingTask
from linrope.training.tasks.language_modeling import LanguageModelingModule
from linrope.training.tasks.recall import RecallModule
from linrope.training.tasks.translation import TranslationConfig, TranslationModule

__all__ = [
    "BatchLoss",
    "BusyCores",
    "CheckpointError",
    "CopyDataModule",
    "GracefulStop",
    "InductionDataModule",
    "LanguageModelingModule",
    "LastCheckpoint",
    "MQARDataModule",
    "MemoryPreflight",
    "NonFiniteError",
    "OpenedText",
    "OptimizerConfig",
    "PasskeyDataModule",
    "PrintSample",
    "ProgressReport",
    "RankSampler",
    "RecallBatches",
    "RecallDataModule",
    "RecallModule",
    "ResumableDataModule",
    "RunSummary",
    "ShardedStrategy",
    "TextDataModule",
    "Throughput",
    "TrainingTask",
    "TranslationConfig",
    "TranslationDataModule",
    "TranslationModule",
    "WholeCheckpointIO",
    "learning_rate_factor",
    "text_of_documents",
]
