"""Text for the Lightning trainer: loaders over the windows of `linrope.data`, resumable and right under DDP."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from linrope.data import Corpus, EvaluationWindows, TrainingBatches, TrainingWindows, find_sources, split_corpus
from linrope.errors import InputError

Batch = dict[str, Tensor]


class TextDataModule(LightningDataModule):
    """The text to learn from.

    Batches are `{"inputs", "targets"}`, each int64 (batch_size, context). Training has no epochs: sample `i` of a run
    follows from `seed` and `i`, and a resumed run goes on with the sample after the last that its checkpoint has
    learned from.

    Args:
        path: Your text: a file, a folder or a glob. null is the built-in corpus, the Python standard library's source.
        context: Tokens (bytes) of one sample.
        batch_size: Samples of one batch, per device.
        fractions: Shares of train, val and test. A single file is cut by position, in this order; several are dealt
            out whole, by a hash of their names.
        seed: Names the order of the training samples.
        num_workers: Processes that read samples ahead; 0 reads them in the training process.

    Raises:
        InputError: when set up: nothing to read there, fractions that are none, or a split shorter than one sample.
    """

    def __init__(
        self,
        path: str | None = None,
        context: int = 1024,
        batch_size: int = 8,
        fractions: list[float] = [0.9, 0.05, 0.05],  # noqa: B006 (read only; a list is what YAML and help can show)
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("context", context, 1),
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
        ):
            if value < least:
                raise InputError(f"data.{name}={value} must be {least} or more.")
        self.path = Path(path) if path is not None else None
        self.context, self.batch_size, self.fractions = context, batch_size, fractions
        self.seed, self.num_workers = seed, num_workers
        self.corpora: dict[str, Corpus] = {}
        self.origin, self.n_skipped = "", 0

    def setup(self, stage: str) -> None:
        if not self.corpora:
            sources = find_sources(self.path)
            self.origin, self.n_skipped = sources.origin, sources.n_skipped
            self.corpora = split_corpus(sources, self.fractions)
        # Made here, before any work, so that a split that is too short is found at once.
        if stage == "fit":
            self._train = TrainingWindows(self.corpora["train"], self.context, self.seed)
        if stage == "validate" or (stage == "fit" and self._validates):
            self._val = EvaluationWindows(self.corpora["val"], self.context, "val")
        if stage == "test":
            self._test = EvaluationWindows(self.corpora["test"], self.context, "test")

    @property
    def _validates(self) -> bool:
        return self.fractions[1] > 0 and self.trainer.limit_val_batches > 0

    def train_dataloader(self) -> DataLoader[Batch]:
        """An endless loader. Lightning asks for it after it has restored the step that a checkpoint was saved at."""
        trainer = self.trainer
        samples_per_step = trainer.accumulate_grad_batches * self.batch_size * trainer.world_size
        batches = TrainingBatches(
            self.batch_size,
            first=trainer.global_step * samples_per_step,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
        )
        return self._loader(self._train, batch_sampler=batches)

    def val_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        return self._evaluation_loader(self._val) if self._validates or self.trainer.state.fn == "validate" else []

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._evaluation_loader(self._test)

    def _evaluation_loader(self, windows: EvaluationWindows) -> DataLoader[Batch]:
        """Every rank takes every `world_size`-th window; none is seen twice, so the last batches may be unequal."""
        mine = Subset(windows, range(self.trainer.global_rank, len(windows), self.trainer.world_size))
        return self._loader(mine, batch_size=self.batch_size)

    def _loader(self, dataset: Dataset[Batch], **options: object) -> DataLoader[Batch]:
        on_gpu = self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            dataset,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=on_gpu,
            **options,
        )
