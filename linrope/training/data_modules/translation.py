"""Parallel text for translation."""

from __future__ import annotations

import hashlib
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from linrope.data.batches.pairs import EvaluationPairs, TokenPairs, TrainingPairs
from linrope.data.parallel_text import ParallelText, read_parallel_text
from linrope.data.synthetic.number_words import LANGUAGES, number_pairs
from linrope.data.tokenizers.base import open_tokenizer, tokenizer_from_serialized
from linrope.data.tokenizers.training import train_bpe
from linrope.errors import InputError, require_choice, require_not_empty
from linrope.positions.base import PositionsConfig
from linrope.training.data_modules.base import (
    Counting,
    RankSampler,
    ResumableDataModule,
    TimedLoader,
    require_least,
    require_size,
    require_tokens,
    require_workers,
    set_up_split,
)


class TranslationDataModule(ResumableDataModule):
    """The parallel text to train on.

    A batch is a dictionary:
        inputs: int64 (B, S), the tokens of each source and its end, padded.
        source_mask: booleans (B, S), False for padding.
        decoder_inputs: int64 (B, T), the token of the beginning and the tokens of each target.
        targets: int64 (B, T), the tokens of each target and its end; IGNORE for padding.
        n_positions: only in training: data.tokens_per_batch.
        sources, references: only in validation and test: the texts. Predictions have inputs, source_mask and sources,
            and need no target file.

    Batches have pairs of similar lengths. Training has epochs, but no end: batch `i` follows from `seed` and `i`. A
    resumed run continues with the batch after the last one that its checkpoint was trained on.

    Args:
        path: Folder of the text files, in UTF-8; line n of one language translates line n of the other. null is a small
            built-in text: numbers from 0 to 999,999 written out in English (en) and German (de).
        source: Language to translate from, the ending of its files.
        target: Language to translate into, the ending of its files.
        train: Training files without the ending; train and en is train.en.
        val: Validation files without the ending; null for none.
        test: Test files without the ending.
        tokenizer: Path of a tokenizer.json of Hugging Face's tokenizers, or "bytes". null trains a BPE on both sides of
            the training text, at each start.
        vocab_size: Tokens of the BPE that is trained; fewer where the text is small.
        max_length: Longest side of a training pair in tokens, the end counted. Longer pairs are left out of training,
            never cut, and counted in the run's summary. Validation and test keep all.
        tokens_per_batch: Tokens of one batch, per device: its rows · its longest side is at most this.
        seed: Decides the order of the training pairs.
        num_workers: Processes that make batches ahead; 0 makes them in the training process.

    Raises:
        InputError: a number out of range; when set up: files that are missing, no UTF-8 or of different numbers of
            lines; no pair to train on; fewer pairs to evaluate than devices; no tokenizer.
    """

    def __init__(
        self,
        path: str | None = None,
        source: str = "en",
        target: str = "de",
        train: str = "train",
        val: str | None = "val",
        test: str = "test",
        tokenizer: str | None = None,
        vocab_size: int = 8192,
        max_length: int = 128,
        tokens_per_batch: int = 4096,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        require_not_empty("data.path", path)
        for name, value, least in (("max_length", max_length, 2), ("seed", seed, 0)):
            require_least(name, value, least)
        require_workers(num_workers)
        require_tokens("data.tokens_per_batch", tokens_per_batch)
        if tokens_per_batch < max_length:
            raise InputError(
                f"data.tokens_per_batch={tokens_per_batch} has no room for a pair of data.max_length={max_length}: "
                f"raise it to {max_length} or more."
            )
        if path is None:
            require_choice("data.source", source, LANGUAGES)
            require_choice("data.target", target, LANGUAGES)
        self.path, self.languages = None if path is None else Path(path).expanduser(), (source, target)
        self.names = {"train": train, "val": val, "test": test}
        self.tokenizer_name, self.vocab_size = tokenizer, vocab_size
        self.max_length, self.tokens_per_batch = max_length, tokens_per_batch
        self.seed, self.num_workers = seed, num_workers
        self._evaluated: dict[str, EvaluationPairs | None] = {}

    def open(self) -> None:
        if self.tokenizer is not None:
            return
        if self.tokenizer_name is not None:
            self.tokenizer = open_tokenizer(self.tokenizer_name, "data.tokenizer")
            return
        text = self._training_text
        self.tokenizer = train_bpe(chain(text.source, text.target), self.vocab_size, "data.vocab_size")

    def measure_as(self, saved: dict[str, Any]) -> None:
        if self.tokenizer_name is None and saved["tokenizer"] is not None:
            self.tokenizer = tokenizer_from_serialized(saved["tokenizer"])

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.open()
        if stage == "fit":
            self.training  # noqa: B018 — errors come now
            validates = self.names["val"] is not None and self.asks_to_validate
            self._evaluated["val"] = self._evaluation_pairs("val") if validates else None
        else:
            split = "val" if stage == "validate" else "test"
            self._evaluated[split] = self._evaluation_pairs(split, predicts=stage == "predict")

    def _text(self, split: str, languages: tuple[str, str]) -> ParallelText:
        if self.path is None:
            return ParallelText(*number_pairs(split, *languages))
        name = self.names[split]
        if name is None:
            raise InputError(f"data.{split} is null, so there is no {split} text: name its files.")
        return read_parallel_text(*(self.path / f"{name}.{language}" for language in languages))

    @cached_property
    def _training_text(self) -> ParallelText:
        return self._text("train", self.languages)

    @cached_property
    def training(self) -> TrainingPairs:
        """The training batches; it needs `open`."""
        pairs = TokenPairs(self._training_text, self.tokenizer, self.max_length)
        self.n_empty = self._training_text.n_empty
        del self._training_text  # of a large text it is most of the memory
        return TrainingPairs(pairs, self.tokens_per_batch, self.seed)

    def _evaluation_pairs(self, split: str, predicts: bool = False) -> EvaluationPairs:
        """Those of a split; for predictions only its sources are read, and keep their order."""
        source, target = self.languages
        text, position = self._text(split, (source, source if predicts else target)), self.run_position
        if text.n_empty:
            n = text.n_empty + len(text)
            rank_zero_warn(f"the {split} text has {text.n_empty:,} of {n:,} pairs with an empty side: left out.")
        if len(text) < position.world_size:  # a rank without any would not take part in the sums
            raise InputError(
                f"the {split} text has {len(text)} pairs, but {position.world_size} devices need a pair each: give "
                "more text, or set fewer trainer.devices."
            )
        pairs = TokenPairs(text, self.tokenizer, keep_text=True)
        return EvaluationPairs(pairs, self.tokens_per_batch, position.rank, position.world_size, in_order=predicts)

    def require_positions(self, positions: PositionsConfig) -> None:
        positions.require_row("data.max_length", self.max_length)
        for split, found in self._evaluated.items():  # with all their pairs, however long
            if found is not None:
                positions.require_row(f"the longest row of data.{split}", int(found.pairs.lengths.max()))

    def require_vocabulary(self, vocab_size: int) -> None:
        require_size(vocab_size, self.tokenizer.vocab_size, f"the tokenizer {self.tokenizer.name}")

    def steps_per_epoch_for(self, batches_per_step: int) -> int:
        return -(-self.training.n_batches // batches_per_step)

    def order(self) -> dict[str, Any]:
        pairs, text = self.training.pairs, hashlib.blake2b(digest_size=16)
        for tokens, lengths in zip(pairs.tokens, pairs.lengths, strict=True):
            text.update(tokens)
            text.update(lengths)
        options = {"tokens_per_batch": self.tokens_per_batch, "max_length": self.max_length, "seed": self.seed}
        return {**options, "text": text.hexdigest(), "tokenizer": self.tokenizer.fingerprint}

    def describe(self) -> list[tuple[str, str]]:
        where = "numbers written out (built in)" if self.path is None else str(self.path)
        n_tokens = f"{self.tokenizer.vocab_size:,} tokens"
        trained = f"BPE of {n_tokens}, trained on the training text"
        pairs, n_batches = self.training.pairs, self.training.n_batches
        rows = [
            ("text", f"{where}, {' to '.join(self.languages)}"),
            ("tokenizer", trained if self.tokenizer_name is None else f"{self.tokenizer.name}, {n_tokens}"),
            ("  train", f"{len(pairs):,} pairs in {n_batches:,} batches{self._skipped(pairs.n_long)}"),
        ]
        if (val := self._evaluated.get("val")) is not None:
            rows.append(("  val", f"{len(val.pairs):,} pairs"))
        return rows

    def _skipped(self, n_long: int) -> str:
        reasons = []
        if self.n_empty:
            reasons.append(f"{self.n_empty:,} with an empty side")
        if n_long:
            reasons.append(f"{n_long:,} longer than data.max_length={self.max_length}")
        return f" (left out: {', '.join(reasons)})" if reasons else ""

    def train_dataloader(self) -> TimedLoader:
        """An endless loader. Lightning asks for it after it has restored the step of a checkpoint."""
        position = self.run_position
        first = position.batches_done * position.world_size + position.rank
        batches = Counting(first, position.world_size)
        return self.loader(self.training, num_workers=self.num_workers, sampler=RankSampler(batches))

    def val_dataloader(self) -> TimedLoader | list[TimedLoader]:
        return [] if set_up_split(self._evaluated, "val") is None else self._evaluation_loader("val")

    def test_dataloader(self) -> TimedLoader:
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> TimedLoader:
        return self._evaluation_loader("test")

    def _evaluation_loader(self, split: str) -> TimedLoader:
        pairs = set_up_split(self._evaluated, split)
        return self.loader(pairs, num_workers=self.num_workers, sampler=RankSampler(range(len(pairs))))
