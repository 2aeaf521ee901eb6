"""`task:` names what is trained, also a class of the user's own; `linrope predict` writes predictions."""

import json
import sys
from pathlib import Path

import pytest
import torch

from linrope import LanguageModel
from linrope.cli import imports
from linrope.cli.main import main
from linrope.data.tokenizers.bytes import SEPARATOR
from tests.cli.conftest import read_csv

SOURCE = '''
from dataclasses import dataclass

import torch
from torch import nn

from linrope.models.base import Model, ModelConfig
from linrope.training import BatchLoss, RankSampler, ResumableDataModule, TrainingTask


@dataclass(frozen=True)
class LineConfig(ModelConfig):
    slope: float = 0.5
    """Its weight at the start."""
    vocab_size: int = 1
    """Unused."""

    def build(self):
        return Line(self)


class Line(Model):
    config_class = LineConfig

    def __init__(self, config):
        super().__init__(config)
        self.weight = nn.Parameter(torch.tensor([[config.slope]]))

    def forward(self, x):
        return x @ self.weight


class Points(ResumableDataModule):
    """Points of the line y = 3 x.

    Args:
        n: How many.
        batch_size: Points of a batch.
    """

    def __init__(self, n: int = 12, batch_size: int = 4):
        super().__init__()
        self.n, self.batch_size = n, batch_size

    def order(self):
        return {"n": self.n}

    def require_vocabulary(self, vocab_size):
        pass

    def describe(self):
        return [("points", f"{self.n}")]

    def steps_per_epoch_for(self, batches_per_step):
        return -(-self.n // (self.batch_size * batches_per_step))

    def _batch(self, number):
        x = torch.arange(self.batch_size)[:, None] + self.batch_size * (number % 3) + 1.0
        return {"inputs": x / self.n, "targets": 3 * x / self.n}

    def train_dataloader(self):
        batches = [self._batch(i) for i in range(1000)][self.run_position.batches_done :]
        return self.loader(batches, sampler=RankSampler(range(len(batches))))

    def val_dataloader(self):
        return self.loader([self._batch(0)])

    test_dataloader = predict_dataloader = val_dataloader


class Regression(TrainingTask):
    config_class, data_class = LineConfig, Points

    def __init__(self, model_config, optimizer_config=None, seed=0):
        super().__init__(model_config.build(), optimizer_config, seed)

    def batch_loss(self, batch):
        error = self.model(batch["inputs"]) - batch["targets"]
        return BatchLoss(error.square().sum(), torch.tensor(error.numel()), error.numel())

    def evaluate(self, batch, sums):
        error = (self.model(batch["inputs"]) - batch["targets"]).square()
        sums["error"] = sums.get("error", 0) + torch.stack([error.sum(), torch.tensor(float(error.numel()))])

    def evaluation_metrics(self, split, sums):
        total, n = sums["error"].tolist()
        return {f"{split}_loss": total / n, f"{split}_root": (total / n) ** 0.5}

    @property
    def monitor(self):
        return "val_root", "min"

    def predict_step(self, batch, batch_idx):
        x = batch["inputs"]
        return [{"x": x.item(), "y": y.item()} for x, y in zip(x, self.model(x))]


class Other(Regression):
    def training_metrics(self, sums):
        return {"train_square": sums["loss"] / sums["targets"]}

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {"x": batch["inputs"], "targets": batch["targets"]}

    def batch_loss(self, batch):
        return super().batch_loss({"inputs": batch["x"], "targets": batch["targets"]})

    def evaluate(self, batch, sums):
        super().evaluate({"inputs": batch["x"], "targets": batch["targets"]}, sums)
'''
RUN = ["--trainer.accelerator=cpu", "--trainer.val_check_interval=3", "--trainer.log_every_n_steps=1"]
RUN += ["--optimizer.lr=0.1", "--optimizer.warmup_steps=0", "--optimizer.weight_decay=0.0", "--run.name=line"]


def assert_mistakes(capsys, *cases: tuple[list[str], str]) -> None:
    """Each command line ends with exit code 2 and its message."""
    for args, message in cases:
        capsys.readouterr()
        assert main(args) == 2
        assert message in capsys.readouterr().err


@pytest.fixture
def own_task(tmp_path, monkeypatch) -> list[str]:
    """The options that train it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(imports, "imported", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("lines.py").write_text(SOURCE)
    yield ["--import", "lines.py", "--task=lines.Regression", *RUN]
    sys.modules.pop("lines", None)


def test_a_task_of_ones_own_is_trained_by_epochs_resumed_measured_and_predicts(own_task, capsys):
    assert main(["fit", *own_task, "--trainer.max_epochs=4"]) == 0  # of three steps
    assert "points" in capsys.readouterr().out
    folder = Path("runs/line/version_0")
    assert "max_steps: 12\n" not in (folder / "config.yaml").read_text()  # the user's own options are kept
    last = folder / "checkpoints" / "last.ckpt"
    assert main(["fit", *own_task, "--trainer.max_steps=40", f"--ckpt_path={last}"]) == 0
    again = [f"--ckpt_path={last}", "--import", "lines.py"]
    for command, split in (("validate", "val"), ("test", "test")):
        capsys.readouterr()
        assert main([command, *again]) == 0  # the run's config.yaml names the task
        out = capsys.readouterr().out
        loss, root = (float(out.split(f"{split}_{name} ")[1].split()[0]) for name in ("loss", "root"))
        assert loss == pytest.approx(root**2, abs=2e-4)
        assert loss < 0.5 * 2.5**2 * (1 + 4 + 9 + 16) / (4 * 144)  # less than with the slope at the start
    assert main(["predict", *again, "--output", "found.jsonl"]) == 0
    rows = [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]
    assert [row["x"] for row in rows] == pytest.approx([1 / 12, 2 / 12, 3 / 12, 4 / 12])
    slopes = [row["y"] / row["x"] for row in rows]
    assert slopes == pytest.approx([slopes[0]] * 4)
    assert abs(slopes[0] - 3) < 1.5  # 0.5 at the start
    assert_mistakes(
        capsys,
        (["predict", *again, "--output", "found.jsonl"], "--output='found.jsonl' exists"),
        (["validate", *again, "--task=lines.Other"], "is of the task lines.Regression, and this is lines.Other: give"),
        (["validate", *again, "--lengths", "1x"], "--lengths and --report read language models only"),
    )


def test_a_task_of_ones_own_may_have_other_metrics_and_batches(own_task):
    assert main(["fit", *own_task, "--task=lines.Other", "--trainer.max_steps=2"]) == 0
    (first, *_) = read_csv(Path("runs/line/version_0/metrics.csv"))
    assert float(first["train_square"]) > 0
    assert "tokens_per_second" not in first


def test_what_is_no_task_is_named(own_task, capsys):
    assert_mistakes(
        capsys,
        (["fit", "--task=language_modelling"], "Did you mean 'language_modeling'?"),
        (["fit", "--task=nowhere.Task"], "task='nowhere.Task' is no class"),
        (["fit", "--task=linrope.LanguageModel"], "must be a subclass of linrope.training.task.TrainingTask"),
        (["fit", *own_task, "--segment_length=3", "--trainer.max_steps=4"], "unknown option 'segment_length'"),
        (["fit", *own_task, "--sample.prompt=a", "--trainer.max_steps=4"], "unknown option 'sample.prompt'"),
    )


def test_language_models_predict_the_loss_of_each_row_in_the_order_of_the_text(trained_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["predict", *trained_run.resumed, "--output=found.jsonl"]) == 0
    rows = [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]
    corpus = (trained_run.folder.parents[2] / "corpus.txt").read_bytes()
    text = torch.tensor([*corpus[round(0.95 * len(corpus)) :], SEPARATOR])  # where the test split begins
    model = LanguageModel.from_pretrained(trained_run.checkpoint)
    with torch.no_grad():
        inputs, targets = (text[at : at + 32 * len(rows)].view(-1, 32) for at in (0, 1))
        losses = model(inputs, targets=targets, reduction="none").sum(1)
    assert len(rows) > 9
    assert all(row["targets"] == 32 for row in rows)
    assert [row["loss"] for row in rows] == pytest.approx(losses.tolist(), rel=1e-4)


def test_predictions_that_are_no_numbers_are_an_error_and_leave_no_file(trained_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = LanguageModel.from_pretrained(trained_run.checkpoint)
    torch.nn.init.constant_(model.norm.weight, torch.nan)
    model.save_pretrained("broken")
    data = [option for option in trained_run.resumed if option.startswith("--data.")]
    assert main(["predict", "--ckpt_path=broken", *data, "--output=found.jsonl"]) == 1
    assert "prediction 0 holds a number that is not finite ({'loss': nan" in capsys.readouterr().err
    assert not Path("found.jsonl").exists()
