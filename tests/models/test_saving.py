"""Folders with a model: checksums, and saves that are interrupted."""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
import torch

from linrope import EncoderDecoderConfig, InputError, LanguageModel, LanguageModelConfig
from linrope.data.tokenizers.subwords import SubwordTokenizer
from linrope.rotary import RotaryConfig
from tests.conftest import assert_input_errors
from tests.data.tokenizers.subword_files import byte_level

CONFIG = LanguageModelConfig(vocab_size=400, d_model=16, n_layers=1, n_heads=2)


def a_model(**changes) -> LanguageModel:
    model = LanguageModel(dataclasses.replace(CONFIG, **changes))
    model.tokenizer = SubwordTokenizer(byte_level(())).to_serialized()
    return model


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_each_file_has_a_checksum_that_reading_verifies(tmp_path):
    a_model().save_pretrained(tmp_path)
    files = {"config.json", "model.pt", "tokenizer.json"}
    lines = dict(reversed(line.split("  ")) for line in (tmp_path / "SHA256SUMS").read_text().splitlines())
    assert lines == {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in files}
    LanguageModel.from_pretrained(tmp_path)
    for name in files:
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:-3] + b" " + content[-2:])
        with pytest.raises(InputError, match=rf"{name}' is not the file that was saved.* remove .*SHA256SUMS"):
            LanguageModel.from_pretrained(tmp_path)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json' is missing, SHA256SUMS lists it"):
        LanguageModel.from_pretrained(tmp_path)


def test_a_folder_is_read_without_verification_when_asked(tmp_path):
    a_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope"]["base"] = 500.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"config\.json' is not the file that was saved"):
        LanguageModel.from_pretrained(tmp_path)
    assert LanguageModel.from_pretrained(tmp_path, verify=False).config.rope.base == 500
    (tmp_path / "SHA256SUMS").unlink()
    assert LanguageModel.from_pretrained(tmp_path).config.rope.base == 500


@pytest.mark.parametrize("n_moved", range(5))
def test_an_interrupted_save_leaves_no_mixture(n_moved, tmp_path, monkeypatch):
    """The new model has the same shapes: its weights would run with the old configuration."""
    old, new = a_model(), a_model(rope=RotaryConfig(base=500.0))
    old.save_pretrained(tmp_path)
    before, moved, replace = contents(tmp_path), [], Path.replace

    def killed(path: Path, target: Path) -> Path:
        if target.parent == tmp_path:  # not the checksums, written whole before
            if len(moved) == n_moved:
                raise KeyboardInterrupt
            moved.append(target.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", killed)
    if n_moved == 4:
        new.save_pretrained(tmp_path)
        assert LanguageModel.from_pretrained(tmp_path).config == new.config
        return
    with pytest.raises(KeyboardInterrupt):
        new.save_pretrained(tmp_path)
    if n_moved == 0:
        assert contents(tmp_path) == before
    else:
        with pytest.raises(InputError, match="a later save was interrupted"):
            LanguageModel.from_pretrained(tmp_path)


def test_a_save_that_fails_leaves_the_model_before(tmp_path, monkeypatch):
    a_model().save_pretrained(tmp_path)
    before = contents(tmp_path)

    def full(weights, path):
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        a_model().save_pretrained(tmp_path)
    assert contents(tmp_path) == before


def test_each_weight_keeps_its_dtype(tmp_path):
    """Buffers too, here those of FAVOR+; θ has float32 in a block of bfloat16."""
    model = a_model(rope=RotaryConfig(trainable=True), feature_map="favor", tie_embeddings=False)
    model.blocks.bfloat16()
    model.output.double()
    model.save_pretrained(tmp_path)
    read = LanguageModel.from_pretrained(tmp_path).state_dict()
    torch.testing.assert_close(read, model.state_dict(), rtol=0, atol=0)
    assert read["blocks.0.attention.qkv.weight"].dtype == torch.bfloat16
    assert read["output.weight"].dtype == torch.float64


@pytest.mark.parametrize("config", [CONFIG, EncoderDecoderConfig(vocab_size=400, d_model=16, n_heads=2)])
def test_a_model_that_is_not_that_of_its_configuration_is_saved_once_that_is_corrected(config, tmp_path):
    model = config.build()
    model.embedding = torch.nn.Embedding(500, 16)
    with pytest.raises(InputError, match=r"embedding\.weight is \(500, 16\), and \(400, 16\) by .* vocab_size=\.\.\."):
        model.save_pretrained(tmp_path)
    model.config = dataclasses.replace(config, vocab_size=500)
    model.output = torch.nn.Linear(16, 500, bias=False)
    with pytest.raises(InputError, match=r"output\.weight is not embedding\.weight, .* tie_embeddings=False"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    model.config = dataclasses.replace(model.config, tie_embeddings=False)
    model.save_pretrained(tmp_path)
    read = type(model).from_pretrained(tmp_path).state_dict()
    torch.testing.assert_close(read, model.state_dict(), rtol=0, atol=0)


def test_weights_without_values_and_ties_of_two_dtypes_are_refused(tmp_path):
    with torch.device("meta"):
        empty = a_model()
    double = a_model()
    double.output.weight = torch.nn.Parameter(double.output.weight.detach().double())
    assert_input_errors(
        (lambda: empty.save_pretrained(tmp_path), r"embedding\.weight is on the device meta, without values"),
        (lambda: double.save_pretrained(tmp_path), r"output\.weight is not embedding\.weight"),
    )
    assert not list(tmp_path.iterdir())


def test_a_model_that_diverged_is_saved(tmp_path):
    model = a_model()
    model.embedding.weight.data.fill_(torch.nan)
    model.save_pretrained(tmp_path)
    assert LanguageModel.from_pretrained(tmp_path).output.weight.isnan().all()
