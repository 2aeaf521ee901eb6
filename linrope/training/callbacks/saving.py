"""What a run saves to be repeated and resumed: its configuration and `last.ckpt`, also on Ctrl-C and SIGTERM."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from linrope.errors import InputError, Interrupted
from linrope.training.rank_board import names
from linrope.training.run_folder import RunFolder
from linrope.utils.files import whole_file


def finished_a_step(trainer: Trainer, batch_idx: int) -> bool:
    """Whether the batch that just ended was the last of its optimizer step."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


class BestCheckpoint(ModelCheckpoint):
    """Lightning's checkpoint of the best metric, as `best.ckpt`. The class gives its state a name of its own, so that a
    ModelCheckpoint of the user's may monitor the same metric."""

    def __init__(self, folder: str | Path, monitor: str, mode: str) -> None:
        super().__init__(folder, "best", monitor=monitor, mode=mode, enable_version_counter=False)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Takes the state of a run whose folder was moved."""
        state, here = checkpoint["callbacks"].get(self.state_key), Path(self.dirpath, "best.ckpt")
        if trainer.strategy.broadcast(here.exists()) and state is not None:
            _move(state, here)


def _move(state: dict[str, Any], path: Path) -> None:
    """Let the state of a ModelCheckpoint name its only checkpoint by `path`: of another folder Lightning takes no
    score, and would replace the checkpoint by a worse one."""
    state["dirpath"] = str(path.parent)
    if state["best_model_path"]:
        state["best_model_path"] = state["kth_best_model_path"] = str(path)
    state["best_k_models"] = {str(path): score for score in state["best_k_models"].values()}


class LastCheckpoint(Checkpoint):
    """Writes `last.ckpt` every `every_n_steps` optimizer steps and at the end of training.

    If a validation follows the step, it is written again after it, because a resumed run does not repeat that.
    `last_path` is the file; None before it was first written. The newest `n_kept` checkpoints also stay beside it, as
    `step_N.ckpt`, the last one among them.
    """

    def __init__(self, folder: str | Path, every_n_steps: int, n_kept: int = 0) -> None:
        self.path, self.every_n_steps, self.n_kept = Path(folder) / "last.ckpt", every_n_steps, n_kept
        self.last_path: Path | None = None
        self._saved_at = -1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.path = trainer.strategy.broadcast(self.path)
        if stage == "fit" and getattr(trainer.strategy, "writes_parts", False):
            self._require_shared(trainer, pl_module)

    def _require_shared(self, trainer: Trainer, task: LightningModule) -> None:
        """Raise InputError unless all ranks see the folder in which each writes its parts of checkpoints."""
        mark = self.path.with_name(f"{secrets.token_hex(4)}.partial")  # a name that no other run has used
        with contextlib.suppress(OSError):  # then no rank sees it
            if trainer.is_global_zero:
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()
        mark = trainer.strategy.broadcast(mark)
        others = [rank for rank, sees in enumerate(task.gather(mark.exists())) if not sees]
        if trainer.is_global_zero:
            mark.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it holds checkpoints already
                mark.parent.rmdir()
        if others:
            raise InputError(
                f"run.folder: what rank 0 writes into {str(mark.parent)!r} is not there on {names(others)}, and each "
                "rank writes its parts of a checkpoint there: give a folder that all share, as an absolute path."
            )

    def save(self, trainer: Trainer) -> None:
        """Writes the checkpoint unless it is of this step already. Every rank must call it."""
        if self._saved_at != trainer.global_step:
            trainer.save_checkpoint(self.path)
            self._saved_at, self.last_path = trainer.global_step, self.path
            if self.n_kept:
                self._keep(trainer)

    def _keep(self, trainer: Trainer) -> None:
        """Writes the checkpoint under the name of its step too, and removes the oldest ones."""
        trainer.save_checkpoint(self.path.with_name(f"step_{trainer.global_step}.ckpt"))
        steps = {int(file.stem[5:]): file for file in self.path.parent.glob("step_*.ckpt") if file.stem[5:].isdecimal()}
        for old in sorted(steps)[: -self.n_kept]:
            trainer.strategy.remove_checkpoint(steps[old])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # The checkpoint of the last step is saved here too, not in on_train_end: a longer run that resumes from one of
        # on_train_end logs its steps off by one (Lightning counts logged steps separately from its global step).
        due = trainer.global_step % self.every_n_steps == 0 or trainer.global_step == trainer.max_steps
        if due and finished_a_step(trainer, batch_idx):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and self._saved_at == trainer.global_step:
            self._saved_at = -1
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)  # max_time or a user's callback stopped it early


class GracefulStop(Callback):
    """On SIGINT (Ctrl-C) or SIGTERM: finish the step, save `checkpoint` if there is one, raise `Interrupted`.

    A validation that is running or due is finished first. A second SIGINT aborts immediately.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, checkpoint: LastCheckpoint | None) -> None:
        self.checkpoint = checkpoint
        self._received: int | None = None
        self._previous: dict[int, Any] = {}
        self._prints, self._ended = True, False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._prints, self._trainer = trainer.is_global_zero, trainer
        if stage == "fit":
            self._received, self._ended = None, False
            for signum in self.SIGNALS:
                handler = signal.signal(signum, self._on_signal)
                if handler != self._on_signal:  # which Lightning leaves after an earlier run of this Trainer
                    self._previous[signum] = handler

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Again: since setup() Lightning has installed a SIGTERM handler that exits without saving.
        for signum in self.SIGNALS:
            signal.signal(signum, self._on_signal)
        self._first_step = trainer.global_step
        self._stop_if_asked(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Not at the end of the step before: its metrics are logged and its validation runs only after that.
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._stop_if_asked(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()

    def _end(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._ended = True

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._ended:  # Lightning has set this handler again, which it found when training began
            signal.signal(signum, self._previous[signum])
            return signal.raise_signal(signum)
        if self._received is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = signum
        if self._prints:  # not print(): a signal can arrive while the main thread is inside print()
            validating = self._trainer.validating
            what = b"validation" if validating else b"step"
            then = b"" if self.checkpoint is None else b", then saving a checkpoint"
            end = b"\n\n" if validating else b"\n"  # a live display of two rows erases two when it is drawn again
            with contextlib.suppress(OSError):  # `2>&1 | tee` may have ended by the same Ctrl-C
                os.write(2, b"\nfinishing this " + what + then + b" (Ctrl-C again aborts immediately)" + end)

    def _stop_if_asked(self, trainer: Trainer) -> None:
        if trainer.global_step >= trainer.max_steps:
            return  # nothing to resume: let it end
        # Ranks may get the signal at different times, and saving needs all of them.
        if not trainer.strategy.reduce_boolean_decision(self._received is not None, all=False):
            return
        path = None
        if self.checkpoint is not None and trainer.global_step > self._first_step:
            path = self.checkpoint.path
            self.checkpoint.save(trainer)
        raise Interrupted(self._received or signal.SIGTERM, trainer.global_step, path)


class SaveConfig(Callback):
    """Writes `config`, the run's whole configuration as YAML, to config.yaml and passes it to the loggers, when
    training starts. A run that Lightning's sanity check refuses leaves no folder.

    Raises InputError when set up if the run may not write to its folder.
    """

    def __init__(self, folder: RunFolder, config: str) -> None:
        self.folder, self.config = folder, config

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Rank 0 decides for all: no rank may wait for one that has stopped.
        if stage == "fit" and (problem := trainer.strategy.broadcast(self.folder.problem)) is not None:
            raise InputError(problem)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            with whole_file(self.folder.path / "config.yaml") as file:
                file.write(self.config.encode())
        for logger in trainer.loggers:
            logger.log_hyperparams(yaml.safe_load(self.config))
