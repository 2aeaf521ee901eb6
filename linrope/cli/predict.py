"""`linrope predict`: write what a checkpoint predicts as JSON lines, one for each row of the data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from linrope.cli.checkpoint import with_run_config
from linrope.cli.output import say
from linrope.cli.training import CheckpointOptions, TrainingCLI
from linrope.errors import InputError, NonFiniteError
from linrope.utils.files import require_new, whole_file


@dataclass(frozen=True, kw_only=True)
class PredictOptions(CheckpointOptions):
    """The checkpoint, and the file for its predictions."""

    output: str
    """File to write, one JSON object a line."""
    overwrite: bool = False
    """Replace the file if it exists."""

    def __post_init__(self) -> None:
        require_new(Path(self.output), "--output", self.overwrite)


class WritePredictions(Callback):
    """Writes the predictions of each batch as JSON lines; it keeps none in memory. `n_written` is their number."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.n_written = file, 0

    def on_predict_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        for prediction in outputs:
            try:
                line = json.dumps(prediction, ensure_ascii=False, allow_nan=False)
            except ValueError as error:
                raise NonFiniteError(
                    f"prediction {self.n_written} holds a number that is not finite ({prediction}): the weights are "
                    "damaged, or the training diverged. Give another checkpoint."
                ) from error
            self.file.write(f"{line}\n".encode())
        self.n_written += len(outputs)


class PredictCLI(TrainingCLI):
    """The run of `linrope predict`, on one device, so that the file has the order of the data."""

    def run(self, **options: Any) -> None:
        if self.trainer.world_size > 1:
            raise InputError(
                f"`linrope predict` runs on one device, not on {self.trainer.world_size}: set trainer.devices=1 and "
                "trainer.strategy=auto."
            )
        if self.task.predict_step is LightningModule.predict_step:
            raise InputError(f"task={self.config.task!r} predicts nothing: `linrope validate` measures its runs.")
        with whole_file(Path(self.options.output)) as file:
            writer = WritePredictions(file)
            self.trainer.callbacks.append(writer)
            super().run(return_predictions=False)
        say(f"wrote {writer.n_written:,} predictions to {self.options.output}")


def run(args: Sequence[str]) -> None:
    """Run `linrope predict` with the command line `args`."""
    PredictCLI("predict", with_run_config(args), PredictOptions).run()
