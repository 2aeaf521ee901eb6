"""The base class of fine-tuning tasks: an encoder with a head, trained on the data of its task."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from linrope.errors import InputError
from linrope.training.data_modules.finetune import FineTuningDataModule
from linrope.training.task import Batch
from linrope.training.tasks.encoder import EncoderTask


class FineTuningModule(EncoderTask):
    """What fine-tuning tasks share. A subclass sets `head` and `data_class`; arguments are those of `EncoderTask`.

    Raises:
        InputError: when set up: data of another task, or with another number of labels than the model's; with a
            checkpoint: data with other labels than those of its training.
    """

    @property
    def data(self) -> FineTuningDataModule:
        """The trainer's data module."""
        return self.trainer.datamodule

    def setup(self, stage: str) -> None:
        if not isinstance(self.data, self.data_class):
            found = type(self.data).__name__
            raise InputError(
                f"{type(self).__name__} trains on a {self.data_class.__name__}, not on a {found}: pass one."
            )
        super().setup(stage)
        before, here = self.model.labels, list(self.data.labels or ())
        if stage != "fit":
            self._require_labels(before, "the model that was loaded")
        elif before not in (None, here):
            rank_zero_warn(
                f"training begins with a head for the labels {_named(before)}, and the data has {_named(here)}: to "
                "begin with a new head, start from an encoder of --task masked_lm."
            )
        self.model.labels = here or None

    def require_data(self, data: FineTuningDataModule) -> None:
        """As `TrainingTask`. Raises InputError unless the model has the data's labels, too."""
        super().require_data(data)
        if (found := data.n_labels) not in (None, n_labels := self.model_config.n_labels):
            what = "values (regression)" if found == 1 else f"{found} labels"
            raise InputError(f"model.n_labels={n_labels}, and the data has {what}: set model.n_labels to {found}.")

    def task_state(self) -> dict[str, Any]:
        labels = self.data.labels
        return {} if labels is None else {"labels": list(labels)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """As `TrainingTask`. Refuses data with other labels: their numbers would stand for those of training."""
        super().on_load_checkpoint(checkpoint)
        labels = checkpoint["linrope"].get("labels")  # none of data without labels
        if self._stage is None:  # loaded without a trainer
            self.model.labels = labels
            return
        self._require_labels(labels, f"checkpoint {str(self.trainer.ckpt_path)!r}")

    def _require_labels(self, labels: list[str] | None, what: str) -> None:
        """Raise InputError if the data has other labels; None are not known."""
        here = list(self.data.labels or ())
        if labels is not None and labels != here:
            raise InputError(
                f"{what} was trained with the labels {_named(labels)}, and the data has {_named(here)}: give a "
                "training file with the same labels."
            )

    def labelled(self, batch: Batch, logits: Tensor) -> list[dict[str, Any]]:
        """The predictions of rows with logits (B, n): the id, the name of the best label, the probability of each."""
        labels = self.data.labels
        return [
            {"id": id_, "label": labels[best], "scores": dict(zip(labels, scores))}
            for id_, best, scores in zip(batch["id"], logits.argmax(-1).tolist(), logits.softmax(-1).tolist())
        ]

    def logits(self, batch: Batch) -> Tensor:
        """What the model predicts of a batch, float32."""
        return self.model(batch["inputs"], batch["key_mask"], batch["token_types"]).float()


def _named(labels: list[str]) -> str:
    return ", ".join(map(repr, labels))
