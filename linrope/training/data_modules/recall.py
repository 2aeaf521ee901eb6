"""Recall tasks for the Lightning trainer: an endless mixture to learn from, cases to measure.

Multi-query associative recall, copying and induction of random tokens; a pass key in real text is in `passkey`.
"""

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
from linrope.data.synthetic.task import Case, Stage, Task
from linrope.errors import InputError
from linrope.training.data_modules.base import RankSampler, ResumableDataModule, TimedLoader

# As in Zoology's experiments (arXiv 2312.04927): what it learns from, in thousands of rows, and what it is asked.
STAGES: tuple[Stage, ...] = ((64, 4, 100), (128, 8, 20), (256, 16, 20), (256, 32, 20), (256, 64, 20))


CASES: tuple[Case, ...] = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 64), (512, 128), (1024, 256))


class RecallDataModule(ResumableDataModule):
    """What the recall tasks share: batches from a task's rows.

    Batches are `{"inputs", "targets"}`, each int64 (rows, length), of one case; targets are IGNORE where nothing is
    asked. Those of validation and test have `"case"` too, its name. Training has no epochs: batch `i` of a run follows
    from `seed` and `i`, and a resumed run goes on with the batch after the last that its checkpoint has learned from.
    Validation and test have rows of their own, the same for every seed. On several devices set
    `trainer.use_distributed_sampler` to False: the loaders deal rows to ranks by themselves. A model must know the
    task's tokens; they are no text, but for pass keys.

    Args:
        task: makes the rows.
        stages: What to learn from: cases, each with a last number more, its share of all rows.
        cases: What to measure.
        tokens_per_batch: Tokens of one batch, per device; it has as many whole rows as fit.
        test_rows: Rows of each case, in validation and again in test.
        seed: Names the training rows and their order.
        num_workers: Processes that make batches ahead; 0 makes them in the training process.

    Raises:
        InputError: no stage or case, one that the task cannot serve or that does not fit a batch, or a number out of
            range; when set up: a trainer that limits or deals out training batches by itself.
    """

    def __init__(
        self,
        task: Task,
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
        """Raise InputError unless there are `cases`, and each fits the task and a batch."""
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
                f"model.vocab_size={vocab_size} is too small for the rows, whose tokens are {self.task.vocab_size}: "
                f"set it to {self.task.vocab_size} or more."
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

    def task_of(self, split: str) -> Task:
        """What makes the rows of a split: "train", "val" or "test"."""
        return self.task

    def train_dataloader(self) -> TimedLoader:
        """An endless loader. Lightning asks for it after it has restored the step that a checkpoint was saved at."""
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
        """All cases in order. Every rank takes every `world_size`-th row; none is seen twice."""
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
        stages: What to learn from: (length, n_pairs, rows) each, where `rows` is a share of all rows.
        cases: What to measure: (length, n_pairs) each.
        vocab_size: Number of tokens; the model's must be as large.
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
        stages: What to learn from: (length, rows) each, where `rows` is a share of all rows.
        cases: What to measure: (length,) each.
        vocab_size: Number of tokens, the mark among them; the model's must be as large.
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
        stages: What to learn from: (length, rows) each, where `rows` is a share of all rows; the mark stands anywhere.
        cases: What to measure: (length,) each, or (length, depth in percent).
        vocab_size: Number of tokens, the mark among them; the model's must be as large.
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
