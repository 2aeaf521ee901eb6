"""Files damaged at random: each reader gives what was written, or says that the file is damaged."""

import random
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from linrope import InputError, LanguageModel, LanguageModelConfig
from linrope.cli.main import main
from linrope.data.corpus.opening import open_text
from linrope.data.corpus.splits import SPLITS
from linrope.data.prepare.config import PrepareConfig
from linrope.data.prepare.preparation import prepare
from linrope.generation.decoding import read
from linrope.generation.prompt_state import load_prompt_state, save_prompt_state
from tests.conftest import LINE, tiny_options, write_text_file


def a_model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LanguageModelConfig(d_model=16, n_layers=1, n_heads=2, short_conv=2, forget_gate=True)).eval()


def contents_of_model(path: Path) -> list:
    model = LanguageModel.from_pretrained(path)
    return [repr(model.config), *(tensor.numpy().tobytes() for tensor in model.state_dict().values())]


def saved_model(folder: Path) -> None:
    a_model().save_pretrained(folder / "model")


def exported_model(folder: Path) -> None:
    a_model().save_pretrained(folder / "plain")
    assert main(["export", "--ckpt_path", str(folder / "plain"), "--output", str(folder / "model")]) == 0
    shutil.rmtree(folder / "plain")


def checkpoint(folder: Path) -> None:
    made = folder.with_name("made")
    made.mkdir()
    assert main(["fit", *tiny_options(write_text_file(made), made)]) == 0
    shutil.copy(next(made.rglob("last.ckpt")), folder / "model")


def prompt_state(folder: Path) -> None:
    model = a_model()
    save_prompt_state(folder / "state", model, read(model, torch.tensor([[1, 2, 3, 4]])))


def contents_of_state(folder: Path) -> list:
    found = load_prompt_state(folder / "state", a_model())
    past = found.state[0].past
    return [past.length, found.recent.tolist(), found.logits.tolist(), past.kv.tolist(), past.k_sum.tolist()]


def prepared(folder: Path) -> None:
    text = folder.with_name("text")
    text.mkdir()
    for number in range(12):
        (text / f"{number}.txt").write_text(LINE * (number + 1))
    prepare(PrepareConfig(path=str(text), output=str(folder / "prepared"), workers=1), lambda *_: None)


def contents_of_prepared(folder: Path) -> list:
    corpora = open_text(folder / "prepared", [0.5, 0.25, 0.25]).corpora
    return [corpora[split].tokens(0, len(corpora[split])).tolist() for split in SPLITS]


KINDS = {
    "saved model": (saved_model, lambda folder: contents_of_model(folder / "model")),
    "exported model": (exported_model, lambda folder: contents_of_model(folder / "model")),
    "checkpoint": (checkpoint, lambda folder: contents_of_model(folder / "model")),
    "prompt state": (prompt_state, contents_of_state),
    "prepared text": (prepared, contents_of_prepared),
}


def damage(file: Path, draw: random.Random) -> str:
    """Change one file; says how."""
    content = bytearray(file.read_bytes())
    kind = draw.choice(["bit", "bits", "byte", "cut", "zeros", "longer", "empty", "gone", "moved", "zipped again"])
    at = draw.randrange(max(len(content), 1))
    if kind in ("bit", "bits"):
        for _ in range(1 if kind == "bit" else 20):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        content[at] = draw.randrange(256)
    elif kind == "cut":
        del content[at:]
    elif kind == "zeros":
        content[at : at + 64] = bytes(len(content[at : at + 64]))
    elif kind == "longer":
        content += draw.randbytes(100)
    elif kind == "moved":
        content[at:at] = draw.randbytes(8)
    elif kind == "zipped again" and zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, entry in entries.items():
                archive.writestr(name, entry)
        return kind
    file.write_bytes(b"" if kind == "empty" else content)
    if kind == "gone":
        file.unlink()
    return kind


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_read_as_written_or_refused(kind, tmp_path):
    write, contents = KINDS[kind]
    whole = tmp_path / "whole"
    whole.mkdir()
    write(whole)
    expected, refused = contents(whole), 0
    names = sorted(file.relative_to(whole) for file in whole.rglob("*") if file.is_file())
    for seed in range(150):
        draw, copy = random.Random(f"{kind} {seed}"), tmp_path / "copy"
        shutil.copytree(whole, copy)
        name = draw.choice(names)
        how = f"seed {seed}: {damage(copy / name, draw)} in {name}"
        try:
            found = contents(copy)
        except InputError as error:
            refused += len(str(error)) < 1000
        except Exception as error:
            raise AssertionError(how) from error
        else:
            assert found == expected, how
        shutil.rmtree(copy)
    assert refused > 50
