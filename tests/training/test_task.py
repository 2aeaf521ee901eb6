import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.harness.trainer import quiet_trainer
from linrope.errors import InputError, NonFiniteError
from linrope.losses import IGNORE, bits_per_byte, token_losses
from linrope.models.encoder import EncoderConfig
from linrope.models.language_model import LanguageModel, LanguageModelConfig
from linrope.training import (
    BatchLoss,
    LanguageModelingModule,
    OptimizerConfig,
    TextDataModule,
    TrainingTask,
    learning_rate_factor,
)
from linrope.training.optimizer import parameter_groups
from linrope.training.tasks.masked_lm import MaskedLMModule

# 64 tokens in each of 4 steps, 128 in each of 3, and 64 again: 768 after 9.
TOKENS = [0, 64, 128, 192, 256, 384, 512, 640, 704, 768, 832]


def test_the_learning_rate_follows_tokens():
    schedule = {"max_steps": 9, "final_fraction": 0.1, "tokens_at": TOKENS.__getitem__}
    factors = [learning_rate_factor(step, warmup_steps=2, **schedule) for step in range(11)]
    # After the warm-up's 128 tokens 640 are left: step 4 has seen 0.2 of them, step 5 0.4, step 7 0.8.
    assert factors[:3] == [0.5, 1.0, 1.0]
    assert factors[4] == pytest.approx(0.1 + 0.45 * (1 + 0.8090169944))  # cos 36°
    assert factors[5] == pytest.approx(0.1 + 0.45 * (1 + 0.3090169944))  # cos 72°
    assert factors[7] == pytest.approx(0.1 + 0.45 * (1 - 0.8090169944))
    assert factors[9] == factors[10] == pytest.approx(0.1)
    warming = [learning_rate_factor(step, warmup_steps=6, **schedule) for step in range(6)]
    assert warming == [64 / 512, 128 / 512, 192 / 512, 256 / 512, 384 / 512, 1.0]


@pytest.mark.parametrize(("warmup_steps", "max_steps"), [(0, 1), (0, 7), (10, 110), (7, 1001), (20, 10)])
def test_with_equal_steps_counting_tokens_changes_no_bit(warmup_steps, max_steps):
    schedule = {"warmup_steps": warmup_steps, "max_steps": max_steps, "final_fraction": 0.1}
    for step in range(max_steps + 20):
        if step < warmup_steps:
            expected = (step + 1) / warmup_steps
        else:
            progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
            expected = 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
        assert learning_rate_factor(step, **schedule) == expected
        assert learning_rate_factor(step, **schedule, tokens_at=lambda step: step * 24576) == expected


def test_the_other_schedules():
    schedule = {"max_steps": 9, "final_fraction": 0.1, "warmup_steps": 4}
    inverse = [learning_rate_factor(step, **schedule, schedule="inverse_sqrt") for step in (0, 3, 4, 16, 400)]
    assert inverse == [0.25, 1.0, 1.0, 0.5, 0.1]  # √(4 / 16), √(4 / 400)
    schedule["warmup_steps"] = 0
    assert [learning_rate_factor(step, **schedule, schedule="inverse_sqrt") for step in (0, 1, 4)] == [1.0, 1.0, 0.5]
    of_tokens = {"max_steps": 9, "final_fraction": 0.1, "warmup_steps": 2, "tokens_at": TOKENS.__getitem__}
    linear = [learning_rate_factor(step, **of_tokens, schedule="linear") for step in (0, 2, 4, 7, 9, 10)]
    assert linear == pytest.approx([0.5, 1.0, 1 - 0.9 * 0.2, 1 - 0.9 * 0.8, 0.1, 0.1])
    assert learning_rate_factor(7, **of_tokens, schedule="inverse_sqrt") == math.sqrt(128 / 640)
    with pytest.raises(InputError, match="schedule"):
        OptimizerConfig(schedule="cosin")


def test_only_matrices_decay():
    module = LanguageModelingModule(LanguageModelConfig(d_model=16, n_layers=1, n_heads=2, forget_gate=True))
    decaying, plain = parameter_groups(module.model, 0.1)
    assert (decaying["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in plain["params"]} == {1}
    assert 1 not in {p.ndim for p in decaying["params"]}
    assert len(decaying["params"]) + len(plain["params"]) == len(list(module.parameters()))


def test_losses_are_float32_cross_entropies_and_bits_need_bytes():
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 3, 257), torch.randint(257, (2, 3))
    expected = F.cross_entropy(logits.double().transpose(1, 2), targets, reduction="none")
    torch.testing.assert_close(token_losses(logits, targets).double(), expected)
    assert token_losses(logits.bfloat16(), targets).dtype == torch.float32
    assert bits_per_byte(8 * math.log(2), 4) == pytest.approx(2)
    assert math.isnan(bits_per_byte(1.0, 0))


@pytest.mark.parametrize(
    ("vocab_size", "tokenizer", "known"),
    [
        (257, None, True),
        (300, None, False),
        (300, {"kind": "bytes"}, True),
        (257, {"kind": "unknown"}, False),
        (300, {"kind": "unknown"}, False),
    ],
)
def test_bits_per_byte_are_left_out_where_tokens_are_no_bytes(vocab_size, tokenizer, known):
    tokens = torch.randint(250, (2, 3, 9))
    loader = DataLoader([{"inputs": row[:, :-1], "targets": row[:, 1:]} for row in tokens], batch_size=None)
    trainer = quiet_trainer(num_sanity_val_steps=0, callbacks=[], max_steps=1)
    module = LanguageModelingModule(replace(SMALL, vocab_size=vocab_size))
    module.model.tokenizer = tokenizer
    trainer.fit(module, loader)
    assert ("train_bpb" in trainer.logged_metrics) == known
    assert ("val_bpb" in trainer.validate(module, loader, verbose=False)[0]) == known


@pytest.mark.parametrize("sizes", [[(2, 8), (1, 8)], [(2, 8), (2, 8), (1, 8)], [(2, 8), (2, 30)], [(1, 30), (3, 8)]])
def test_each_target_of_a_step_has_the_same_weight_whatever_its_micro_batch(sizes):
    """Also where the last step has fewer micro-batches than the others: Lightning divides by their number anyway."""
    torch.manual_seed(0)
    rows = [torch.randint(250, (n, length + 1)) for n, length in sizes]
    loader = DataLoader([{"inputs": row[:, :-1], "targets": row[:, 1:]} for row in rows], batch_size=None)
    module = LanguageModelingModule(SMALL, OptimizerConfig(lr=0.0, clip_norm=0.0, warmup_steps=0))
    quiet_trainer(max_steps=1, callbacks=[], accumulate_grad_batches=3).fit(module, loader)
    logged = module.trainer.logged_metrics
    n_targets = sum(n * length for n, length in sizes)
    nats = sum(module.model(row[:, :-1], targets=row[:, 1:]) for row in rows)
    gradients = torch.autograd.grad(nats / n_targets, list(module.model.parameters()))
    assert logged["train_loss"].item() == pytest.approx(nats.item() / n_targets, rel=1e-5)
    assert logged["grad_norm"].item() == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), rel=1e-4)


def test_a_batch_of_another_form_and_a_frozen_model_are_refused():
    tokens = torch.randint(250, (2, 8))
    for batch, found in ((tokens, "a Tensor"), ({"input_ids": tokens, "labels": tokens}, r"\['input_ids', 'labels'\]")):
        with pytest.raises(InputError, match=f"a batch is {found}: .* a dict with inputs and targets"):
            quiet_trainer(max_steps=1, callbacks=[]).fit(
                LanguageModelingModule(SMALL), DataLoader([batch], batch_size=None)
            )
    frozen = LanguageModelingModule(SMALL)
    frozen.model.requires_grad_(False)
    with pytest.raises(InputError, match="nothing to train"):
        quiet_trainer(max_steps=1, callbacks=[]).fit(frozen, DataLoader([tokens], batch_size=None))


def test_an_evaluation_without_targets_has_no_loss_and_ignored_targets_have_no_bytes():
    module, inputs = LanguageModelingModule(SMALL), torch.randint(250, (2, 8))
    targets = torch.full((2, 8), IGNORE)
    trainer, data = quiet_trainer(max_steps=1, callbacks=[]), {"inputs": inputs, "targets": targets}
    assert math.isnan(trainer.validate(module, DataLoader([data], batch_size=None), verbose=False)[0]["val_loss"])
    targets[:, 4:] = inputs[:, 4:]
    data["n_bytes"] = torch.ones(2, 8, dtype=torch.int64)
    found = trainer.validate(module, DataLoader([data], batch_size=None), verbose=False)[0]
    assert found["val_bpb"] == pytest.approx(found["val_loss"] / math.log(2))  # one byte a target


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"optimizer\.lr=-1\.0 must be 0 or more"),
        ({"lr": math.nan}, r"optimizer\.lr=nan"),
        ({"warmup_steps": -1}, r"optimizer\.warmup_steps=-1"),
        ({"final_lr_fraction": 2.0}, r"optimizer\.final_lr_fraction=2\.0 must lie between 0 and 1"),
        ({"betas": (0.9, 1.0)}, r"optimizer\.betas=\(0\.9, 1\.0\)"),
    ],
)
def test_optimizer_options_out_of_range_are_named(options, message):
    with pytest.raises(InputError, match=message):
        OptimizerConfig(**options)


class Doubler(nn.Module):
    """A model of one number: it should double its inputs."""

    tokenizer = None
    config = SimpleNamespace(vocab_size=8, to_dict=lambda: {"model": "doubler"})

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.factor * inputs


class DoublingTask(TrainingTask):
    """What somebody writes for a task of their own: a loss and metrics."""

    def batch_loss(self, batch):
        error = (self.model(batch["x"]) - 2 * batch["x"]) ** 2
        asked = batch["asked"]
        return BatchLoss((error * asked).sum(), asked.sum(), asked.numel(), {"largest": error.max().detach()})

    def training_metrics(self, sums):
        return {**super().training_metrics(sums), "train_largest": sums["largest"]}

    def evaluate(self, batch, sums):
        sums["error"] = sums.get("error", 0) + (self.model(batch["x"]) - 2 * batch["x"]).abs().sum()
        sums["n"] = sums.get("n", 0) + batch["x"].numel()

    def evaluation_metrics(self, split, sums):
        return {f"{split}_error": (sums["error"] / sums["n"]).item()}

    def task_state(self):
        return {"own": 7}


def test_sums_of_a_loss_in_half_precision_are_of_float32(monkeypatch):
    """bfloat16 rounds 3 · 131 to 392, and 999 targets to 1,000."""
    task = DoublingTask(Doubler())
    task.trainer = SimpleNamespace(world_size=1)
    loss = torch.tensor(131.0, dtype=torch.bfloat16, requires_grad=True)
    monkeypatch.setattr(task, "batch_loss", lambda batch: BatchLoss(loss, torch.tensor(333), 333))
    for number in range(3):
        task.training_step({}, number)
    assert task._finish_step_sums() == {"loss": 393.0, "targets": 999.0}


def test_a_new_task_writes_its_loss_and_its_metrics(tmp_path):
    """On loaders that are not of a `ResumableDataModule`, with a step of two batches of unequal numbers of targets."""
    batches = [
        {"x": torch.tensor([1.0, 2.0]), "asked": torch.tensor([True, False])},
        {"x": torch.tensor([3.0, 4.0]), "asked": torch.tensor([True, True])},
    ]
    loader = DataLoader(batches, batch_size=None)
    task = DoublingTask(Doubler(), OptimizerConfig(lr=0.1, warmup_steps=0, weight_decay=0.0))
    trainer = quiet_trainer(num_sanity_val_steps=0, callbacks=[], max_steps=1, accumulate_grad_batches=2)
    trainer.fit(task, loader, loader)
    assert {name: value.item() for name, value in trainer.callback_metrics.items()} == pytest.approx(
        {
            "train_loss": (1 + 9 + 16) / 3,
            "train_largest": 4 + 16,
            "grad_norm": 2 * (1 + 9 + 16) / 3,
            "lr": 0.1,
            "val_error": 0.9 * 10 / 4,  # the first step of AdamW is the learning rate
        }
    )
    trainer.save_checkpoint(tmp_path / "task.ckpt")
    saved = torch.load(tmp_path / "task.ckpt", weights_only=True)["linrope"]
    shared = {"order": {"seed_everything": 0}, "tokenizer": None, "precision": "32-true"}
    shared |= {"optimizer": "adamw", "optimizer_class": None, "optimizer_changes": []}
    class_path = f"{DoublingTask.__module__}.DoublingTask"
    assert saved == {"task": class_path, "config": {"model": "doubler"}, **shared, "own": 7}
    restored = []
    again = DoublingTask(Doubler(), OptimizerConfig(lr=0.0, warmup_steps=0, weight_decay=0.0))
    again.load_task_state = restored.append
    more = quiet_trainer(num_sanity_val_steps=0, callbacks=[], max_steps=3, accumulate_grad_batches=2)
    more.fit(again, loader, ckpt_path=tmp_path / "task.ckpt")
    assert more.global_step == 3
    assert restored[0]["own"] == 7
    assert torch.equal(again.model.factor, task.model.factor)  # with this run's learning rate of 0


class ScaledTask(DoublingTask):
    """With a parameter of the task itself."""

    def __init__(self, *args):
        super().__init__(*args)
        self.scale = nn.Parameter(torch.ones(()))

    def batch_loss(self, batch):
        loss = super().batch_loss(batch)
        return replace(loss, total=loss.total * self.scale)


class OwnOptimizerTask(ScaledTask):
    """With an optimizer as in any LightningModule: a group for each parameter, and a schedule."""

    def configure_optimizers(self):
        rates = (0.5, 0.25)  # of the scale and the factor
        groups = [{"params": [p], "lr": lr} for p, lr in zip(self.parameters(), rates, strict=True)]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        halve = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halve, "interval": "step"}}


def test_an_optimizer_of_the_task_is_resumed_as_it_was(tmp_path):
    batch = {"x": torch.tensor([1.0, 0.5]), "asked": torch.tensor([True, False])}
    loader, no_clipping = DataLoader([batch], batch_size=None), OptimizerConfig(clip_norm=0.0)

    def trained(n_steps, **options):
        trainer = quiet_trainer(num_sanity_val_steps=0, callbacks=[], max_steps=n_steps)
        trainer.fit(task := OwnOptimizerTask(Doubler(), no_clipping), loader, **options)
        return task, trainer

    task, trainer = trained(1)
    assert task.scale.item() == 1 - 0.5 * 1  # the gradient of the mean over one target: (1 - 2)²
    assert task.model.factor.item() == 1 - 0.25 * -2
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    whole, _ = trained(4)
    resumed, trainer = trained(4, ckpt_path=tmp_path / "one.ckpt")
    assert list(map(torch.Tensor.item, resumed.parameters())) == list(map(torch.Tensor.item, whole.parameters()))
    groups = trainer.optimizers[0].param_groups
    options = [tuple(group[name] for name in ("lr", "weight_decay", "momentum")) for group in groups]
    assert options == [(0.5 / 4, 0, 0.9), (0.25 / 4, 0, 0.9)]
    assert "betas" not in groups[0]
    with pytest.raises(InputError, match=r"optimizer\.name=adamw, but .* has the states of .*\.OwnOptimizerTask"):
        quiet_trainer(max_steps=4, callbacks=[]).fit(
            DoublingTask(Doubler()), loader, ckpt_path=tmp_path / "one.ckpt", weights_only=True
        )


def test_parameters_that_no_optimizer_trains_are_named():
    rows = DataLoader([{"x": torch.ones(1), "asked": torch.tensor([True])}], batch_size=None)
    trainer = quiet_trainer(max_steps=1, callbacks=[])
    with pytest.raises(InputError, match=r"^scale of ScaledTask would not be trained; .*: make them part of the model"):
        trainer.fit(ScaledTask(Doubler()), rows)
    task = ScaledTask(Doubler())  # with a copy that no loss reads, as of a moving average
    del task.scale
    task.scale, task.average = 2.0, Doubler()
    trainer = quiet_trainer(max_steps=1, callbacks=[])
    trainer.fit(task, rows)
    assert trainer.global_step == 1


def test_a_loss_that_is_not_finite_stops_any_task_before_its_weights_change():
    batches = [{"x": torch.tensor([math.inf]), "asked": torch.tensor([True])}]
    task = DoublingTask(Doubler())
    with pytest.raises(NonFiniteError, match=r"the loss is (nan|inf) at step 1; .* Start again"):
        quiet_trainer(num_sanity_val_steps=0, callbacks=[], max_steps=1).fit(task, DataLoader(batches, batch_size=None))
    assert task.model.factor.item() == 1.0


def test_a_callback_that_is_not_supported_is_refused_from_python_too():
    batches = [{"x": torch.ones(1), "asked": torch.tensor([True])}]
    trainer = quiet_trainer(callbacks=[GradientAccumulationScheduler({0: 2})], max_steps=1)
    with pytest.raises(InputError, match=r"a GradientAccumulationScheduler, .* Set trainer\.accumulate_grad_batches"):
        trainer.fit(DoublingTask(Doubler()), DataLoader(batches, batch_size=None))


class OnThisDevice(FSDPStrategy):
    """As on a GPU, which Lightning needs for it."""

    root_device = torch.device("cpu")


def test_a_strategy_without_the_norm_of_all_gradients_is_refused():
    task = DoublingTask(Doubler())
    trainer = SimpleNamespace(datamodule=None, precision="32-true", callbacks=[], strategy=OnThisDevice(), max_steps=1)
    task.trainer = trainer
    with pytest.raises(InputError, match=r"is a OnThisDevice, .* do not know the norm of all gradients: set fsdp2"):
        task.setup("fit")


SCALED = {"plugins": [MixedPrecision("16-mixed", "cpu")]}  # with a GradScaler, as on a GPU


@pytest.mark.parametrize(
    ("options", "fused"), [({}, True), ({"precision": "bf16-mixed"}, True), (SCALED, None)], ids=["32", "bf16", "16"]
)
def test_the_optimizer_is_one_pass_on_a_cpu_and_clips_gradients_as_they_are(options, fused):
    """A GradScaler scales gradients by 65,536: the norm that is logged and clipped must not be that."""
    batch = {"x": torch.tensor([1.0, 2.0]), "asked": torch.tensor([True, True])}
    loader = DataLoader([batch], batch_size=None)
    task = DoublingTask(Doubler(), OptimizerConfig(lr=0.1, warmup_steps=0))
    trainer = quiet_trainer(num_sanity_val_steps=0, callbacks=[], max_steps=1, **options)
    trainer.fit(task, loader)
    assert trainer.optimizers[0].param_groups[0]["fused"] is fused
    assert trainer.callback_metrics["grad_norm"].item() == pytest.approx(2 * (1 + 4) / 2, rel=1e-2)


SMALL = LanguageModelConfig(vocab_size=300, d_model=8, n_layers=1, n_heads=2)


def test_a_task_trains_a_model_that_is_given_or_builds_one():
    model = LanguageModel(SMALL)
    module = LanguageModelingModule(model.eval())  # as `from_pretrained` leaves it
    assert module.model is model
    assert model.training
    assert module.model_config is SMALL
    assert LanguageModelingModule(SMALL).model.config is SMALL
    encoder = EncoderConfig(vocab_size=300, d_model=8, n_layers=1, n_heads=2)
    masked = MaskedLMModule(encoder).model
    assert masked.config == replace(encoder, head="masked_lm")
    assert MaskedLMModule(masked).model is masked


@pytest.mark.parametrize("wrong", [{"d_model": 8}, LanguageModelConfig, EncoderConfig(d_model=8), None])
def test_a_model_of_another_kind_is_refused(wrong):
    with pytest.raises(
        InputError, match=r"LanguageModelingModule cannot train .*: pass a LanguageModelConfig, or a model"
    ):
        LanguageModelingModule(wrong)
    with pytest.raises(InputError, match=r"optimizer_config is a dict: pass a linrope\.training"):
        LanguageModelingModule(SMALL, {"lr": 1.0})
    with pytest.raises(
        InputError, match=r"LanguageModel takes a LanguageModelConfig, not .*: pass LanguageModelConfig\("
    ):
        LanguageModel(wrong)


def test_a_compiled_model_is_refused():
    with pytest.raises(InputError, match=r"a model of torch\.compile, whose weights have other names: pass the model"):
        LanguageModelingModule(torch.compile(LanguageModel(SMALL)))


def test_a_model_with_another_head_is_refused():
    model = EncoderConfig(vocab_size=300, d_model=8, n_layers=1, n_heads=2, head="classification", n_labels=2).build()
    with pytest.raises(InputError, match="trains an encoder with head='masked_lm', and this one has 'classification'"):
        MaskedLMModule(model)
    module = MaskedLMModule(model.config)
    module.model.take(model, "the classifier")
    assert all(map(torch.equal, module.model.body.parameters(), model.body.parameters()))


@pytest.mark.parametrize(
    ("option", "value", "needed"),
    [
        ("lr", "1e-3", "a number"),
        ("warmup_steps", 1.5, "a whole number"),
        ("betas", 0.9, "a list, each entry a number"),
    ],
)
def test_options_of_the_optimizer_have_types(option, value, needed):
    with pytest.raises(InputError, match="seed='a' must be a whole number"):
        LanguageModelingModule(SMALL, seed="a")
    with pytest.raises(InputError, match=f"optimizer.{option}={value!r} has the wrong type: it must be {needed}"):
        OptimizerConfig(**{option: value})


@pytest.mark.parametrize(("option", "value"), [("context", 16.5), ("batch_size", "2"), ("num_workers", True)])
def test_sizes_of_data_are_whole_numbers(option, value):
    with pytest.raises(InputError, match=f"data.{option}={value!r} must be a whole number, [01] or more"):
        TextDataModule(**{option: value})
