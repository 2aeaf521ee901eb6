"""Checkpoints of training runs: written atomically, found, and compared with the run that resumes from them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from linrope.data.tokenizers.base import (
    Tokenizer,
    known_or_bytes,
    tokenizer_from_serialized,
    tokenizer_to_serialized,
)
from linrope.errors import CheckpointError, InputError
from linrope.interop.roformer import load_trained
from linrope.models.base import Model, ModelConfig, differences, flat_options
from linrope.models.saving import is_checkpoint, open_checkpoint
from linrope.models.sharded_checkpoint import read_sharded_checkpoint
from linrope.models.sharded_files import folder_of_link, is_sharded_checkpoint, make_replaceable
from linrope.training.data_modules.base import ResumableDataModule, data_parallel
from linrope.training.optimizer import OptimizerConfig
from linrope.utils.files import in_newest_version, whole_file

TRAINING_STATE = ("global_step", "loops", "lr_schedulers", "optimizer_states")
TEXT_MODIFIED = "data.text_modified"
"""What `run_order` calls the entry of `Corpus.identity` that may differ, with a warning."""
TEXT_PLACE = "data.place"
"""What it calls the place of the text on this machine."""


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint atomically; a plugin of Lightning's Trainer.

    Lightning's own makes two copies in memory, writes a temporary file into $TMPDIR (then copied, if the checkpoint is
    on another file system) and does not wait until the disk has it. Raises CheckpointError if the file could not be
    written (the disk is full, say).
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: dict[str, Any] | None = None
    ) -> None:
        if _is_remote(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            make_replaceable(path)
            shards = folder_of_link(path)
            with whole_file(path) as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            if (reason := os_error(error)) is None:
                raise
            raise unwritten(path, reason.strerror) from error
        if shards is not None:
            shutil.rmtree(shards, ignore_errors=True)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a file, or a sharded checkpoint: the link and its folder."""
        shards = None if _is_remote(path) else folder_of_link(Path(path))
        super().remove_checkpoint(path)
        if shards is not None:
            shutil.rmtree(shards, ignore_errors=True)

    def load_checkpoint(self, path: str | Path, *args: Any, **options: Any) -> dict[str, Any]:
        """The contents of a file, or of the folder of a sharded checkpoint."""
        if is_sharded_checkpoint(path):
            return read_sharded_checkpoint(path)
        return super().load_checkpoint(path, *args, **options)


def _is_remote(path: str | Path) -> bool:
    """Whether a path is an address, s3://bucket/a.ckpt for example, which Lightning writes by fsspec."""
    return "://" in str(path)


def unwritten(path: Path, reason: str) -> CheckpointError:
    """The error of a checkpoint that could not be written, with the last one that was."""
    written = (file for file in path.parent.glob("*.ckpt") if file.exists())  # not a link that leads nowhere
    newest = max(written, key=lambda file: file.stat().st_mtime, default=None)
    then = f"resume from {newest}, the last that was written whole" if newest else "start again"
    return CheckpointError(
        f"checkpoint {path} could not be written: {reason}. Make room for it or change run.folder, then {then}."
    )


def os_error(error: BaseException | None) -> OSError | None:
    """The operating system's error that caused `error`; torch's writer raises its own error from it."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def newest_last(folder: Path) -> Path | None:
    """The `last.ckpt` of the newest run in `folder` (its subfolders `version_N`) that has one; None if none has."""
    return in_newest_version(folder, "checkpoints/last.ckpt")


def find_last(folder: Path) -> Path:
    """`newest_last`. InputError if there is none."""
    if (newest := newest_last(folder)) is None:
        raise InputError(
            f"--ckpt_path=last: no run in {str(folder)!r} has a last.ckpt. Name the checkpoint file, or set "
            "run.folder and run.name to those of its run."
        )
    return newest


def require_same_model(trained: ModelConfig, config: ModelConfig, path: str | Path) -> None:
    """Raises InputError, naming the options that differ, unless a checkpoint's model is the configured one."""
    if differing := differences(flat_options(trained), flat_options(config)):
        raise InputError(
            f"checkpoint {str(path)!r} holds another model than the one configured; {_fix(path)}:\n  "
            + "\n  ".join(differing.values())
        )


def start_from(model: Model, path: str, fractions: list[float] | None) -> list[str]:
    """Copies the weights and the tokenizer of a trained model to a new run's model; returns what differs, in words.

    `path` is a .ckpt file or a folder. Warns if the new run's `fractions` hold out text that the model was trained on.
    Raises InputError for no model at `path`, or one that differs in an option that decides the weights.
    """
    source = _trained(path, model)
    differing = model.take(source, f"run.start_from={path!r}")
    if is_checkpoint(path) and fractions is not None:
        warn_of_other_split(open_checkpoint(path), fractions, path)
    return differing


def _trained(path: str, model: Model) -> Model:
    """The model at `path`, of the same family as `model`."""
    try:
        return load_trained(path, model.config_class)
    except InputError as error:
        raise InputError(
            f"run.start_from={path!r}: {error} Name a .ckpt file or a folder with a model, or give null to begin with "
            "random weights."
        ) from error


def warn_of_other_split(checkpoint: dict[str, Any], fractions: list[float], path: str | Path) -> None:
    """Warns if the data's fractions are not those of the checkpoint's run: it may have trained on held-out text."""
    then = checkpoint["linrope"]["order"].get("data.fractions")
    if then is not None and then != fractions and fractions[0] < 1:  # else nothing is held out
        rank_zero_warn(
            f"checkpoint {str(path)!r} was trained with data.fractions={then}, and here they are {fractions}: if the "
            "text is the same, it was trained on some text that is held out here, and losses on that mean little. Give "
            "the same data.fractions."
        )


def require_same_tokenizer(of_model: dict[str, str] | None, of_data: dict[str, str], source: str) -> None:
    """Raises InputError unless model and data have the same (serialized) tokenizer, or the model's is unknown."""
    trained, here = tokenizer_from_serialized(of_model, source), tokenizer_from_serialized(of_data)
    if trained is None or (here is not None and trained.fingerprint == here.fingerprint):
        return
    tokens = "tokens of an unknown tokenizer" if here is None else f"those of {_described(here)}"
    raise InputError(
        f"{source} was trained with the tokenizer {_described(trained)}, and the data holds {tokens}: give data that "
        "was prepared with that tokenizer, or for a .bin file set data.tokenizer to it."
    )


def require_tokenizer_of_teacher(teacher: Model, tokenizer: Tokenizer | None, source: str) -> None:
    """Raises InputError unless data of this tokenizer fit a teacher; warns if the teacher's tokenizer is unknown."""
    of_teacher = known_or_bytes(teacher.tokenizer, teacher.config.vocab_size)
    if tokenizer_from_serialized(of_teacher) is None:
        rank_zero_warn(f"{source} has no tokenizer, so the data cannot be checked against it.")
    require_same_tokenizer(of_teacher, tokenizer_to_serialized(tokenizer), source)


def _described(tokenizer: Tokenizer) -> str:
    fingerprint = f", fingerprint {tokenizer.fingerprint[:8]}" if tokenizer.fingerprint else ""
    return f"{tokenizer.name} ({tokenizer.vocab_size:,} tokens{fingerprint})"


def require_training_state(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Raises InputError if a checkpoint has weights but not the training state."""
    if missing := [key for key in TRAINING_STATE if key not in checkpoint]:
        raise InputError(
            f"checkpoint {str(path)!r} cannot be resumed from: it has no {', '.join(missing)}. Give one that "
            "`linrope fit` wrote, or Lightning's save_checkpoint without save_weights_only."
        )


def run_order(trainer: Trainer, seed: int) -> dict[str, Any]:
    """What decides the samples of every step and dropout's random numbers: plain values by the names of their options.

    The data's part is `order()` of a `ResumableDataModule`. Other data are not compared: only Lightning knows where
    their loaders continue.
    """
    if not isinstance(data := trainer.datamodule, ResumableDataModule):
        return {"seed_everything": seed}
    overfitted = {"trainer.overfit_batches": trainer.overfit_batches} if trainer.overfit_batches else {}
    return {
        **overfitted,
        **{f"data.{name}": value for name, value in data.order().items()},
        "trainer.accumulate_grad_batches × devices": trainer.accumulate_grad_batches * data_parallel(trainer)[1],
        "seed_everything": seed,
    }


def require_same_order(checkpoint: dict[str, Any], order: dict[str, Any], path: str | Path) -> None:
    """Raises InputError, naming what differs, if the checkpoint's run had other samples, or another order of them.
    Warns if only the times of a text differ, whose contents are too large to be compared whole."""
    then, now = dict(checkpoint["linrope"]["order"]), dict(order)
    for one in (then, now):
        one.pop(TEXT_PLACE, None)
    modified = then.pop(TEXT_MODIFIED, None), now.pop(TEXT_MODIFIED, None)
    if differing := differences(then, now):
        raise InputError(
            f"checkpoint {str(path)!r} is of a run with other data, batches or seed; {_fix(path)} (a new run needs no "
            "--ckpt_path):\n  " + "\n  ".join(differing.values())
        )
    if None not in modified and modified[0] != modified[1]:  # a copy of the text may have new times
        rank_zero_warn(
            f"the newest file of the text is of {modified[1]}, and of {modified[0]} in checkpoint {str(path)!r}. "
            "Names, sizes and samples of the contents are the same. If any file was edited, start a new run instead."
        )


def require_same_optimizer(checkpoint: dict[str, Any], config: OptimizerConfig, path: str | Path) -> None:
    """Raises InputError if the checkpoint's run had another optimizer, by name or class, whose states this one cannot
    use."""
    saved = checkpoint["linrope"]
    name, own_class = saved["optimizer"], saved["optimizer_class"]
    if own_class != config.own_class:
        now = f"class_path={config.own_class}" if config.own_class else f"name={config.name}"
        then = own_class or name
    elif name != config.name:
        now, then = f"name={config.name}", name
    else:
        return
    raise InputError(
        f"optimizer.{now}, but checkpoint {str(path)!r} has the states of {then}: set {then}, or start a new run with "
        "its weights: --run.start_from in place of --ckpt_path."
    )


def _fix(path: str | Path) -> str:
    beside = Path(path).parent.parent / "config.yaml"
    fix = f"--config {beside}" if beside.is_file() else "--config with the YAML that trained it"
    return f"pass {fix}, or make these equal"


def rewind_to_step(checkpoint: dict[str, Any], accumulate_grad_batches: int) -> None:
    """Sets a checkpoint's position in its endless epoch to the end of its last optimizer step.

    A checkpoint can be from the middle of a step, without its gradients (`best.ckpt` after a validation there, or
    `max_time`), from the end of the run, or from a run with other micro-batches. The counts are those that Lightning
    saves right after a step, before it has counted the batch as completed.
    """
    step = checkpoint["global_step"]
    n_batches = step * accumulate_grad_batches
    batches = {"ready": n_batches, "started": n_batches, "processed": n_batches, "completed": n_batches - 1}
    epochs = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    loop = checkpoint["loops"]["fit_loop"]
    loop["epoch_loop.batch_progress"] = {"total": batches, "current": dict(batches), "is_last_batch": False}
    loop["epoch_loop.state_dict"] = {"_batches_that_stepped": step - 1}  # the step of the loggers
    loop["epoch_progress"] = {"total": epochs, "current": dict(epochs)}
