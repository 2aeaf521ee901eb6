import math
from collections import Counter

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from benchmarks.harness.trainer import quiet_trainer
from linrope.data.synthetic.mqar import MQAR
from linrope.data.tokenizers.base import tokenizer_from_serialized
from linrope.data.tokenizers.bytes import SEPARATOR
from linrope.errors import InputError
from linrope.losses import IGNORE, token_losses
from linrope.models.language_model import LanguageModel, LanguageModelConfig
from linrope.training import LanguageModelingModule, MQARDataModule, OptimizerConfig, RecallBatches, RecallModule
from linrope.training.checkpoint import require_same_order
from tests.training.attached import attach, first_batches

STAGES = ((16, 2, 3), (32, 4, 1))
SMALL = {"stages": STAGES, "cases": ((16, 2), (32, 4)), "vocab_size": 64, "tokens_per_batch": 128, "test_rows": 11}
MODEL = LanguageModelConfig(vocab_size=64, d_model=16, n_layers=1, n_heads=2)


def attached(*, seed: int = 0, num_workers: int = 0, **of_trainer) -> MQARDataModule:
    data = MQARDataModule(**SMALL, seed=seed, num_workers=num_workers)
    attach(data, **of_trainer)
    return data


def small_trainer(**options) -> Trainer:
    return quiet_trainer(**{"max_steps": -1, "callbacks": [], "num_sanity_val_steps": 0, **options})


def test_a_batch_holds_rows_of_one_stage_and_as_many_as_fit():
    batches = RecallBatches(MQAR(64), STAGES, tokens_per_batch=100)
    shapes = set()
    for number in range(20):
        targets = batches[number]["targets"]
        assert batches[number]["inputs"].shape == targets.shape
        n_asked = set((targets != IGNORE).sum(1).tolist())
        shapes.add((*targets.shape, *n_asked))
    assert shapes == {(6, 16, 2), (3, 32, 4)}


def test_stages_have_their_shares_of_all_rows():
    rows, n = Counter(), 2000
    batches = RecallBatches(MQAR(64), STAGES, tokens_per_batch=96)
    for number in range(n):
        n_rows, length = batches[number]["inputs"].shape
        rows[length] += n_rows
    # 3 : 1 rows in batches of 6 and 3 are 3 : 2 batches, each count with a deviation of √(n · 0.6 · 0.4) = 22.
    assert rows[16] / 6 == pytest.approx(0.6 * n, abs=4 * 22)
    assert rows[32] / 3 == pytest.approx(0.4 * n, abs=4 * 22)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_loader_starts_after_what_its_step_has_seen(num_workers):
    alone = first_batches(MQARDataModule(**SMALL), 9)  # without a trainer: of one process, from the first on
    resumed = first_batches(attached(step=3, accumulate=2, num_workers=num_workers), 3)
    assert all(map(torch.equal, resumed, alone[6:]))
    assert not torch.equal(first_batches(attached(seed=1), 1)[0][:4], alone[0][:4])


def test_ranks_train_on_different_rows_of_the_same_stages():
    ranks = [first_batches(attached(rank=rank, world_size=2), 8) for rank in range(2)]
    assert [batch.shape for batch in ranks[0]] == [batch.shape for batch in ranks[1]]
    rows = [tuple(row.tolist()) for batches in ranks for batch in batches for row in batch]
    assert len(set(rows)) == len(rows)


def test_a_run_goes_on_with_as_many_devices_only():
    two, alone = attached(rank=1, world_size=2).order(), attached().order()
    require_same_order({"linrope": {"order": two}}, attached(world_size=2).order(), "a.ckpt")
    with pytest.raises(InputError, match=r"a\.ckpt.*\n  devices: 1 in the checkpoint, 2 here$"):
        require_same_order({"linrope": {"order": alone}}, two, "a.ckpt")


def test_each_device_needs_a_row_of_each_case():
    attached(world_size=11)
    with pytest.raises(InputError, match=r"data\.test_rows=11: 12 devices need a row of each case each: raise it\."):
        attached(world_size=12)


def test_ranks_share_out_the_cases_without_repeating_a_row():
    def rows(loader):
        return [tuple(row.tolist()) for batch in loader for row in batch["inputs"]]

    ranks = [attached(rank=rank, world_size=2) for rank in range(2)]
    dealt = [rows(data.val_dataloader()) for data in ranks]
    assert len(set(dealt[0]) | set(dealt[1])) == len(dealt[0]) + len(dealt[1]) == 2 * 11
    alone = attached(seed=5)
    assert sorted(dealt[0] + dealt[1]) == sorted(rows(alone.val_dataloader()))  # whatever the seed
    assert not set(rows(alone.test_dataloader())) & set(rows(alone.val_dataloader()))


def test_the_defaults_are_zoologys():
    data = MQARDataModule()
    assert [stage[:2] for stage in data.stages] == [(64, 4), (128, 8), (256, 16), (256, 32), (256, 64)]
    assert (1024, 256) in data.cases
    assert RecallBatches(data.task, data.stages, data.tokens_per_batch)[0]["inputs"].numel() == 16384


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": ()}, r"data\.stages is empty"),
        ({"stages": ((64, 17, 1),)}, r"data\.stages: length=64 is too short for n_pairs=17"),
        ({"stages": ((64, 4),)}, r"data\.stages: \(64,\) must be \(length, n_pairs\)"),
        ({"stages": ((64, 4, 0),)}, r"data\.stages=.* its share of rows, must be above 0"),
        ({"cases": ((63, 4),)}, r"data\.cases: length=63 must be even"),
        ({"vocab_size": 100}, r"data\.stages: vocab_size=100 has too few keys .* n_pairs=64"),
        ({"num_workers": 10**9}, r"data\.num_workers=1000000000 must be at most 1024"),
        ({"tokens_per_batch": 10**9}, r"data\.tokens_per_batch = 1,000,000,000 tokens are more than"),
        ({"test_rows": 10**9}, r"data\.test_rows · length of data\.cases = [\d,]+ tokens are more than"),
        ({"tokens_per_batch": 255}, r"data\.tokens_per_batch=255 has no room for a row of length=256 of data\.stages"),
        ({"test_rows": 0}, r"data\.test_rows=0 must be 1 or more"),
        ({"seed": -1}, r"data\.seed=-1 must be 0 or more"),
        ({"num_workers": -1}, r"data\.num_workers=-1 must be 0 or more"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(InputError, match=message):
        MQARDataModule(**options)


@pytest.mark.parametrize(
    ("trainer", "vocab_size", "message"),
    [
        ({"limit_train_batches": 1}, 64, r"would train on the same first samples again and again"),
        ({"overfit_batches": 0.5}, 64, r"trainer\.overfit_batches=0\.5 is a share of data that has no end"),
        ({}, 65, r"model\.vocab_size=64 is too small .* set it to 65 or more"),
    ],
)
def test_a_trainer_or_a_model_that_does_not_fit_the_data_is_refused(trainer, vocab_size, message):
    data = MQARDataModule(**{**SMALL, "vocab_size": vocab_size})
    with pytest.raises(InputError, match=message):
        small_trainer(max_steps=6, **trainer).fit(RecallModule(MODEL), data)


def test_tokens_of_no_text_have_no_tokenizer(tmp_path):
    module = RecallModule(MODEL)
    trainer = small_trainer(max_steps=1, limit_val_batches=0)
    trainer.fit(module, MQARDataModule(**SMALL))
    module.model.save_pretrained(tmp_path / "model")
    assert tokenizer_from_serialized(LanguageModel.from_pretrained(tmp_path / "model").tokenizer) is None


def test_ignored_targets_cost_nothing_and_are_no_bytes():
    torch.manual_seed(0)
    module = LanguageModelingModule(LanguageModelConfig(d_model=16, n_layers=1, n_heads=2))
    inputs = torch.randint(257, (1, 6))
    targets = torch.tensor([[1, IGNORE, SEPARATOR, 3, IGNORE, IGNORE]])
    losses = token_losses(module(inputs), targets)
    assert (losses[targets == IGNORE] == 0).all()
    loss = module.training_step({"inputs": inputs, "targets": targets}, 0)
    torch.testing.assert_close(loss, losses[targets != IGNORE].sum() / 6)  # the step puts it right: see below
    nats, n_bytes, n_targets = (module._step_sums[name].item() for name in ("loss", "bytes", "targets"))
    assert (n_bytes, n_targets) == (2, 3)
    assert nats == pytest.approx(losses.sum().item())
    module.validation_step({"inputs": inputs, "targets": targets}, 0)
    assert module.loss_by_position.totals[1:].tolist() == [2, 3]


def test_a_batch_without_targets_has_loss_and_gradients_of_zero():
    module = LanguageModelingModule(MODEL)
    batch = {"inputs": torch.randint(64, (2, 8)), "targets": torch.full((2, 8), IGNORE)}
    loss = module.training_step(batch, 0)
    loss.backward()
    assert loss.item() == 0
    assert all((p.grad == 0).all() for p in module.parameters() if p.grad is not None)


class Recaller(torch.nn.Module):
    """A model that says the value of every key it has seen, but for questions of rows longer than `reach`."""

    tokenizer = None

    def __init__(self, reach: int):
        super().__init__()
        self.reach = reach

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*tokens.shape, 64)
        if tokens.shape[1] <= self.reach:
            for row, scores in zip(tokens, logits):
                for t, token in enumerate(row):
                    seen = (row[:t] == token).nonzero()
                    if len(seen):
                        scores[t, row[seen[0] + 1]] = 50.0
        return logits


def test_accuracy_is_the_share_of_questions_answered_by_case_and_their_mean():
    module = RecallModule(MODEL)
    module.model = Recaller(reach=16)
    (metrics,) = small_trainer().test(module, MQARDataModule(**SMALL), verbose=False)
    # The long case's logits are all equal, and argmax takes token 0, which is no value. Its rows have twice the pairs.
    expected = {"test_accuracy": 0.5, "test_accuracy/16x2": 1.0, "test_accuracy/32x4": 0.0}
    assert metrics == {**expected, "test_loss": pytest.approx(math.log(64) * 2 / 3, rel=1e-5)}


@pytest.mark.exhaustive
def test_recall_is_learned():
    seed_everything(0, verbose=False)
    data = MQARDataModule(stages=[(16, 4, 1)], cases=[(16, 4)], vocab_size=64, tokens_per_batch=1024, test_rows=100)
    model = LanguageModelConfig(vocab_size=64, d_model=64, n_layers=2, n_heads=2, attention="softmax", short_conv=4)
    module = RecallModule(model, OptimizerConfig(lr=1e-2, warmup_steps=20))
    trainer = small_trainer(max_steps=130)
    (before,) = trainer.validate(module, data, verbose=False)
    assert before["val_accuracy"] < 0.1  # the chance of a value is 1/32, of a token 1/64
    assert before["val_loss"] == pytest.approx(math.log(64), rel=0.05)
    trainer.fit(module, data)
    assert trainer.callback_metrics.keys() == {"train_loss", "grad_norm", "lr"}
    (after,) = trainer.validate(module, data, verbose=False)
    assert after.keys() == {"val_loss", "val_accuracy", "val_accuracy/16x4"}
    assert after["val_accuracy"] > 0.9
