"""Progress lines on the console."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.utils.data import DataLoader

from linrope.training.callbacks.saving import finished_a_step


class ProgressReport(ProgressBar):
    """Loss, bits per byte and tokens per second while training, on the console: a live bar in a terminal, otherwise a
    line every `every_n_steps` steps. Of validations within training it prints the results."""

    def __init__(self, console: Console, every_n_steps: int) -> None:
        super().__init__()
        self.console, self.every_n_steps = console, every_n_steps
        self._enabled = True
        self._progress: Progress | None = None
        self._lines: list[tuple[float, int]] = []  # time and step of each line

    def disable(self) -> None:
        self._enabled = False  # Lightning calls this on all ranks but rank 0

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._lines = [(time.perf_counter(), trainer.global_step)]
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
        if trainer.sanity_checking:  # it is no result, and comes before the bar of training
            return
        if self._progress is None:
            self._open(trainer)  # `linrope validate`, `test` and `predict` have no training bar
        if self._progress is not None:
            name = "predict" if trainer.predicting else "test" if trainer.testing else "val"
            total = sum(getattr(trainer, f"num_{name}_batches"))
            self._progress.reset(self._eval, description=name, total=total, visible=True)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self._progress is not None:
            self._progress.advance(self._eval)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        if self._progress is not None:
            self._progress.update(self._eval, visible=False)
        if trainer.state.fn != "fit":
            self._close()
        elif self._enabled:
            metrics = trainer.callback_metrics
            stage = f"  stage {metrics['stage']:.0f}" if "stage" in metrics else ""
            self._print(f"step {trainer.global_step}  {evaluation_metrics(metrics, 'val')}{stage}")

    on_test_start, on_test_batch_end, on_test_end = on_validation_start, on_validation_batch_end, on_validation_end
    on_predict_start, on_predict_batch_end = on_validation_start, on_validation_batch_end
    on_predict_end = on_validation_end

    def _open(self, trainer: Trainer) -> None:
        if not self._enabled or not self.console.is_terminal or self.console.is_dumb_terminal:
            return  # lines instead
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

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)

    def _time_left(self, trainer: Trainer) -> str:
        """By the speed since half of the lines: the first steps may compile, and a machine be suspended."""
        now, step = time.perf_counter(), trainer.global_step
        began_at, first_step = self._lines[len(self._lines) // 2]
        self._lines.append((now, step))
        per_step = (now - began_at) / max(1, step - first_step)
        minutes, seconds = divmod(round(per_step * (trainer.max_steps - step)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d} left" if hours else f"{minutes}:{seconds:02d} left"


def evaluation_metrics(metrics: Mapping[str, Tensor], split: str) -> str:
    """The metrics of "val" or "test" as text, the loss first."""
    names = [name for name in metrics if name.startswith(f"{split}_")]
    names.sort(key=lambda name: name != f"{split}_loss")
    return "  ".join(f"{name} {metrics[name]:.4f}" for name in names)


def part_read(trainer: Trainer, split: str) -> str | None:
    """What share of "val" or "test" was read, if not all: a run's validations are often short, and their limit holds
    for later ones too."""
    loader, n_read = getattr(trainer, f"{split}_dataloaders"), sum(getattr(trainer, f"num_{split}_batches"))
    n_batches = sized_len(loader) if isinstance(loader, DataLoader) else None
    if n_batches is None or n_read >= n_batches:
        return None
    whole = f"trainer.limit_{split}_batches=1.0 reads the whole split"
    return f"{n_read:,} of {n_batches:,} batches were read: {whole}"


def _train_metrics(trainer: Trainer) -> str:
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    bpb = f"  bpb {metrics['train_bpb']:.3f}" if "train_bpb" in metrics else ""  # the number of bytes may be unknown
    speed = f"  {metrics['tokens_per_second']:,.0f} tok/s" if "tokens_per_second" in metrics else ""  # not at once
    loss = f"loss {metrics['train_loss']:.3f}" if "train_loss" in metrics else ""  # a task of one's own may log none
    return f"{loss}{bpb}{speed}".strip()
