"""Multi-query associative recall for the Lightning trainer: an endless mixture to learn from, cases to measure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from linrope.data import IGNORE, mqar_rows, require_mqar
from linrope.errors import InputError
from linrope.training.module import LanguageModelingModule, token_losses

Batch = dict[str, Tensor]
Stage = tuple[int, int, int]
Case = tuple[int, int]

# As in Zoology's experiments (arXiv 2312.04927): what it learns from, in thousands of rows, and what it is asked.
STAGES: tuple[Stage, ...] = ((64, 4, 100), (128, 8, 20), (256, 16, 20), (256, 32, 20), (256, 64, 20))
CASES: tuple[Case, ...] = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 64), (512, 128), (1024, 256))

# What a seed's numbers are for: no two uses may draw the same rows.
_CHOICE, _TRAIN, _VAL, _TEST = range(4)


class MQARBatches(IterableDataset[Batch]):
    """The endless training batches of one rank, from number `first` on.

    A batch has rows of one stage, which follows from (seed, number) alone, so that all ranks do the same work at the
    same time; its rows follow from (seed, number, rank).

    Args:
        stages: (length, n_pairs, rows) each; a stage's share of all rows is in proportion to its `rows`.
        tokens_per_batch: tokens of a batch, rounded down to whole rows.
        vocab_size: number of tokens.
        seed, rank: name the order.
        first: number of the first batch.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        tokens_per_batch: int,
        vocab_size: int,
        seed: int = 0,
        rank: int = 0,
        first: int = 0,
    ) -> None:
        self.stages, self.tokens_per_batch, self.vocab_size = stages, tokens_per_batch, vocab_size
        self.seed, self.rank, self.first = seed, rank, first
        batches = np.array([rows / self._n_rows(length) for length, _, rows in stages])
        self._shares = batches / batches.sum()  # of batches: those of long rows have fewer of them

    def _n_rows(self, length: int) -> int:
        return self.tokens_per_batch // length

    def __getitem__(self, number: int) -> Batch:
        """Batch `number ≥ 0`."""
        stage = np.random.default_rng((_CHOICE, self.seed, number)).choice(len(self.stages), p=self._shares)
        length, n_pairs, _ = self.stages[stage]
        seed = (_TRAIN, self.seed, number, self.rank)
        inputs, targets = mqar_rows(self._n_rows(length), length, n_pairs, self.vocab_size, seed)
        return {"inputs": inputs, "targets": targets}

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()  # a loader takes from its workers in turn, so the order is that of one process
        mine = count(self.first + worker.id, worker.num_workers) if worker else count(self.first)
        return map(self.__getitem__, mine)


class MQARDataModule(LightningDataModule):
    """Multi-query associative recall: see `linrope.data.mqar_rows`.

    Batches are `{"inputs", "targets"}`, each int64 (rows, length), of one length and number of pairs; targets are
    IGNORE where nothing is asked. Training has no epochs: batch `i` of a run follows from `seed` and `i`, and a resumed
    run goes on with the batch after the last that its checkpoint has learned from. Validation and test have rows of
    their own, the same for every seed. On several devices set `trainer.use_distributed_sampler` to False: the loaders
    deal rows to ranks by themselves.

    Args:
        stages: What to learn from: (length, n_pairs, rows) each, where `rows` is a share of all rows.
        cases: What to measure: (length, n_pairs) each.
        vocab_size: Number of tokens; the model's must be as large.
        tokens_per_batch: Tokens of one batch, per device; it has as many whole rows as fit.
        test_rows: Rows of each case, in validation and again in test.
        seed: Names the training rows and their order.
        num_workers: Processes that make batches ahead; 0 makes them in the training process.

    Raises:
        InputError: no stage or case, one that does not fit its length, its batch or the vocabulary, or a number out of
            range.
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
        super().__init__()
        for name, value, least in (("test_rows", test_rows, 1), ("seed", seed, 0), ("num_workers", num_workers, 0)):
            if value < least:
                raise InputError(f"data.{name}={value} must be {least} or more.")
        _check("stages", [(length, n_pairs) for length, n_pairs, _ in stages], vocab_size, tokens_per_batch)
        _check("cases", cases, vocab_size, tokens_per_batch)
        if min(rows for _, _, rows in stages) <= 0:
            raise InputError(f"data.stages={stages}: the last number of each, its share of rows, must be above 0.")
        self.stages, self.cases, self.vocab_size = stages, cases, vocab_size
        self.tokens_per_batch, self.test_rows = tokens_per_batch, test_rows
        self.seed, self.num_workers = seed, num_workers

    def order(self) -> dict[str, Any]:
        """All options that decide which rows follow which, as plain values."""
        return {
            "stages": [list(stage) for stage in self.stages],
            "vocab_size": self.vocab_size,
            "tokens_per_batch": self.tokens_per_batch,
            "seed": self.seed,
        }

    def train_dataloader(self) -> DataLoader[Batch]:
        """An endless loader. Lightning asks for it after it has restored the step that a checkpoint was saved at."""
        trainer = self.trainer
        batches = MQARBatches(
            self.stages,
            self.tokens_per_batch,
            self.vocab_size,
            self.seed,
            rank=trainer.global_rank,
            first=trainer.global_step * trainer.accumulate_grad_batches,
        )
        return self._loader(batches, num_workers=self.num_workers, persistent_workers=self.num_workers > 0)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self._evaluation_batches(_VAL))

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self._evaluation_batches(_TEST))

    def _evaluation_batches(self, split: int) -> list[Batch]:
        """All cases in order. Every rank takes every `world_size`-th row; none is seen twice."""
        mine = slice(self.trainer.global_rank, None, self.trainer.world_size)
        batches = []
        for length, n_pairs in self.cases:
            rows = mqar_rows(self.test_rows, length, n_pairs, self.vocab_size, (split, length, n_pairs))
            inputs, targets = (tokens[mine] for tokens in rows)
            n = self.tokens_per_batch // length
            batches += [
                {"inputs": inputs[start : start + n], "targets": targets[start : start + n]}
                for start in range(0, len(inputs), n)
            ]
        return batches

    def _loader(self, batches: IterableDataset[Batch] | list[Batch], **options: object) -> DataLoader[Batch]:
        on_gpu = self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(batches, batch_size=None, pin_memory=on_gpu, **options)


def _check(name: str, cases: Sequence[Case], vocab_size: int, tokens_per_batch: int) -> None:
    """Raise InputError unless there are `cases`, and each fits the vocabulary and a batch."""
    if not cases:
        raise InputError(f"data.{name} is empty: give at least one.")
    for length, n_pairs in cases:
        try:
            require_mqar(length, n_pairs, vocab_size)
        except InputError as error:
            raise InputError(f"data.{name}: {error}") from error
        if length > tokens_per_batch:
            raise InputError(
                f"data.tokens_per_batch={tokens_per_batch} has no room for a row of length={length} of data.{name}: "
                f"raise it to {length} or more."
            )


class RecallModule(LanguageModelingModule):
    """Trains a `LanguageModel` on `MQARDataModule`'s batches and measures how much it recalls.

    Logs `train_loss` (nats per question), `grad_norm` and `lr` per optimizer step, and over a whole evaluation
    `val_loss`, `val_accuracy/{length}x{pairs}` (the share of a case's questions whose value has the highest logit) and
    `val_accuracy` (the mean over cases); in a test the same as `test_…`. Arguments and errors are those of
    `LanguageModelingModule`.
    """

    def _start_evaluation(self) -> None:
        self._cases: dict[Case, np.ndarray] = {}  # (length, pairs): (nats, right answers, questions)

    def _add_to_evaluation(self, batch: dict[str, Tensor]) -> None:
        logits, targets = self.model(batch["inputs"]), batch["targets"]
        losses, right, asked = token_losses(logits, targets), logits.argmax(-1) == targets, targets != IGNORE
        sums = np.array(torch.stack([losses.sum(), right.sum(), asked.sum()]).tolist())  # one transfer
        n_rows, length = targets.shape
        case = length, round(sums[2] / n_rows)
        self._cases[case] = self._cases.get(case, 0) + sums

    def _log_evaluation(self, split: str) -> None:
        cases: dict[Case, np.ndarray] = {}
        for of_rank in self._cases_of_all_ranks():
            for case, sums in of_rank.items():
                cases[case] = cases.get(case, 0) + sums
        accuracies = {
            f"{split}_accuracy/{length}x{n_pairs}": right / asked
            for (length, n_pairs), (_, right, asked) in sorted(cases.items())
        }
        nats, _, asked = sum(cases.values())
        mean = sum(accuracies.values()) / len(accuracies)
        self.log_dict({**self._metrics(split, nats, 0, asked), f"{split}_accuracy": mean, **accuracies})

    def _cases_of_all_ranks(self) -> list[dict[Case, np.ndarray]]:
        if self.trainer.world_size == 1:
            return [self._cases]
        gathered: list[dict[Case, np.ndarray]] = [{}] * self.trainer.world_size
        torch.distributed.all_gather_object(gathered, self._cases)  # ranks may not have seen the same cases
        return gathered

    def _metrics(self, split: str, nats: float, n_bytes: float, tokens: float) -> dict[str, float]:
        return {f"{split}_loss": nats / max(tokens, 1)}  # there are no bytes here
