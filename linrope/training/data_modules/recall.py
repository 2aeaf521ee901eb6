"""Recall tasks of random tokens for training: multi-query associative recall, copying and induction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from linrope.data.synthetic.batches import TEST, VAL, Batch, RecallBatches
from linrope.data.synthetic.copying import (
    Copy,
    Induction,
)
from linrope.data.synthetic.mqar import MQAR
from linrope.data.synthetic.recall_task import Case, RecallTask, Stage
from linrope.errors import InputError
from linrope.training.data_modules.base import RankSampler, ResumableDataModule, TimedLoader

STAGES: tuple[Stage, ...] = ((64, 4, 100), (128, 8, 20), (256, 16, 20), (256, 32, 20), (256, 64, 20))
"""Training cases (length, n_pairs) of Zoology's experiments (arXiv 2312.04927), with thousands of rows."""


CASES: tuple[Case, ...] = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 64), (512, 128), (1024, 256))
"""Test cases of the same experiments."""


class RecallDataModule(ResumableDataModule):
    """What the data modules of recall tasks share: batches of a task's rows.

    A batch is a dictionary:
        inputs, targets: int64 (rows, length), rows of one case; targets are IGNORE where nothing is asked.
        case: only in validation and test: the name of the case.

    Training has no epochs: batch `i` of a run follows from `seed` and `i`. A resumed run continues with the batch after
    the last one that its checkpoint was trained on. Validation and test have their own rows, the same for every seed.
    Tokens are random numbers below the task's `vocab_size`, and text only for pass keys.

    Args:
        task: makes the rows.
        stages: Training cases, each followed by its share of all rows.
        cases: Cases of validation and test.
        tokens_per_batch: Tokens of one batch, per device, rounded down to whole rows.
        test_rows: Rows of each case in validation, and as many others in test.
        seed: Decides the training rows and their order.
        num_workers: Processes that make batches ahead; 0 makes them in the training process.

    Raises:
        InputError: no stage or case, a case that is invalid or longer than a batch, a number out of range; when set up:
            a trainer that limits the training batches.
    """

    def __init__(
        self,
        task: RecallTask,
        stages: Sequence[Stage],
        cases: Sequence[Case],
        tokens_per_batch: int,
        test_rows: int,
        seed: int,
        num_workers: int,
    ) -> None:
        super().__init__()
        for name, value, least in (("test_rows", test_rows, 1), ("seed", seed, 0), ("num_workers", num_workers, 0)):
            if value < least:
                raise InputError(f"data.{name}={value} must be {least} or more.")
        self.task = task
        self.stages, self.cases = stages, cases
        self.tokens_per_batch, self.test_rows = tokens_per_batch, test_rows
        self.seed, self.num_workers = seed, num_workers
        self._check("stages", [tuple(stage[:-1]) for stage in stages])
        self._check("cases", cases)
        if min(rows for *_, rows in stages) <= 0:
            raise InputError(f"data.stages={stages}: the last number of each, its share of rows, must be above 0.")

    def _check(self, name: str, cases: Sequence[Case]) -> None:
        """Raise InputError unless there are `cases`, each valid for the task and no longer than a batch."""
        if not cases:
            raise InputError(f"data.{name} is empty: give at least one.")
        for case in cases:
            try:
                self.task.require(tuple(case))
            except InputError as error:
                raise InputError(f"data.{name}: {error}") from error
            if case[0] > self.tokens_per_batch:
                raise InputError(
                    f"data.tokens_per_batch={self.tokens_per_batch} has no room for a row of length={case[0]} of "
                    f"data.{name}: raise it to {case[0]} or more."
                )

    def require_vocabulary(self, vocab_size: int) -> None:
        if vocab_size < self.task.vocab_size:
            raise InputError(
                f"model.vocab_size={vocab_size} is too small for the rows, whose tokens are below "
                f"{self.task.vocab_size}: set it to {self.task.vocab_size} or more."
            )

    def order(self) -> dict[str, Any]:
        return {
            "stages": [list(stage) for stage in self.stages],
            **asdict(self.task),
            "tokens_per_batch": self.tokens_per_batch,
            "seed": self.seed,
        }

    def samples_of(self, step: int) -> str:
        per_step = self.run_position.batches_per_step
        return f"batches {step * per_step} … {(step + 1) * per_step - 1}"

    def task_of(self, split: str) -> RecallTask:
        """The task that makes the rows of a split: "train", "val" or "test"."""
        return self.task

    def train_dataloader(self) -> TimedLoader:
        """An endless loader. Lightning asks for it after it has restored the step of a checkpoint."""
        batches = RecallBatches(
            self.task_of("train"),
            self.stages,
            self.tokens_per_batch,
            self.seed,
            rank=self.run_position.rank,
            first=self.run_position.batches_done,
        )
        return TimedLoader(
            batches,
            batch_size=None,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=self.run_position.on_gpu,
        )

    def val_dataloader(self) -> TimedLoader:
        return self._evaluation_loader(self._evaluation_batches("val", VAL))

    def test_dataloader(self) -> TimedLoader:
        return self._evaluation_loader(self._evaluation_batches("test", TEST))

    def _evaluation_batches(self, split: str, number: int) -> list[Batch]:
        """All cases in order. Each rank has every `world_size`-th row; no row is read twice."""
        mine = slice(self.run_position.rank, None, self.run_position.world_size)
        task, batches = self.task_of(split), []
        for case in map(tuple, self.cases):
            inputs, targets = (tokens[mine] for tokens in task.rows(self.test_rows, case, (number, *case)))
            n = self.tokens_per_batch // case[0]
            batches += [
                {"inputs": inputs[start : start + n], "targets": targets[start : start + n], "case": task.name(case)}
                for start in range(0, len(inputs), n)
            ]
        return batches

    def _evaluation_loader(self, batches: list[Batch]) -> TimedLoader:
        sampler = RankSampler(range(len(batches)))
        return TimedLoader(batches, batch_size=None, sampler=sampler, pin_memory=self.run_position.on_gpu)


class MQARDataModule(RecallDataModule):
    """Multi-query associative recall: see `mqar_rows` and `RecallDataModule`.

    Args:
        stages: Training cases (length, n_pairs, rows), where `rows` is a share of all rows.
        cases: Cases (length, n_pairs) of validation and test.
        vocab_size: Number of tokens; the model's must be at least as large.
        tokens_per_batch, test_rows, seed, num_workers: As in `RecallDataModule`.
    """

    def __init__(
        self,
        stages: Sequence[Stage] = STAGES,
        cases: Sequence[Case] = CASES,
        vocab_size: int = 8192,
        tokens_per_batch: int = 16384,
        test_rows: int = 1000,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(MQAR(vocab_size), stages, cases, tokens_per_batch, test_rows, seed, num_workers)


class CopyDataModule(RecallDataModule):
    """Copying rows of random tokens: see `copy_rows` and `RecallDataModule`.

    Args:
        stages: Training cases (length, rows), where `rows` is a share of all rows.
        cases: Cases (length,) of validation and test.
        vocab_size: Number of tokens with the mark; the model's must be at least as large.
        tokens_per_batch, test_rows, seed, num_workers: As in `RecallDataModule`.
    """

    def __init__(
        self,
        stages: Sequence[Stage] = ((32, 1), (64, 1), (128, 1)),
        cases: Sequence[Case] = ((64,), (128,), (256,), (512,)),
        vocab_size: int = 32,
        tokens_per_batch: int = 4096,
        test_rows: int = 200,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(Copy(vocab_size), stages, cases, tokens_per_batch, test_rows, seed, num_workers)


class InductionDataModule(RecallDataModule):
    """One induction step in rows of random tokens: see `induction_rows` and `RecallDataModule`.

    Args:
        stages: Training cases (length, rows), where `rows` is a share of all rows; the mark has a random place.
        cases: Cases (length,) or (length, depth in percent) of validation and test.
        vocab_size: Number of tokens with the mark; the model's must be at least as large.
        tokens_per_batch, test_rows, seed, num_workers: As in `RecallDataModule`.
    """

    def __init__(
        self,
        stages: Sequence[Stage] = ((64, 1), (128, 1), (256, 1)),
        cases: Sequence[Case] = ((64,), (256,), (1024,), (4096,)),
        vocab_size: int = 16,
        tokens_per_batch: int = 4096,
        test_rows: int = 200,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(Induction(vocab_size), stages, cases, tokens_per_batch, test_rows, seed, num_workers)
