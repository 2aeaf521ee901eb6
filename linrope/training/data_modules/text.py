"""Text for training and evaluation: loaders over windows or contiguous batches, sharded over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from linrope.data.batches.contiguous import ContiguousBatches
from linrope.data.batches.curriculum import CurriculumStage, PlannedStage, TrainingBatches, TrainingPlan
from linrope.data.batches.windows import CurriculumWindows, EvaluationWindows, OverlappingWindows, TrainingWindows
from linrope.data.corpus.opening import OpenedText, open_text, open_whole, with_own_text
from linrope.data.corpus.sequences import TokenSequence
from linrope.data.corpus.splits import SPLIT_WAYS, SPLITS
from linrope.data.corpus.token_files import TOKEN_DTYPES
from linrope.data.tokenizers.base import Tokenizer
from linrope.distributed.group import SequenceGroup
from linrope.distributed.segments import tokens_of_rank
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
from linrope.utils.formatting import count_of
from linrope.utils.options import check_keys

Batch = dict[str, Tensor]
FRACTIONS = [0.9, 0.05, 0.05]


class TextDataModule(ResumableDataModule):
    """The text to train on.

    Batches have the keys that `LanguageModelingModule` names: `n_bytes` only where a token is not one byte,
    `segment_ids` only with a document mask, `fresh` only if contiguous.

    Training has no epochs: sample `i` of a run follows from `seed` and `i`. A resumed run continues with the sample
    after the last one that its checkpoint was trained on. Without a Trainer, `setup("fit")` and `train_dataloader()`
    give the batches of one process, from the first on.

    Args:
        path: Your text: a file, a folder or a glob; a folder that `linrope prepare` wrote; or a flat file of tokens
            (.bin, nanoGPT's format). null is the built-in corpus, the Python standard library's source.
        context: Tokens (bytes, by default) of one sample.
        batch_size: Samples of one batch, per device.
        fractions: Shares of train, val and test: see split. By default train also has the share of a split with a path
            of its own.
        seed: Decides the order of the training samples.
        num_workers: Processes that read samples ahead; 0 reads them in the training process.
        document_mask: true: tokens see only their own document. false: a sample is read as one text, across the ends of
            its documents.
        contiguous: Read the training text in order: each row of a batch continues the same row of the batch before, and
            the model's state is carried over, without gradient. false draws windows at random.
        curriculum: Lengths of training rows, a list of stages {tokens: N, seq_len: N, batch_size: N}: tokens to train
            on before the next stage begins (the last stage has no end), tokens of a sample, and samples of a batch per
            device (by default as many tokens as context · batch_size). null is context for the whole run. Evaluation
            keeps context.
        tokenizer: Tokenizer of a .bin file: "bytes" or the path of a tokenizer.json. null reads text as bytes and a
            prepared folder with its own tokenizer; for a .bin file it leaves bits per byte and text unknown.
        token_dtype: Number format of a .bin file: uint16 or uint32.
        test_stride: Tokens between the starts of two test rows, from 1 to context. Each token is predicted once, after
            at least context - test_stride others (except in the first row). null: rows do not overlap, and the first
            tokens of each have little context.
        split: document: each file (or prepared document) goes to one split as a whole, by a hash of its name. position:
            the text is cut in the order train, val, test. null is document, but position for fewer than 20 documents or
            where a split would have none. A single file and a .bin file are always cut by position.
        verify: Compare the checksums of a prepared folder when it is opened, which reads its files once (about a second
            for each GB). false skips that for very large ones.
        val_path: Text to validate on, as a whole: a file, a folder, a glob, a prepared folder or a .bin file, as path.
            null cuts it from path: see fractions.
        test_path: Text to test on, like val_path.

    Raises:
        InputError: an option out of range, an invalid stage; when set up: no text at `path`, invalid fractions, a split
            shorter than one sample (for evaluation: than one for each device), or a curriculum longer than
            `trainer.max_steps`.
    """

    def __init__(
        self,
        path: str | None = None,
        context: int = 1024,
        batch_size: int = 8,
        fractions: list[float] = FRACTIONS,
        seed: int = 0,
        num_workers: int = 0,
        document_mask: bool = False,
        contiguous: bool = False,
        curriculum: list[dict[str, Any]] | None = None,  # or of CurriculumStage; `_stage` checks both, in plain words
        tokenizer: str | None = None,
        token_dtype: str = "uint16",
        test_stride: int | None = None,
        split: str | None = None,
        verify: bool = True,
        val_path: str | None = None,
        test_path: str | None = None,
    ) -> None:
        super().__init__()
        require_least("context", context, 1)
        require_least("batch_size", batch_size, 1)
        require_least("seed", seed, 0)
        require_workers(num_workers)
        require_not_empty("data.path", path)
        require_choice("data.token_dtype", token_dtype, TOKEN_DTYPES)
        if split is not None:
            require_choice("data.split", split, SPLIT_WAYS)
        self.path = Path(path) if path is not None else None
        self.context, self.batch_size = context, batch_size
        self.fractions = list(fractions) if isinstance(fractions, tuple) else fractions
        require_not_empty("data.val_path", val_path)
        require_not_empty("data.test_path", test_path)
        self.own_paths = {name: Path(p) for name, p in (("val", val_path), ("test", test_path)) if p is not None}
        """Paths of the splits that have one."""
        if self.own_paths and self.fractions == FRACTIONS:
            val, test = (0.0 if name in self.own_paths else FRACTIONS[SPLITS.index(name)] for name in ("val", "test"))
            self.fractions = [1 - val - test, val, test]
        if contiguous and curriculum is not None:
            raise InputError(
                "data.contiguous=True needs rows of one length, data.curriculum changes it: drop one of them."
            )
        if test_stride is not None and not 1 <= test_stride <= context:
            raise InputError(
                f"data.test_stride={test_stride} must be from 1 to data.context={context}, or null: test rows start so "
                "many tokens after each other."
            )
        self.seed, self.num_workers, self.test_stride = seed, num_workers, test_stride
        self.document_mask, self.contiguous, self.split = document_mask, contiguous, split
        self.curriculum = None if curriculum is None else _stages(curriculum, context * batch_size)
        self._tokenizer_name, self.token_dtype, self.verify = tokenizer, token_dtype, verify
        self.corpora: dict[str, TokenSequence] = {}
        self._windows: dict[str, Any] = {}
        self._measured: str | None = None  # the only split to open

    training_windows: type[TrainingWindows] = TrainingWindows
    evaluation_windows_of: type[EvaluationWindows] = EvaluationWindows
    """The classes of samples; a subclass may have others."""

    def open(self) -> dict[str, TokenSequence]:
        """The corpora by split, opened at the first call; `setup` calls it."""
        if not self.corpora:
            opened = self._opened = self.read()
            self.origin, self.n_skipped, self.why_cut = opened.origin, opened.n_skipped, opened.why_cut
            self.corpora = opened.corpora
        return self.corpora

    def read(self) -> OpenedText:
        """The text by split, and its tokenizer. Override it for text that is in no file: `text_of_documents` makes what
        it returns. `open` calls it once."""
        options = self._tokenizer_name, self.token_dtype
        if self._measured is not None:
            return open_whole(self._measured, self.own_paths[self._measured], *options, self.verify)
        opened = open_text(self.path, self.fractions, *options, self.split, self.verify)
        for split, path in self.own_paths.items():
            if share := self.fractions[SPLITS.index(split)]:
                raise InputError(
                    f"data.fractions={self.fractions} gives {share} of data.path to {split}, which has its own text, "
                    f"data.{split}_path: set that fraction to 0, and add it to the first."
                )
            opened = with_own_text(opened, split, open_whole(split, path, *options, self.verify), path)
        return opened

    @property
    def has_validation_text(self) -> bool:
        return "val" in self.own_paths or super().has_validation_text

    def measure(self, split: str) -> None:
        """Opens nothing but the text of this split, if it has a path of its own, and otherwise data.path alone."""
        if split in self.own_paths:
            self._measured, self.fractions = split, None
        else:
            self.own_paths = {}

    def measure_path(self) -> None:
        if (split := self._measured) is not None:
            raise InputError(
                f"data.path is not read: this run's {split} text is data.{split}_path={str(self.own_paths[split])!r}. "
                f"Give --data.{split}_path to measure another text as a whole."
            )

    def keep_split_of(self, order: dict[str, Any]) -> None:
        """Splits this text as the run of a checkpoint did, whose `order` this is. Another text is left as it is, with a
        warning where it may hold out what that run was trained on: a cut by position moves with every new file, and the
        names of files, which decide their splits, are others below another folder.

        A run may be older than the rule that cuts few documents by position. Called before `setup`.
        """
        if self._measured is not None:
            return
        self.open()
        trained_on, by_position = order.get("data.train_documents"), order.get("data.split") == "position"
        if self.split is None and self.why_cut is not None and not by_position:
            self.split = "document"
            if self.read().corpora["train"].fingerprint() == trained_on:
                self.corpora = {}  # to be opened again, so
                return
            self.split = None
        if trained_on in (None, self.corpora["train"].fingerprint()):
            return
        if order.get("data.fractions") != self.fractions or self.fractions[0] == 1:  # the task warns, or none is cut
            return
        fix = "Give other text, and data.split=document to runs whose text will grow."
        if by_position or self.why_cut is not None:
            why = f"{'that run' if by_position else 'this text'} is cut by position"
        elif _is_nested(then := order.get("data.place"), self._opened.place):
            why, fix = f"its data.path was {then}, below which files have other names", "Give the same data.path."
        else:
            return
        rank_zero_warn(
            f"the training split is not that of the checkpoint's run, and {why}: if this text holds files of that run, "
            f"it was trained on some text that is held out here, and losses on that mean little. {fix}"
        )

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.open()
        # Made here, so that a split that is too short is found before any work.
        if stage == "fit":
            self._windows["train"] = self._contiguous_batches() if self.contiguous else self._training_windows()
            validates = self.has_validation_text and self.asks_to_validate
            self._windows["val"] = self.evaluation_windows("val") if validates else None
        if stage in ("validate", "test", "predict"):
            split = "val" if stage == "validate" else "test"
            self._windows[split] = self.evaluation_windows(split)
        # Last: of a row longer than the text the errors above say more.
        for number, planned in enumerate(self.plan.stages if stage == "fit" else ()):
            options = "data.context · data.batch_size"
            if self.curriculum is not None:
                options = f"data.curriculum[{number}].seq_len · batch_size"
            require_tokens(options, planned.seq_len * planned.batch_size)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of these tokens, None if unknown; it needs `setup`."""
        return self._opened.tokenizer

    def require_vocabulary(self, vocab_size: int) -> None:
        require_size(vocab_size, self._opened.vocab_size, f"the text ({self._opened.reason})")

    @property
    def row_lengths(self) -> dict[str, int]:
        """The lengths of training and validation rows, by the options that set them."""
        stages = {f"data.curriculum[{n}].seq_len": stage.seq_len for n, stage in enumerate(self.curriculum or [])}
        return {"data.context": self.context, **stages}

    def require_positions(self, positions: PositionsConfig) -> None:
        """Raise InputError if a row is longer than a model with these positions can read. With the document mask each
        document of a row starts at position 0, and only the text knows how long they are."""
        for option, length in () if self.document_mask else self.row_lengths.items():
            positions.require_row(option, length)

    def require_slices(self, segment_length: int | None, group: SequenceGroup) -> None:
        """Raise InputError unless rows have a token for each of the devices that share them, in every segment."""
        for option, length in self.row_lengths.items():
            tokens_of_rank(length, segment_length, group, option)

    def _training_windows(self) -> CurriculumWindows:
        lengths = self.row_lengths
        if self.curriculum is not None:
            del lengths["data.context"]
            if self.trainer is not None and not self.trainer.fast_dev_run:  # which takes a few steps
                self.require_steps(self.plan, self.trainer.max_steps)
        return CurriculumWindows(
            self.training_windows(self.corpora["train"], length, self.seed, self.document_mask, option)
            for option, length in lengths.items()
        )

    def _contiguous_batches(self) -> ContiguousBatches:
        options = self.context, self.batch_size, self.seed, self.document_mask
        where = self.run_position
        batches = ContiguousBatches(self.corpora["train"], *options, where.rank, where.world_size)
        if batches.batches_per_pass == 1:
            rank_zero_warn(
                f"data.contiguous=True carries no state: the text has one row of data.context={self.context} for each "
                f"of data.batch_size={self.batch_size} rows. Lower one of them, or give more text."
            )
        return batches

    def evaluation_windows(self, split: str) -> EvaluationWindows:
        """The windows of validation or test; it needs `open`."""
        options = self.corpora[split], self.context, split, self.document_mask
        if split == "test" and self.test_stride is not None:
            windows = OverlappingWindows(*options, stride=self.test_stride)
        else:
            windows = self.evaluation_windows_of(*options)
        world_size = self.run_position.world_size
        if len(windows) < world_size:  # a rank without any would not take part in the sums
            raise InputError(
                f"the {split} split holds {len(windows)} × data.context={self.context} tokens, but {world_size} "
                "devices need a sample each: lower data.context, raise its share in data.fractions, or set fewer "
                "trainer.devices."
            )
        return windows

    @property
    def plan(self) -> TrainingPlan:
        """The samples of each optimizer step, with the trainer's devices and accumulation."""
        return self.plan_for(self.run_position.batches_per_step * self.run_position.world_size)

    def plan_for(self, batches_per_step: int) -> TrainingPlan:
        """The samples of each optimizer step of `batches_per_step` batches, over all devices."""
        # Without a curriculum there is one stage, which has no end.
        stages = self.curriculum or [CurriculumStage(1, self.context, self.batch_size)]
        return TrainingPlan(stages, batches_per_step)

    def require_steps(self, plan: TrainingPlan, max_steps: int) -> None:
        """Raise InputError if a run of `max_steps` would end before its curriculum."""
        if self.curriculum is not None and max_steps < plan.n_steps:
            raise InputError(
                f"trainer.max_steps={max_steps} ends before data.curriculum does, which takes {plan.n_steps:,} "
                f"optimizer steps: set it to {plan.n_steps} or more, or lower the stages' tokens."
            )

    def tokens_at(self, step: int) -> int:
        return self.plan.tokens_at(step)

    def stage_at(self, step: int) -> int | None:
        return None if self.curriculum is None else self.plan.index_at(step)

    def samples_of(self, step: int) -> str:
        if self.contiguous:
            return f"{super().samples_of(step)} of the contiguous rows"
        stage, first = self.plan.stage_at(step), self.plan.first_sample_of(step)
        return f"samples {first} … {first + stage.samples_per_step - 1} of length {stage.seq_len}"

    def first_batch(self, stage: PlannedStage) -> Batch:
        """The first training batch of a stage of `plan`, on the CPU; it needs `setup("fit")`."""
        samples = range(stage.first_sample, stage.first_sample + stage.batch_size)
        return set_up_split(self._windows, "train")[[(stage.seq_len, i) for i in samples]]

    def describe(self) -> list[tuple[str, str]]:
        """Origin, tokenizer and splits of the text, and the size of a step."""
        skipped = f" ({self.n_skipped:,} files skipped: binary, empty or unreadable)" if self.n_skipped else ""
        rows = [("corpus", f"{self.origin}{skipped}")]
        if self.tokenizer is None or self.tokenizer.fingerprint:
            rows.append(("tokenizer", "unknown" if self.tokenizer is None else self.tokenizer.name))
        if self.why_cut is not None:
            rows.append(("split", f"by position: {self.why_cut}"))
        for split, corpus in self.corpora.items():
            own = self._opened.own_origins.get(split)
            rows.append((f"  {split}", self._size_of(corpus) + ("" if own is None else f", from {own}")))
        return rows + self._describe_steps()

    def describe_split(self, split: str) -> str:
        where = self._opened.own_origins.get(split) or f"the {split} split of {self.origin}"
        return f"{where}: {self._size_of(self.corpora[split])}"

    def _size_of(self, corpus: TokenSequence) -> str:
        """The size of a corpus in tokens, bytes and documents, as far as known."""
        are_bytes = self.tokenizer is not None and not self.tokenizer.fingerprint
        parts, n_bytes = [] if are_bytes else [f"{len(corpus):,} tokens"], corpus.n_bytes
        if n_bytes is not None:
            parts.append(f"{n_bytes / 1e6:,.1f} MB" if n_bytes >= 1e5 else f"{n_bytes:,} bytes")
        documents = "" if corpus.n_documents is None else f" in {count_of(corpus.n_documents, 'document')}"
        return f"{', '.join(parts)}{documents}"

    def _describe_steps(self) -> list[tuple[str, str]]:
        """The size of a step; with a curriculum that of each stage, the last one up to the end of the run."""
        stages = self.plan.stages
        if self.curriculum is None:
            (stage,) = stages
            return [("a step", f"{stage.samples_per_step} × {stage.seq_len:,} = {stage.tokens_per_step:,} tokens")]
        rows = [("curriculum", count_of(len(stages), "stage"))]
        ends = [*(stage.first_step for stage in stages[1:]), self.trainer.max_steps]
        for number, (stage, end) in enumerate(zip(stages, ends, strict=True)):
            n_steps = end - stage.first_step
            tokens, size = n_steps * stage.tokens_per_step, f"{stage.samples_per_step} × {stage.seq_len:,}"
            rows.append((f"  [{number}]", f"{tokens:,} tokens: {count_of(n_steps, 'step')} of {size}"))
        return rows

    def order(self) -> dict[str, Any]:
        return {
            "fractions": list(self.fractions),
            "split": None if self.why_cut is None else "position",
            "context": self.context,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "document_mask": self.document_mask,
            "contiguous rows × devices": self.batch_size * self.run_position.world_size if self.contiguous else None,
            "curriculum": None if self.curriculum is None else [asdict(stage) for stage in self.curriculum],
            **self.corpora["train"].identity(),
            **({"val_documents": self.corpora["val"].fingerprint()} if "val" in self.own_paths else {}),
            "place": None if self._opened.place is None else str(self._opened.place),
            "tokenizer": None if self.tokenizer is None else self.tokenizer.fingerprint,
        }

    def train_dataloader(self) -> TimedLoader:
        """An endless loader. Lightning asks for it after it has restored the step of a checkpoint."""
        windows, position = set_up_split(self._windows, "train"), self.run_position
        if self.contiguous:
            batches = Counting(position.batches_done)
        else:
            batches = TrainingBatches(self.plan, position.step, position.rank, position.world_size)
        return self.loader(windows, num_workers=self.num_workers, sampler=RankSampler(batches))

    def val_dataloader(self) -> TimedLoader | list[TimedLoader]:
        windows = set_up_split(self._windows, "val")
        return [] if windows is None else self._evaluation_loader(windows)

    def test_dataloader(self) -> TimedLoader:
        return self._evaluation_loader(set_up_split(self._windows, "test"))

    def predict_dataloader(self) -> TimedLoader:
        """The rows of the test split in the order of the text."""
        windows = set_up_split(self._windows, "test")
        return self._evaluation_loader(windows, sorted(range(len(windows)), key=windows.start_of))

    def _evaluation_loader(self, windows: EvaluationWindows, order: Sequence[int] | None = None) -> TimedLoader:
        """Each rank reads every `world_size`-th window. No window is read twice, so the last batches may differ."""
        mine = (order or range(len(windows)))[self.run_position.rank :: self.run_position.world_size]
        return self.loader(windows, self.batch_size, self.num_workers, sampler=RankSampler(mine))


def _is_nested(then: str | None, now: Path | None) -> bool:
    """Whether one of the places of two texts lies inside the other."""
    return None not in (then, now) and (Path(then) in now.parents or now in Path(then).parents)


def _stages(curriculum: Sequence[CurriculumStage | dict[str, Any]], tokens_per_batch: int) -> list[CurriculumStage]:
    """The stages, each with its batch size: by default the one that gives `tokens_per_batch`."""
    if not isinstance(curriculum, list | tuple):
        raise InputError(f"data.curriculum={curriculum!r} must be a list of stages, or null for none.")
    if not curriculum:
        raise InputError("data.curriculum=[] has no stage: give at least one, or null for data.context throughout.")
    return [_stage(f"data.curriculum[{n}]", stage, tokens_per_batch) for n, stage in enumerate(curriculum)]


def _stage(name: str, stage: CurriculumStage | dict[str, Any], tokens_per_batch: int) -> CurriculumStage:
    if not isinstance(stage, CurriculumStage):
        try:
            check_keys(stage, CurriculumStage)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
        stage = CurriculumStage(**stage)
    for option, value in asdict(stage).items():
        if not (type(value) is int and value >= 1) and (option, value) != ("batch_size", None):
            raise InputError(f"{name}.{option}={value!r} must be a whole number, 1 or more.")
    if stage.batch_size is not None:
        return stage
    if tokens_per_batch % stage.seq_len:
        raise InputError(
            f"{name}.seq_len={stage.seq_len} does not divide data.context · data.batch_size = {tokens_per_batch}, the "
            "tokens of a batch: give the stage a batch_size, or another seq_len."
        )
    return replace(stage, batch_size=tokens_per_batch // stage.seq_len)
