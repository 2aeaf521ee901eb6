"""The command line: `linrope fit | validate | test | plan | recall | generate | prepare | export`.

The first three are Lightning's: every option of its Trainer can be set, in YAML or as `--trainer.OPTION`. `plan` takes
the same options, and runs nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import shlex
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace, set_parsing_settings
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from linrope.checkpoints import CONFIG_FILE, open_checkpoint, require_writable
from linrope.data import DocumentChanged
from linrope.errors import InputError, NonFiniteError, suggest
from linrope.footprint import shapes_only
from linrope.model import LanguageModel, LanguageModelConfig
from linrope.segments import require_segments
from linrope.training.averaging import AverageWeights, require_same_averaging
from linrope.training.callbacks import (
    GracefulStop,
    Interrupted,
    LastCheckpoint,
    PrintSample,
    ProgressReport,
    RunSummary,
    SaveConfig,
)
from linrope.training.checkpoints import (
    CheckpointError,
    WholeCheckpointIO,
    find_last,
    require_same_model,
    require_training_state,
    start_from,
)
from linrope.training.config import (
    ExportConfig,
    GenerateConfig,
    PlanConfig,
    RecallConfig,
    ReportConfig,
    RunConfig,
    SampleConfig,
    add_case_options,
    add_plan_options,
    add_report_options,
)
from linrope.training.data import TextDataModule
from linrope.training.extrapolation import read_lengths
from linrope.training.extrapolation import show as show_lengths
from linrope.training.extrapolation import write as write_lengths
from linrope.training.health import HealthMonitor, SpikeWarning
from linrope.training.module import LanguageModelingModule, OptimizerConfig
from linrope.training.plan import Setting, measure_rate
from linrope.training.plan import show as show_plan
from linrope.training.prepare import run_prepare
from linrope.training.ranks import first_rank_speaks, is_first_rank
from linrope.training.reading import LengthReading
from linrope.training.recall_map import recall_by_depth, require_cases, table_of
from linrope.training.recall_map import write as write_recall
from linrope.training.reports import WITHOUT_PICTURES, can_draw, make_folder, name_of
from linrope.training.throughput import Throughput
from linrope.training.trial import TryLargestStages
from linrope.training.usage import PlainParser, TrainingParser
from linrope.training.writing import run_generate
from linrope.units import parse_bytes

set_parsing_settings(docstring_parse_attribute_docstrings=True)

STOP_HELP = "End the text where this string comes, which is left out; may be given several times."

DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # for this user, too, and for one file

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
    """

    def __init__(self, command: str, args: Sequence[str]) -> None:
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
                "description": COMMANDS[command].__doc__,
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
            TryLargestStages(),
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


def fit(args: Sequence[str]) -> None:
    """Train a language model."""
    cli = TrainingCLI("fit", args)
    try:
        cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=cli.ckpt_path, weights_only=True)
    except Interrupted as interrupted:
        if not cli.trainer.is_global_zero:
            pass  # the first rank speaks for all
        elif interrupted.checkpoint is None:
            again = f"resume from {cli.ckpt_path} again" if cli.ckpt_path else "there is nothing to resume"
            _say(f"stopped before a step was finished: {again}.")
        else:
            resume = _command_line("fit", _without_option(args, "--ckpt_path"), "--ckpt_path", interrupted.checkpoint)
            _say(f"stopped after step {interrupted.step}. To go on from there:\n  {resume}")
        raise
    if cli.trainer.is_global_zero:
        lines = [f"\ncheckpoint  {(path := cli.last_checkpoint.path)}"]
        if cli.datamodule.tokenizer is not None:  # tokens that nobody can read are not written
            prompt = cli.config_init.sample.prompt or "import "
            lines.append(f"sample      {_command_line('generate', ['--ckpt_path', path, '--prompt', prompt])}")
        cli.console.print(*lines, sep="\n", markup=False, soft_wrap=True)


def validate(args: Sequence[str]) -> None:
    """Measure a checkpoint on the validation split: by position in the row, and in longer rows (--lengths)."""
    cli = TrainingCLI("validate", args)
    data, checkpoint = cli.datamodule, cli.checkpoint_given
    if cli.report.report is not None or cli.report.lengths:  # now, so that a mistake costs no validation
        data.open()
        cli.report.require_bytes(data.tokenizer)
    folder = None if cli.report.report is None else make_folder("--report", cli.report.report)
    if cli.report.lengths:
        corpus = data.open()["val"]
        lengths, text = cli.report.text_of(corpus, data.context, data.documents, cli.trainer.world_size)
    cli.trainer.validate(cli.model, data, ckpt_path=cli.ckpt_path, verbose=False, weights_only=True)
    if not cli.trainer.is_global_zero:
        return
    readings = [LengthReading.of_rows(data.context, cli.model.loss_by_position)]
    if cli.report.lengths:
        with cli.trainer.precision_plugin.val_step_context():
            model = cli.model.model.to(cli.trainer.strategy.root_device)
            readings = read_lengths(cli.console, model, text, lengths, data.context)
    show_lengths(cli.console, readings, data.context, at_lengths=bool(cli.report.lengths))
    if folder is not None:
        details = {"command": _command_line("validate", args), "checkpoint": checkpoint, "context": data.context}
        written = write_lengths(folder, readings, details, f"{name_of(checkpoint)}, trained at {data.context:,}")
        _say_written(cli.console, written)


def test(args: Sequence[str]) -> None:
    """Measure a checkpoint on the test split."""
    cli = TrainingCLI("test", args)
    cli.trainer.test(cli.model, cli.datamodule, ckpt_path=cli.ckpt_path, verbose=False, weights_only=True)


def plan(args: Sequence[str]) -> None:
    """Say what a run will take before it runs: memory against length, operations, time."""
    cli = TrainingCLI("plan", args)
    config, wanted = cli.config_init, cli.plan
    memory = None if wanted.memory is None else parse_bytes(wanted.memory)
    if config.segment_length is not None:
        require_segments(shapes_only(config.model), config.segment_length)
    setting = planned(config)
    rate = wanted.tokens_per_second
    if wanted.measure:
        rate = measure_rate(setting) * setting.devices
        if setting.devices > 1:
            cli.console.print(f"measured on one device, and counted {setting.devices} times")
    show_plan(cli.console, setting, memory, rate)


def planned(config: Namespace) -> Setting:
    """What a run's costs follow from, of its configuration."""
    data, trainer = config.data, config.trainer
    gpu = trainer.accelerator in ("gpu", "cuda") or (trainer.accelerator == "auto" and torch.cuda.is_available())
    devices = _n_devices(trainer.devices, gpu) * trainer.num_nodes
    plan = data.plan_for(trainer.accumulate_grad_batches * devices)
    if trainer.max_steps >= 1:
        data.require_steps(plan, trainer.max_steps)
    return Setting(
        model=config.model,
        plan=plan,
        devices=devices,
        max_steps=trainer.max_steps,
        segment_length=config.segment_length,
        apart=data.documents == "apart",
        precision=str(trainer.precision or "32-true"),
        averaged=config.run.ema_decay is not None,
        device="cuda" if gpu else "cpu",
    )


def _n_devices(devices: int | str | list[int], gpu: bool) -> int:
    """How many a run would have; where it takes all there are, those of this machine."""
    if isinstance(devices, list):
        return len(devices)
    if str(devices).isdecimal():
        return int(devices)
    return max(1, torch.cuda.device_count()) if gpu else 1


def recall(args: Sequence[str]) -> None:
    """Measure what a model recalls, by length and depth: a pass key in text, or an induction step."""
    parser = PlainParser(prog="linrope recall", usage="linrope recall --ckpt_path FILE [--lengths N N ...] [options]")
    parser.description, parser.allow_abbrev = recall.__doc__, False
    parser.add_class_arguments(RecallConfig, skip={"lengths", "depths"})
    add_case_options(parser)
    config = RecallConfig(**vars(parser.parse_args(args)))
    console = Console(highlight=False)
    folder = None if config.report is None else make_folder("--report", config.report)
    model = LanguageModel.from_pretrained(config.ckpt_path).to(_pick_device(config.device)).eval()
    task = config.make_task(model.config.vocab_size)
    require_cases(task, config.lengths, config.depths, config.rows)
    bar = Progress(TextColumn("asking"), BarColumn(), console=console, transient=True, disable=not console.is_terminal)
    with bar:
        number = bar.add_task("", total=len(config.lengths) * len(config.depths))
        cases = config.lengths, config.depths, config.rows, config.seed
        found = list(recall_by_depth(model, task, *cases, tick=lambda: bar.advance(number)))
    title = f"{config.task}: rows answered, {name_of(config.ckpt_path)}"
    console.print(table_of(found, title))
    if folder is not None:
        details = {"command": _command_line("recall", args)}
        _say_written(console, write_recall(folder, found, details, title))


def generate(args: Sequence[str]) -> None:
    """Write text with a trained model."""
    parser = PlainParser(prog="linrope generate", usage="linrope generate --ckpt_path FILE --prompt TEXT [options]")
    parser.description, parser.allow_abbrev = generate.__doc__, False
    parser.add_class_arguments(GenerateConfig, skip={"stop"})
    parser.add_argument("--stop", action="append", default=[], help=STOP_HELP)
    config = GenerateConfig(**vars(parser.parse_args(args)))
    model = LanguageModel.from_pretrained(config.ckpt_path).to(_pick_device(config.device)).eval()
    run_generate(config, model, _write, Console(stderr=True))


def prepare(args: Sequence[str]) -> None:
    """Tokenize text once, into a folder to train from."""
    run_prepare(args, prepare.__doc__)


def export(args: Sequence[str]) -> None:
    """Write a trained model for transformers: safetensors, config.json, tokenizer."""
    parser = PlainParser(prog="linrope export", usage="linrope export --ckpt_path FILE --output FOLDER [--overwrite]")
    parser.description, parser.allow_abbrev = export.__doc__, False
    parser.add_class_arguments(ExportConfig)
    config = ExportConfig(**vars(parser.parse_args(args)))
    from linrope import hf  # an extra

    hf.require_free(Path(config.output), config.overwrite)
    hf.export(LanguageModel.from_pretrained(config.ckpt_path), config.output, overwrite=config.overwrite)
    _say(f"wrote {config.output}")


def _say_written(console: Console, written: Sequence[Path]) -> None:
    console.print("wrote", *map(str, written), soft_wrap=True, highlight=False)
    if not can_draw():
        console.print(WITHOUT_PICTURES, markup=False, highlight=False)


def _pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    available = {"cpu": True, "cuda": torch.cuda.is_available()}
    if not available[name]:
        raise InputError(f"--device={name} is not available on this machine: choose auto or cpu.")
    return torch.device(name)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "fit": fit,
    "validate": validate,
    "test": test,
    "plan": plan,
    "recall": recall,
    "generate": generate,
    "prepare": prepare,
    "export": export,
}


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line `args` (without the program's name; by default the process's own).

    Returns:
        The exit code: 0; 1 where a run failed; 2 for a mistake in what it was given; 128 + N where signal N ended it.
    """
    args = list(sys.argv[1:] if args is None else args)
    quiet_lightning()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal's encoding lacks
    try:
        if not args or args[0] in ("-h", "--help"):
            print(_help())
        elif args[0] in COMMANDS:
            with first_rank_speaks():
                COMMANDS[args[0]](args[1:])
        else:
            raise InputError(
                f"unknown command {args[0]!r}: choose one of {', '.join(COMMANDS)}.{suggest(args[0], COMMANDS)}"
            )
    except (InputError, MisconfigurationException) as error:
        _say(f"error: {error}")
        return 2
    except (NonFiniteError, DocumentChanged, CheckpointError) as error:
        _say(f"error: {error}")
        return 1
    except Interrupted as interrupted:
        return 128 + interrupted.signum
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again as it exits
        return 128 + signal.SIGPIPE  # the reader, `head` perhaps, has enough
    except OSError as error:
        if error.errno not in DISK_IS_FULL:
            raise
        _say(f"error: {error}. Make room; a training run then resumes with --ckpt_path last.")
        return 1
    except KeyboardInterrupt:
        _say("interrupted.")
        return 128 + signal.SIGINT
    except SystemExit as exit_:
        if isinstance(exit_.__context__, KeyboardInterrupt):  # Lightning turns Ctrl-C into exit code 1
            return 128 + signal.SIGINT
        raise
    return 0


def _help() -> str:
    lines = [
        "usage: linrope COMMAND [options]\n",
        "Language models with linear attention and rotary positions: train them and let them write.\n",
        "commands:",
        *(f"  {name:<10}{command.__doc__}" for name, command in COMMANDS.items()),
        "\n`linrope COMMAND --help` lists a command's options.",
        "A first run: linrope fit --config configs/quickstart.yaml",
    ]
    return "\n".join(lines)


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


def _say(text: str) -> None:
    rank = "" if is_first_rank() else f"rank {rank_zero_only.rank}: "
    print(f"linrope: {rank}{text}", file=sys.stderr)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _command_line(command: str, args: Sequence[Any], *more: Any) -> str:
    """A line to copy: with the path to this program as it was typed, where its name alone would not be found."""
    typed = sys.argv[0] if Path(sys.argv[0]).name == "linrope" and shutil.which("linrope") is None else "linrope"
    return shlex.join([typed, command, *map(str, args), *map(str, more)])


def _without_option(args: Sequence[str], option: str) -> list[str]:
    """`args` without `option VALUE` and `option=VALUE`."""
    kept = [arg for arg in args if not arg.startswith(f"{option}=")]
    while option in kept:
        at = kept.index(option)
        del kept[at : at + 2]
    return kept


if __name__ == "__main__":
    sys.exit(main())
