"""`linrope prepare`: what it prints, its progress, Ctrl-C, and the batches of what it wrote."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from linrope.cli.main import main
from linrope.data.batches.curriculum import CurriculumStage
from linrope.data.corpus.opening import open_text
from linrope.data.prepare.config import PrepareConfig
from linrope.data.prepare.parts import write_part
from linrope.data.prepare.preparation import prepare
from linrope.data.tokenizers.subwords import SubwordTokenizer
from tests.data.tokenizers.subword_files import byte_level, write_tokenizer
from tests.training.attached import attached


def test_prepare_says_what_it_found(tmp_path, capsys, error_of):
    sizes = [1, 2, 3, 4, 4, 7, 8, 300]
    lines = [json.dumps({"body": "x" * size}) for size in sizes]
    (tmp_path / "text.jsonl").write_text("\n".join([*lines, "not JSON", json.dumps({"body": ""})]))
    args = ["prepare", f"--path={tmp_path / 'text.jsonl'}", f"--output={tmp_path / 'out'}", "--workers=1"]
    assert "text.jsonl line 9 is not JSON" in error_of(*args, "--text_field=body")
    assert main([*args, f"--output={tmp_path / 'skipped'}", "--text_field=body", "--skip_bad_lines"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^documents +8 *$", out, re.M)
    assert re.search(r"^tokens +329, plus a separator", out, re.M)
    assert re.search(r"^bytes per token +1\.000 \(329 bytes of text\)", out, re.M)
    assert re.search(r"^skipped +1 bad lines *$", out, re.M)
    assert re.search(r"^skipped +1 documents without a token *$", out, re.M)
    rows = re.findall(r"^ *(\d+)(?: … (\d+))?  +(\d+)  (█*) *$", out, re.M)
    found = [(int(low), int(high or low), int(n)) for low, high, n, _ in rows]
    powers = [(2**power, 2 ** (power + 1) - 1) for power in range(9)]
    assert found == [(low, high, sum(low <= size <= high for size in sizes)) for low, high in powers]
    assert [len(bar) for *_, bar in rows] == [-(-40 * n // 3) for *_, n in found]
    assert f"train on it with --data.path {tmp_path / 'skipped'}\n" in out
    assert main([*args, f"--output={tmp_path / 'skipped'}", "--text_field=body", "--skip_bad_lines=true"]) == 0
    assert capsys.readouterr().out == out
    args += [f"--output={tmp_path / 'skipped'}", "--text_field=body", "--skip_bad_lines=false"]
    assert "was prepared with --skip_bad_lines, and 1 lines were skipped" in error_of(*args)


def test_bytes_per_token_are_those_of_the_text(texts, subwords, tmp_path, capsys):
    args = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--output", str(subwords), "--path", str(texts)]
    assert main(["prepare", *args]) == 0
    out = capsys.readouterr().out
    tokenizer = SubwordTokenizer(byte_level())
    documents = [file.read_bytes() for file in texts.iterdir()]
    n_bytes = sum(map(len, documents))
    n_tokens = sum(len(tokenizer.encode_document(document)[0]) for document in documents)
    assert re.search(rf"^tokens +{n_tokens:,},", out, re.M)
    assert re.search(rf"^bytes per token +{n_bytes / n_tokens:.3f} ", out, re.M)
    assert f"--data.path {subwords} --model.vocab_size 300" in out


def test_prepare_shows_how_far_it_is_and_stops_on_ctrl_c(texts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("linrope.cli.prepare.Console", partial(Console, force_terminal=True, width=100))
    monkeypatch.setattr("linrope.data.prepare.units.UNIT_BYTES", 1000)
    args = ["prepare", f"--path={texts}", f"--output={tmp_path / 'out'}", "--workers=1"]

    def interrupted(unit, part, *options):
        if len(list(part.parent.glob("*.json"))) == 5:
            raise KeyboardInterrupt
        write_part(unit, part, *options)

    with monkeypatch.context() as patch:
        patch.setattr("linrope.data.prepare.workers.write_part", interrupted)
        assert main(args) == 130
    out = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", capsys.readouterr().out)
    total = sum(file.stat().st_size for file in texts.iterdir()) / 1000
    shown = [float(size) for size in re.findall(rf"reading.* (\d+\.\d)/{total:.1f} kB", out)]
    assert 0 < shown[-1] < total
    assert "stopped: run the same command again to continue." in out
    assert main(args) == 0
    assert open_text(tmp_path / "out", [1.0, 0.0, 0.0]).corpora["train"].n_documents == 60


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


def test_names_of_files_do_not_steer_the_terminal(tmp_path, capsys, error_of):
    name = "a\x1b]0;title\x07\u202e"
    (tmp_path / name).mkdir()
    (tmp_path / name / "b.jsonl").write_text('{"text": "a"}\n[]')
    args = ["prepare", f"--path={tmp_path / name}", f"--output={tmp_path / name}2", "--workers=1"]
    shown = error_of(*args)
    assert main([*args, "--skip_bad_lines"]) == 0
    shown += capsys.readouterr().out
    assert "a\ufffd]0;title\ufffd\ufffd/b.jsonl line 2 holds a list" in shown
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e]", shown)
