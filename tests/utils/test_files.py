"""Files that are read safely."""

import shutil
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch

from linrope import InputError, LanguageModel, LanguageModelConfig
from linrope.utils.files import load_plain
from tests.conftest import assert_input_errors

SMALL = LanguageModelConfig(vocab_size=40, d_model=16, n_layers=1, n_heads=2)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file with shared, sliced, empty and nested tensors, and its content."""
    content = {
        "weights": LanguageModel(SMALL).state_dict(),  # the embedding is also the output
        "rows": torch.randn(4, 4)[1:],
        "double": [torch.randn(7, dtype=torch.float64), (torch.empty(0), torch.nn.Parameter(torch.randn(3)))],
        "number": 3,
    }
    torch.save(content, tmp_path / "saved.pt")
    return tmp_path / "saved.pt"


def pack_again(source: Path, target: Path, compression: int, change=None) -> None:
    """The entries of an archive, in another order."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for name in reversed(old.namelist()):
            content = old.read(name)
            new.writestr(name, content if change is None else change(name, content))


def test_an_archive_packed_again_is_read_right_or_refused(saved, tmp_path):
    before = torch.load(saved, weights_only=True)
    pack_again(saved, tmp_path / "stored.pt", zipfile.ZIP_STORED)
    for file in ("saved.pt", "stored.pt"):
        after = load_plain(tmp_path / file)
        assert after["number"] == 3
        assert torch.equal(after["rows"], before["rows"])
        assert torch.equal(after["double"][0], before["double"][0])
        assert all(torch.equal(after["weights"][name], tensor) for name, tensor in before["weights"].items())
    pack_again(saved, tmp_path / "packed.pt", zipfile.ZIP_DEFLATED)
    with pytest.raises(InputError, match=r"checkpoint '.*packed\.pt' was unpacked and packed again, with compression"):
        load_plain(tmp_path / "packed.pt")


def test_records_of_another_size_than_their_tensors_are_refused(saved, tmp_path):
    def shortened(name: str, content: bytes) -> bytes:
        return content[:-4] if name.endswith("data/0") else content

    def lengthened(name: str, content: bytes) -> bytes:
        return content + b"0000" if name.endswith("data/2") else content

    for name, change in (("short.pt", shortened), ("long.pt", lengthened)):
        pack_again(saved, tmp_path / name, zipfile.ZIP_STORED, change)
        with pytest.raises(InputError, match=f"state file '.*{name}' is damaged or no state file"):
            load_plain(tmp_path / name, "state file")


def test_a_model_packed_again_does_not_load(tmp_path):
    LanguageModel(SMALL).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "SHA256SUMS").unlink()
    weights = tmp_path / "model" / "model.pt"
    shutil.copy(weights, tmp_path / "original.pt")
    pack_again(tmp_path / "original.pt", weights, zipfile.ZIP_DEFLATED)
    assert_input_errors((partial(LanguageModel.from_pretrained, tmp_path / "model"), "packed again, with compression"))
