"""Averaged weights: what they are, where they are seen, and that a resumed run goes on with them bit for bit."""

import re
import signal

import pytest
import torch

from linrope import LanguageModel
from linrope.cli.main import main
from linrope.training.tasks.language_modeling import LanguageModelingModule
from tests.training.test_resume import TRAINED, equal, interrupt, load, losses, stop_early, version

AVERAGED = ("current_model_state", "averaging_state")


@pytest.fixture
def averaged(tiny) -> list[str]:
    options = ["--run.ema_decay=0.3", "--optimizer.lr=0.1", "--optimizer.warmup_steps=0"]
    return [*tiny, *options, "--trainer.max_steps=5", "--trainer.val_check_interval=5"]


def test_checkpoints_and_validation_have_the_moving_average(averaged, run_folder, tmp_path, capsys, monkeypatch):
    seen = []

    def note(self, outputs, batch, batch_idx):
        seen.append({name: weight.detach().clone().double() for name, weight in self.model.named_parameters()})

    monkeypatch.setattr(LanguageModelingModule, "on_train_batch_end", note)
    assert main(["fit", *averaged]) == 0
    assert len(seen) == 5
    average = seen[0]
    for n, weights in enumerate(seen[1:], start=1):
        kept = min(0.3, (1 + n) / (10 + n))  # 2 / 11, 3 / 12 and 0.3 twice
        average = {name: kept * before + (1 - kept) * weights[name] for name, before in average.items()}
    checkpoint = run_folder / "checkpoints" / "last.ckpt"
    model = LanguageModel.from_pretrained(checkpoint)
    for name, weight in model.named_parameters():
        # float32: each of five steps rounds a weight of at most 1 or so by 6e-8
        torch.testing.assert_close(weight.double(), average[name], rtol=1e-5, atol=1e-6)
    assert main(["export", f"--ckpt_path={checkpoint}", f"--output={tmp_path / 'exported'}"]) == 0
    exported = LanguageModel.from_pretrained(tmp_path / "exported")
    assert equal(exported.state_dict(), model.state_dict())
    last = load(run_folder)["current_model_state"]
    assert torch.equal(last["model.embedding.weight"].double(), seen[-1]["embedding.weight"])
    assert not torch.allclose(last["model.embedding.weight"], model.embedding.weight, atol=1e-2)

    capsys.readouterr()
    config = f"--config={run_folder / 'config.yaml'}"
    for path in (checkpoint, tmp_path / "exported"):
        assert main(["validate", config, f"--ckpt_path={path}"]) == 0
        loss = float(re.match(r"val_loss (\S+)", capsys.readouterr().out)[1])
        assert loss == pytest.approx(float(losses(run_folder, "val_loss")[5]), abs=1e-4)  # printed with four digits


@pytest.mark.exhaustive
def test_a_resumed_run_is_the_one_that_was_not_stopped(averaged, run_folder, monkeypatch):
    averaged = [*averaged, "--model.dropout=0.2", "--trainer.accumulate_grad_batches=2"]
    assert main(["fit", *averaged]) == 0
    with monkeypatch.context() as patch:
        interrupt(patch, lambda trainer: trainer.fit_loop.total_batch_idx == 5, signal.SIGINT)
        assert main(["fit", *averaged]) == 130
    assert load(version(run_folder, 1))["global_step"] == 3
    assert main(["fit", *averaged, f"--ckpt_path={version(run_folder, 1)}/checkpoints/last.ckpt"]) == 0
    whole, resumed = load(run_folder), load(version(run_folder, 1))
    assert all(equal(whole[key], resumed[key]) for key in (*TRAINED, *AVERAGED))


def test_a_run_that_a_time_limit_ends_keeps_the_last_weights_beside_the_average(averaged, run_folder, monkeypatch):
    """`last.ckpt` is then written when training has ended."""
    stop_early(monkeypatch, 2)
    assert main(["fit", *averaged]) == 0
    checkpoint = load(run_folder)
    assert checkpoint["global_step"] == 3
    assert not torch.equal(
        checkpoint["state_dict"]["model.embedding.weight"], checkpoint["current_model_state"]["model.embedding.weight"]
    )


def test_averaging_is_not_taken_up_or_dropped_on_the_way(averaged, tiny, run_folder, error_of):
    assert main(["fit", *averaged]) == 0
    assert main(["fit", *tiny]) == 0
    with_average, without = (f"--ckpt_path={version(run_folder, n)}/checkpoints/last.ckpt" for n in (0, 1))
    for options, said in (
        (
            [*tiny, "--trainer.max_steps=9", with_average],
            "averages the weights of its run: set run.ema_decay to resume",
        ),
        ([*averaged, "--trainer.max_steps=9", without], "run.ema_decay=0.3, but checkpoint"),
        ([*tiny, "--run.ema_decay=1.5"], "run.ema_decay=1.5 must lie between 0 and 1"),
    ):
        assert said in error_of("fit", *options)
