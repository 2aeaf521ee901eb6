"""Recall tasks for training: multi-query associative recall, copying, induction, and pass keys in real text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import Any

from linrope.data.corpus.files import find_sources
from linrope.data.corpus.splits import SPLIT_WAYS, SPLITS, split_corpus
from linrope.data.synthetic.copying import Copy, Induction
from linrope.data.synthetic.mqar import MQAR
from linrope.data.synthetic.passkey import Passkey
from linrope.data.synthetic.recall_task import TEST, VAL, Case, RecallBatches, RecallTask, Stage
from linrope.data.tokenizers.bytes import ByteTokenizer
from linrope.errors import InputError, require_choice
from linrope.training.data_modules.base import (
    RankSampler,
    ResumableDataModule,
    TimedLoader,
    require_least,
    require_size,
    require_tokens,
    require_workers,
)

STAGES: tuple[Stage, ...] = ((64, 4, 100), (128, 8, 20), (256, 16, 20), (256, 32, 20), (256, 64, 20))
"""Training cases (length, n_pairs) of Zoology's experiments (arXiv 2312.04927), with thousands of rows."""
CASES: tuple[Case, ...] = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 64), (512, 128), (1024, 256))
"""Test cases of the same experiments."""


class RecallDataModule(ResumableDataModule):
    """What the data modules of recall tasks share: batches of a task's rows.

    A batch is a dictionary:
        inputs, targets: int64 (rows, length), rows of one case; targets are IGNORE where nothing is asked.
        case: only in validation and test: the name of the case.

    Training has no epochs: batch `i` of a device follows from `seed`, `i` and the device's number. A resumed run
    continues with the batch after the last one that its checkpoint was trained on, on as many devices. Validation and
    test have their own rows, the same for every seed. Tokens are random numbers below the task's `vocab_size`, and text
    only for pass keys.

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
        tokens_per_batch: int = 4096,
        test_rows: int = 200,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        for name, value, least in (("test_rows", test_rows, 1), ("seed", seed, 0)):
            require_least(name, value, least)
        require_workers(num_workers)
        require_tokens("data.tokens_per_batch", tokens_per_batch)
        self.task, self.stages, self.cases = task, stages, cases
        self.tokens_per_batch, self.test_rows = tokens_per_batch, test_rows
        self.seed, self.num_workers = seed, num_workers
        self._check("data.stages", [stage[:-1] for stage in stages], task)
        self._check("data.cases", cases, task)
        require_tokens("data.test_rows · length of data.cases", test_rows * max(length for length, *_ in cases))
        if min(rows for *_, rows in stages) <= 0:
            raise InputError(f"data.stages={stages}: the last number of each, its share of rows, must be above 0.")

    def _check(self, name: str, cases: Sequence[Case], task: RecallTask) -> None:
        """Raise InputError unless there are `cases`, each valid for the task and no longer than a batch."""
        if not cases:
            raise InputError(f"{name} is empty: give at least one.")
        for case in cases:
            try:
                task.require(tuple(case))
            except InputError as error:
                raise InputError(f"{name}: {error}") from error
            if case[0] > self.tokens_per_batch:
                raise InputError(
                    f"data.tokens_per_batch={self.tokens_per_batch} has no room for a row of length={case[0]} of "
                    f"{name}: raise it to {case[0]} or more."
                )

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if self.test_rows < (n := self.run_position.world_size):  # a rank without any would not take part in the sums
            raise InputError(f"data.test_rows={self.test_rows}: {n} devices need a row of each case each: raise it.")

    def require_vocabulary(self, vocab_size: int) -> None:
        least = self.task.vocab_size
        require_size(vocab_size, least, f"the rows, whose tokens are below {least}")

    def order(self) -> dict[str, Any]:
        rows = {"stages": [list(stage) for stage in self.stages], "tokens_per_batch": self.tokens_per_batch}
        n_devices = self.run_position.world_size  # a batch follows from its number on its device
        return {**rows, "devices": n_devices, "seed": self.seed, **self.order_of_task()}

    def order_of_task(self) -> dict[str, Any]:
        """The part of `order` that the task decides."""
        return asdict(self.task)

    def task_of(self, split: str) -> RecallTask:
        """The task that makes the rows of a split: "train", "val" or "test"."""
        return self.task

    def train_dataloader(self) -> TimedLoader:
        """An endless loader. Lightning asks for it after it has restored the step of a checkpoint."""
        options, position = (self.stages, self.tokens_per_batch, self.seed), self.run_position
        batches = RecallBatches(self.task_of("train"), *options, position.rank, position.batches_done)
        return self.loader(batches, num_workers=self.num_workers)

    def val_dataloader(self) -> TimedLoader:
        return self._evaluation_loader("val", VAL)

    def test_dataloader(self) -> TimedLoader:
        return self._evaluation_loader("test", TEST)

    def _evaluation_loader(self, split: str, number: int) -> TimedLoader:
        """A batch of each case in order, then the next of each, so that the first ones are of all cases. Each rank has
        every `world_size`-th row; no row is read twice."""
        mine = slice(self.run_position.rank, None, self.run_position.world_size)
        task, batches = self.task_of(split), []  # with the number of each among those of its case
        for case in map(tuple, self.cases):
            inputs, targets = (tokens[mine] for tokens in task.rows(self.test_rows, case, (number, *case)))
            n = self.tokens_per_batch // case[0]
            for number_of_case, start in enumerate(range(0, len(inputs), n)):
                rows = slice(start, start + n)
                batch = {"inputs": inputs[rows], "targets": targets[rows], "case": task.name(case)}
                batches.append((number_of_case, batch))
        in_turn = [batch for _, batch in sorted(batches, key=itemgetter(0))]
        return self.loader(in_turn, sampler=RankSampler(range(len(in_turn))))


class MQARDataModule(RecallDataModule):
    """Multi-query associative recall: see `MQAR` and, for the other arguments and errors, `RecallDataModule`.

    Stages are (length, n_pairs, rows), cases (length, n_pairs). The model's `vocab_size` must be at least this one.
    """

    def __init__(
        self,
        stages: Sequence[Stage] = STAGES,
        cases: Sequence[Case] = CASES,
        vocab_size: int = 8192,
        tokens_per_batch: int = 16384,
        test_rows: int = 1000,
        **options: int,
    ) -> None:
        super().__init__(MQAR(vocab_size), stages, cases, tokens_per_batch, test_rows, **options)


class CopyDataModule(RecallDataModule):
    """Copying rows of random tokens: see `Copy` and `RecallDataModule`.

    Stages are (length, rows), cases (length,); the other arguments are those of `RecallDataModule`.
    """

    def __init__(
        self,
        stages: Sequence[Stage] = ((32, 1), (64, 1), (128, 1)),
        cases: Sequence[Case] = ((64,), (128,), (256,), (512,)),
        vocab_size: int = 32,
        **options: int,
    ) -> None:
        super().__init__(Copy(vocab_size), stages, cases, **options)


class InductionDataModule(RecallDataModule):
    """One induction step in rows of random tokens: see `Induction` and `RecallDataModule`.

    Stages are (length, rows), with the mark at a random place; cases are (length,) or (length, depth in percent). The
    other arguments are those of `RecallDataModule`.
    """

    def __init__(
        self,
        stages: Sequence[Stage] = ((64, 1), (128, 1), (256, 1)),
        cases: Sequence[Case] = ((64,), (256,), (1024,), (4096,)),
        vocab_size: int = 16,
        **options: int,
    ) -> None:
        super().__init__(Induction(vocab_size), stages, cases, **options)


class PasskeyDataModule(RecallDataModule):
    """A pass key in real text: see `Passkey` and, for the other arguments and errors, `RecallDataModule`.

    Stages are (length, rows), with the key at a random place; cases are (length,) or (length, depth in percent).

    Args:
        path: Text around the keys: a file, a folder or a glob. null is the built-in corpus.
        fractions, split: Shares of the text for train, val and test, as in `TextDataModule`.

    Raises:
        InputError: also for no text at `path`, or less than a row in one of the splits.
    """

    tokenizer = ByteTokenizer()

    def __init__(
        self,
        path: str | None = None,
        stages: Sequence[Stage] = ((128, 4), (256, 2), (512, 1)),
        cases: Sequence[Case] = ((128,), (512,), (2048,)),
        fractions: Sequence[float] = (0.9, 0.05, 0.05),
        tokens_per_batch: int = 4096,
        test_rows: int = 100,
        split: str | None = None,
        **options: int,
    ) -> None:
        if split is not None:
            require_choice("data.split", split, SPLIT_WAYS)
        sources = find_sources(path)
        corpora, self.why_cut = split_corpus(sources, fractions, split)
        self.tasks = {name: Passkey(corpus) for name, corpus in corpora.items()}
        self.origin, self.fractions = sources.origin, list(fractions)
        super().__init__(self.tasks["train"], stages, cases, tokens_per_batch, test_rows, **options)
        for split in SPLITS[1:]:
            self._check(f"data.cases in the {split} split", cases, self.tasks[split])

    def task_of(self, split: str) -> Passkey:
        return self.tasks[split]

    def order_of_task(self) -> dict[str, Any]:
        split = {"fractions": self.fractions, "split": None if self.why_cut is None else "position"}
        return {**split, **self.task.text.identity()}
