"""The run behind `linrope fit`, `validate`, `test`, `predict` and `plan`: the sections of its YAML file, Lightning's
command line, its model and its Trainer."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console

from linrope.cli.checkpoint import LANGUAGE_MODELING, RUNS
from linrope.cli.config_files import require_sound_configs, values_of
from linrope.cli.epochs import count_steps, count_validations, require_devices
from linrope.cli.generate import SamplingConfig
from linrope.cli.output import say, say_once
from linrope.cli.own_classes import own_classes
from linrope.cli.parser import add_options, parse, parser_settings
from linrope.cli.ranks import compare_ranks, require_launched
from linrope.cli.tasks import TASKS, name_of_task, task_of
from linrope.cli.trainer_options import (
    require_duration,
    require_gpu,
    require_known_values,
    require_packages_of_loggers,
)
from linrope.errors import InputError
from linrope.interop.roformer import load_trained
from linrope.models.base import Model, ModelConfig, config_in
from linrope.models.saving import CONFIG_FILE, open_checkpoint
from linrope.training.callbacks.monitors import RequireMonitored
from linrope.training.callbacks.named_errors import name_setup_errors
from linrope.training.callbacks.progress import ProgressReport, evaluation_metrics, part_read
from linrope.training.checkpoint import find_last, require_same_model
from linrope.training.optimizer import OptimizerConfig
from linrope.training.precision import AUTO, automatic_precision
from linrope.training.sharding import own_strategy
from linrope.training.task import TrainingTask
from linrope.training.tasks.language_modeling import LanguageModelingModule
from linrope.utils.formatting import bytes_text
from linrope.utils.memory import keep_freed_memory, memory_of
from linrope.utils.options import class_path_of


@dataclass(frozen=True)
class RunConfig:
    """Logs and checkpoints of a run; they are in FOLDER/NAME/version_N. A resumed run goes on in its folder."""

    name: str = "default"
    """Name of the run."""
    folder: str = RUNS
    """Folder of all runs."""
    start_from: str | None = None
    """Checkpoint file, or folder of save_pretrained or `linrope export`, whose weights a new run starts with, at step
    0. The new model may differ in options without weights (window, dropout, gate_normalizer, rope.base, rope.scaling),
    so that rows can be longer. Keep data.fractions, or the run is validated on text that the model was trained on. null
    starts with random weights. A resumed run ignores this option."""
    checkpoint_every_n_steps: int = 500
    """Steps between two checkpoints (last.ckpt; it is also written at the end and on Ctrl-C)."""
    keep_checkpoints: int = 0
    """How many checkpoints to keep beside last.ckpt, as step_N.ckpt: the newest ones; `linrope average` takes the mean
    of their weights."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the weights, 0.999 for example. The averaged weights are validated,
    sampled from and saved in place of the last weights; null does not average."""
    health_every_n_steps: int = 100
    """Steps between two measurements of linear attention's health (columns health/… of metrics.csv); 0 for none. Only
    in language models."""
    spike_factor: float = 3.0
    """Warn when the loss or the gradient norm exceeds this factor × its median over the last 100 steps, and name the
    samples of that step; 0 for no warnings."""
    compile: bool = False
    """Compile the model's blocks for training steps (torch.compile; needs a C++ compiler). The first step takes some
    ten seconds; the others are faster in bf16-mixed."""

    def __post_init__(self) -> None:
        parts = self.name.split("/")  # runs may be grouped in folders
        if any(part in ("", ".", "..") or len(part.encode()) > 200 or not part.isprintable() for part in parts):
            shown = self.name if len(self.name) <= 40 else f"{self.name[:40]}…"
            raise InputError(
                f"run.name={shown!r} names a folder in run.folder: give 1 to 200 printable characters, without '..'; "
                "the folder itself is run.folder."
            )
        if self.checkpoint_every_n_steps < 1:
            raise InputError(f"run.checkpoint_every_n_steps={self.checkpoint_every_n_steps} must be 1 or more.")
        if self.keep_checkpoints < 0:
            raise InputError(f"run.keep_checkpoints={self.keep_checkpoints} must be 0 (none) or more.")
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
    """Optimizer steps to train for; must be set, or trainer.max_epochs for data that has epochs."""
    accelerator: str = "auto"
    """Where to run: "cpu", "gpu" or "auto"."""
    devices: int | str | list[int] = "auto"
    """Number of devices, a list of their indices, or "auto" for all."""
    precision: str | None = None
    """Number format: "32-true" (the default), "bf16-mixed", or "auto": bf16-mixed where the processor or GPU multiplies
    bfloat16, 32-true elsewhere; with a checkpoint, the precision of its run."""
    accumulate_grad_batches: int = 1
    """Batches of one step, whose loss is the mean over all their targets."""
    val_check_interval: int | str | None = 500
    """Training batches between two validations, or a time, as DD:HH:MM:SS. Data with epochs is validated in each where
    this is the default."""
    limit_val_batches: int | float | None = None
    """Batches of a validation: a number, or a fraction of the split (1.0 is all of it)."""
    limit_test_batches: int | float | None = None
    """Batches of `linrope test`: a number, or a fraction of the split."""
    log_every_n_steps: int = 10
    """Steps between two rows of metrics.csv."""
    max_time: str | None = None
    """Stop after this time, as DD:HH:MM:SS, with a checkpoint. A resumed run has the same time again."""
    overfit_batches: int = 0
    """Train on the first batches only, this many, again and again: a check whether a model learns at all. 0 trains on
    the whole text."""
    enable_progress_bar: bool | None = None
    """false prints no progress."""
    enable_checkpointing: bool | None = None
    """false writes no checkpoints."""


TRAINER_DEFAULTS = {
    **vars(TrainerOptions()),
    "max_epochs": -1,  # training is one endless epoch
    "check_val_every_n_epoch": None,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,  # our data loaders shard samples themselves
    "enable_model_summary": False,  # RunSummary prints what matters
}


def sections_of(task: type[TrainingTask]) -> dict[str, type]:
    """The class of each section but `trainer`, whose options are those of Lightning's Trainer."""
    sections = {"model": task.config_class, "optimizer": OptimizerConfig, "data": task.data_class, "run": RunConfig}
    return {**sections, **({"sample": SampleConfig} if writes_text(task) else {}), **task.own_sections}


def writes_text(task: type[TrainingTask]) -> bool:
    """Whether the task trains language models, which have options of their own: samples and segments."""
    return issubclass(task, LanguageModelingModule)


LOGGERS_BY_NAME = Literal["CSVLogger", "TensorBoardLogger"]
"""Loggers that need no options here: they write into the run's folder."""
MAX_PROCESSES = 10_000


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """The checkpoint to measure."""

    ckpt_path: str | None = None
    """Checkpoint file, or a folder of save_pretrained or `linrope export`; last: last.ckpt of the newest run."""


class ConfigCLI(LightningCLI):
    """The command line of a run: sections model, optimizer, data, run, sample, trainer, and a command's own options.
    The task decides the classes of model and data. The first three sections may name a class of the user's
    (`class_path`), whose options are then those of the section.

    `config` holds the configuration as values, `config_init` an object for each section, both without the command's own
    options, which `options` holds. `by_hand`: see `linrope.cli.parser.add_options`.
    """

    console_class: type[Console] = Console

    def __init__(self, command: str, args: Sequence[str], options: type, **by_hand: dict[str, Any]) -> None:
        quiet_lightning()
        require_sound_configs(args)
        self.command, self.options_class, self.by_hand = command, options, by_hand
        self.task = task_of(args)
        self.sections = sections_of(self.task)
        self.own_classes = own_classes(args, {name: self.sections[name] for name in ("model", "optimizer", "data")})
        self.console = self.console_class(highlight=False)
        usage = f"linrope {command} --config FILE [--SECTION.OPTION VALUE ...]"
        if {"-h", "--help"} & set(args):
            self._print_help(ArgumentParser(usage=usage, **parser_settings(command)))
            raise SystemExit(0)
        super().__init__(
            self.task,
            self.task.data_class,
            save_config_callback=None,  # it refuses to write twice; SaveConfig is ours
            trainer_defaults=dict(TRAINER_DEFAULTS),
            seed_everything_default=1,
            parser_kwargs={"usage": usage, **parser_settings(command)},
            args=list(args),
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def _print_help(self, parser: ArgumentParser) -> None:
        """Print the command's own options, those of the sections, and of the Trainer's the usual ones."""
        self.add_default_arguments_to_parser(parser)
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="YAML file with any of these options.")
        for name, section in {**self.sections, **self.own_classes, "trainer": TrainerOptions}.items():
            parser.add_class_arguments(section, name)
        parser.print_help()

    def add_default_arguments_to_parser(self, parser: ArgumentParser) -> None:
        add_options(parser, self.options_class, **self.by_hand)
        seed_help = "Seed of the initial weights and of dropout."
        parser.add_argument("--seed_everything", type=int, default=1, help=seed_help)
        task_help = f"What is trained: {', '.join(TASKS)}; or the class of a task of your own."
        parser.add_argument("--task", type=str, default=LANGUAGE_MODELING, help=task_help)
        if not writes_text(self.task):
            return
        parser.add_argument(
            "--segment_length",
            type=int | None,
            default=None,
            help="Train on sequences in segments of this many tokens: gradients are exact, and memory does not grow "
            "with data.context. null uses whole sequences.",
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for name, section in {**self.sections, **self.own_classes}.items():
            parser.add_class_arguments(section, name)
            if name in self.own_classes:
                parser.add_argument(f"--{name}.class_path", type=str)
        trainer = self.trainer_class
        parser.add_class_arguments(
            trainer, "trainer", skip={"precision", "logger"}, fail_untyped=False, instantiate=False, sub_configs=True
        )
        hints = get_type_hints(trainer.__init__)
        parser.add_argument("--trainer.precision", type=Literal["auto"] | hints["precision"], default=None)
        parser.add_argument("--trainer.logger", type=LOGGERS_BY_NAME | hints["logger"], default=None)
        parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items()})

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        try:
            self.config = parse(parser, args, {f"{name}.": section for name, section in self.sections.items()})
        except InputError:
            require_known_values(args, get_type_hints(self.trainer_class.__init__)["precision"])
            raise
        # config.yaml does not repeat the command's own options: a copy of that run starts from scratch
        names = [field.name for field in fields(self.options_class)]
        self.options = self.options_class(**{name: self.config.pop(name) for name in names})
        for section in (*self.sections, "trainer"):
            if not isinstance(self.config[section], Namespace):
                raise InputError(f"{section}: {self.config[section]!r} must be a section of options, not a value.")
            require_values(self.config[section], {**self.sections, "trainer": TrainerOptions}[section], section)
        self.config.trainer.strategy = own_strategy(self.config.trainer.strategy)
        if (seed := self.config.seed_everything) is None or not 0 <= seed < 2**32:
            raise InputError(f"--seed_everything={seed} must be a number from 0 to {2**32 - 1}.")

    def instantiate_classes(self) -> None:
        options = self.config.clone()
        for section in self.own_classes:
            del options[section]["class_path"]
        require_packages_of_loggers(options.trainer.logger)
        try:
            self.config_init = self.parser.instantiate(options)
        except InputError:
            raise
        except ValueError as error:
            raise InputError(str(error)) from error

    def build_task(self) -> TrainingTask:
        """The task with a new model. InputError if its weights do not fit into this machine's memory."""
        config = self.config_init
        require_memory(config.model)
        own = {name: config[name] for name in self.task.own_sections}
        if writes_text(self.task):
            own["segment_length"] = config.segment_length
        return self.task(config.model, config.optimizer, seed=config.seed_everything, **own)

    def count_steps(self) -> None:
        """Replace options of the Trainer that count epochs by others that count steps and batches."""
        trainer, data = self.config_init.trainer, self.config_init.data
        if self.command == "fit":
            count_validations(trainer, data, TRAINER_DEFAULTS["val_check_interval"])
        count_steps(trainer, data)


class TrainingCLI(ConfigCLI):
    """The run of a command with a checkpoint: its data, model and Trainer. This class measures; `FitCLI` trains.

    `checkpoint` is the path of the checkpoint or folder, `ckpt_path` what Lightning loads: None where the model holds
    its weights already. `why_precision` is the reason for the precision that `trainer.precision: auto` stands for; None
    if the precision was given.
    """

    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        config = self.config_init
        self.checkpoint, self.trained_precision = self.named_checkpoint(), None
        self.ckpt_path = self.checkpoint
        if self.command != "fit":
            config.data.measure("val" if self.command == "validate" else "test")
        trained = self.check_checkpoint()
        if self.command != "fit" and self.path_is_given:
            config.data.measure_path()
        self.why_precision = self._resolve_precision()
        self.datamodule = config.data
        self.model = self.build_task()
        if trained is not None:
            self.model.model, self.ckpt_path = trained, None
        self.trainer = self.instantiate_trainer()

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        super().parse_arguments(parser, args)
        own = any(values_of(args, f"--data.{split}_path") for split in ("val", "test"))
        self.path_is_given = bool(values_of(args, "--data.path")) and not own
        if self.command != "fit":  # of the run's config.yaml, which asked for a check of training
            for name, off in (("fast_dev_run", False), ("overfit_batches", 0.0)):
                if not values_of(args, f"--trainer.{name}"):
                    self.config.trainer[name] = off

    def named_checkpoint(self) -> str | None:
        """The path that --ckpt_path stands for."""
        if (path := self.options.ckpt_path) == "last":
            run = self.config_init.run
            path = str(find_last(Path(run.folder, run.name)))
            say_once(f"--ckpt_path=last is {path}")
        return path

    def _resolve_precision(self) -> str | None:
        """Replace `trainer.precision: auto`, also in what is saved, by what it stands for; return the reason."""
        trainer = self.config_init.trainer
        if trainer.precision != AUTO:
            return None
        if self.trained_precision is not None:
            precision, why = self.trained_precision, "that of the checkpoint"
        else:
            precision, why = automatic_precision(trainer.accelerator)
        trainer.precision = self.config.trainer.precision = precision
        return why

    def check_checkpoint(self) -> Model | None:
        """The model of a folder of save_pretrained; None for a checkpoint, which Lightning loads. InputError if there
        is no checkpoint, or that of another model."""
        if self.checkpoint is None:
            raise InputError(f"--ckpt_path is missing: name the checkpoint to {self.command}.")
        if not Path(self.checkpoint, CONFIG_FILE).is_file():
            self.config_init.data.measure_as(self.open_checkpoint()["linrope"])
            return None
        trained = load_trained(self.checkpoint, self.task.config_class)
        require_same_model(trained.config, self.task.config_of(self.config_init.model), self.checkpoint)
        self.config_init.data.measure_as({"tokenizer": trained.tokenizer, "labels": trained.labels})
        return trained

    def open_checkpoint(self) -> dict[str, Any]:
        """The contents of the checkpoint file. InputError if it holds another model than the configured one."""
        contents = open_checkpoint(self.checkpoint)
        self.trained_precision = contents["linrope"]["precision"]
        trained_task, task = contents["linrope"]["task"], class_path_of(self.task)
        if trained_task != task:
            raise InputError(
                f"checkpoint {str(self.checkpoint)!r} is of the task {trained_task}, and this is {task}: give "
                f"--task {name_of_task(trained_task)}."
            )
        trained = config_in(contents["linrope"]["config"], self.task.config_class, self.checkpoint)
        require_same_model(trained, self.task.config_of(self.config_init.model), self.checkpoint)
        self.config_init.data.keep_split_of(contents["linrope"]["order"])
        return contents

    def instantiate_trainer(self) -> Trainer:
        if self.config_init.trainer.val_check_interval == 0:
            raise InputError(
                "trainer.val_check_interval=0 must be above 0: training batches between two validations. For none, set "
                "trainer.limit_val_batches=0."
            )
        if self.config_init.trainer.barebones:
            raise InputError(
                "trainer.barebones=True leaves out the logs and checkpoints that linrope keeps of every run: remove it."
            )
        for name in ("devices", "num_nodes"):
            number = str(getattr(self.config_init.trainer, name))
            if number.isdecimal() and int(number) > MAX_PROCESSES:
                raise InputError(f"trainer.{name}={number} must be at most {MAX_PROCESSES:,}.")
        require_gpu(self.config_init.trainer.accelerator)
        require_duration(self.config_init.trainer.max_time)
        try:
            loggers = self.loggers()
            self.trainer_defaults["callbacks"] = [*self.callbacks(), *self._progress()]
            for given in self.given_callbacks():
                name_setup_errors(given)
            self.config_init.trainer.callbacks = [RequireMonitored(), *self.given_callbacks()]  # come before these
            trainer = super().instantiate_trainer(logger=loggers or False)
        except InputError:
            raise
        except (ValueError, TypeError, RuntimeError, MisconfigurationException) as error:  # as for two equal callbacks
            raise InputError(f"section trainer: {error}") from error
        require_launched(trainer)
        require_devices(self.config_init.trainer, trainer.world_size)
        if not hasattr(trainer, "val_check_interval"):  # it is a time, and EarlyStopping reads it even so
            trainer.val_check_interval = None
        return trainer

    def given_callbacks(self) -> list[Callback]:
        """The callbacks of `trainer.callbacks`."""
        given = self.config_init.trainer.callbacks or []
        return list(given) if isinstance(given, list) else [given]

    def _progress(self) -> list[Callback]:
        """The progress report, unless the user wants none or has another one: Lightning takes one."""
        trainer = self.config_init.trainer
        has_own = any(isinstance(callback, ProgressBar) for callback in self.given_callbacks())
        if trainer.enable_progress_bar is False or has_own:
            return []
        return [ProgressReport(self.console, trainer.log_every_n_steps or 10)]

    def loggers(self) -> list[Logger]:
        """The Trainer's loggers."""
        return []

    def callbacks(self) -> list[Callback]:
        """The Trainer's callbacks, beside the progress report."""
        return []

    def run(self, **options: Any) -> None:
        """Run the Trainer's method of the command's name; print the metrics of a measurement."""
        keep_freed_memory()  # steps and batches allocate the same again and again
        if self.trainer.world_size > 1:
            compared = {**self.config.as_dict(), "ckpt_path": self.checkpoint}
            compared.pop("config", None)  # the files that it was read from
            compare_ranks(self.trainer, compared, self.config.trainer.strategy)
        split = {"validate": "val"}.get(self.command, self.command)
        if self.command != "fit" and getattr(self.trainer, limit := f"limit_{split}_batches") == 0:
            raise InputError(f"trainer.{limit}=0 leaves nothing to read: set it to 1.0 for the whole split.")
        method = getattr(self.trainer, self.command)
        try:
            method(self.model, self.datamodule, ckpt_path=self.ckpt_path, weights_only=True, **options)
        except MisconfigurationException as error:
            raise InputError(str(error)) from error
        except RuntimeError as error:  # PyTorch raises one, wherever this process is
            self.datamodule.raise_if_killed(error)
            raise
        if self.command in ("validate", "test") and self.trainer.is_global_zero:
            line = evaluation_metrics(self.trainer.callback_metrics, split)
            self.console.print(line, highlight=False, soft_wrap=True)
            if (text := self.datamodule.describe_split(split)) is not None:
                say(f"measured on {text}")
            if (part := part_read(self.trainer, split)) is not None:
                say(part)


def require_values(options: Namespace, config: type, section: str) -> None:
    """Raise InputError for an option that is null, as YAML reads an empty value, where its type has no None."""
    hints = get_type_hints(config if is_dataclass(config) else config.__init__)
    for name, hint in hints.items():
        if name in options and options[name] is None and hint is not type(None) and type(None) not in get_args(hint):
            raise InputError(f"{section}.{name} has no value: give one, or remove the line to keep the default.")


def require_memory(config: ModelConfig) -> None:
    """Raise InputError if a model's weights do not fit into this machine's memory."""
    memory = memory_of()
    if config.least_weight_bytes() > memory:
        raise InputError(
            f"the model's weights do not fit into this machine's memory of {bytes_text(memory)}: lower model.d_model, "
            "model.n_layers, model.d_ff, model.vocab_size or model.short_conv."
        )


def quiet_lightning() -> None:
    """Turn off Lightning's advice that this program already follows."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # that is how they print their tables
    for message in (
        ".*does not have many workers.*",  # reading a window takes microseconds
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*The dirpath has changed from.*",  # a resumed run keeps its own best checkpoint
        ".*GPU available but not used.*",
        ".*callbacks used to create the checkpoint need to be provided.*",  # not to validate it
        ".*LeafSpec.*",  # Lightning's use of a class that newer PyTorch renames
        ".*smaller than the logging interval.*",  # steps are counted over the epochs of trainer.overfit_batches
        ".*sync_dist=True.*",  # what is logged are sums over all ranks already
        ".*Total length of `list` across ranks is zero.*",  # no validation, which the run's summary says
    ):
        warnings.filterwarnings("ignore", message)
