"""The parser and the run behind `linrope fit`, `validate`, `test` and `plan`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from rich.console import Console

from linrope.cli.options import PlanConfig, ReportConfig, RunConfig, SampleConfig, add_plan_options, add_report_options
from linrope.cli.output import _say, _write
from linrope.cli.parser import TrainingParser
from linrope.errors import InputError
from linrope.models.language_model import LanguageModel, LanguageModelConfig
from linrope.models.saving import CONFIG_FILE, open_checkpoint
from linrope.training.callbacks.averaging import AverageWeights, require_same_averaging
from linrope.training.callbacks.health import HealthMonitor
from linrope.training.callbacks.interruption import GracefulStop
from linrope.training.callbacks.last_checkpoint import LastCheckpoint
from linrope.training.callbacks.memory_preflight import MemoryPreflight
from linrope.training.callbacks.progress import ProgressReport
from linrope.training.callbacks.sample import PrintSample
from linrope.training.callbacks.save_config import SaveConfig
from linrope.training.callbacks.spikes import SpikeWarning
from linrope.training.callbacks.summary import RunSummary
from linrope.training.callbacks.throughput import Throughput
from linrope.training.checkpoint import (
    WholeCheckpointIO,
    find_last,
    require_same_model,
    require_training_state,
    start_from,
)
from linrope.training.data_modules.text import TextDataModule
from linrope.training.optimizer import OptimizerConfig
from linrope.training.ranks import is_first_rank
from linrope.training.tasks.language_modeling import LanguageModelingModule
from linrope.utils.files import require_writable

SECTIONS = ("model", "optimizer", "data", "run", "sample", "trainer")


TRAINER_DEFAULTS = {
    "max_epochs": -1,  # training is one endless epoch
    "val_check_interval": 500,
    "check_val_every_n_epoch": None,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 10,
    "use_distributed_sampler": False,  # the loaders deal samples to ranks by themselves
    "enable_model_summary": False,  # RunSummary says what matters
}


TRAINER_HELP = {
    "max_steps": "Optimizer steps to train for; must be set.",
    "accelerator": 'Where to run: "cpu", "gpu" or "auto".',
    "devices": 'How many devices, a list of their numbers, or "auto" for all.',
    "precision": 'Number format: "32-true", or "bf16-mixed" on a GPU.',
    "accumulate_grad_batches": "Batches whose gradients are averaged for one step.",
    "val_check_interval": "Training batches between two validations.",
    "limit_val_batches": "Batches of a validation: a number, or a fraction of the split (1.0 is all of it).",
    "limit_test_batches": "The same for `linrope test`.",
    "log_every_n_steps": "Steps between two rows of metrics.csv.",
    "max_time": "Stop after this long, as DD:HH:MM:SS.",
}


class TrainingCLI(LightningCLI):
    """LightningCLI with the sections model, optimizer, data, run, sample and trainer; runs nothing by itself.

    Args:
        command: "fit", "validate" or "test".
        args: the command line after the command.
        description: what the command does, for its help.
    """

    def __init__(self, command: str, args: Sequence[str], description: str) -> None:
        self.command, self.ckpt_path = command, None
        self.console = Console(highlight=False)
        super().__init__(
            LanguageModelingModule,
            TextDataModule,
            save_config_callback=None,  # it refuses to write twice; SaveConfig is ours
            trainer_defaults=dict(TRAINER_DEFAULTS),
            seed_everything_default=1,
            parser_class=TrainingParser,
            parser_kwargs={
                "prog": f"linrope {command}",
                "usage": f"linrope {command} --config FILE [--SECTION.OPTION VALUE ...]",
                "description": description,
                "allow_abbrev": False,
            },
            args=list(args),
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--seed_everything", type=int, default=1, help="Seed of the first weights and of dropout.")
        folder = "or a folder of save_pretrained or `linrope export`"
        what = "resume from" if self.command == "fit" else f"{self.command}, {folder}"
        parser.add_argument(
            "--segment_length",
            type=int | None,
            default=None,
            help="Read sequences in segments of so many tokens, with exact gradients, in memory that does not grow "
            "with data.context; null reads each at once.",
        )
        if self.command == "plan":
            return add_plan_options(parser)
        parser.add_argument(
            "--ckpt_path", type=str | None, default=None, help=f"Checkpoint file to {what}; last: the newest run's."
        )
        if self.command == "validate":
            add_report_options(parser)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(LanguageModelConfig, "model")
        parser.add_class_arguments(OptimizerConfig, "optimizer")
        parser.add_class_arguments(TextDataModule, "data")
        parser.add_class_arguments(RunConfig, "run")
        parser.add_class_arguments(SampleConfig, "sample")
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items()})
        parser.groups["trainer"].title = "Lightning's Trainer: these, and every other option it has"
        for action in parser._actions:
            section, _, option = action.dest.partition(".")
            if section == "trainer" and option in TRAINER_HELP:
                action.help, action.extra_help = TRAINER_HELP[option], str  # str() is "": no lists of classes
            elif section == "trainer" or (section in SECTIONS and not option):  # not option: a file for one section
                parser.left_out_of_help.append(action)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        self.config = parser.parse_args(args)
        # Not part of what config.yaml repeats: a copy of that run starts from scratch.
        self.ckpt_path = self.config.pop("ckpt_path", None)
        self.report, self.plan = (
            config(**{f.name: self.config.pop(f.name, f.default) for f in fields(config)})
            for config in (ReportConfig, PlanConfig)
        )
        for section in SECTIONS:
            if not isinstance(self.config[section], Namespace):
                raise InputError(f"{section}: {self.config[section]!r} must be a section of options, not a value.")
        if not 0 <= (seed := self.config.seed_everything) < 2**32:
            raise InputError(f"--seed_everything={seed} must be a number from 0 to {2**32 - 1}.")

    def instantiate_classes(self) -> None:
        self.config_init = self.parser.instantiate(self.config)
        if self.command == "plan":
            return
        self._find_checkpoint(self.config_init.run)
        self.checkpoint_given = self.ckpt_path
        self._check_checkpoint(self.config_init.model, self.config_init.run)
        self.datamodule = self.config_init.data
        config = self.config_init
        self.model = LanguageModelingModule(
            config.model, config.optimizer, config.segment_length, config.seed_everything
        )
        if self.pretrained is not None:
            self.model.model = self.pretrained
            self.ckpt_path = None
        self.start = None
        if self.command == "fit" and self.ckpt_path is None and (path := config.run.start_from) is not None:
            self.start = ", ".join([path, *start_from(self.model.model, path, self.datamodule.fractions)])
        self.trainer = self.instantiate_trainer()

    def _find_checkpoint(self, run: RunConfig) -> None:
        """Replaces `last` by the file it stands for, and says which."""
        if self.ckpt_path == "last":
            self.ckpt_path = str(find_last(Path(run.folder, run.name)))
            if is_first_rank():
                _say(f"--ckpt_path=last is {self.ckpt_path}")

    def _check_checkpoint(self, model_config: LanguageModelConfig, run: RunConfig) -> None:
        """Before anything is built: is there a checkpoint where one is needed, and does it fit?"""
        self.pretrained = None  # the model of a folder, which has no state of a trainer
        if self.ckpt_path is None:
            if self.command != "fit":
                raise InputError(f"--ckpt_path is missing: name the checkpoint to {self.command}.")
            return
        if Path(self.ckpt_path, CONFIG_FILE).is_file():
            if self.command == "fit":
                raise InputError(
                    f"--ckpt_path={self.ckpt_path!r} holds weights and no training state to go on from: name a .ckpt "
                    "file of `linrope fit`, or begin a new run with these weights, with --run.start_from."
                )
            self.pretrained = LanguageModel.from_pretrained(self.ckpt_path)
            return require_same_model(self.pretrained.config, model_config, self.ckpt_path)
        checkpoint = open_checkpoint(self.ckpt_path)
        trained = LanguageModelConfig.from_dict(checkpoint["linrope"]["config"])  # an older one lacks newer options
        require_same_model(trained, model_config, self.ckpt_path)
        if self.command != "fit":
            return
        require_training_state(checkpoint, self.ckpt_path)
        require_same_averaging(checkpoint, run.ema_decay, self.ckpt_path)
        max_steps, step = self.config.trainer.max_steps, checkpoint["global_step"]
        if 0 < max_steps <= step:
            raise InputError(
                f"trainer.max_steps={max_steps} is already done: {self.ckpt_path} is at step {step}. Raise it."
            )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        options = self.config_init.trainer
        if options.max_epochs not in (None, -1):
            raise InputError(
                f"trainer.max_epochs={options.max_epochs} has no meaning here, where training draws from an endless "
                "stream of samples: set trainer.max_steps."
            )
        progress = ProgressReport(self.console, options.log_every_n_steps or 10)
        if self.command != "fit":
            self.trainer_defaults["callbacks"] = [progress]
            return self._make_trainer(logger=False, **kwargs)
        loggers = self._loggers() if options.logger in (None, True) else options.logger
        logged_to = [logger.log_dir for logger in loggers if logger.log_dir] if isinstance(loggers, list) else []
        folder = Path((logged_to or [options.default_root_dir or "."])[0])
        self.last_checkpoint = LastCheckpoint(folder / "checkpoints", self.config_init.run.checkpoint_every_n_steps)
        self.trainer_defaults["callbacks"] = [*self._training_callbacks(folder), progress]
        return self._make_trainer(logger=loggers, **kwargs)

    def _make_trainer(self, **options: Any) -> Trainer:
        try:
            trainer = super().instantiate_trainer(**options)
        except (ValueError, TypeError) as error:
            raise InputError(f"section trainer: {error}") from error
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # neither the user's nor a special strategy's
            trainer.strategy.checkpoint_io = WholeCheckpointIO()
        return trainer

    def _loggers(self) -> list[Logger]:
        run = self.config_init.run
        require_writable(Path(run.folder), "run.folder")
        csv = CSVLogger(run.folder, run.name, flush_logs_every_n_steps=1)
        if find_spec("tensorboard") is None:
            return [csv]
        return [csv, TensorBoardLogger(run.folder, run.name, version=csv.version)]

    def _training_callbacks(self, folder: Path) -> list[Callback]:
        sample, decay = self.config_init.sample, self.config_init.run.ema_decay
        callbacks = [
            *([] if decay is None else [AverageWeights(decay)]),  # before what saves or samples
            SaveConfig(folder / "config.yaml", self.parser.dump(self.config), replace=self._goes_on_in(folder)),
            RunSummary(self.console, self.start),
            MemoryPreflight(),
            Throughput(),
            GracefulStop(self.last_checkpoint),
            ModelCheckpoint(folder / "checkpoints", "best", monitor="val_loss", enable_version_counter=False),
            self.last_checkpoint,  # after the best, whose score it keeps
        ]
        if self.config_init.run.health_every_n_steps:
            callbacks.append(HealthMonitor(self.config_init.run.health_every_n_steps))
        if self.config_init.run.spike_factor:
            callbacks.append(SpikeWarning(self.console, self.config_init.run.spike_factor))
        if sample.prompt is not None:
            callbacks.append(PrintSample(_write, sample.prompt, **sample.options))
        return callbacks

    def _goes_on_in(self, folder: Path) -> bool:
        """Whether the run to resume is the one in `folder`: only runs without a version of their own share one."""
        return self.ckpt_path is not None and Path(self.ckpt_path).resolve().is_relative_to(folder.resolve())


def quiet_lightning() -> None:
    """Keeps Lightning's advice to itself where this program has already acted on it."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers.*",  # reading a window takes microseconds
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*The dirpath has changed from.*",  # a resumed run keeps its own best checkpoint
        ".*GPU available but not used.*",
        ".*callbacks used to create the checkpoint need to be provided.*",  # not to validate it
        ".*LeafSpec.*",  # Lightning's use of a class that newer PyTorch renames
        ".*sync_dist=True.*",  # what is logged are sums over all ranks already
    ):
        warnings.filterwarnings("ignore", message)
