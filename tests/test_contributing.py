"""CONTRIBUTING.md: its diffs fit the code, and do what it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def changes() -> Iterator[tuple[str, list[str]]]:
    """(path, changed lines) of each file in the page's diffs."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for block in re.findall(r"^```diff\n(.*?)^```$", page, re.M | re.S):
        for part in re.split(r"^--- .*\n", block, flags=re.M)[1:]:
            first, *lines = part.splitlines()
            yield first.removeprefix("+++ b/"), lines


def changed(text: str, lines: list[str]) -> str:
    """The text after a change, whose lines that stay or go must stand there, in this order."""
    at = 0
    for number, line in enumerate(lines):
        sign, rest = line[:1], f"{line[1:]}\n"
        if sign == "+":
            text = text[:at] + rest + text[at:]
            at += len(rest)
            continue
        found = text.find(rest, at)
        assert found >= 0, f"line {number + 1} of the diff: {rest}"
        at = found if sign == "-" else found + len(rest)
        text = text[:found] + text[found + len(rest) :] if sign == "-" else text
    return text


def test_the_diffs_fit_the_code():
    found = dict(changes())
    assert len(found) == 5
    for path, lines in found.items():
        assert changed((ROOT / path).read_text() if (ROOT / path).exists() else "", lines)


USE = """
import sqlite3, sys
import torch
from linrope import RotaryConfig, RotaryEmbedding, RotaryScaling, linear_attention
from linrope.cli.main import main

q, k, v = torch.randn(3, 1, 2, 9, 4)
o = linear_attention(q, k, v, feature_map="square")
torch.testing.assert_close(o, linear_attention(q.square(), k.square(), v, feature_map="identity"))
scaling = RotaryScaling("truncate", 1.0, original_context=100)
theta = RotaryEmbedding.from_config(8, RotaryConfig(scaling=scaling)).frequencies(torch.device("cpu"))
assert (theta > 0).tolist() == [True, True, False, False]  # 1 and 0.1 turn once in 100 tokens
with sqlite3.connect("texts.db") as database:
    database.execute("CREATE TABLE texts (id INTEGER, text TEXT)")
    database.executemany("INSERT INTO texts VALUES (?, ?)", enumerate(["a line of text " * 9] * 50))
assert main(["count", "--path=text.txt"]) == 0
data = ["--data.class_path=linrope.training.data_modules.sqlite.Rows", "--data.path=texts.db", "--data.context=32"]
sizes = ["--model.d_model=16", "--model.n_layers=1", "--model.n_heads=2", "--trainer.max_steps=1"]
sys.exit(main(["fit", *data, *sizes, "--trainer.accelerator=cpu", "--model.feature_map=square"]))
"""


@pytest.mark.exhaustive
def test_the_diffs_do_what_the_page_says(tmp_path):
    shutil.copytree(ROOT / "linrope", tmp_path / "linrope", ignore=shutil.ignore_patterns("__pycache__"))
    for path, lines in changes():
        file = tmp_path / path
        file.write_text(changed(file.read_text() if file.exists() else "", lines))
    (tmp_path / "text.txt").write_text("twelve bytes")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "13 tokens" in done.stdout
    assert "in 45 documents" in done.stdout
