"""`python -m benchmarks.conversion` on a tiny teacher."""

from __future__ import annotations

import json

import pytest

from benchmarks.experiments.conversion import Conversion
from linrope import LanguageModel, LanguageModelConfig
from tests.benchmarks.commands import refusal
from tests.conftest import write_text_file

SMALL = ["--tokens", "640", "--context", "32", "--batch_size", "2", "--window", "16", "--validation_tokens", "64"]
SMALL += ["--precision", "32-true", "--seeds", "0"]


@pytest.fixture
def command(tmp_path) -> list[str]:
    LanguageModel(LanguageModelConfig(d_model=16, n_layers=2, n_heads=2, attention="softmax")).save_pretrained(
        tmp_path / "teacher"
    )
    text = write_text_file(tmp_path)
    files = ["--teacher", str(tmp_path / "teacher"), "--data", str(text), "--output", str(tmp_path / "out")]
    return [*files, *SMALL, "--layers", "linear,softmax"]


@pytest.mark.exhaustive
def test_stages_share_the_tokens_and_results_are_kept(command, tmp_path, capsys):
    args = [*command, "--shares", "0.2,0.5,0.3", "0,1,0", "--scratch_lr", "1e-3"]
    assert Conversion.main(args) == 0
    contents = json.loads((tmp_path / "out" / "conversion.json").read_text())
    points = contents["points"]
    assert [list(point["after"]) for point in points] == [
        ["start", "align", "distill", "train"],
        ["start", "distill"],
        ["train"],
    ]
    assert [point["tokens"] for point in points] == [640, 640, 640]
    assert all(7 < loss < 9 for point in points for loss in (point["teacher"], *point["after"].values()))
    assert points[0]["bpb"] == points[0]["after"]["train"]
    assert "640 tokens" in capsys.readouterr().out
    before = (tmp_path / "out" / "conversion.json").read_text()
    assert "results of --precision 32-true" in refusal(Conversion, [*args, "--precision", "bf16-mixed"], capsys)
    assert Conversion.main(args) == 0
    assert json.loads(before)["points"] == json.loads((tmp_path / "out" / "conversion.json").read_text())["points"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--teacher", "nowhere"], "--teacher: checkpoint 'nowhere' does not exist"),
        (["--shares", "0.5,0.6,0"], "three numbers from 0, which add up to 1"),
        (["--feature_map", "hedgehgo"], "Did you mean 'hedgehog'"),
        (["--data", "nowhere"], "--data nowhere: no such file"),
        (["--tokens", "0"], "--tokens 0: must be above 0"),
        (["--tokens", "20"], "--tokens 20: no step of 64 tokens; give 92 or more"),
        (["--precision", "foo"], "argument --precision: invalid choice: 'foo'"),
    ],
)
def test_bad_input_is_named(command, options, message, capsys):
    assert message in refusal(Conversion, [*command, *options], capsys)
