"""Question answering from the command line: trained, resumed, measured, predicted; the best span."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from linrope.cli.main import main
from linrope.losses import IGNORE
from linrope.models.base import load_model
from linrope.models.encoder import EncoderConfig
from linrope.training.data_modules.question_answering import QuestionAnsweringDataModule
from linrope.training.tasks.question_answering import QuestionAnsweringModule, best_span

OPTIONS = ["--task=question_answering", "--model.d_model=16", "--model.n_layers=1", "--model.n_heads=2"]
OPTIONS += ["--optimizer.lr=2e-2", "--optimizer.warmup_steps=2", "--data.batch_size=5", "--data.max_length=40"]
OPTIONS += ["--trainer.accelerator=cpu", "--trainer.val_check_interval=15", "--run.name=answers", "--data.path=."]
OPTIONS += ["--trainer.max_epochs=9", "--data.max_answer_length=6"]


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch) -> None:
    """The answer is the number in the context; the context of one row is too long to hold it."""
    monkeypatch.chdir(tmp_path)
    paragraphs = []
    for i in range(23):
        answer = str(11 * (1 + i % 4))
        context = f"{'word ' * (i % 3 + 9 * (i == 4))}{answer} end"
        answers = [{"text": answer, "answer_start": context.index(answer)}]
        paragraphs.append({"context": context, "qas": [{"id": f"q{i}", "question": "how many", "answers": answers}]})
    for name, part in (("train-v1.1", paragraphs), ("dev-v1.1", paragraphs[:7])):
        Path(f"{name}.json").write_text(json.dumps({"data": [{"paragraphs": part[:3]}, {"paragraphs": part[3:]}]}))


@pytest.mark.exhaustive
def test_a_run_learns_resumes_is_measured_and_predicts(monkeypatch, capsys):
    assert main(["fit", *OPTIONS]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "train 23 rows, 1 truncated to 40 tokens, 1 of these without their answer" in out
    losses = [float(part.split()[0]) for part in out.split("val_loss ")[1:]]
    assert losses[-1] < losses[0] < 3.7  # ln 40

    def interrupt(self, *unused) -> None:
        if self.trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGINT)

    parts = [*OPTIONS, "--run.name=parts"]
    with monkeypatch.context() as patch:
        patch.setattr(QuestionAnsweringModule, "on_train_batch_end", interrupt)
        assert main(["fit", *parts]) == 128 + signal.SIGINT
    part, whole = (f"runs/{name}/version_0/checkpoints/last.ckpt" for name in ("parts", "answers"))
    assert main(["fit", *parts, f"--ckpt_path={part}"]) == 0
    states = [torch.load(path, weights_only=True)["state_dict"] for path in (part, whole)]
    torch.testing.assert_close(*states, rtol=0, atol=0)

    capsys.readouterr()
    with pytest.warns(UserWarning, match="1 rows of the val split are truncated"):
        assert main(["validate", f"--ckpt_path={whole}"]) == 0
    measured = dict(zip(*[iter(capsys.readouterr().out.split())] * 2))
    with pytest.warns(UserWarning, match="truncated"):
        assert main(["predict", f"--ckpt_path={whole}", "--output=found.jsonl"]) == 0  # of dev, as there is no test
    rows = {row["id"]: row["answer"] for row in map(json.loads, Path("found.jsonl").read_text().splitlines())}
    right = {f"q{i}": str(11 * (1 + i % 4)) for i in range(7)}
    assert rows.keys() == right.keys()
    exact = sum(rows[id_] == right[id_] for id_ in rows) / 7
    assert float(measured["val_exact_match"]) == pytest.approx(exact, abs=1e-4)
    assert float(measured["val_f1"]) >= float(measured["val_exact_match"])

    data = QuestionAnsweringDataModule(path=".", max_length=40, batch_size=7)
    with pytest.warns(UserWarning, match="truncated"):
        data.setup("validate")
    (batch,) = data.val_dataloader()
    with torch.no_grad():
        logits = load_model(whole, EncoderConfig)(batch["inputs"], batch["key_mask"], batch["token_types"])
    nats, n_tokens = [], []
    for row, (first, last) in zip(logits, batch["targets"].tolist()):
        row = row[batch["key_mask"][len(n_tokens)]]
        n_tokens.append(len(row))
        if first >= 0:
            nats.append(-(row[:, 0].log_softmax(0)[first] + row[:, 1].log_softmax(0)[last]).item() / 2)
    assert len(nats) == 6
    assert len(set(n_tokens)) > 1
    assert float(measured["val_loss"]) == pytest.approx(sum(nats) / 6, abs=1e-4)


def test_the_best_span_is_that_of_all_pairs():
    torch.manual_seed(0)
    for longest in (1, 3, 12, 13, 14, 20, 10**9):
        logits, allowed = torch.randn(13, 2), torch.rand(13) < 0.6
        pairs = [(i, j) for i in range(13) for j in range(i, min(13, i + longest)) if allowed[i] and allowed[j]]
        best = max(pairs, key=lambda pair: logits[pair[0], 0] + logits[pair[1], 1])
        assert best_span(logits, allowed, longest) == best
    assert best_span(torch.randn(5, 2), torch.zeros(5, dtype=torch.bool), 3) == (0, 0)
    assert best_span(torch.randn(1, 2), torch.ones(1, dtype=torch.bool), 3) == (0, 0)
    n = 2**17  # the pairs would take 64 GiB
    logits = torch.zeros(n, 2)
    logits[n - 9, 0] = logits[n - 2, 1] = logits[5, 1] = 1
    assert best_span(logits, torch.ones(n, dtype=torch.bool), 64) == (n - 9, n - 2)


def test_questions_of_one_id_are_measured_one_by_one(monkeypatch):
    module = QuestionAnsweringModule(EncoderConfig(d_model=16, n_layers=1, n_heads=2))
    monkeypatch.setattr(module, "logits", lambda batch: torch.zeros(3, 4, 2))
    monkeypatch.setattr(module, "answers", lambda batch, logits: ["eleven men", "two", "three"])
    right = [["ten men"], ["one", "Two"], ["four"]]
    module.evaluate(
        {"targets": torch.ones(3, 2, dtype=torch.int64), "id": ["a", "a", "a"], "answers": right}, sums := {}
    )
    found = module.evaluation_metrics("val", sums)
    assert found == pytest.approx({"val_loss": np.log(4), "val_exact_match": 1 / 3, "val_f1": 1.5 / 3}, abs=1e-6)
    monkeypatch.setattr(module, "answers", lambda batch, logits: ["the", "a man", ""])
    module.evaluate(
        {"targets": torch.ones(3, 2).long(), "id": [*"abc"], "answers": [["The"], ["an"], ["."]]}, sums := {}
    )
    found = module.evaluation_metrics("val", sums)
    assert (found["val_exact_match"], found["val_f1"]) == pytest.approx((2 / 3, 2 / 3))  # of answers without words
    cut_off = torch.full((3, 2), IGNORE)
    module.evaluate({"targets": cut_off, "id": ["a", "a", "a"], "answers": right}, sums := {})
    assert np.isnan(module.evaluation_metrics("val", sums)["val_loss"])  # of no answer, and not perfect


def test_what_does_not_fit_is_named(capsys):
    assert main(["fit", *OPTIONS, "--data.max_answer_length=0"]) == 2
    assert "data.max_answer_length=0 must be 1 or more" in capsys.readouterr().err
