"""Classification from the command line: trained by epochs, resumed, measured, predicted; its metrics and errors."""

import json
import os
import re
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from linrope import EncoderConfig, SequenceClassifier
from linrope.cli.main import main
from linrope.errors import InputError
from linrope.training.data_modules.classification import ClassificationDataModule
from linrope.training.data_modules.masked_text import MaskedTextDataModule
from linrope.training.tasks.classification import METRICS, ClassificationModule

OPTIONS = ["--task=classification", "--model.d_model=16", "--model.n_layers=1", "--model.n_heads=2"]
OPTIONS += ["--optimizer.lr=2e-2", "--optimizer.warmup_steps=2", "--data.batch_size=8", "--data.max_length=24"]
OPTIONS += ["--trainer.accelerator=cpu", "--trainer.val_check_interval=5", "--run.name=small"]


def write_pairs(folder: Path, n: int = 44) -> None:
    """Whether the second text is of digits: labels "no" and "yes"."""
    rows = [f"{i}\tword {i * 7 % 10}\t{'ab12'[i % 4] * (6 + i % 3)}\t{'no' if i % 4 < 2 else 'yes'}" for i in range(n)]
    for name, part in (("train", rows), ("dev", rows[:11]), ("test", rows[3:8])):
        labelled = name != "test"
        header = "id\tfirst\tsecond" + "\tanswer" * labelled
        lines = [row if labelled else row.rpartition("\t")[0] for row in part]
        (folder / f"{name}.tsv").write_text("\n".join([header, *lines, ""]))


@pytest.fixture
def options(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path)
    return [*OPTIONS, f"--data.path={tmp_path}", "--data.text=first", "--data.pair=second", "--data.label=answer"]


def test_a_run_by_epochs_learns_resumes_is_measured_and_predicts(options, capsys, monkeypatch):
    options = [*options, "--trainer.max_epochs=5"]
    assert main(["fit", *options]) == 0
    out = capsys.readouterr().out
    assert "labels 2: no, yes" in " ".join(out.split())
    assert "train 44 rows, 50.0% have the most frequent label" in " ".join(out.split())
    losses = [float(line.split("val_loss ")[1].split()[0]) for line in out.splitlines() if "val_loss" in line]
    assert losses[-1] < 0.6 < losses[0]
    assert "step 30/30" in out  # 5 · ⌈44 / 8⌉
    assert "a step 8 rows; the run of 30 reads each row 5.5 times" in " ".join(out.split())

    def interrupt(self, *unused) -> None:
        if self.trainer.global_step == 9:
            os.kill(os.getpid(), signal.SIGINT)

    parts = [*options, "--run.name=parts"]
    with monkeypatch.context() as patch:
        patch.setattr(ClassificationModule, "on_train_batch_end", interrupt)
        assert main(["fit", *parts]) == 128 + signal.SIGINT
    part, whole = (f"runs/{name}/version_0/checkpoints/last.ckpt" for name in ("parts", "small"))
    assert main(["fit", *parts, f"--ckpt_path={part}"]) == 0
    states = [torch.load(path, weights_only=True)["state_dict"] for path in (part, whole)]
    torch.testing.assert_close(*states, rtol=0, atol=0)

    capsys.readouterr()
    assert main(["validate", f"--ckpt_path={whole}"]) == 0
    assert f"val_loss {losses[-1]:.4f}" in capsys.readouterr().out
    assert main(["test", f"--ckpt_path={whole}"]) == 2
    assert "the test file in data.path=" in capsys.readouterr().err
    assert main(["predict", f"--ckpt_path={whole}", "--output=found.jsonl"]) == 0
    rows = [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["3", "4", "5", "6", "7"]
    for row in rows:
        assert row["label"] == max(row["scores"], key=row["scores"].get)
        assert sum(row["scores"].values()) == pytest.approx(1, abs=1e-5)
    Path("train.tsv").write_text("id\tfirst\tsecond\tanswer\n1\ta\tb\tno\n2\tc\td\tyes\n")
    assert main(["fit", *options, f"--ckpt_path={part}", "--trainer.max_epochs=90"]) == 2
    assert "data.train_hash" in capsys.readouterr().err


def test_a_checkpoint_is_not_measured_on_other_labels(options, capsys):
    """Sorted, those of the changed files have each other's numbers."""
    assert main(["fit", *options, "--trainer.max_steps=1"]) == 0
    path = "runs/small/version_0/checkpoints/last.ckpt"
    for name in ("train", "dev"):
        file = Path(f"{name}.tsv")
        file.write_text(file.read_text().replace("\tyes", "\taye"))
    capsys.readouterr()
    assert main(["validate", f"--ckpt_path={path}"]) == 2
    assert "dev.tsv, line 4: the label 'aye' is unknown: the labels are 'no', 'yes'" in capsys.readouterr().err
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    data = ClassificationDataModule(text="first", pair="second", label="answer", path=".")
    with pytest.raises(InputError, match="trained with the labels 'no', 'yes', and the data has 'aye', 'no': "):
        trainer.validate(ClassificationModule.load_from_checkpoint(path), data, ckpt_path=path, verbose=False)


def test_a_head_that_was_trained_for_other_labels_is_kept_with_a_warning(options):
    path = "runs/small/version_0/checkpoints/last.ckpt"
    assert main(["fit", *options, "--trainer.max_steps=1"]) == 0
    again = ["fit", *options, "--trainer.max_steps=1", f"--run.start_from={path}"]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="training begins with")
        assert main(again) == 0
    for name in ("train", "dev"):
        file = Path(f"{name}.tsv")
        file.write_text(file.read_text().replace("\tyes", "\taye"))
    with pytest.warns(UserWarning, match="a head for the labels 'no', 'yes', and the data has 'aye', 'no'"):
        assert main(again) == 0


@pytest.mark.exhaustive
def test_saved_averaged_and_exported_models_hold_the_names_of_their_labels(options, capsys):
    softmax = ["--model.attention=softmax", "--trainer.max_steps=1"]
    assert main(["fit", *options, *softmax]) == 0
    path = "runs/small/version_0/checkpoints/last.ckpt"
    assert main(["average", path, path, "--output=averaged"]) == 0
    assert main(["export", f"--ckpt_path={path}", "--output=exported"]) == 0
    SequenceClassifier.from_pretrained("averaged").save_pretrained("saved")
    config = json.loads(Path("exported/config.json").read_text())
    assert config["id2label"] == {"0": "no", "1": "yes"}
    assert config["label2id"] == {"no": 0, "yes": 1}
    Path("train.tsv").unlink()
    data = [*OPTIONS[:1], "--data.path=.", "--data.text=first", "--data.pair=second", "--data.label=answer"]
    data += ["--data.max_length=24", "--trainer.accelerator=cpu"]
    found = []
    for trained in (path, "averaged", "saved", "exported"):
        assert main(["predict", f"--ckpt_path={trained}", *data, "--output=found.jsonl", "--overwrite"]) == 0
        found.append([json.loads(line) for line in Path("found.jsonl").read_text().splitlines()])
        assert set(found[-1][0]["scores"]) == {"no", "yes"}
        for row, expected in zip(found[-1], found[0], strict=True):
            assert row["scores"] == pytest.approx(expected["scores"], abs=1e-6)
    file = Path("dev.tsv")
    file.write_text(file.read_text().replace("\tyes", "\taye"))
    capsys.readouterr()
    for trained in ("averaged", "exported"):
        assert main(["validate", f"--ckpt_path={trained}", *data]) == 2
        assert "the label 'aye' is unknown: the labels are 'no', 'yes'" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_new_rows_are_measured_and_predicted_without_the_training_file(options, capsys):
    assert main(["fit", *options, "--trainer.max_epochs=5"]) == 0
    checkpoint = "--ckpt_path=runs/small/version_0/checkpoints/best.ckpt"
    capsys.readouterr()
    assert main(["validate", checkpoint]) == 0
    measured = capsys.readouterr().out
    assert main(["predict", checkpoint, "--output=found.jsonl"]) == 0
    Path("new").mkdir()
    Path("dev.tsv").rename("new/dev.tsv")
    header, *rows = Path("test.tsv").read_text().splitlines()
    lines = [f"{header}\tanswer", f"{rows[0]}\tyes", *(f"{row}\t" for row in rows[1:])]  # labels that are not known yet
    Path("new/test.tsv").write_text("\n".join(lines))
    new = [checkpoint, "--data.path=new"]
    assert main(["validate", *new]) == 0
    assert capsys.readouterr().out == measured
    assert main(["predict", *new, "--output=new.jsonl"]) == 0
    assert Path("new.jsonl").read_text() == Path("found.jsonl").read_text()
    Path("mine.tsv").write_text("\n".join([header, *rows[1:]]))  # test.tsv lies beside it
    with pytest.warns(UserWarning, match=r"mine\.tsv' itself is read, and not test\.tsv beside it"):
        assert main(["predict", checkpoint, "--data.path=mine.tsv", "--output=mine.jsonl"]) == 0
    found = [json.loads(line)["label"] for line in Path("found.jsonl").read_text().splitlines()]
    assert [json.loads(line)["label"] for line in Path("mine.jsonl").read_text().splitlines()] == found[1:]
    capsys.readouterr()
    assert main(["test", *new]) == 2
    assert "has no label for row '4'" in capsys.readouterr().err
    Path("new/dev.tsv").unlink()
    Path("new/test.tsv").unlink()
    for command, name in ((["validate"], "dev.tsv"), (["predict", "--output=none.jsonl"], "test.tsv")):
        assert main([*command, *new]) == 2
        assert f"data.path='new' has no {name}: add the file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("--model.n_labels=3", "model.n_labels=3, and the data has 2 labels: set model.n_labels to 2"),
        ("--model.vocab_size=260", "model.vocab_size=260 is too small"),
        ("--data.pair=third", "train.tsv has no column 'third'"),
        ("--data.label=first", "dev.tsv, line 2: the label"),
        ("--data.path=commas", "has no column 'answer': its first line names 'first,second,answer'. It has no tab: "),
        ("--data.max_length=4", "data.max_length=4 must be 5 or more"),
        ("--data.dataset=mrpc", "data.dataset='mrpc' has columns of its own"),
        ("--data.path=nowhere", "data.path='nowhere' does not exist"),
        ("--model.n_token_types=1", "n_token_types is 1"),
        ("--data.regression=true", "train.tsv, line 2: the value 'no'"),
        (
            "--model.positions.name=learned --model.positions.length=9 --data.max_length=10",
            "data.max_length=10 is longer than the rows of model.positions.length=9",
        ),
    ],
)
def test_what_does_not_fit_is_named(options, changed, message, capsys):
    Path("commas").mkdir()
    Path("commas/train.tsv").write_text("first,second,answer\na,b,no\n")
    if changed == "--data.label=first":
        Path("dev.tsv").write_text("first\tsecond\nother\tx\n")
    assert main(["fit", *options, "--trainer.max_steps=2", *changed.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        (["--trainer.val_check_interval=500", "--trainer.max_epochs=2"], ["6", "12"]),  # the default: each epoch
        (["--trainer.val_check_interval=200", "--trainer.max_epochs=2"], ["12"]),  # at the end at least
        (["--trainer.val_check_interval=200", "--trainer.max_epochs=2", "--trainer.max_steps=3"], ["3"]),
        (["--trainer.val_check_interval=200", "--trainer.max_steps=3"], ["3"]),
    ],
)
def test_a_short_run_is_validated_too(options, given, steps, capsys):
    assert main(["fit", *options, *given]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^step (\d+)  val_loss", out, re.M) == steps
    assert Path("runs/small/version_0/checkpoints/best.ckpt").exists()


def test_validations_are_counted_in_epochs(options, capsys):
    options = [*options, "--trainer.max_epochs=4", "--trainer.accumulate_grad_batches=2"]
    by_epoch = [*options, "--trainer.check_val_every_n_epoch=2", "--trainer.val_check_interval=null"]
    assert main(["fit", *by_epoch]) == 0
    assert re.findall(r"^step (\d+)  val_loss", capsys.readouterr().out, re.M) == ["6", "12"]  # 3 steps an epoch
    assert main(["validate", "--ckpt_path=runs/small/version_0/checkpoints/best.ckpt"]) == 0
    assert main(["fit", *options, "--trainer.check_val_every_n_epoch=2"]) == 2
    assert "check_val_every_n_epoch=2 and trainer.val_check_interval=5 exclude each other" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_epochs_may_be_shortened(options, capsys):
    options = [option for option in options if "val_check_interval" not in option]
    by_epoch = ["--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=1", "--trainer.accumulate_grad_batches=2"]
    for limit, steps in (("3", 2), ("0.4", 2), ("99", 3), ("1.0", 3)):  # 3 steps of 2 batches are an epoch
        assert main(["fit", *options, *by_epoch, f"--trainer.limit_train_batches={limit}"]) == 0
        out = capsys.readouterr().out
        assert re.findall(r"^step (\d+)  val_loss", out, re.M) == [str(steps), str(2 * steps)]
    shorter = ["--trainer.max_epochs=4", "--trainer.limit_train_batches=3", "--ckpt_path"]
    assert main(["fit", *options, *by_epoch, *shorter, "runs/small/version_0/checkpoints/last.ckpt"]) == 0
    assert re.findall(r"^step (\d+)  val_loss", capsys.readouterr().out, re.M) == ["6", "8"]
    for wrong in ("0", "-1", "1.5"):
        assert main(["fit", *options, *by_epoch, f"--trainer.limit_train_batches={wrong}"]) == 2
        assert "must be the batches of an epoch" in capsys.readouterr().err
    for limit in ("2", "0.5"):
        assert main(["fit", *options, "--trainer.max_steps=2", f"--trainer.limit_train_batches={limit}"]) == 2
        assert "set trainer.max_epochs beside it, for epochs of this size, or remove it" in capsys.readouterr().err


def test_values_are_predicted_and_correlated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    header = "index\tsentence1\tsentence2"
    rows = [f"{i}\t{'x' * (i % 7)}\ty\t{i % 7 / 2}" for i in range(33)]
    Path("train.tsv").write_text("\n".join([f"{header}\tscore", *rows]))
    Path("dev.tsv").write_text("\n".join([f"{header}\tscore", *rows[:9]]))
    Path("test.tsv").write_text(f"{header}\n4\txx\ty\n")
    stsb = [*OPTIONS, "--data.path=.", "--data.dataset=stsb", "--model.n_labels=1", "--trainer.max_steps=10"]
    assert main(["fit", *stsb]) == 0
    assert "val_pearson" in (out := capsys.readouterr().out)
    assert "val_spearman" in out
    best = torch.load("runs/small/version_0/checkpoints/best.ckpt", weights_only=True)
    monitored = next(state for name, state in best["callbacks"].items() if name.startswith("BestCheckpoint"))
    assert monitored["monitor"] == "val_spearman"
    assert main(["predict", "--ckpt_path=runs/small/version_0/checkpoints/last.ckpt", "--output=values.jsonl"]) == 0
    (row,) = map(json.loads, Path("values.jsonl").read_text().splitlines())
    assert (row["id"], type(row["value"])) == ("4", float)
    assert main(["fit", *stsb, "--model.n_labels=2"]) == 2
    assert "model.n_labels=2, and the data has values (regression)" in capsys.readouterr().err


def test_groups_of_a_split_are_measured_by_themselves(tmp_path):
    header = "index\tsentence1\tsentence2\tgold_label"
    labels = ["entailment", "neutral", "contradiction"]
    for name, n in (("train", 9), ("dev_matched", 5), ("dev_mismatched", 7)):
        rows = [f"{i}\t{name} {i}\tb\t{labels[i * i % 3]}" for i in range(n)]
        (tmp_path / f"{name}.tsv").write_text("\n".join([header, *rows]))
    data = ClassificationDataModule("mnli", path=str(tmp_path), batch_size=5)
    module = ClassificationModule(EncoderConfig(d_model=16, n_layers=1, n_heads=2, n_labels=3))
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    (found,) = trainer.validate(module, data, verbose=False)
    right = {"matched": [], "mismatched": []}
    losses = []
    for batch in data.val_dataloader():
        with torch.no_grad():
            logits = module.eval().logits(batch)
        losses += torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="none").tolist()
        for group, is_right in zip(batch["group"], (logits.argmax(-1) == batch["targets"]).tolist()):
            right[group].append(is_right)
    assert [len(right["matched"]), len(right["mismatched"])] == [5, 7]
    for group, rows in right.items():
        assert found[f"val_accuracy/{group}"] == pytest.approx(np.mean(rows))
    assert found["val_accuracy"] == pytest.approx(np.mean(right["matched"] + right["mismatched"]))
    assert found["val_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    predicted = [row for rows in trainer.predict(module, data) for row in rows]  # without a test file
    assert [(row["id"], row["group"]) for row in predicted] == [
        (str(i), group) for group, n in (("matched", 5), ("mismatched", 7)) for i in range(n)
    ]
    with pytest.raises(InputError, match="ClassificationModule trains on a ClassificationDataModule"):
        trainer.validate(module, MaskedTextDataModule())


def ranks(values: np.ndarray) -> np.ndarray:
    """Mean ranks of equal values."""
    return np.array([(values < value).sum() + ((values == value).sum() - 1) / 2 for value in values])


def test_metrics_are_those_of_their_definitions():
    rng = np.random.default_rng(3)
    predicted, targets = rng.integers(0, 3, 29), rng.integers(0, 3, 29)
    three = torch.tensor(predicted).double(), torch.tensor(targets).double()

    def f1_of(label: int) -> float:
        hits = ((predicted == label) & (targets == label)).sum()
        return 2 * hits / ((predicted == label).sum() + (targets == label).sum())

    assert METRICS["accuracy"](*three, 3).item() == pytest.approx((predicted == targets).mean())
    assert METRICS["f1"](*three, 3).item() == pytest.approx(np.mean([f1_of(label) for label in range(3)]), rel=1e-6)
    predicted, targets = predicted % 2, targets % 2
    assert METRICS["f1"](torch.tensor(predicted), torch.tensor(targets), 2).item() == pytest.approx(f1_of(1), rel=1e-6)
    x, y = rng.normal(size=31), rng.integers(0, 6, 31).astype(float)
    values = torch.tensor(x), torch.tensor(y)
    assert METRICS["pearson"](*values, 1).item() == pytest.approx(np.corrcoef(x, y)[0, 1], rel=1e-6)
    assert METRICS["spearman"](*values, 1).item() == pytest.approx(np.corrcoef(ranks(x), ranks(y))[0, 1], rel=1e-4)
    for name in ("pearson", "spearman"):  # without a warning
        assert METRICS[name](values[0], torch.full((31,), 2.5).double(), 1).item() == 0
        assert METRICS[name](values[0][:1], values[1][:1], 1).item() == 0
