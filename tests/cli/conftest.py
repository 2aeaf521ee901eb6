from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from linrope.cli.main import main
from linrope.data.prepare.config import PrepareConfig
from linrope.data.prepare.preparation import prepare
from tests.conftest import LINE, tiny_options, write_text_file
from tests.data.tokenizers.subword_files import write_tokenizer


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True)
class TrainedRun:
    """A run of two steps on rows of 32 tokens, with 1,048 tokens to validate on. Tests only read it."""

    options: list[str]
    folder: Path

    @property
    def resumed(self) -> list[str]:
        """The options, with the checkpoint."""
        return [*self.options, f"--ckpt_path={self.checkpoint}"]

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


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """60 documents of up to 400 bytes."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text((f"{number} " + LINE * 6)[: 1 + 97 * number % 400])
    return folder


@pytest.fixture
def subwords(texts: Path, tmp_path: Path) -> Path:
    """The same, prepared with a tokenizer."""
    options = {"path": str(texts), "tokenizer": str(write_tokenizer(tmp_path)), "workers": 1}
    prepare(PrepareConfig(output=str(tmp_path / "subwords"), **options))
    return tmp_path / "subwords"
