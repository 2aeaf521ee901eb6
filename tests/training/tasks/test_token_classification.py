"""Token classification from the command line: trained, resumed, measured, predicted."""

import json
import math
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from linrope.cli.main import main
from linrope.training.tasks.token_classification import TokenClassificationModule

OPTIONS = ["--task=token_classification", "--model.d_model=16", "--model.n_layers=1", "--model.n_heads=2"]
OPTIONS += ["--optimizer.lr=2e-2", "--optimizer.warmup_steps=2", "--data.batch_size=5", "--data.max_length=24"]
OPTIONS += ["--trainer.accelerator=cpu", "--trainer.val_check_interval=15", "--run.name=words", "--data.path=."]
OPTIONS += ["--trainer.max_epochs=9", "--model.n_labels=3"]
WORDS = {"77": "B-NUM", "88": "I-NUM", "one": "O", "two": "O", "six": "O"}


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = list(WORDS)
    sentences = [[names[(i * (j + 2) + j) % 5] for j in range(3 + i % 3 + 9 * (i == 4))] for i in range(23)]
    for name, part in (("train", sentences), ("valid", sentences[:7])):
        text = "\n\n".join("\n".join(f"{word} X {WORDS[word]}" for word in words) for words in part)
        Path(f"{name}.txt").write_text(text)
    Path("test.txt").write_text("\n\n".join("\n".join(words) for words in sentences[3:6]))


@pytest.mark.exhaustive
def test_a_run_learns_resumes_is_measured_and_predicts(monkeypatch, capsys):
    assert main(["plan", *OPTIONS]) == 0
    assert re.search(r"^a step +\d+ targets, ", capsys.readouterr().out, re.M)
    assert main(["fit", *OPTIONS]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "labels 3: B-NUM, I-NUM, O" in out
    assert "train 23 rows, 1 truncated to 24 tokens" in out
    losses = [float(part.split()[0]) for part in out.split("val_loss ")[1:]]
    assert losses[-1] < 0.5  # ln 3 is 1.1

    def interrupt(self, *unused) -> None:
        if self.trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGINT)

    parts = [*OPTIONS, "--run.name=parts"]
    with monkeypatch.context() as patch:
        patch.setattr(TokenClassificationModule, "on_train_batch_end", interrupt)
        assert main(["fit", *parts]) == 128 + signal.SIGINT
    part, whole = (f"runs/{name}/version_0/checkpoints/last.ckpt" for name in ("parts", "words"))
    assert main(["fit", *parts, f"--ckpt_path={part}"]) == 0
    states = [torch.load(path, weights_only=True)["state_dict"] for path in (part, whole)]
    torch.testing.assert_close(*states, rtol=0, atol=0)

    with pytest.warns(UserWarning, match="1 rows of the test split are truncated"):
        assert main(["predict", f"--ckpt_path={whole}", "--output=found.jsonl"]) == 0
    rows = [json.loads(line)["labels"] for line in Path("found.jsonl").read_text().splitlines()]
    assert [len(row) for row in rows] == [3, 13, 5]
    assert rows[1][-1] is None  # cut off
    assert {label for row in rows for label in row} <= {None, *WORDS.values()}
    assert main(["test", f"--ckpt_path={whole}"]) == 2
    assert "has no label for row '0'" in capsys.readouterr().err

    capsys.readouterr()
    with pytest.warns(UserWarning, match="truncated"):
        assert main(["validate", f"--ckpt_path={whole}"]) == 0
    measured = dict(zip(*[iter(capsys.readouterr().out.split())] * 2))
    Path("new").mkdir()
    Path("test.txt").rename("new/test.txt")
    with pytest.warns(UserWarning, match="truncated"):
        assert main(["predict", f"--ckpt_path={whole}", "--data.path=new", "--output=new.jsonl"]) == 0
    assert Path("new.jsonl").read_text() == Path("found.jsonl").read_text()  # the labels are the checkpoint's
    # without a test file it predicts what it was validated on
    with pytest.warns(UserWarning, match="truncated"):
        assert main(["predict", f"--ckpt_path={whole}", "--output=val.jsonl"]) == 0
    words = [part.split("\n") for part in Path("valid.txt").read_text().split("\n\n")]
    pairs = []
    for line, sentence in zip(Path("val.jsonl").read_text().splitlines(), words, strict=True):
        pairs += zip(json.loads(line)["labels"], (word.split()[-1] for word in sentence), strict=True)
    right = [found == label for found, label in pairs if found is not None]
    assert float(measured["val_accuracy"]) == pytest.approx(sum(right) / len(right), abs=1e-4)
    assert 0.3 < float(measured["val_f1"]) <= 1


def test_losses_and_f1_are_those_of_their_definitions():
    class Data:
        labels = ("B-A", "I-A", "O")

    class Module(TokenClassificationModule):
        data = Data()

        def __init__(self) -> None:
            pass

    rows = [(3.0, [0, 1, 2], [0, 1, 2]), (1.0, [0, 2, 0, 1], [0, 1, 0, 2])]  # entities: 1 of 1; none of 2 and 2
    found = Module().evaluation_metrics("val", {"rows": rows})
    assert found == pytest.approx({"val_loss": 4 / 7, "val_accuracy": 5 / 7, "val_f1": 2 * 1 / (3 + 3)})
    Data.labels = ("X", "Y", "Z")
    f1 = [2 * 3 / (3 + 3), 2 * 1 / (2 + 2), 2 * 1 / (2 + 2)]
    assert Module().evaluation_metrics("val", {"rows": rows})["val_f1"] == pytest.approx(sum(f1) / 3)
    of_nothing = Module().evaluation_metrics("val", {"rows": [(0.0, [], [])]})  # each word was cut off
    assert [math.isnan(value) for value in of_nothing.values()] == [True] * 3


@pytest.mark.parametrize(
    ("options", "valid", "message"),
    [
        (["--model.n_labels=4"], None, "model.n_labels=4, and the data has 3 labels"),
        ([], "one X O\n77 X Q\n", "valid.txt, line 2: the label 'Q' is unknown"),
        ([], "one X O\n77 X\n", "valid.txt, line 2: it has 2 columns"),
    ],
)
def test_what_does_not_fit_is_named(options, valid, message, capsys):
    if valid is not None:
        Path("valid.txt").write_text(valid)
    for command in ("fit", "plan"):
        assert main([command, *OPTIONS, *options]) == 2
        assert message in capsys.readouterr().err
