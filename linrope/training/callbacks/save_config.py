"""The run's configuration, saved beside its checkpoints."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from linrope.errors import InputError
from linrope.utils.files import whole_file


class SaveConfig(Callback):
    """Writes the run's whole configuration, a YAML text, to `path` before training.

    Args:
        path: the file, in the folder of the run.
        config: its content.
        replace: whether an existing file may be overwritten: this run resumes the one in the folder.

    Raises:
        InputError: when set up: the file exists and must not be overwritten.
    """

    def __init__(self, path: Path, config: str, replace: bool = False) -> None:
        self.path, self.config, self.replace = path, config, replace

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        # Rank 0 decides for all: no rank may wait for one that has stopped.
        if trainer.strategy.broadcast(self.path.exists() and not self.replace):
            raise InputError(
                f"{self.path} exists, and this run would overwrite the files beside it: choose another folder (set "
                "trainer.default_root_dir, or the logger's), or resume that run with --ckpt_path. If it has only just "
                "begun, start this one again."
            )
        if trainer.is_global_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self.path) as file:
                file.write(self.config.encode())
