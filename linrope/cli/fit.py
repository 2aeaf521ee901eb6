"""`linrope fit`: train a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from rich.console import Console

from linrope.cli.config_files import without_option
from linrope.cli.epochs import n_data_parallel, n_devices
from linrope.cli.output import command_line, discard, rank, say, say_once, write
from linrope.cli.ranks import errors_printed_once
from linrope.cli.training import TrainingCLI, writes_text
from linrope.errors import InputError, Interrupted, NothingToDo
from linrope.models.saving import CONFIG_FILE, is_checkpoint, open_checkpoint
from linrope.training.callbacks.averaging import AverageWeights, require_same_averaging
from linrope.training.callbacks.busy_cores import BusyCores
from linrope.training.callbacks.compiled import CompiledTraining, require_compiler
from linrope.training.callbacks.early_end import TimeLimit, reason_of_early_end
from linrope.training.callbacks.health import HealthMonitor, SpikeWarning
from linrope.training.callbacks.memory_preflight import MemoryPreflight
from linrope.training.callbacks.monitors import needs_sanity_check
from linrope.training.callbacks.saving import BestCheckpoint, GracefulStop, LastCheckpoint, SaveConfig
from linrope.training.callbacks.summary import PrintSample, RunSummary
from linrope.training.callbacks.throughput import Throughput
from linrope.training.callbacks.unsupported import require_supported
from linrope.training.checkpoint import newest_last, require_training_state, start_from
from linrope.training.data_modules.text import TextDataModule
from linrope.training.metrics_file import METRICS_FILE, MetricsFile
from linrope.training.precision import AUTO, is_nvidia
from linrope.training.run_folder import RunFolder, folder_of, new_run_folder, resumed_run_folder
from linrope.utils.files import require_writable


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """The run to resume."""

    ckpt_path: str | None = None
    """Checkpoint file to resume from; last: last.ckpt of the newest run; auto: the same, or a new run if there is none,
    for jobs that are started again by themselves."""


@errors_printed_once()
def run(args: Sequence[str]) -> None:
    """Run `linrope fit` with the command line `args`."""
    if not args:
        raise InputError(
            "a run needs a configuration: `linrope fit --config configs/quickstart.yaml` for a first run; "
            "`linrope fit --help` lists the options."
        )
    cli = FitCLI("fit", args, FitOptions)
    try:
        _train(cli, args)
    finally:
        if cli.folder is not None:
            cli.folder.release()


def _train(cli: FitCLI, args: Sequence[str]) -> None:
    try:
        cli.run()
    except Interrupted as interrupted:
        if cli.trainer.is_global_zero:
            _say_interrupted(cli, args, interrupted)
        raise
    if not cli.trainer.is_global_zero or cli.trainer.fast_dev_run:
        return
    if (reason := reason_of_early_end(cli.trainer)) is not None:
        say(f"ended after step {cli.trainer.global_step} of {cli.trainer.max_steps}: {reason}.{_to_resume(cli, args)}")
    if cli.last_checkpoint is not None and cli.last_checkpoint.last_path is not None:
        _print_checkpoint(cli, cli.last_checkpoint.last_path)


def _say_interrupted(cli: FitCLI, args: Sequence[str], interrupted: Interrupted) -> None:
    if interrupted.checkpoint is not None or cli.last_checkpoint is None:
        say(f"stopped after step {interrupted.step}.{_to_resume(cli, args)}")
    else:
        again = f"resume from {cli.ckpt_path} again" if cli.ckpt_path else "there is nothing to resume"
        say(f"stopped before the first step was finished: {again}.")


def _to_resume(cli: FitCLI, args: Sequence[str]) -> str:
    if cli.last_checkpoint is None:
        option = "fast_dev_run" if cli.trainer.fast_dev_run else "enable_checkpointing=False"
        return f" trainer.{option} left nothing to resume."
    if (last := cli.last_checkpoint.last_path or cli.ckpt_path) is None:
        return " There is nothing to resume."
    resume = command_line("fit", without_option(args, "--ckpt_path"), "--ckpt_path", last)
    return f" To resume:\n  {resume}"


def _print_checkpoint(cli: FitCLI, path: Path) -> None:
    lines = [f"\ncheckpoint  {path}"]
    if writes_text(cli.task) and cli.datamodule.tokenizer is not None:  # without one no text can be generated
        prompt = cli.config_init.sample.prompt or "import "
        lines.append(f"sample      {command_line('generate', ['--ckpt_path', path, '--prompt', prompt])}")
    cli.console.print(*lines, sep="\n", markup=False, soft_wrap=True)


def tensorboard(folder: Path) -> Logger:
    """TensorBoard's logger, which writes into a run's folder. InputError if it is not installed."""
    try:
        return TensorBoardLogger(folder.parent, "", version=folder.name)
    except ModuleNotFoundError as error:
        raise InputError("trainer.logger=TensorBoardLogger needs a package: pip install tensorboard.") from error


class RunConsole(Console):
    """A run goes on when the reader of its output ends, as in `linrope fit … | head`."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard(sys.stdout)
        try:
            say("the output is closed: the run goes on without it")
        except BrokenPipeError:  # `2>&1 |`
            discard(sys.stderr)


class FitCLI(TrainingCLI):
    """The run of `linrope fit`: new or resumed, with logs, checkpoints and callbacks, in `folder`."""

    console_class = RunConsole
    step = 0
    """Of the checkpoint to resume from."""
    folder: RunFolder | None = None
    """Where the run writes; None with trainer.fast_dev_run, which saves nothing."""

    def named_checkpoint(self) -> str | None:
        if self.options.ckpt_path == AUTO:
            run = self.config_init.run
            last = newest_last(Path(run.folder, run.name))
            say_once("--ckpt_path=auto starts a new run" if last is None else f"--ckpt_path=auto is {last}")
            return None if last is None else str(last)
        return super().named_checkpoint()

    def check_checkpoint(self) -> None:
        if self.checkpoint is None:
            return
        if Path(self.checkpoint, CONFIG_FILE).is_file():
            raise InputError(
                f"--ckpt_path={self.checkpoint!r} holds weights, but no training state to resume: name a .ckpt file of "
                "`linrope fit`, or start a new run with these weights, with --run.start_from."
            )
        if self.config_init.trainer.fast_dev_run:
            raise InputError("trainer.fast_dev_run is a check, which resumes no run: drop --ckpt_path.")
        contents = self.open_checkpoint()
        require_training_state(contents, self.checkpoint)
        require_same_averaging(contents, self.config_init.run.ema_decay, self.checkpoint)
        trainer, step = self.config_init.trainer, contents["global_step"]
        given = {name: trainer[name] for name in ("max_steps", "max_epochs")}
        self.count_steps()
        if 0 < trainer.max_steps <= step:
            option = "max_steps" if trainer.max_steps == given["max_steps"] else "max_epochs"
            raise NothingToDo(
                f"trainer.{option}={given[option]} is already done: {self.checkpoint} is at step {step}. To train on, "
                "raise it."
            )
        self.step = step

    def instantiate_trainer(self) -> Trainer:
        trainer = self.config_init.trainer
        require_supported(self.given_callbacks(), in_runs=True)
        if needs_sanity_check(self.given_callbacks(), self.model.monitor[0]):
            trainer.num_sanity_val_steps = trainer.num_sanity_val_steps or 1
        if self.config_init.run.compile:
            self._require_compiled_blocks()
        self.start = self._take_weights()
        try:
            self.count_steps()
            return super().instantiate_trainer()
        except BaseException:
            if self.folder is not None:
                self.folder.release()
            raise

    def _require_compiled_blocks(self) -> None:
        """Raise InputError unless `run.compile` works in this run."""
        trainer = self.config_init.trainer
        if not writes_text(self.task):
            raise InputError(f"run.compile=True compiles language models only, not those of task={self.config.task!r}.")
        if n_data_parallel(trainer) != n_devices(trainer):
            raise InputError("run.compile=True does not go with trainer.strategy.sequence_parallel_size: drop one.")
        require_compiler("cuda" if is_nvidia(trainer.accelerator) else "cpu")

    def _take_weights(self) -> str | None:
        """Give a new run the weights of `run.start_from`; return a line for the run's summary, None for random ones."""
        path = self.config_init.run.start_from
        if path is None or self.checkpoint is not None:
            return None
        differing = start_from(self.model.model, path, self.datamodule.fractions)
        if is_checkpoint(path):
            self.datamodule.keep_split_of(open_checkpoint(path)["linrope"]["order"])
        return ", ".join([path, *differing])

    def claim_folder(self) -> RunFolder:
        """The folder of this run: a new one, or that of the run to resume."""
        run = self.config_init.run
        runs = Path(run.folder, run.name)
        require_writable(runs, "run.folder")
        if rank() != 0:
            return RunFolder(runs / "version")  # rank 0 tells the others where they write
        if self.checkpoint is not None:
            if (folder := resumed_run_folder(runs, Path(self.checkpoint), self.step)) is not None:
                return folder
            say(f"{self.checkpoint} is not the last checkpoint of a run in {runs}: this run gets a folder of its own.")
        return new_run_folder(runs)

    def loggers(self) -> list[Logger]:
        """metrics.csv; beside it the loggers of `trainer.logger`, by default TensorBoard's where it is installed."""
        if self.config_init.trainer.fast_dev_run:
            return []
        self.folder, given = self.claim_folder(), self.config_init.trainer.logger
        folder = self.folder.path
        resumed = None if self.checkpoint is None else folder_of(Path(self.checkpoint))
        earlier = None if resumed is None else resumed.path / METRICS_FILE
        loggers: list[Logger] = [MetricsFile(folder, earlier, self.step)]
        if isinstance(given, Logger):
            loggers.append(given)
        elif given == "TensorBoardLogger" or (given in (None, True) and find_spec("tensorboard") is not None):
            loggers.append(tensorboard(folder))
        elif isinstance(given, list):
            loggers += given
        return loggers

    def checkpoints(self) -> list[Callback]:
        """Those that write checkpoints, beside the user's."""
        self.last_checkpoint, run = None, self.config_init.run
        if self.folder is None:
            return []
        folder = self.folder.path / "checkpoints"
        for given in self.given_callbacks():
            if isinstance(given, ModelCheckpoint) and given.dirpath is None:
                given.dirpath = str(folder.resolve())  # beside ours, in the folder with config.yaml
        if self.config_init.trainer.enable_checkpointing is False:
            return []
        self.last_checkpoint = LastCheckpoint(folder, run.checkpoint_every_n_steps, run.keep_checkpoints)
        best = BestCheckpoint(folder, *self.model.monitor)
        return [best, self.last_checkpoint]  # after the best, whose score it keeps

    def save_config(self) -> SaveConfig:
        """The callback that writes config.yaml."""
        # False keeps what is null; the configuration was validated when it was parsed
        return SaveConfig(self.folder, self.parser.dump(self.config, "yaml", False, skip_validation=True))

    def callbacks(self) -> list[Callback]:
        run, sample = self.config_init.run, self.config_init.get("sample")
        trainer, checkpoints = self.config_init.trainer, self.checkpoints()
        callbacks = [
            *([] if trainer.max_time is None else [TimeLimit(trainer.max_time)]),
            *([] if run.ema_decay is None else [AverageWeights(run.ema_decay)]),  # before what saves or samples
            *([] if self.folder is None else [self.save_config()]),
            RunSummary(self.console, self.start, self.why_precision),
            *([MemoryPreflight()] if isinstance(self.datamodule, TextDataModule) else []),
            Throughput(),
            BusyCores(),
            GracefulStop(self.last_checkpoint),
            *checkpoints,
        ]
        if run.health_every_n_steps and writes_text(self.task):
            callbacks.append(HealthMonitor(run.health_every_n_steps))
        if run.compile:
            callbacks.append(CompiledTraining())  # after the monitor, which hooks layers
        if run.spike_factor:
            callbacks.append(SpikeWarning(self.console, run.spike_factor))
        if sample is not None and sample.prompt is not None:
            callbacks.append(PrintSample(write, sample.prompt, **sample.options))
        return callbacks
