"""`document_mask`: a packed batch gives what its documents give one by one."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.cli.main import main
from linrope.data.tokenizers.bytes import SEPARATOR
from linrope.models.language_model import LanguageModelConfig
from linrope.rotary import RotaryConfig
from linrope.training import LanguageModelingModule
from tests.conftest import covering, write_documents
from tests.training.attached import attached
from tests.training.test_resume import losses, version

MODELS = {
    "linear": {"attention": "linear"},
    "rotary": {"attention": "linear", "rope": RotaryConfig(placement="both")},
    "mixed": {"attention": ["linear", "softmax"], "window": 6},
}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_documents(tmp_path / "texts", (1 + 13 * number % 40 for number in range(60)))


def first_batch(texts: Path, stage: str) -> dict[str, Tensor]:
    options = {"context": 97, "batch_size": 2, "document_mask": True, "fractions": [0.5, 0.5, 0.0]}
    data = attached(texts, stage=stage, **options)
    return next(iter(data.train_dataloader() if stage == "fit" else data.val_dataloader()))


def module_of(name: str, segment_length: int | None = None) -> LanguageModelingModule:
    torch.manual_seed(0)
    config = LanguageModelConfig(d_model=16, n_layers=2, n_heads=2, short_conv=4, forget_gate=True, **MODELS[name])
    return LanguageModelingModule(config, segment_length=segment_length).double()


def documents_of(batch: dict[str, Tensor]) -> list[tuple[int, slice]]:
    """The row and the place of every document, found by its separator."""
    found = []
    for number, row in enumerate(batch["inputs"].tolist()):
        stops = [i + 1 for i, token in enumerate(row) if token == SEPARATOR and i + 1 < len(row)]
        found += [(number, slice(*ends)) for ends in zip([0, *stops], [*stops, len(row)])]
    return found


def read_one_by_one(module: LanguageModelingModule, batch: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
    """Each document's logits, and the nats of all."""
    logits, nats = [], torch.zeros((), dtype=torch.float64)
    for row, place in documents_of(batch):
        logits.append(module.model(batch["inputs"][row, place][None])[0])
        nats = nats + F.cross_entropy(logits[-1], batch["targets"][row, place], reduction="sum")
    return logits, nats


def gradients(module: LanguageModelingModule, nats: Tensor) -> list[Tensor]:
    module.zero_grad()
    nats.backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)  # float64: the order of sums is what differs


@pytest.mark.parametrize("stage", ["fit", "validate"])
@pytest.mark.parametrize("name", MODELS)
def test_a_packed_batch_is_its_documents_run_one_by_one(texts, name, stage):
    module = module_of(name).train(stage == "fit")
    batch = first_batch(texts, stage)
    assert len(documents_of(batch)) > 6
    packed = module.model(batch["inputs"], segment_ids=batch["segment_ids"])
    alone, nats = read_one_by_one(module, batch)
    assert_same([packed[row, place] for row, place in documents_of(batch)], alone)
    loss = F.cross_entropy(packed.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    assert_same([loss], [nats])
    assert_same(gradients(module, loss), gradients(module, nats))
    trained_on = module.batch_loss(batch).total  # in float32
    torch.testing.assert_close(trained_on.double(), nats, rtol=1e-6, atol=0)
    unmasked = module.batch_loss({name: batch[name] for name in ("inputs", "targets")}).total
    assert abs(unmasked - trained_on) > 1e-5 * trained_on


SEGMENTS = [*product(("linear", "rotary"), (1, 7, 32, 200)), *product(["mixed"], (7, 32, 200))]  # no less than a window


@pytest.mark.parametrize(("name", "segment_length"), covering(SEGMENTS, [("linear", 7), ("mixed", 7)]))
def test_in_segments_too(texts, name, segment_length):
    module = module_of(name, segment_length)
    batch = first_batch(texts, "fit")
    _, nats = read_one_by_one(module, batch)
    in_segments = module.batch_loss(batch).total
    assert_same([in_segments], [nats])
    assert_same(gradients(module, in_segments), gradients(module, nats))


@pytest.mark.exhaustive
def test_a_run_in_segments_trains_as_one_at_once(tiny, run_folder):
    """Over steps of two micro-batches, clipped, in mixed precision: the same losses and gradient norms, but for sums in
    another order and logits of three digits in bfloat16."""
    options = ["--model.short_conv=3", "--model.forget_gate=true", "--trainer.accumulate_grad_batches=2"]
    options += ["--optimizer.clip_norm=0.1", "--optimizer.lr=0.01", "--optimizer.warmup_steps=1"]
    options += ["--trainer.max_steps=4", "--trainer.precision=bf16-mixed", "--trainer.log_every_n_steps=1"]
    found = []
    for number, segments in enumerate(([], ["--segment_length=11"])):
        assert main(["fit", *tiny, *options, *segments]) == 0
        logged = (losses(version(run_folder, number), name) for name in ("train_loss", "grad_norm"))
        found.append([float(value) for by_step in logged for value in by_step.values()])
    assert len(found[0]) == 8
    assert found[1] == pytest.approx(found[0], rel=2e-2)
    assert found[0][0] > found[0][3] + 0.1  # it has learned, so that later steps depend on the weights
