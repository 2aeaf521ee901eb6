"""What happens around training: the table before it, the progress line, checkpoints, Ctrl-C, the sample after it."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from linrope.checkpoints import whole_file
from linrope.data import SPLITS, Tokenizer, TokenSequence
from linrope.errors import InputError
from linrope.model import LanguageModel
from linrope.training.data import TextDataModule
from linrope.training.writing import require_tokenizer, write_sample


def finished_a_step(trainer: Trainer, batch_idx: int) -> bool:
    """Whether the batch that just ended was the last of its optimizer step."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


class LastCheckpoint(Checkpoint):
    """Keeps `last.ckpt`: overwritten every `every_n_steps` optimizer steps, and always at the end of training.

    Where a validation follows the step, it is written once more after it, for a resumed run does not repeat that.
    `last_path` is the file once it was written.
    """

    def __init__(self, folder: str | Path, every_n_steps: int) -> None:
        self.path, self.every_n_steps = Path(folder) / "last.ckpt", every_n_steps
        self.last_path: Path | None = None
        self._saved_at = -1

    def save(self, trainer: Trainer) -> None:
        """Writes the checkpoint, unless this step's is already there. Every rank must call it."""
        if self._saved_at != trainer.global_step:
            trainer.save_checkpoint(self.path)
            self._saved_at, self.last_path = trainer.global_step, self.path

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # The last step's is saved here too, not in on_train_end: a longer run that resumes from a checkpoint of the
        # latter has its logged steps off by one (Lightning counts them apart from its global step).
        due = trainer.global_step % self.every_n_steps == 0 or trainer.global_step == trainer.max_steps
        if due and finished_a_step(trainer, batch_idx):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and self._saved_at == trainer.global_step:
            self._saved_at = -1
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)  # max_time or a callback of the user's stopped it early


class Interrupted(Exception):
    """Training was stopped by a signal, after a whole step and with a checkpoint (None before the first step)."""

    def __init__(self, signum: int, step: int, checkpoint: Path | None) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}")
        self.signum, self.step, self.checkpoint = signum, step, checkpoint


class GracefulStop(Callback):
    """On SIGINT (Ctrl-C) or SIGTERM: finish the step, save `checkpoint`, raise `Interrupted`.

    A validation that is under way or due is finished too. A second SIGINT aborts at once.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, checkpoint: LastCheckpoint) -> None:
        self.checkpoint = checkpoint
        self._received: int | None = None
        self._previous: dict[int, Any] = {}
        self._speaks = True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._speaks = trainer.is_global_zero
        if stage == "fit":
            self._previous = {signum: signal.signal(signum, self._on_signal) for signum in self.SIGNALS}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Once more: since setup() Lightning has put a SIGTERM handler around ours that exits without saving.
        for signum in self.SIGNALS:
            signal.signal(signum, self._on_signal)
        self._first_step = trainer.global_step
        self._stop_if_asked(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Not where the step before ends: its metrics are logged, and what follows it is validated, only after that.
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._stop_if_asked(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore_handlers()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._received is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = signum
        if self._speaks:  # not print(): a signal can arrive while the main thread is inside a print of its own
            os.write(2, b"\nfinishing this step, then saving a checkpoint (Ctrl-C again aborts at once)\n")

    def _stop_if_asked(self, trainer: Trainer) -> None:
        if trainer.global_step >= trainer.max_steps:
            return  # nothing is left to resume: let it end
        # Ranks may hear of it at different times, and saving needs all of them.
        if not trainer.strategy.reduce_boolean_decision(self._received is not None, all=False):
            return
        stepped = trainer.global_step > self._first_step
        if stepped:
            self.checkpoint.save(trainer)
        raise Interrupted(
            self._received or signal.SIGTERM, trainer.global_step, self.checkpoint.path if stepped else None
        )


class SaveConfig(Callback):
    """Writes the run's whole configuration, a YAML text, to `path` before training.

    Args:
        path: the file, in the folder of the run.
        config: what it is to hold.
        replace: whether the folder may hold a run already, which this one goes on with.

    Raises:
        InputError: when set up: the file is there and not to be replaced.
    """

    def __init__(self, path: Path, config: str, replace: bool = False) -> None:
        self.path, self.config, self.replace = path, config, replace

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        # What the first rank finds holds for all: none is to wait for one that has stopped.
        if trainer.strategy.broadcast(self.path.exists() and not self.replace):
            raise InputError(
                f"{self.path} exists, and this run would overwrite what lies beside it: choose another folder (set "
                "trainer.default_root_dir, or the logger's), or resume that run with --ckpt_path. If it has only just "
                "begun, start this one again."
            )
        if trainer.is_global_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self.path) as file:
                file.write(self.config.encode())


class RunSummary(Callback):
    """Prints, before training, what is about to be trained on what.

    Args:
        start: the model whose weights it begins with, and in what it differs from that; None for random weights.
    """

    def __init__(self, console: Console, start: str | None = None) -> None:
        self.console, self.start = console, start

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self._rows(trainer, pl_module):
            table.add_row(name, escape(value))
        self.console.print(table)

    def _rows(self, trainer: Trainer, pl_module: LightningModule) -> list[tuple[str, str]]:
        data: TextDataModule = trainer.datamodule
        skipped = f" ({data.n_skipped:,} files skipped: binary, empty or unreadable)" if data.n_skipped else ""
        rows = [
            ("parameters", f"{pl_module.model.n_parameters:,}"),
            *([] if self.start is None else [("weights of", self.start)]),
            ("decoding state", _state_size(pl_module.model, data.context)),
            ("corpus", f"{data.origin}{skipped}"),
        ]
        if data.tokenizer is None or data.tokenizer.fingerprint:
            named = "unknown" if data.tokenizer is None else data.tokenizer.name
            rows.append(("tokenizer", named))
        for split in SPLITS:
            corpus = data.corpora[split]
            rows.append((f"  {split}", _corpus_size(corpus, data.tokenizer)))
        rows += [
            *_step_rows(data, trainer.max_steps),
            ("steps", f"{trainer.max_steps:,}"),
            ("device", f"{_device(trainer)}, {trainer.precision}"),
        ]
        return rows


def _step_rows(data: TextDataModule, max_steps: int) -> list[tuple[str, str]]:
    """What a step consists of; with a curriculum, stage by stage, the last one up to the end of the run."""
    stages = data.plan.stages
    if data.curriculum is None:
        (stage,) = stages
        samples, tokens = stage.samples_per_step, stage.tokens_per_step
        return [("a step", f"{samples} × {stage.seq_len:,} = {tokens:,} tokens")]
    rows = [("curriculum", _count(len(stages), "stage"))]
    ends = [*(stage.first_step for stage in stages[1:]), max_steps]
    for number, (stage, end) in enumerate(zip(stages, ends, strict=True)):
        n_steps = end - stage.first_step
        tokens, size = n_steps * stage.tokens_per_step, f"{stage.samples_per_step} × {stage.seq_len:,}"
        rows.append((f"  [{number}]", f"{tokens:,} tokens: {_count(n_steps, 'step')} of {size}"))
    return rows


def _state_size(model: LanguageModel, context: int) -> str:
    """What one sequence's decoding state takes, and whether it grows with the sequence."""
    now, later = model.state_bytes(context), model.state_bytes(2 * context)
    grows = f" at {context:,} tokens, and growing" if later > now else " at any length"
    return f"{now / 1024:,.0f} KiB{grows}"


def _corpus_size(corpus: TokenSequence, tokenizer: Tokenizer | None) -> str:
    """How much text a corpus is, as far as it is known."""
    tokens = [f"{len(corpus):,} tokens"] if tokenizer is None or tokenizer.fingerprint else []
    text = [_bytes(corpus.n_bytes)] if corpus.n_bytes is not None else []
    documents = f" in {_count(corpus.n_documents, 'document')}" if corpus.n_documents is not None else ""
    return ", ".join(tokens + text) + documents


def _bytes(n: int) -> str:
    return f"{n / 1e6:,.1f} MB" if n >= 1e5 else f"{n:,} bytes"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def _device(trainer: Trainer) -> str:
    kind = trainer.strategy.root_device.type
    return kind if trainer.world_size == 1 else f"{trainer.world_size} × {kind}"


class ProgressReport(ProgressBar):
    """Loss, bits per byte and tokens per second while training: a live bar in a terminal, plain lines in a pipe.

    Args:
        console: where to; whether it is a terminal decides the form.
        every_n_steps: steps between two lines in a pipe.
    """

    def __init__(self, console: Console, every_n_steps: int) -> None:
        super().__init__()
        self.console, self.every_n_steps = console, every_n_steps
        self._enabled = True
        self._progress: Progress | None = None
        self._began = (0.0, 0)

    def disable(self) -> None:
        self._enabled = False  # Lightning calls this on every rank but the first

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = (time.perf_counter(), trainer.global_step)
        self._open(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._enabled or not finished_a_step(trainer, batch_idx):
            return
        step = trainer.global_step
        if self._progress is not None:
            self._progress.update(self._train, completed=step, metrics=_train_metrics(trainer))
        if step == trainer.max_steps or (self._progress is None and step % self.every_n_steps == 0):
            self._print(f"step {step}/{trainer.max_steps}  {_train_metrics(trainer)}  {self._time_left(trainer)}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_evaluation(trainer, "val", sum(trainer.num_val_batches))

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._advance_evaluation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_evaluation(trainer, "val")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_evaluation(trainer, "test", sum(trainer.num_test_batches))

    def on_test_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._advance_evaluation()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_evaluation(trainer, "test")

    def _open(self, trainer: Trainer) -> None:
        if not (self._enabled and self.console.is_terminal):
            return
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            expand=True,
            transient=True,
        )
        training = trainer.state.fn == "fit"
        self._train = self._progress.add_task(
            "train", total=max(1, trainer.max_steps), completed=trainer.global_step, visible=training, metrics=""
        )
        self._eval = self._progress.add_task("", visible=False, metrics="")
        self._progress.start()

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _start_evaluation(self, trainer: Trainer, split: str, n_batches: int) -> None:
        if self._progress is None:
            self._open(trainer)  # `linrope validate` and `test` have no training bar
        if self._progress is not None:
            self._progress.reset(self._eval, description=split, total=n_batches, visible=True)

    def _advance_evaluation(self) -> None:
        if self._progress is not None:
            self._progress.advance(self._eval)

    def _end_evaluation(self, trainer: Trainer, split: str) -> None:
        if self._progress is not None:
            self._progress.update(self._eval, visible=False)
        if trainer.state.fn != "fit":
            self._close()
        if self._enabled:
            metrics = [f"{split}_{name}" for name in ("loss", "bpb")]
            values = "  ".join(
                f"{name} {trainer.callback_metrics[name]:.4f}" for name in metrics if name in trainer.callback_metrics
            )
            at = f"step {trainer.global_step}  " if trainer.state.fn == "fit" else ""
            self._print(f"{at}{values}")

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)

    def _time_left(self, trainer: Trainer) -> str:
        began_at, first_step = self._began
        per_step = (time.perf_counter() - began_at) / max(1, trainer.global_step - first_step)
        minutes, seconds = divmod(round(per_step * (trainer.max_steps - trainer.global_step)), 60)
        return f"{minutes}:{seconds:02d} left"


def _train_metrics(trainer: Trainer) -> str:
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    bpb = f"  bpb {metrics['train_bpb']:.3f}" if "train_bpb" in metrics else ""  # tokens may stand for unknown bytes
    return (
        f"loss {metrics.get('train_loss', math.nan):.3f}{bpb}  {metrics.get('tokens_per_second', math.nan):,.0f} tok/s"
    )


class PrintSample(Callback):
    """Writes, after training, a text by the model; the arguments are `write_sample`'s."""

    def __init__(self, write: Callable[[str], Any], prompt: str, **options: Any) -> None:
        self.write, self.prompt, self.options = write, prompt, options

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        require_tokenizer(pl_module.model, "sample.prompt")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.write("\n")
            write_sample(self.write, pl_module.model.eval(), self.prompt, **self.options)
