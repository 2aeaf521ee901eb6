"""Text that was prepared gives the batches of the text itself, and the order names data and tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from linrope.data.batches.curriculum import CurriculumStage
from linrope.data.prepare.config import PrepareConfig
from linrope.data.prepare.preparation import prepare
from linrope.data.tokenizers.subwords import SubwordTokenizer
from tests.conftest import LINE
from tests.data.tokenizers.subword_files import byte_level, write_tokenizer
from tests.training.attached import attached


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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"document_mask": True},
        {"contiguous": True},
        {"contiguous": True, "document_mask": True},
        {"curriculum": [CurriculumStage(200, 16), CurriculumStage(100, 64)]},
        {"document_mask": True, "num_workers": 2, "world_size": 2, "rank": 1, "step": 3},
    ],
    ids=str,
)
def test_prepared_bytes_give_the_batches_of_the_text(texts, tmp_path, options):
    prepare(PrepareConfig(path=str(texts), output=str(tmp_path / "bytes"), workers=1))
    options = {"fractions": [0.6, 0.2, 0.2], **options}
    plain, ready = (attached(path, **options) for path in (texts, tmp_path / "bytes"))
    for loaders in zip(*((data.train_dataloader(), data.val_dataloader()) for data in (plain, ready)), strict=True):
        for _, one, other in zip(range(6), *loaders):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_order_notices_another_tokenizer_and_other_data(texts, subwords, tmp_path):
    def order(path: Path, **options: object) -> dict:
        return attached(path, **options).order()

    first = order(subwords)
    assert first == order(subwords) == {**first, "tokenizer": SubwordTokenizer(byte_level()).fingerprint}
    same_size = tmp_path / "other"
    (texts / "07.txt").write_text((texts / "07.txt").read_text().swapcase())
    tokenizer = str(write_tokenizer(tmp_path, byte_level(special=("</s>",)), "other.json"))  # whose tokens are as many
    for name, file in (("data", tmp_path / "tokenizer.json"), ("tokenizer", tokenizer)):
        folder = same_size / name
        prepare(PrepareConfig(path=str(texts), output=str(folder), tokenizer=str(file), workers=1))
        changed = order(folder)
        assert changed["train_documents"] != first["train_documents"]
        assert (changed["tokenizer"] == first["tokenizer"]) == (name == "data")
