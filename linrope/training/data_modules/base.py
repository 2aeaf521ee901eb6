"""The base class of data modules whose training batches follow from the step alone, and their loader."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from numbers import Integral
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from linrope.data.tokenizers.base import Tokenizer
from linrope.errors import DocumentChanged, InputError, WorkerKilled
from linrope.positions.base import PositionsConfig

MOST_WORKERS = 1024
MOST_TOKENS = 1 << 28
"""Tokens of the largest batch: 2 GiB as int64, and as much again for its targets."""


@dataclass(frozen=True)
class RunPosition:
    """Rank, world size and progress: what a loader needs to shard and to resume. Default: one process, at the start."""

    rank: int = 0
    world_size: int = 1
    batches_per_step: int = 1
    """Batches of one process in one optimizer step."""
    step: int = 0
    """Finished optimizer steps."""
    on_gpu: bool = False

    @property
    def batches_done(self) -> int:
        """Training batches that each process has finished."""
        return self.step * self.batches_per_step


def data_parallel(trainer: Trainer) -> tuple[int, int]:
    """The place of this process among those that read different batches, and their number."""
    dealt = getattr(trainer.strategy, "distributed_sampler_kwargs", None)  # none of a strategy with one device
    return (trainer.global_rank, trainer.world_size) if dealt is None else (dealt["rank"], dealt["num_replicas"])


class ResumableDataModule(LightningDataModule):
    """Training batches that follow from the options and the number of finished steps, so that any run can resume.

    A new data module derives from it and writes

    - `train_dataloader`: an endless loader. It starts at `run_position` and yields the batches of that rank only.
    - `val_dataloader` and `test_dataloader`: each sample of the split on exactly one rank.
    - `order` and `require_vocabulary`; `tokens_at` if steps differ in tokens; `samples_of` if samples have numbers.

    Loaders are made by `loader`, with a `RankSampler`. `TrainingTask` saves `order` in checkpoints and refuses to
    resume a run whose order differs. Other data modules train too: Lightning then decides where their loaders continue.
    """

    tokenizer: Tokenizer | None = None
    """Tokenizer of these tokens; None if unknown."""
    fractions: list[float] | None = None
    """Shares of the text in train, val and test; None for data that is not split."""
    contiguous = False
    """Whether each row continues the same row of the batch before, so that the model's state is carried over."""

    def __init__(self) -> None:
        super().__init__()
        self._loaders: list[TimedLoader] = []

    @property
    def run_position(self) -> RunPosition:
        """Where this process is in its run; without a trainer the default."""
        if (trainer := self.trainer) is None:
            return RunPosition()
        on_gpu = trainer.strategy.root_device.type == "cuda"
        steps = trainer.accumulate_grad_batches, trainer.global_step
        return RunPosition(*data_parallel(trainer), *steps, on_gpu)

    @property
    def asks_to_validate(self) -> bool:
        """Whether the trainer's options ask for validations in training; True without a trainer."""
        return self.trainer is None or self.trainer.limit_val_batches > 0

    def setup(self, stage: str) -> None:
        """Raise InputError for Trainer options with which training would repeat samples or never finish a step."""
        if (trainer := self.trainer) is None:
            return
        require_accumulation(trainer.accumulate_grad_batches)
        if stage == "fit" and trainer.overfit_batches:
            self._require_overfitting(trainer.overfit_batches)
        elif stage == "fit" and not trainer.fast_dev_run:
            self._require_no_limit(trainer.limit_train_batches)
            self._require_last_step(trainer.max_epochs, trainer.max_steps)

    def _require_no_limit(self, limit: int | float | None) -> None:
        """Raise InputError if training would begin anew after `limit` batches, or after that share of an epoch."""
        if limit is None or (isinstance(limit, float) and limit == 1):
            return
        self.open()
        has_epochs = self.steps_per_epoch_for(1) is not None
        fix = "set trainer.max_epochs beside it, for epochs of this size, or remove" if has_epochs else "remove"
        raise InputError(
            f"trainer.limit_train_batches={limit} would train on the same first samples again and again: {fix} it and "
            "set trainer.max_steps. To overfit a few batches, as a check, set trainer.overfit_batches."
        )

    def _require_last_step(self, max_epochs: int | None, max_steps: int) -> None:
        """Raise InputError if so many readings of the data end before `max_steps`: to a Trainer made in Python,
        training is one endless epoch."""
        if max_epochs is None or max_epochs < 0 or max_steps < 1:
            return
        self.open()
        where = self.run_position
        steps = self.steps_per_epoch_for(where.batches_per_step * where.world_size)
        if steps is not None and max_epochs * steps < max_steps:
            raise InputError(
                f"trainer.max_epochs={max_epochs} ends after {max_epochs * steps:,} steps, and would be ignored beside "
                f"trainer.max_steps={max_steps:,}: set trainer.max_steps={max_epochs * steps} alone."
            )

    def _require_overfitting(self, n_batches: int | float) -> None:
        """Raise InputError unless Lightning can train on the first `n_batches` batches again and again."""
        option, per_step = f"trainer.overfit_batches={n_batches}", self.trainer.accumulate_grad_batches
        if not isinstance(n_batches, int):
            raise InputError(f"{option} is a share of data that has no end: give a whole number of batches.")
        if n_batches % per_step:
            raise InputError(f"{option} must be a multiple of trainer.accumulate_grad_batches={per_step}.")
        if self.contiguous:
            raise InputError(f"{option} reads the same rows again, and data.contiguous=True continues them: drop one.")

    def order(self) -> dict[str, Any]:
        """All options that decide the training samples and their order, as plain values; it needs `setup`."""
        raise NotImplementedError

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raise InputError where a token is `vocab_size` or more; it needs `setup`."""
        raise NotImplementedError

    def require_positions(self, positions: PositionsConfig) -> None:
        """Raise InputError if a row is known to be longer than a model with these positions can read."""

    def open(self) -> Any:
        """Read what decides the other answers, as names and sizes of files; `setup` calls it, and a second call
        does nothing."""

    def steps_per_epoch_for(self, batches_per_step: int) -> int | None:
        """Optimizer steps that read all training samples once, of that many batches over all devices; None for data
        without epochs. It needs `open`."""
        return None

    def describe(self) -> list[tuple[str, str]]:
        """Rows (name, value) about the data for the summary of a run; it needs `setup`."""
        return []

    @property
    def has_validation_text(self) -> bool:
        """Whether there is a validation split; it may have a path of its own."""
        return self.fractions is None or self.fractions[1] > 0

    def describe_split(self, split: str) -> str | None:
        """Where the text of "val" or "test" is from, and its size, for measurements; None for other data. It needs
        `setup`."""
        return None

    def measure(self, split: str) -> None:
        """Called first, before all others, by a command that measures this split, "val" or "test", and trains on
        nothing."""

    def keep_split_of(self, order: dict[str, Any]) -> None:
        """Splits the data as the run of a checkpoint did, whose `order` this is. Called before `setup`."""

    def measure_as(self, saved: dict[str, Any]) -> None:
        """Takes from a checkpoint, whose entry "linrope" this is, what a measurement or prediction would otherwise read
        in the training data; of a folder it has the tokenizer and the labels. Called before `setup`."""

    def measure_path(self) -> None:
        """Called before `setup` if the command line of a measurement or prediction gives `path`. By default nothing
        changes."""

    def samples_of(self, step: int) -> str:
        """Describes the training samples of the optimizer step that follows `step` finished ones, for messages."""
        per_step = self.run_position.batches_per_step
        return f"batches {step * per_step} … {(step + 1) * per_step - 1}"

    def tokens_at(self, step: int) -> int:
        """Tokens trained on, over all devices, after `step` steps; in any unit if all steps have the same number."""
        return step

    def stage_at(self, step: int) -> int | None:
        """The number of the curriculum's stage, from 0, of the optimizer step that follows `step` finished ones; None
        without a curriculum."""
        return None

    def loader(self, dataset: Any, batch_size: int | None = None, num_workers: int = 0, **options: Any) -> TimedLoader:
        """A loader for this process and its device, whose workers ignore signals; `options` are those of DataLoader."""
        options |= {"persistent_workers": num_workers > 0, "pin_memory": self.run_position.on_gpu}
        options |= {"num_workers": num_workers, "worker_init_fn": ignore_signals}
        loader = TimedLoader(dataset=dataset, batch_size=batch_size, **options)  # by name: Lightning makes it again
        self._loaders.append(loader)
        return loader

    def raise_if_killed(self, error: RuntimeError) -> None:
        """Raise WorkerKilled, from the `error` that ended a run, if the process of a worker was killed."""
        killed = [
            -worker.exitcode for loader in self._loaders for worker in loader.workers if (worker.exitcode or 0) < 0
        ]
        if killed:
            raise WorkerKilled(
                f"a data worker was killed ({signal.Signals(killed[0]).name}), perhaps because memory ran out: lower "
                "data.num_workers, and resume from the last checkpoint (--ckpt_path last)."
            ) from error


def require_accumulation(n_batches: int) -> None:
    """Raise InputError unless `trainer.accumulate_grad_batches` is 1 or more."""
    if n_batches < 1:
        raise InputError(f"trainer.accumulate_grad_batches={n_batches} must be 1 or more.")


def require_least(name: str, value: int, least: int) -> None:
    """Raise InputError unless an option of data is a whole number and at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InputError(f"data.{name}={value!r} must be a whole number, {least} or more.")
    if value < least:
        raise InputError(f"data.{name}={value} must be {least} or more.")


def set_up_split(made: Mapping[str, Any], split: str) -> Any:
    """What `setup` made of a split. InputError if it was not called for it."""
    if split not in made:
        stage = {"train": "fit", "val": "validate", "test": "test"}[split]
        raise InputError(f'the {split} split is not set up: call setup("{stage}") before {split}_dataloader().')
    return made[split]


def require_workers(num_workers: int) -> None:
    """Raise InputError for a number of workers below 0 or above MOST_WORKERS."""
    require_least("num_workers", num_workers, 0)
    if num_workers > MOST_WORKERS:
        raise InputError(f"data.num_workers={num_workers} must be at most {MOST_WORKERS}: a few are enough.")


def require_size(vocab_size: int, needed: int, what: str) -> None:
    """Raise InputError if a model's `vocab_size` is below what `what` needs."""
    if vocab_size < needed:
        raise InputError(f"model.vocab_size={vocab_size} is too small for {what}: set it to {needed} or more.")


def require_tokens(options: str, n: int) -> None:
    """Raise InputError if `n` tokens, which these options of data ask for at once, are more than MOST_TOKENS."""
    if n > MOST_TOKENS:
        raise InputError(
            f"{options} = {n:,} tokens are more than can be asked for at once, {MOST_TOKENS:,}: lower it. For larger "
            "steps raise trainer.accumulate_grad_batches."
        )


def ignore_signals(worker: int) -> None:
    """Makes a worker, given its number, ignore SIGINT and SIGTERM, which reach all processes of a run: the main process
    still needs batches to finish its step and to save. Workers end when it ends."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)


class RankSampler(DistributedSampler[Any], SequentialSampler):
    """The indices of one rank, in the order given: iterated over as often as asked, without a length if endless.

    `trainer.use_distributed_sampler` makes Lightning replace the samplers of loaders, which would shard them a second
    time, and `trainer.overfit_batches` those that shuffle. It leaves a DistributedSampler and a SequentialSampler as
    they are.
    """

    def __init__(self, indices: Iterable[Any]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class Counting:
    """The integers `first`, `first + step`, … without an end."""

    def __init__(self, first: int, step: int = 1) -> None:
        self.first, self.step = first, step

    def __iter__(self) -> Iterator[int]:
        return count(self.first, self.step)


class TimedLoader(DataLoader[Any]):
    """A DataLoader that measures in `waited` the seconds that its caller waited for batches.

    `workers` are the processes that it started. An error of ours in a worker has its own message here, without the
    worker's traceback.
    """

    waited = 0.0
    workers: tuple[BaseProcess, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        others = set(active_children())
        batches = super().__iter__()
        self.workers += tuple(set(active_children()) - others)
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (DocumentChanged, InputError) as error:
                raise type(error)(_own_message(error)) from error
            finally:
                self.waited += time.perf_counter() - began
            yield batch


def _own_message(error: Exception) -> str:
    """The message of an error. That of a worker comes inside its traceback, which ends with class and message."""
    return str(error).rpartition(f"{type(error).__module__}.{type(error).__qualname__}: ")[2].rstrip("\n")
