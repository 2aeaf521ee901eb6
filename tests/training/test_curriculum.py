"""Runs with a length curriculum, from the command line on."""

import re
import signal
from pathlib import Path

import pytest
import torch

from linrope.cli.main import main
from linrope.training import LanguageModelingModule, MemoryPreflight
from linrope.training.callbacks import memory_preflight
from tests.training.test_resume import equal, interrupt, load, losses, version

# 4 steps of 4 × 16 (that is context · batch_size, 64 tokens), 3 steps of 1 × 128, 2 steps of 4 × 16: 768 tokens.
YAML = """
model: {short_conv: 4, forget_gate: true, dropout: 0.1}
data:
  document_mask: true
  curriculum:
    - {tokens: 200, seq_len: 16}
    - tokens: 3_00
      seq_len: 128
      batch_size: 1
    - {tokens: 100, seq_len: 16}
optimizer: {warmup_steps: 2}
"""
SHAPES = [(4, 16)] * 4 + [(1, 128)] * 3 + [(4, 16)] * 2


@pytest.fixture
def run(tiny, tmp_path) -> list[str]:
    """Options of a run of all the curriculum's steps, over 100 documents of 40 bytes."""
    (tmp_path / "curriculum.yaml").write_text(YAML)
    (tmp_path / "texts").mkdir()
    for number in range(100):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number:02} " * 13 + ".")
    options = [f"--data.path={tmp_path / 'texts'}", "--trainer.max_steps=9", "--trainer.log_every_n_steps=1"]
    return [f"--config={tmp_path / 'curriculum.yaml'}", *tiny, *options]


@pytest.fixture
def seen(monkeypatch) -> list[dict[str, torch.Tensor]]:
    """Every training batch, in order."""
    batches: list[dict[str, torch.Tensor]] = []
    training_step = LanguageModelingModule.training_step

    def recorded(self, batch, batch_idx):
        batches.append(batch)
        return training_step(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModelingModule, "training_step", recorded)
    return batches


@pytest.fixture
def tried(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the batches that were tried before training."""
    shapes: list[tuple[int, ...]] = []
    try_batch = memory_preflight._try_batch

    def recorded(trainer, module, batch):
        shapes.append(tuple(batch["inputs"].shape))
        try_batch(trainer, module, batch)

    monkeypatch.setattr(memory_preflight, "_try_batch", recorded)
    return shapes


def logged(run_folder: Path, column: str) -> list[float]:
    return list(map(float, losses(run_folder, column).values()))


def test_a_run_goes_up_and_down_with_a_document_mask(run, run_folder, seen, tried, capsys):
    assert main(["fit", *run]) == 0
    assert [tuple(batch["inputs"].shape) for batch in seen] == SHAPES
    assert all(batch["segment_ids"].shape == batch["inputs"].shape for batch in seen)
    assert seen[4]["segment_ids"].max() in (3, 4)  # ends within 128 tokens of 41 to a document
    assert tried == [(1, 128)]
    out = capsys.readouterr().out
    assert re.search(r"^curriculum +3 stages *$", out, re.M)
    stages = "256 tokens: 4 steps of 4 × 16", "384 tokens: 3 steps of 1 × 128", "128 tokens: 2 steps of 4 × 16"
    for number, stage in enumerate(stages):
        assert re.search(rf"^  \[{number}\] +{stage} *$", out, re.M)
    assert "a step" not in out
    assert re.search(r"^step 8  val_loss", out, re.M)
    cosines = {2: 1.0, 4: 0.8090169944, 5: 0.3090169944, 7: -0.8090169944}  # of 0, 0.2, 0.4 and 0.8 · 180°
    rates = logged(run_folder, "lr")
    assert rates[:2] == pytest.approx([0.5e-3, 1e-3])
    for step, cosine in cosines.items():
        assert rates[step] == pytest.approx(1e-3 * (0.1 + 0.45 * (1 + cosine)))


def test_the_runs_own_configuration_repeats_it(run, run_folder, seen):
    assert main(["fit", *run]) == 0
    assert main(["fit", f"--config={run_folder / 'config.yaml'}"]) == 0
    assert all(torch.equal(first["inputs"], again["inputs"]) for first, again in zip(seen[:9], seen[9:], strict=True))


def test_the_preflight_changes_nothing(run, run_folder, monkeypatch):
    assert main(["fit", *run]) == 0
    monkeypatch.setattr(MemoryPreflight, "on_train_start", lambda *args: None)
    assert main(["fit", *run]) == 0
    assert equal(load(run_folder)["state_dict"], load(version(run_folder, 1))["state_dict"])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried\nto"), MemoryError()])
def test_a_stage_that_does_not_fit_is_named_before_training(run, run_folder, seen, capsys, monkeypatch, error):
    batch_loss = LanguageModelingModule.batch_loss

    def scarce(self, batch):
        if batch["inputs"].shape[1] > 32:
            raise error
        return batch_loss(self, batch)

    monkeypatch.setattr(LanguageModelingModule, "batch_loss", scarce)
    assert main(["fit", *run]) == 2
    assert seen == []
    what = re.escape(str(error).partition("\n")[0] or "MemoryError")
    said = rf"linrope: error: data\.curriculum\[1\] does not fit: a batch of 1 × 128 tokens, .* with '{what}'\. Lower"
    assert re.match(said, capsys.readouterr().err)
    assert not list(run_folder.rglob("*.ckpt"))


def test_without_a_curriculum_nothing_is_tried(tiny, tried, capsys):
    assert main(["fit", *tiny]) == 0
    assert tried == []
    assert re.search(r"^a step +2 × 32 = 64 tokens", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("step", [5, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 8))])
def test_a_run_that_was_stopped_in_any_stage_resumes_with_the_batches_that_are_left(
    run, run_folder, seen, monkeypatch, step
):
    run = [*run, "--model.dropout=0"]
    assert main(["fit", *run]) == 0
    whole, rates = list(seen), logged(run_folder, "lr")
    seen.clear()
    with monkeypatch.context() as patch:
        interrupt(patch, lambda trainer: len(seen) == step, signal.SIGTERM)
        assert main(["fit", *run]) == 128 + signal.SIGTERM
    stopped, resumed = version(run_folder, 1), version(run_folder, 2)
    assert main(["fit", *run, f"--ckpt_path={stopped / 'checkpoints' / 'last.ckpt'}"]) == 0
    for name in ("inputs", "targets", "segment_ids"):
        assert all(torch.equal(then[name], now[name]) for then, now in zip(whole, seen, strict=True))
    assert logged(stopped, "lr") + logged(resumed, "lr") == rates
    torch.testing.assert_close(load(resumed)["state_dict"], load(run_folder)["state_dict"])


def test_a_mistake_in_a_stage_is_one_clean_message(tiny, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("data: {curriculum: [{tokens: many, seq_len: 16}]}")
    assert main(["fit", f"--config={tmp_path / 'run.yaml'}", *tiny]) == 2
    said = "linrope: error: data.curriculum[0].tokens='many' must be a whole number, 1 or more.\n"
    assert capsys.readouterr().err == said
