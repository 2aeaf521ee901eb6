"""Masked language modeling from the command line: trained, resumed, measured, predicted, started from."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from linrope import MaskedLM
from linrope.cli.main import main
from linrope.data.prepare.config import PrepareConfig
from linrope.data.prepare.preparation import prepare
from linrope.interop import load_roformer
from linrope.losses import IGNORE
from linrope.models.encoder import EncoderConfig
from linrope.training.data_modules.masked_text import MaskedTextDataModule
from linrope.training.tasks.masked_lm import MaskedLMModule
from tests.conftest import assert_input_errors, write_text_file
from tests.data.tokenizers.subword_files import byte_level, write_tokenizer
from tests.training.test_resume import losses

OPTIONS = ["--task=masked_lm", "--model.d_model=16", "--model.n_layers=1", "--model.n_heads=2", "--model.dropout=0.1"]
OPTIONS += ["--data.context=32", "--data.batch_size=4", "--optimizer.lr=3e-2", "--optimizer.warmup_steps=2"]
OPTIONS += ["--trainer.accelerator=cpu", "--trainer.val_check_interval=10", "--trainer.limit_val_batches=4"]


@pytest.fixture
def options(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    return [*OPTIONS, f"--data.path={write_text_file(tmp_path)}", "--run.name=mlm"]


def interrupt(patch: pytest.MonkeyPatch, step: int) -> None:
    """Sends this process Ctrl-C at the end of a step."""

    def at_step(self, *unused) -> None:
        if self.trainer.global_step == step:
            os.kill(os.getpid(), signal.SIGINT)

    patch.setattr(MaskedLMModule, "on_train_batch_end", at_step)


@pytest.mark.exhaustive
def test_a_resumed_run_ends_with_the_weights_of_a_whole_one(options, capsys, monkeypatch):
    assert main(["fit", *options, "--trainer.max_steps=20"]) == 0
    out = capsys.readouterr().out
    losses = [float(line.split("val_loss ")[1].split()[0]) for line in out.splitlines() if "val_loss" in line]
    assert losses[1] < losses[0] < 5.6  # ln 261
    options = [*options, "--trainer.max_steps=20", "--run.name=parts"]

    with monkeypatch.context() as patch:
        interrupt(patch, 9)
        assert main(["fit", *options]) == 128 + signal.SIGINT
    part = "runs/parts/version_0/checkpoints/last.ckpt"
    assert main(["fit", *options, f"--ckpt_path={part}"]) == 0
    whole = "runs/mlm/version_0/checkpoints/last.ckpt"
    torch.testing.assert_close(
        MaskedLM.from_pretrained(part).state_dict(), MaskedLM.from_pretrained(whole).state_dict(), rtol=0, atol=0
    )


def test_rows_longer_than_the_table_of_positions_are_refused_before_training(options, capsys):
    options += ["--model.attention=softmax", "--model.positions.name=learned", "--model.positions.length=31"]
    assert main(["fit", *options, "--trainer.max_steps=1"]) == 2
    assert "data.context=32 is longer than the rows of model.positions.length=31" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_checkpoint_is_measured_predicts_and_starts_another_run(options, capsys):
    assert main(["fit", *options, "--trainer.max_steps=10"]) == 0
    again = ["--ckpt_path=runs/mlm/version_0/checkpoints/last.ckpt"]
    for command in ("validate", "test"):
        assert main([command, *again]) == 0
    assert "test_accuracy" in capsys.readouterr().out
    assert main(["predict", *again, "--output=rows.jsonl"]) == 0
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    assert rows
    assert all(0 <= row["right"] <= row["masked"] <= 32 and row["masked"] > 0 < row["loss"] for row in rows)
    assert main(["export", *again, "--output=linear"]) == 0
    assert "transformers has no model like this MaskedLM" in capsys.readouterr().err
    softmax = ["--model.attention=softmax", f"--run.start_from={again[0].partition('=')[2]}", "--run.name=softmax"]
    assert main(["fit", *options, *softmax, "--trainer.max_steps=1"]) == 0
    assert "model.attention: 'linear' in the checkpoint, 'softmax' here" in " ".join(capsys.readouterr().out.split())
    trained = "runs/softmax/version_0/checkpoints/last.ckpt"
    assert main(["export", f"--ckpt_path={trained}", "--output=exported"]) == 0
    tokens = torch.arange(40).reshape(2, 20)
    assert torch.equal(load_roformer("exported")(tokens), MaskedLM.from_pretrained(trained)(tokens))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("--model.vocab_size=260", "model.vocab_size=260 is too small"),
        ("--data.mask_share=0", "data.mask_share=0"),
        ("--data.contiguous=true", "data.contiguous=True is for language models"),
        ("--model.head=classifier", "head"),
        ("--run.compile=true", "run.compile=True compiles language models only"),
        ("--run.start_from=nowhere", "run.start_from='nowhere'"),
        ("--segment_length=8", "unknown option 'segment_length'"),
    ],
)
def test_what_does_not_fit_is_named(options, changed, message, capsys):
    assert main(["fit", *options, "--trainer.max_steps=2", changed]) == 2
    assert message in capsys.readouterr().err


def test_masks_of_evaluation_do_not_depend_on_the_seed(tmp_path):
    rows = []
    for seed in (0, 1):
        data = MaskedTextDataModule(path=str(write_text_file(tmp_path)), context=32, batch_size=2, seed=seed)
        data.setup("fit")
        rows.append((next(iter(data.val_dataloader())), next(iter(data.train_dataloader()))))
    assert torch.equal(rows[0][0]["inputs"], rows[1][0]["inputs"])
    assert not torch.equal(rows[0][1]["inputs"], rows[1][1]["inputs"])
    assert_input_errors((lambda: MaskedTextDataModule(document_mask=True), "data.document_mask=True"))


def test_a_run_resumes_with_the_masks_of_its_checkpoint_only(options, capsys):
    assert main(["fit", *options, "--trainer.max_steps=2"]) == 0
    again = ["--trainer.max_steps=4", "--ckpt_path=runs/mlm/version_0/checkpoints/last.ckpt"]
    for name, then, now in (("mask_share", "0.15", "0.3"), ("whole_words", "True", "False")):
        assert main(["fit", *options, *again, f"--data.{name}={now}"]) == 2
        assert f"{name}: {then} in the checkpoint, {now} here" in capsys.readouterr().err


def test_training_counts_loss_and_right_predictions_of_masked_tokens(tmp_path):
    torch.manual_seed(3)
    task = MaskedLMModule(EncoderConfig(d_model=24, n_layers=1, n_heads=3, dropout=0.0))
    data = MaskedTextDataModule(path=str(write_text_file(tmp_path)), context=37, batch_size=3)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    logits, nats, right, asked = task(batch["inputs"]), 0.0, 0, 0
    best = logits.argmax(-1)
    batch["targets"][:, :20] = torch.where(batch["targets"] == IGNORE, IGNORE, best)[:, :20]  # some are right
    for row, position in (batch["targets"] != IGNORE).nonzero().tolist():
        target = batch["targets"][row, position].item()
        nats -= logits[row, position].log_softmax(-1)[target].item()
        right, asked = right + (best[row, position].item() == target), asked + 1
    assert 0 < right < asked
    loss = task.batch_loss(batch)
    sums = {"loss": loss.total.item(), "targets": loss.n_targets.item(), "right": loss.sums["right"].item()}
    metrics = task.training_metrics(sums)
    assert metrics == {"train_loss": pytest.approx(nats / asked, rel=1e-5), "train_accuracy": right / asked}
    torch.testing.assert_close(loss.total, task.model(batch["inputs"], targets=batch["targets"]), rtol=0, atol=0)


@pytest.mark.exhaustive
def test_a_curriculum_has_loss_and_accuracy_of_each_stage_and_resumes_in_its_second(options, capsys, monkeypatch):
    stages = "[{tokens: 100, seq_len: 16, batch_size: 2}, {tokens: 1, seq_len: 48, batch_size: 3}]"  # four steps, then
    options = [*options, f"--data.curriculum={stages}", "--trainer.max_steps=8", "--trainer.log_every_n_steps=1"]
    options += ["--trainer.val_check_interval=4"]  # the last step of each
    assert main(["fit", *options, "--run.name=whole"]) == 0
    said = capsys.readouterr().out
    for step, stage in ((4, 0), (8, 1)):
        assert re.search(rf"^step {step}  val_loss \S+  val_accuracy \S+  stage {stage}$", said, re.M)
    with monkeypatch.context() as patch:
        interrupt(patch, 6)
        assert main(["fit", *options, "--run.name=parts"]) == 128 + signal.SIGINT
    assert main(["fit", *options, "--run.name=parts", "--ckpt_path=runs/parts/version_0/checkpoints/last.ckpt"]) == 0

    names = ("train_loss", "train_accuracy", "val_loss", "val_accuracy", "stage")
    whole, parts = (
        {name: losses(Path("runs", run, "version_0"), name) for name in names} for run in ("whole", "parts")
    )
    assert whole == parts
    assert {step: float(stage) for step, stage in whole["stage"].items()} == {n: float(n > 4) for n in range(1, 9)}
    assert list(whole["train_loss"]) == list(whole["train_accuracy"]) == list(range(1, 9))
    assert list(whole["val_loss"]) == list(whole["val_accuracy"]) == [4, 8]


def test_a_vocabulary_with_special_tokens_of_its_own_is_masked_with_them(tmp_path):
    special = ("<|endoftext|>", "[PAD]", "[MASK]", "[SEP]", "[CLS]")
    tokenizer = write_tokenizer(tmp_path, byte_level(special, vocab_size=290))
    text = write_text_file(tmp_path)
    prepare(PrepareConfig(path=str(text), output=str(tmp_path / "prepared"), tokenizer=str(tokenizer), workers=1))
    data = MaskedTextDataModule(path=str(tmp_path / "prepared"), context=64, batch_size=8)
    data.setup("fit")
    mask, vocab_size = data.tokenizer.token_id("[MASK]"), data.tokenizer.vocab_size
    assert mask == special.index("[MASK]")
    batch = next(iter(data.train_dataloader()))
    asked = batch["targets"] != IGNORE
    assert batch["inputs"].max() < vocab_size
    assert not (batch["targets"] == mask).any()
    assert (batch["inputs"] == mask).sum() == (batch["inputs"][asked] == mask).sum() > 0.6 * asked.sum()
    data.require_vocabulary(vocab_size)  # nothing is added to it
