from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from linrope.cli.main import main
from tests.conftest import tiny_options, write_text_file


@dataclass(frozen=True)
class TrainedRun:
    """A run of two steps on rows of 32 tokens, with 1,048 tokens to validate on. Tests only read it."""

    options: list[str]
    folder: Path

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("trained")
    options = [*tiny_options(write_text_file(folder), folder), "--trainer.limit_val_batches=1.0"]
    assert main(["fit", *options]) == 0
    return TrainedRun(options, folder / "runs" / "tiny" / "version_0")
