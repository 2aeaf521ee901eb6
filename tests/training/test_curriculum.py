"""Runs with a length curriculum, from the command line on."""

import re
import signal
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from linrope.cli.main import main
from linrope.training import LanguageModelingModule, MemoryPreflight
from linrope.training.callbacks import memory_preflight
from tests.conftest import tiny_options, write_documents
from tests.training.attached import record_batches
from tests.training.test_resume import equal, interrupt, load, losses

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


def record_tried(patch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the batches that are tried before the training to come."""
    shapes: list[tuple[int, ...]] = []
    try_batch = memory_preflight._try_batch

    def recorded(trainer, module, batch):
        shapes.append(tuple(batch["inputs"].shape))
        try_batch(trainer, module, batch)

    patch.setattr(memory_preflight, "_try_batch", recorded)
    return shapes


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> SimpleNamespace:
    """A run of all the curriculum's steps over 100 documents of 40 bytes, which tests only read: its options, folder,
    batches, the shapes that were tried before it, and what it printed."""
    folder = tmp_path_factory.mktemp("curriculum")
    (folder / "curriculum.yaml").write_text(YAML)
    options = tiny_options(write_documents(folder / "texts", [40] * 100), folder)
    options = [f"--config={folder / 'curriculum.yaml'}", *options, "--trainer.max_steps=9"]
    options += ["--trainer.log_every_n_steps=1"]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        batches, tried = record_batches(patch), record_tried(patch)
        assert main(["fit", *options]) == 0
    folder = folder / "runs" / "tiny" / "version_0"
    return SimpleNamespace(options=options, folder=folder, batches=batches, tried=tried, out=out.getvalue())


@pytest.fixture
def run(whole, tmp_path) -> list[str]:
    """The same options, for a folder of its own."""
    return [*whole.options, f"--run.folder={tmp_path / 'runs'}"]


def logged(run_folder: Path, column: str) -> list[float]:
    return list(map(float, losses(run_folder, column).values()))


def test_a_run_goes_up_and_down_with_a_document_mask(whole):
    assert [tuple(batch["inputs"].shape) for batch in whole.batches] == SHAPES
    assert all(batch["segment_ids"].shape == batch["inputs"].shape for batch in whole.batches)
    assert whole.batches[4]["segment_ids"].max() in (3, 4)  # ends within 128 tokens of 41 to a document
    assert whole.tried == [(1, 128)]
    assert re.search(r"^curriculum +3 stages *$", whole.out, re.M)
    stages = "256 tokens: 4 steps of 4 × 16", "384 tokens: 3 steps of 1 × 128", "128 tokens: 2 steps of 4 × 16"
    for number, stage in enumerate(stages):
        assert re.search(rf"^  \[{number}\] +{stage} *$", whole.out, re.M)
    assert "a step" not in whole.out
    assert re.search(r"^step 8  val_loss \S+  val_bpb \S+  stage 2$", whole.out, re.M)
    assert losses(whole.folder, "stage") == {step: str(float((step > 4) + (step > 7))) for step in range(1, 10)}
    cosines = {2: 1.0, 4: 0.8090169944, 5: 0.3090169944, 7: -0.8090169944}  # of 0, 0.2, 0.4 and 0.8 · 180°
    rates = logged(whole.folder, "lr")
    assert rates[:2] == pytest.approx([0.5e-3, 1e-3])
    for step, cosine in cosines.items():
        assert rates[step] == pytest.approx(1e-3 * (0.1 + 0.45 * (1 + cosine)))


def test_the_runs_own_configuration_repeats_it_and_the_preflight_changes_nothing(
    whole, tmp_path, run_folder, monkeypatch
):
    again = record_batches(monkeypatch)
    monkeypatch.setattr(MemoryPreflight, "on_train_start", lambda *args: None)
    assert main(["fit", f"--config={whole.folder / 'config.yaml'}", f"--run.folder={tmp_path / 'runs'}"]) == 0
    assert equal(again, whole.batches)
    assert equal(load(run_folder)["state_dict"], load(whole.folder)["state_dict"])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried\nto"), MemoryError()])
def test_a_stage_that_does_not_fit_is_named_before_training(run, run_folder, error_of, monkeypatch, error):
    batch_loss, seen = LanguageModelingModule.batch_loss, record_batches(monkeypatch)

    def scarce(self, batch):
        if batch["inputs"].shape[1] > 32:
            raise error
        return batch_loss(self, batch)

    monkeypatch.setattr(LanguageModelingModule, "batch_loss", scarce)
    what = re.escape(str(error).partition("\n")[0] or "MemoryError")
    said = rf"linrope: error: data\.curriculum\[1\] does not fit: a batch of 1 × 128 tokens, .* with '{what}'\. Lower"
    assert re.match(said, error_of("fit", *run))
    assert seen == []
    assert not list(run_folder.rglob("*.ckpt"))


def test_without_a_curriculum_nothing_is_tried(tiny, monkeypatch, capsys):
    tried = record_tried(monkeypatch)
    assert main(["fit", *tiny]) == 0
    assert tried == []
    assert re.search(r"^a step +2 × 32 = 64 tokens", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("step", [5, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 8))])
def test_a_run_that_was_stopped_in_any_stage_resumes_with_the_batches_that_are_left(
    whole, run, run_folder, monkeypatch, step
):
    seen = record_batches(monkeypatch)
    with monkeypatch.context() as patch:
        interrupt(patch, lambda trainer: len(seen) == step, signal.SIGTERM)
        assert main(["fit", *run]) == 128 + signal.SIGTERM
    assert main(["fit", *run, f"--ckpt_path={run_folder / 'checkpoints' / 'last.ckpt'}"]) == 0
    assert equal(seen, whole.batches)
    assert logged(run_folder, "lr") == logged(whole.folder, "lr")
    assert equal(load(run_folder)["state_dict"], load(whole.folder)["state_dict"])


def test_a_mistake_in_a_stage_is_one_clean_message(tiny, tmp_path, error_of):
    (tmp_path / "run.yaml").write_text("data: {curriculum: [{tokens: many, seq_len: 16}]}")
    said = "linrope: error: data.curriculum[0].tokens='many' must be a whole number, 1 or more.\n"
    assert error_of("fit", f"--config={tmp_path / 'run.yaml'}", *tiny) == said
