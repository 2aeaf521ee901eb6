"""Multiple choice from the command line: trained, resumed, measured, predicted."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from linrope.cli.main import main
from linrope.models.base import load_model
from linrope.models.encoder import EncoderConfig
from linrope.training.data_modules.multiple_choice import MultipleChoiceDataModule
from linrope.training.tasks.multiple_choice import MultipleChoiceModule

OPTIONS = ["--task=multiple_choice", "--model.d_model=16", "--model.n_layers=1", "--model.n_heads=2"]
OPTIONS += ["--optimizer.lr=2e-2", "--optimizer.warmup_steps=2", "--data.batch_size=5", "--data.max_length=24"]
OPTIONS += ["--trainer.accelerator=cpu", "--trainer.val_check_interval=10", "--run.name=cases", "--data.path=."]
OPTIONS += ["--trainer.max_epochs=6"]


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch) -> None:
    """The case of letters is the right one, in 23 rows; one of them is longer than 24 tokens."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for i in range(23):
        digits, letters = str(i % 4) * (3 + 20 * (i == 5)), "abcd"[i % 4] * 4
        first, second = (letters, digits) if i % 2 else (digits, letters)
        rows.append({"A": "case", "B": first, "C": second, "label": "BC"[(i + 1) % 2]})
    for name, part in (("train", rows), ("valid", rows[:7]), ("test", rows[3:8])):
        Path(f"{name}.json").write_text("\n".join(map(json.dumps, part)))


@pytest.mark.exhaustive
def test_a_run_learns_resumes_is_measured_and_predicts(monkeypatch, capsys):
    assert main(["fit", *OPTIONS]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "train 23 rows, 52.2% have the most frequent label, 1 truncated to 24 tokens" in out
    losses = [float(part.split()[0]) for part in out.split("val_loss ")[1:]]
    assert losses[-1] < 0.4  # ln 2 is 0.69

    def interrupt(self, *unused) -> None:
        if self.trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGINT)

    parts = [*OPTIONS, "--run.name=parts"]
    with monkeypatch.context() as patch:
        patch.setattr(MultipleChoiceModule, "on_train_batch_end", interrupt)
        assert main(["fit", *parts]) == 128 + signal.SIGINT
    part, whole = (f"runs/{name}/version_0/checkpoints/last.ckpt" for name in ("parts", "cases"))
    assert main(["fit", *parts, f"--ckpt_path={part}"]) == 0
    states = [torch.load(path, weights_only=True)["state_dict"] for path in (part, whole)]
    torch.testing.assert_close(*states, rtol=0, atol=0)

    capsys.readouterr()
    with pytest.warns(UserWarning, match="1 rows of the test split are truncated to data.max_length=24"):
        assert main(["test", f"--ckpt_path={whole}"]) == 0
    out = capsys.readouterr().out
    data = MultipleChoiceDataModule(path=".", max_length=24)
    with pytest.warns(UserWarning, match="truncated"):
        data.setup("test")
    (batch,) = data.test_dataloader()
    with torch.no_grad():
        logits = load_model(whole, EncoderConfig)(batch["inputs"], batch["key_mask"], batch["token_types"])
    # one batch here and there, so the padding is the same
    loss = F.cross_entropy(logits, batch["targets"])
    right = (logits.argmax(-1) == batch["targets"]).float().mean()
    assert f"test_loss {loss:.4f}  test_accuracy {right:.4f}" in out
    with pytest.warns(UserWarning, match="truncated"):
        assert main(["predict", f"--ckpt_path={whole}", "--output=found.jsonl"]) == 0
    rows = [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["0", "1", "2", "3", "4"]
    logits = logits[torch.tensor([batch["id"].index(row["id"]) for row in rows])]  # in the order of the file
    assert [row["label"] for row in rows] == ["BC"[best] for best in logits.argmax(-1)]
    assert [row["scores"]["C"] for row in rows] == pytest.approx(logits.softmax(-1)[:, 1].tolist(), rel=1e-4)


def test_what_does_not_fit_is_named(capsys):
    wrong = {"--data.path=x": "data.path='x' does not exist", "--model.vocab_size=258": "model.vocab_size=258 is too"}
    for option, message in wrong.items():
        assert main(["fit", *OPTIONS, option]) == 2
        assert message in capsys.readouterr().err
    Path("train.json").rename("other.json")
    assert main(["fit", *OPTIONS]) == 2
    assert "has no train.json or train.jsonl" in capsys.readouterr().err
