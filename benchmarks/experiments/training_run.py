"""One training run of a grid, in a process of its own: `python -m benchmarks.training_run SPEC.json`.

It trains as `linrope fit` does, prints lines of JSON for the parent's progress bar, and writes SPEC's `result`. A
checkpoint beside it lets an interrupted run continue: Ctrl-C and SIGTERM finish the step and save.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.experiments.grid import BLOCK, EIGHTHS, Settings
from benchmarks.harness.trainer import quiet_trainer
from linrope import LanguageModel, linear_attention
from linrope.cli.training import quiet_lightning
from linrope.data.batches.windows import EvaluationWindows
from linrope.data.tokenizers.bytes import bytes_of
from linrope.errors import Interrupted, NonFiniteError
from linrope.evaluation.row_lengths import row_losses
from linrope.losses import bits_per_byte
from linrope.profiling.hooks import OperatorCall, operator_hook
from linrope.training import LanguageModelingModule, MQARDataModule, OptimizerConfig, RecallModule, TextDataModule
from linrope.training.callbacks.memory_preflight import MemoryPreflight
from linrope.training.callbacks.saving import GracefulStop, LastCheckpoint
from linrope.utils.files import whole_file
from linrope.utils.memory import keep_freed_memory

SAY_EVERY_SECONDS = 0.5
SAVE_EVERY_SECONDS = 120
INTERRUPTED = 130
"""The exit status of a run that Ctrl-C or SIGTERM ended."""
UNFINISHED = ".unfinished"


@dataclass
class Recorder(Callback):
    """Records a run as plain values, which its checkpoints contain: losses in nats per token and gradient norms before
    clipping of every step, metrics at every validation, and the seconds of training steps."""

    folder: Path
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    curve: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.saver = LastCheckpoint(self.folder, every_n_steps=1)
        self._said = self._saved = time.monotonic()

    state_key = "Recorder"

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("losses", "grad_norms", "curve", "seconds")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def on_train_batch_start(self, *args: Any) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.seconds += time.perf_counter() - self._began
        self.losses.append(trainer.callback_metrics["train_loss"].item())
        self.grad_norms.append(trainer.callback_metrics["grad_norm"].item())
        now = time.monotonic()
        if now - self._said > SAY_EVERY_SECONDS or trainer.global_step == trainer.max_steps:
            self._said = now
            say(completed=trainer.global_step, now=f"loss {self.losses[-1]:.3f}")
        validates = trainer.global_step % trainer.val_check_interval == 0  # a resumed run would not repeat that
        if now - self._saved > SAVE_EVERY_SECONDS and not validates:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        self.curve.append({"step": trainer.global_step, **_validation_metrics(trainer)})
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        self._saved = time.monotonic()
        self.saver.save(trainer)


def _validation_metrics(trainer: Trainer) -> dict[str, float]:
    return {k.removeprefix("val_"): v.item() for k, v in trainer.callback_metrics.items() if k.startswith("val_")}


def say(**shown: Any) -> None:
    """Update the bar of the parent process, with options of `Progress.update`."""
    print(json.dumps(shown), flush=True)


class GridText(TextDataModule):
    """Text as in `linrope fit`, but validated on windows of the grid's longest rows, one a batch, cut into the
    variant's own rows. The order of windows depends on their length, and all variants must be validated on the same
    text."""

    def __init__(self, longest_context: int, **options: Any) -> None:
        super().__init__(**options)
        self.longest_context = longest_context

    def evaluation_windows(self, split: str) -> EvaluationWindows:
        return EvaluationWindows(self.corpora[split], self.longest_context, split, self.document_mask)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        def cut(window: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: tokens.view(-1, self.context) for name, tokens in window.items()}

        return DataLoader(self.evaluation_windows("val"), batch_size=None, collate_fn=cut)


def run(identity: dict[str, Any], steps: int, stem: Path) -> dict[str, Any]:
    """Train once, and return the result, which begins with the run's identity (that of its folder). `stem` is the path
    of checkpoints and weights, without an ending."""
    settings, measured, seed = Settings(**identity["settings"]), identity["measured"], identity["seed"]
    device, longest_context = identity["device"], identity["longest_context"]
    precision = measured.get("precision", "32-true")
    seed_everything(seed, verbose=False)
    is_text = settings.task == "text"
    if is_text:
        data = GridText(longest_context, **settings.data, seed=seed)
    else:
        data = MQARDataModule(**settings.data, seed=seed)
    task = LanguageModelingModule if is_text else RecallModule
    module = task(settings.model_config, OptimizerConfig(**settings.optimizer), seed=seed)
    # its name holds all that decides the run, so that a run with other options does not continue from it
    decides = settings.fingerprint, steps, measured["validations"], measured["validation_tokens"], longest_context
    recorder = Recorder(stem.with_name(f"{stem.name}.{'-'.join(map(str, decides))}{UNFINISHED}"))
    checkpoint = recorder.folder / "last.ckpt"
    few, all_ = validation_batches(settings.task, measured["validation_tokens"], longest_context)
    trainer = quiet_trainer(
        steps,
        [recorder, GracefulStop(recorder.saver), *([MemoryPreflight()] if is_text else [])],
        device,
        limit_val_batches=few,
        val_check_interval=max(1, steps // measured["validations"]),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        precision=precision,
    )
    failure = None
    try:
        trainer.fit(module, data, ckpt_path=checkpoint if checkpoint.exists() else None, weights_only=True)
    except NonFiniteError as error:
        failure = str(error).split(";")[0]
    model, plan = module.model, settings.plan
    result = identity | {
        "parameters": model.n_parameters,
        "steps": len(recorder.losses),
        "tokens": plan.tokens_at(len(recorder.losses)),
        "seconds": recorder.seconds,
        "diverged": failure,
        "training": training_summary(recorder, settings),
        "curve": [{**point, "tokens": plan.tokens_at(point["step"])} for point in recorder.curve],
        "state_bytes": model.state_bytes(1024),
    }
    if failure is not None:
        return result
    trainer = quiet_trainer(steps, [], device, limit_val_batches=all_, precision=precision)
    trainer.validate(module, data, verbose=False)
    result["final"] = final = _validation_metrics(trainer)
    if not all(map(math.isfinite, final.values())):
        result["diverged"] = f"val_loss is {final['loss']} after the last step"
    if is_text:
        model = model.to(device).eval()
        result["evaluation"] = evaluate_text(model, data, **measured["evaluate"])
        result["smallest_denominator"] = smallest_denominator(model, data)
    model.save_pretrained(stem.with_name(stem.name + ".model"))
    return result


def validation_batches(task: str, tokens: int, window: int | None) -> tuple[int, int] | tuple[float, float]:
    """`limit_val_batches` for the curves, which read a quarter of the tokens, and for the end; in whole windows. Recall
    tasks read all of their rows, which are few."""
    return (1.0, 1.0) if task != "text" else (max(1, tokens // 4 // window), max(1, tokens // window))


def training_summary(recorder: Recorder, settings: Settings) -> dict[str, Any]:
    """The training losses, and the gradient norms after the warm-up."""
    norms = recorder.grad_norms
    warm = min(OptimizerConfig(**settings.optimizer).warmup_steps, max(0, len(norms) - 1))
    peak = max(range(warm, len(norms)), key=norms.__getitem__, default=None)
    return {
        "losses": in_means(recorder.losses),
        "grad_norm_median": statistics.median(norms[warm:]) if norms[warm:] else math.nan,
        "grad_norm_peak": norms[peak] if peak is not None else math.nan,
        "grad_norm_peak_step": peak,
    }


def in_means(losses: list[float]) -> list[float]:
    """At most a hundred means of losses in a row."""
    size = max(1, math.ceil(len(losses) / 100))
    return [round(statistics.fmean(losses[i : i + size]), 4) for i in range(0, len(losses), size)]


def evaluate_text(model: LanguageModel, data: TextDataModule, contexts: list[int], tokens: int) -> dict[str, Any]:
    """Bits per byte of the same text in rows of each length; bits per token by eighths of a row, over all rows, and by
    blocks of the text in order."""
    found, text = {}, data.corpora["val"].tokens(0, tokens + 1)
    n_bytes = bytes_of(text[1:]).sum().item()
    for context in contexts:
        losses = row_losses(model, text, context, partial(say, now=f"reading rows of {context:,}"))
        bits = losses / math.log(2)
        found[str(context)] = {
            "bpb": bits_per_byte(losses.sum().item(), n_bytes),
            "eighths": _rounded(bits.unflatten(1, (EIGHTHS, -1)).mean(dim=(0, 2))),
            "blocks": _rounded(bits.view(-1, min(BLOCK, context)).mean(dim=1)),
        }
    return found


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


@torch.no_grad()
def smallest_denominator(model: LanguageModel, data: TextDataModule) -> float | None:
    """The smallest |denominator| of any linear layer, head and token in one row of validation text."""
    device = next(model.parameters()).device
    rows, smallest = data.corpora["val"].tokens(0, data.context)[None].to(device), []

    def observe(call: OperatorCall) -> None:
        rope, normalize = call.options["rope"], call.options["normalize"]
        if normalize != "none":
            signed = 0 if rope is None else rope.signed_dim
            positive = call.q[..., signed:], call.k[..., signed:], torch.ones_like(call.v[..., :1])
            options = {**call.options, "rope": rope if normalize == "rotary" else None, "normalize": "none"}
            smallest.append(linear_attention(*positive, **options).abs().min().item())

    with operator_hook(model, observe):
        model(rows)
    return min(smallest, default=None)


def main(spec_path: str) -> None:
    """Run the file's specification, and write its result as a whole."""
    spec = json.loads(Path(spec_path).read_text())
    target = Path(spec["result"])
    quiet_lightning()
    keep_freed_memory()  # as `linrope fit` does
    found = run(spec["identity"], spec["steps"], target.with_suffix(""))
    with whole_file(target) as file:
        file.write((json.dumps(found) + "\n").encode())
    for folder in target.parent.glob(f"{target.stem}.*{UNFINISHED}"):
        shutil.rmtree(folder, ignore_errors=True)


def command(spec_path: str) -> None:
    """`main` as a process, whose exit status says whether it was interrupted."""
    try:
        main(spec_path)
    except (Interrupted, KeyboardInterrupt, SystemExit):  # Lightning makes signals exits, which look like success
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    command(sys.argv[1])
