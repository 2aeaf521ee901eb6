"""The base class of data modules for fine-tuning: labelled examples in shuffled epochs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_warn

from linrope.data.batches.epochs import ShuffledEpochs
from linrope.data.batches.shuffling import permute
from linrope.data.finetune.encoding import TextEncoder
from linrope.data.finetune.examples import find_file
from linrope.data.tokenizers.base import open_tokenizer
from linrope.errors import InputError, require_not_empty
from linrope.positions.base import PositionsConfig
from linrope.training.data_modules.base import (
    RankSampler,
    ResumableDataModule,
    TimedLoader,
    require_least,
    require_size,
    require_tokens,
    require_workers,
    set_up_split,
)

SPLITS_OF_STAGE = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}
SHORTEST = 5
"""Tokens of the shortest row that can hold a pair: [CLS] a [SEP] b [SEP]."""


class Rows:
    """The encoded rows of a split; a list of row numbers gives a batch.

    `make_batch` makes it, of examples and what `encode` makes of each. It can be pickled, for workers.
    """

    def __init__(
        self,
        examples: Sequence[Any],
        encode: Callable[[Any], Any],
        make_batch: Callable[[list[Any], list[Any]], dict[str, Any]],
    ) -> None:
        self.examples, self.make_batch = examples, make_batch
        self.encoded = [encode(example) for example in examples]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, numbers: Sequence[int]) -> dict[str, Any]:
        return self.make_batch([self.examples[i] for i in numbers], [self.encoded[i] for i in numbers])


class FineTuningDataModule(ResumableDataModule):
    """What the data modules of fine-tuning share: examples of files, as rows of tokens.

    A batch is a dictionary with
        inputs: int64 (B, T), rows [CLS] a [SEP] or [CLS] a [SEP] b [SEP], padded to the longest of the batch.
        key_mask: booleans (B, T), False for padding.
        token_types: int64 (B, T), 1 for the second text of a pair.
        targets: what is to be predicted; only where the file has labels.
        id: the name of each row.

    Training reads shuffled epochs one after another; batch `i` of a run follows from `seed` and `i`, so that a resumed
    run continues with the batch after the last one of its checkpoint. Predictions are those of the test file, which
    needs no labels, or else of the validation file.

    A subclass writes `read`, `encode`, `make_batch` and `truncated`, and `n_labels` and `labels` where there are some.

    Args:
        path: Folder with the files; or the training file, with the others beside it under their names. In the command
            line of a measurement or prediction a file is the one to read.
        batch_size: Rows of a batch, per device.
        max_length: Tokens of a row at most, with [CLS] and [SEP]. Of a pair that is longer the longer text loses its
            last tokens.
        tokenizer: Path of a tokenizer.json of Hugging Face's tokenizers; null is bytes.
        seed: Decides the order of training rows.
        num_workers: Processes that make batches ahead; 0 makes them in the training process.

    Raises:
        InputError: a number out of range; when set up: files that are missing or damaged (with the line), a split with
            fewer rows than devices.
    """

    metrics: tuple[str, ...] = ()
    """Names of what evaluations measure beside the loss."""
    splits: ClassVar[tuple[str, ...]] = ("train", "val", "test")
    files: Mapping[str, Sequence[str]] = {}
    """Names of the files of each split."""

    def __init__(
        self,
        path: str | None = None,
        batch_size: int = 32,
        max_length: int = 512,
        tokenizer: str | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        require_not_empty("data.path", path)
        for name, value, least in (("batch_size", batch_size, 1), ("max_length", max_length, SHORTEST)):
            require_least(name, value, least)
        require_least("seed", seed, 0)
        require_workers(num_workers)
        require_tokens("data.max_length · data.batch_size", max_length * batch_size)
        self.path = None if path is None else Path(path).expanduser()
        self.batch_size, self.max_length = batch_size, max_length
        self.seed, self.num_workers = seed, num_workers
        self._tokenizer_name = "bytes" if tokenizer is None else tokenizer
        self._examples: dict[str, list[Any] | None] = {}
        self._rows: dict[str, Rows] = {}
        self._notes: dict[str, str] = {}
        self._trained_labels: tuple[str, ...] | None = None  # of a checkpoint; None leaves them to the training file
        self._measured_file: Path | None = None  # in place of those of val and test

    # What a subclass writes.

    def read(self, split: str) -> list[Any] | None:
        """The examples of a split, with `id`; None if it has no file. It is called once for a split."""
        raise NotImplementedError

    def encode(self, example: Any) -> Any:
        """The tokens of an example."""
        raise NotImplementedError

    def truncated(self, encoded: Any) -> bool:
        """Whether an example lost tokens."""
        raise NotImplementedError

    @property
    def make_batch(self) -> Callable[[list[Any], list[Any]], dict[str, Any]]:
        """The function that makes a batch of examples and their tokens; it can be pickled."""
        raise NotImplementedError

    @property
    def n_labels(self) -> int | None:
        """The `n_labels` that a model must have, None for any; it needs `open`."""
        return None

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The names of the labels by their numbers; None for data without. It needs `open`."""
        return None

    def labelled(self, examples: list[Any]) -> bool:
        """Whether these examples of one split have targets."""
        return all(example.target is not None for example in examples)

    # What all share.

    @property
    def given_path(self) -> Path:
        """`path`. InputError if it is null."""
        if self.path is None:
            raise InputError("data.path is missing: give the folder with the files of this task.")
        return self.path

    def open(self) -> None:
        if self.tokenizer is None:
            self.tokenizer = open_tokenizer(self._tokenizer_name, "data.tokenizer")
            self.encoder = TextEncoder(self.tokenizer, self.max_length)

    def measure_as(self, saved: dict[str, Any]) -> None:
        if saved.get("labels") is not None:
            self._trained_labels = tuple(saved["labels"])

    def measure_path(self) -> None:
        if self.path is not None and self.path.is_file():
            self._measured_file = self.path

    def file_of(self, split: str, names: Mapping[str, Sequence[str]]) -> Path | None:
        """The file of a split, as `find_file` finds it; for val and test the one that is to be measured, if given."""
        if self._measured_file is None:
            return find_file(self.given_path, split, names)
        return find_file(self._measured_file.parent, split, names) if split == "train" else self._measured_file

    def examples(self, split: str) -> list[Any] | None:
        """The examples of a split, read at the first call; None if it has no file."""
        if split not in self._examples:
            self._examples[split] = self.read(split)
        return self._examples[split]

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.open()
        splits = (self.predicted_split,) if stage == "predict" else SPLITS_OF_STAGE[stage]
        for split in splits:
            if stage == "fit" and split == "val" and not (self.asks_to_validate and self.examples("val") is not None):
                continue
            if self._measured_file is not None:
                self._tell_of_other_file(split)
            self._prepare(split, must_have_targets=stage != "predict")
            if stage != "fit" and (n := self.n_truncated(split)):
                rank_zero_warn(f"{n:,} rows of the {split} split are truncated to data.max_length={self.max_length}.")

    def _tell_of_other_file(self, split: str) -> None:
        """Warn if the file that is measured lies beside one with the name of the split: before, that was read."""
        measured = self._measured_file
        there = [name for name in self.files.get(split, ()) if (measured.parent / name).is_file()]
        if there and measured.name not in there:
            rank_zero_warn(
                f"data.path={str(self.path)!r} itself is read, and not {there[0]} beside it: give that, or the folder."
            )

    @property
    def predicted_split(self) -> str:
        """The split that `linrope predict` reads."""
        return "val" if self.examples("test") is None and self.examples("val") is not None else "test"

    def _prepare(self, split: str, must_have_targets: bool) -> None:
        """Encode a split. InputError without it, or without targets."""
        if split == "train":
            self._require_training_file()
        examples, world_size = self.examples(split), self.run_position.world_size
        if examples is None:
            raise InputError(f"data.path={str(self.path)!r} has no {' or '.join(self.files[split])}: add the file.")
        if must_have_targets and not self.labelled(examples):
            without = next(example.id for example in examples if example.target is None)
            raise InputError(
                f"the {split} file in data.path={str(self.path)!r} has no label for row {without!r}, so nothing can be "
                "learned or measured: label every row, or let `linrope predict` write predictions."
            )
        if len(examples) < world_size:  # a rank without any would not take part in the sums
            raise InputError(f"the {split} split has {len(examples)} rows for {world_size} devices: set fewer devices.")
        if split not in self._rows:
            self._rows[split] = Rows(examples, partial(self._encoded, split), self.make_batch)

    def _require_training_file(self) -> None:
        """Raise InputError if `path` is a file that would also be read for validation or test."""
        for split in ("val", "test"):
            if self.path is not None and self.path.is_file() and self.path.name in self.files.get(split, ()):
                raise InputError(
                    f"data.path={str(self.path)!r} is the {split} file by its name: give the training file, or the "
                    f"folder with {' or '.join(self.files['train'])}."
                )

    def _encoded(self, split: str, example: Any) -> Any:
        try:
            return self.encode(example)
        except InputError as error:
            raise InputError(f"row {example.id!r} of the {split} split: {error}") from error

    def n_truncated(self, split: str) -> int:
        """Rows of a split that lost tokens; it needs `setup`. `describe` tells it, and a warning of evaluations."""
        return sum(map(self.truncated, self._rows[split].encoded))

    def require_positions(self, positions: PositionsConfig) -> None:
        positions.require_row("data.max_length", self.max_length)

    def require_vocabulary(self, vocab_size: int) -> None:
        require_size(vocab_size, self.encoder.special.vocab_size, "the text and its special tokens")

    def steps_per_epoch_for(self, batches_per_step: int) -> int:
        return -(-len(self.examples("train")) // (self.batch_size * batches_per_step))

    def order(self) -> dict[str, Any]:
        digest = hashlib.blake2b(digest_size=16)
        for example in self.examples("train"):
            digest.update(repr(example).encode("utf-8", errors="surrogatepass"))
        return {
            "train_rows": len(self.examples("train")),
            "train_hash": digest.hexdigest(),
            "batch_size": self.batch_size,
            "max_length": self.max_length,
            "seed": self.seed,
            "tokenizer": self.tokenizer.fingerprint,
        }

    def describe(self) -> list[tuple[str, str]]:
        rows = [("data", self.origin)]
        if self.labels is not None:
            rows.append(("labels", f"{len(self.labels)}: {', '.join(self.labels)}"))
        if self.tokenizer.fingerprint:
            rows.append(("tokenizer", self.tokenizer.name))
        for split in self._rows:
            rows.append((f"  {split}", self._described(split)))
        if self.asks_to_validate and self.examples("val") is None:
            rows.append(("  val", "no file of this split, so there is no validation"))
        return [*rows, ("a step", f"{self._rows_of_a_step} rows{self._readings}")]

    @property
    def _readings(self) -> str:
        """How often the run reads each row; empty if its length is unknown, or if it reads a few alone."""
        steps = -1 if self.trainer is None or self.trainer.overfit_batches else self.trainer.max_steps
        if steps < 1:
            return ""
        times = steps * self._rows_of_a_step / len(self.examples("train"))
        return f"; the run of {steps:,} reads each row {times:,.1f} times"

    @property
    def _rows_of_a_step(self) -> int:
        return self.batch_size * self.run_position.batches_per_step * self.run_position.world_size

    @property
    def origin(self) -> str:
        """Where the data come from, as people read it."""
        return str(self.given_path)

    def _described(self, split: str) -> str:
        examples, n_truncated = self.examples(split), self.n_truncated(split)
        parts = [f"{len(examples):,} rows"]
        if self.labels is not None and isinstance(examples[0].target, int):
            ((_, n_most),) = Counter(example.target for example in examples).most_common(1)
            parts.append(f"{n_most / len(examples):.1%} have the most frequent label")
        if n_truncated:
            parts.append(f"{n_truncated:,} truncated to {self.max_length} tokens")
        return ", ".join([*parts, *filter(None, [self._notes.get(split)])])

    def samples_of(self, step: int) -> str:
        first = step * self._rows_of_a_step
        return f"rows {first} … {first + self._rows_of_a_step - 1} of the shuffled epochs"

    def train_dataloader(self) -> TimedLoader:
        """An endless loader. Lightning asks for it after it has restored the step of a checkpoint."""
        rows, position = set_up_split(self._rows, "train"), self.run_position
        place = position.batches_done, position.rank, position.world_size
        batches = ShuffledEpochs(len(rows), self.batch_size, self.seed, *place)
        return self.loader(rows, num_workers=self.num_workers, sampler=RankSampler(batches))

    def val_dataloader(self) -> TimedLoader | list[TimedLoader]:
        fitting = "train" in self._rows
        return [] if fitting and "val" not in self._rows else self._evaluation_loader("val")

    def test_dataloader(self) -> TimedLoader:
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> TimedLoader:
        return self._evaluation_loader(self.predicted_split, in_order=True)

    def _evaluation_loader(self, split: str, in_order: bool = False) -> TimedLoader:
        """Each rank reads every `world_size`-th row. No row is read twice, so the last batches may differ.

        The order is random and fixed, so that the first batches are like the others: files are often sorted by label.
        With `in_order` it is that of the file.
        """
        rows, size, n = set_up_split(self._rows, split), self.batch_size, len(self._rows[split])
        order = list(range(n)) if in_order else [permute(i, n) for i in range(n)]
        mine = order[self.run_position.rank :: self.run_position.world_size]
        batches = [mine[start : start + size] for start in range(0, len(mine), size)]
        return self.loader(rows, num_workers=self.num_workers, sampler=RankSampler(batches))
