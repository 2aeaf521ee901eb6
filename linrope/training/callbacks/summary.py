"""What a run prints before training, a table, and after it, a sample of text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from linrope.generation.decoding import require_row
from linrope.generation.text import require_tokenizer, write_sample
from linrope.layers.linear_attention import LinearAttention
from linrope.models.language_model import LanguageModel
from linrope.training.data_modules.base import ResumableDataModule
from linrope.training.data_modules.text import TextDataModule
from linrope.utils.formatting import count_of
from linrope.utils.printable import printable


class RunSummary(Callback):
    """Prints a table of model, data, steps and device before training. `start` names the model whose weights the run
    starts from, and the options that differ; None for random weights. `why_precision` is the reason for the precision;
    None if the user gave it."""

    def __init__(self, console: Console, start: str | None = None, why_precision: str | None = None) -> None:
        self.console, self.start, self.why_precision = console, start, why_precision

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self._rows(trainer, pl_module):
            table.add_row(name, escape(printable(value)))
        self.console.print(table)

    def _rows(self, trainer: Trainer, pl_module: LightningModule) -> list[tuple[str, str]]:
        data: ResumableDataModule = trainer.datamodule
        is_text, model = isinstance(data, TextDataModule), pl_module.model
        rows = [
            ("parameters", f"{model.n_parameters:,}"),
            *([] if self.start is None else [("weights of", self.start)]),
        ]
        if is_text and isinstance(model, LanguageModel):
            rows.append(("decoding state", _state_size(model, data.context)))
        rows += data.describe()
        passes = data.tokens_at(trainer.max_steps) / len(data.corpora["train"]) if is_text else 0
        epochs = (
            f", {passes:,.{0 if passes >= 100 else 2}f} times the training text"
            if passes >= 0.01 and not trainer.overfit_batches
            else ""
        )
        rows.append(("steps", f"{trainer.max_steps:,}{epochs}"))
        if trainer.fast_dev_run:
            rows.append(("check", "trainer.fast_dev_run: nothing is saved"))
        if (warmup := pl_module.optimizer_config.warmup_steps) > trainer.max_steps > 0:
            longer = f"optimizer.warmup_steps={warmup:,} is more than trainer.max_steps={trainer.max_steps:,}"
            rows.append(("warm-up", f"longer than the run: {longer}, so that optimizer.lr is never reached"))
        if why := _why_no_validation(trainer, data):
            rows.append(("validation", f"none: {why}; no best.ckpt is written"))
        device, n = trainer.strategy.root_device.type, trainer.world_size
        if device == "cuda" and any(isinstance(module, LinearAttention) for module in model.modules()):
            rows.append(("kernels", "compiled in the first step, which may take a minute; kept on disk for later runs"))
        why = "" if self.why_precision is None else f" ({self.why_precision})"
        return [*rows, ("device", f"{device if n == 1 else f'{n} × {device}'}, {trainer.precision}{why}")]


def _why_no_validation(trainer: Trainer, data: ResumableDataModule) -> str | None:
    """The reason why a run is not validated; None if it is."""
    if not trainer.limit_val_batches:
        return "trainer.limit_val_batches is 0"
    if trainer.fast_dev_run:
        return None
    batches = trainer.max_steps * trainer.accumulate_grad_batches
    every = getattr(trainer, "val_check_interval", None)  # Lightning sets none where the interval is a time
    if isinstance(every, int) and 0 < batches < every:
        return f"trainer.val_check_interval={every:,} is more than {count_of(batches, 'batch', 'batches')}"
    if isinstance(every, float) and not trainer.overfit_batches:  # Lightning's 1.0 for null: the end of the epoch
        return "trainer.val_check_interval is null, and training is one endless epoch"
    return None if data.has_validation_text else f"data.fractions={data.fractions} leaves no text"


def _state_size(model: LanguageModel, context: int) -> str:
    """Memory of one sequence's decoding state, and whether it grows with the sequence."""
    now, later = model.state_bytes(context), model.state_bytes(2 * context)
    grows = f" at {context:,} tokens, and growing" if later > now else " at any length"
    return f"{now / 1024:,.0f} KiB{grows}"


class PrintSample(Callback):
    """Generates a text after training; the arguments are those of `write_sample`."""

    def __init__(self, write: Callable[[str], Any], prompt: str, **options: Any) -> None:
        self.write, self.prompt, self.options = write, prompt, options

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        n_tokens = len(require_tokenizer(pl_module.model, "sample.prompt").encode_prompt(self.prompt))
        require_row(pl_module.model, n_tokens, self.options["max_new_tokens"], "sample.max_new_tokens")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = pl_module.model.eval()
        if pl_module.is_sharded:
            self._write_on_all_ranks(trainer, model)
        elif trainer.is_global_zero:
            self.write("\n")
            try:
                write_sample(self.write, model, self.prompt, **self.options)
            except KeyboardInterrupt:  # enough of it: the run itself has ended
                self.write("\n")

    def _write_on_all_ranks(self, trainer: Trainer, model: LanguageModel) -> None:
        """Each rank holds a part of the model, so all generate: rank 0 decides the seed and the logits, and writes."""
        seed = self.options.get("seed")
        drawn = int(torch.randint(2**62, ())) if seed is None else seed
        options = {**self.options, "seed": trainer.strategy.broadcast(drawn)}

        def same_logits(module: LanguageModel, inputs: Any, output: Any) -> None:
            torch.distributed.broadcast(output[0] if isinstance(output, tuple) else output, src=0)

        write = self.write if trainer.is_global_zero else _no_write
        hook = model.register_forward_hook(same_logits)
        try:
            write("\n")
            write_sample(write, model, self.prompt, **options)
        finally:
            hook.remove()


def _no_write(text: str) -> None:
    pass
