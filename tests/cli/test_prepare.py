"""`linrope prepare`: what it prints, its progress, and Ctrl-C."""

from __future__ import annotations

import json
import re
from functools import partial

from rich.console import Console

from linrope.cli.main import main
from linrope.data.corpus.opening import open_text
from linrope.data.prepare.parts import write_part
from linrope.data.tokenizers.subwords import SubwordTokenizer
from tests.data.tokenizers.subword_files import byte_level


def fails(capsys, *args: str) -> str:
    """The error of a command that must stop with exit code 2."""
    assert main(list(args)) == 2
    return capsys.readouterr().err


def test_prepare_says_what_it_found(tmp_path, capsys):
    sizes = [1, 2, 3, 4, 4, 7, 8, 300]
    lines = [json.dumps({"body": "x" * size}) for size in sizes]
    (tmp_path / "text.jsonl").write_text("\n".join([*lines, "not JSON", json.dumps({"body": ""})]))
    args = ["prepare", f"--path={tmp_path / 'text.jsonl'}", f"--output={tmp_path / 'out'}", "--workers=1"]
    assert "text.jsonl line 9 is not JSON" in fails(capsys, *args, "--text_field=body")
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
    assert "was prepared with --skip_bad_lines, and 1 lines were skipped" in fails(
        capsys, *args, f"--output={tmp_path / 'skipped'}", "--text_field=body", "--skip_bad_lines=false"
    )


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
        if len(list(part.parent.glob("*.npz"))) == 5:
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
