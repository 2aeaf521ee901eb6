"""Contiguous batches: the state is carried from batch to batch, reset where a row begins anew, and resumed."""

import shutil

import pytest
import torch
from lightning.pytorch import Trainer

from linrope.cli.main import main
from linrope.errors import InputError
from linrope.losses import summed_cross_entropy
from linrope.training import LanguageModelingModule, LastCheckpoint, TextDataModule, Throughput
from linrope.training.optimizer import OptimizerConfig
from tests.conftest import write_documents
from tests.test_segmented import model_of
from tests.training.test_resume import TRAINED, equal, load, version

CONTIGUOUS = ["--data.contiguous=true", "--model.short_conv=3", "--model.forget_gate=true"]


@pytest.mark.parametrize("document_mask", [False, True])
def test_the_loss_of_a_batch_is_that_of_its_row_read_from_the_start(tmp_path, document_mask):
    # of seven tokens with the separator: every seventh row of eight begins with one
    texts = str(write_documents(tmp_path / "texts", [6] * 100))
    data = TextDataModule(texts, 8, 2, [1.0, 0.0, 0.0], contiguous=True, document_mask=document_mask)
    found = []

    class Remembering(LanguageModelingModule):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            found.append((batch, loss.item() * batch["targets"].numel()))
            return loss

    module = Remembering(model_of().config, OptimizerConfig(lr=0.0))
    trainer = Trainer(max_steps=30, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(module, data)
    text = torch.cat([batch["inputs"] for batch, _ in found], dim=1)
    targets = torch.cat([batch["targets"] for batch, _ in found], dim=1)
    ids = None
    if document_mask:  # numbers that go on from batch to batch
        fresh = torch.cat([torch.nn.functional.pad(batch["fresh"][:, None].long(), (0, 7)) for batch, _ in found], 1)
        ids = [batch["segment_ids"] for batch, _ in found]
        within = torch.cat([each.diff(dim=1, prepend=each[:, :1]) for each in ids], dim=1)
        ids = (fresh + within).cumsum(1)
        assert fresh[:, 1:].any()
    for number, (_, nats) in enumerate(found):
        cut = slice(0, 8 * (number + 1))
        with torch.no_grad():
            logits = module.model(text[:, cut], segment_ids=None if ids is None else ids[:, cut])
        expected = summed_cross_entropy(logits[:, -8:], targets[:, cut][:, -8:])
        assert nats == pytest.approx(expected.item(), rel=1e-5)  # float32, in other pieces


@pytest.mark.exhaustive
def test_a_resumed_run_goes_on_from_the_carried_state(tiny, run_folder, tmp_path, monkeypatch):
    """From the checkpoint of any step, in the middle of a pass, and from one of the middle of a step."""
    save = LastCheckpoint.save

    def save_a_copy(self, trainer):
        save(self, trainer)
        shutil.copy(self.path, tmp_path / f"{trainer.global_step}.ckpt")

    def save_within_a_step(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 10:
            trainer.save_checkpoint(tmp_path / "within.ckpt")

    exact = [*tiny, *CONTIGUOUS, "--model.dropout=0.2", "--trainer.accumulate_grad_batches=2"]
    exact += ["--run.checkpoint_every_n_steps=3", "--trainer.max_steps=6"]
    with monkeypatch.context() as patched:
        patched.setattr(LastCheckpoint, "save", save_a_copy)
        patched.setattr(Throughput, "on_train_batch_end", save_within_a_step)
        assert main(["fit", *exact]) == 0
    whole = load(run_folder)
    for number, name in enumerate(("3", "within"), start=1):
        assert main(["fit", *exact, f"--ckpt_path={tmp_path / name}.ckpt"]) == 0
        assert all(equal(whole[key], load(version(run_folder, number))[key]) for key in TRAINED)
        carried = [load(folder)["linrope"]["carried"] for folder in (run_folder, version(run_folder, number))]
        assert equal(*carried)
    # without its state it would have continued differently
    checkpoint = torch.load(tmp_path / "3.ckpt", weights_only=True)
    checkpoint["linrope"].pop("carried")
    torch.save(checkpoint, tmp_path / "3.ckpt")
    assert main(["fit", *exact, f"--ckpt_path={tmp_path / '3.ckpt'}"]) == 0
    assert not equal(whole["state_dict"], load(version(run_folder, 3))["state_dict"])


def test_a_second_fit_of_a_module_begins_anew(text_file):
    module = LanguageModelingModule(model_of().config, OptimizerConfig(lr=0.0))
    for batch_size in (2, 3):
        data = TextDataModule(str(text_file), 16, batch_size, contiguous=True)
        Trainer(max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False).fit(module, data)
    assert module._carried[0].past.kv.shape[0] == 3


def test_contiguous_batches_need_a_state_that_does_not_grow_and_rows_of_one_length(tiny, error_of):
    err = error_of("fit", *tiny, "--data.contiguous=true", "--model.attention=softmax")
    assert "data.contiguous=True needs a state of fixed size, but layer 0 is softmax" in err
    err = error_of("fit", *tiny, "--data.contiguous=true", "--model.rope.trainable=true")
    assert "data.contiguous=True detaches the state" in err
    with pytest.raises(InputError, match=r"data\.contiguous=True needs rows of one length, data\.curriculum changes"):
        TextDataModule(contiguous=True, curriculum=[{"tokens": 10, "seq_len": 5}])
