"""A teacher's layers are aligned, and a hybrid is distilled from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from linrope import LanguageModel
from linrope.cli.main import main
from linrope.models.conversion import convert, hybrid_config
from linrope.training import task_plan
from linrope.training.optimizer import OptimizerConfig
from linrope.training.tasks.conversion import (
    AlignmentOptions,
    AttentionAlignmentModule,
    DistillationModule,
    DistillationOptions,
)
from tests.conftest import LINE, assert_input_errors, write_text_file
from tests.data.tokenizers.subword_files import write_tokenizer
from tests.processes import Run
from tests.training.attached import attached
from tests.training.test_resume import losses

SIZES = ["--model.d_model=32", "--model.n_layers=3", "--model.n_heads=2", "--model.short_conv=3"]
RUN = ["--data.context=64", "--data.batch_size=4", "--optimizer.lr=1e-2", "--optimizer.warmup_steps=5"]
RUN += ["--trainer.accelerator=cpu", "--trainer.max_steps=40", "--trainer.val_check_interval=20"]
RUN += ["--trainer.limit_val_batches=4", "--trainer.log_every_n_steps=1", "--run.folder=runs"]
HYBRID = ["--model.attention=[linear, linear, softmax]", "--model.window=32", "--model.feature_map=hedgehog"]
HYBRID += ["--model.forget_gate=true"]
LAST = "version_0/checkpoints/last.ckpt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a text, a trained softmax model at runs/teacher, its hybrid, and that after an alignment at runs/align."""
    folder = tmp_path_factory.mktemp("conversion")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_text_file(folder)
        run = ["fit", *SIZES, *RUN, "--data.path=corpus.txt"]
        assert main([*run, "--model.attention=softmax", "--run.name=teacher"]) == 0
        teacher = LanguageModel.from_pretrained(f"runs/teacher/{LAST}")
        options = {"window": 32, "feature_map": "hedgehog", "forget_gate": True}
        config = hybrid_config(teacher.config, ["linear", "linear", "softmax"], **options)
        convert(teacher, config).save_pretrained("hybrid")
        align = [*run, *HYBRID, "--task=attention_alignment", f"--conversion.teacher=runs/teacher/{LAST}"]
        assert main([*align, "--run.start_from=hybrid", "--run.name=align"]) == 0
    return folder


@pytest.fixture
def here(folder, monkeypatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def run(task: str, *options: str) -> list[str]:
    teacher = f"--conversion.teacher=runs/teacher/{LAST}"
    return ["fit", *SIZES, *RUN, *HYBRID, "--data.path=corpus.txt", f"--task={task}", teacher, *options]


def test_alignment_trains_the_layers_that_differ_and_nothing_else(here):
    errors = {step: float(error) for step, error in losses(Path("runs/align/version_0")).items()}
    assert errors[40] < 0.25 * errors[1]
    start, end = LanguageModel.from_pretrained("hybrid"), LanguageModel.from_pretrained(f"runs/align/{LAST}")
    after = dict(end.named_parameters())
    changed = {name for name, weight in start.named_parameters() if not torch.equal(weight, after[name])}
    assert changed == {name for name in after if re.match(r"blocks\.\d\.attention\.", name)}
    teacher, rows = LanguageModel.from_pretrained(f"runs/teacher/{LAST}"), rows_of_text()
    assert divergence(end, teacher, rows) < divergence(start, teacher, rows)


def rows_of_text() -> torch.Tensor:
    return torch.tensor(list((LINE * 4).encode()))[:256].view(4, 64)


def divergence(model: LanguageModel, teacher: LanguageModel, rows: torch.Tensor) -> float:
    with torch.no_grad():
        ours, theirs = (one(rows).log_softmax(-1) for one in (model, teacher))
    return F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1).mean().item()


def test_only_new_weights_are_trained_if_asked(here):
    options = ["--conversion.train=new", "--run.start_from=hybrid", "--run.name=new", "--trainer.max_steps=3"]
    assert main(run("attention_alignment", *options)) == 0
    start, end = LanguageModel.from_pretrained("hybrid"), LanguageModel.from_pretrained(f"runs/new/{LAST}")
    after = dict(end.named_parameters())
    changed = {name for name, weight in start.named_parameters() if not torch.equal(weight, after[name])}
    new = ("feature_map.weight", "forget.linear.weight", "forget.linear.bias")
    assert changed == {f"blocks.{layer}.attention.{name}" for layer in (0, 1) for name in new}


def test_the_error_of_a_layer_is_that_of_its_outputs_for_the_teachers_inputs(here):
    teacher = LanguageModel.from_pretrained(f"runs/teacher/{LAST}")
    config = hybrid_config(teacher.config, ["linear", "softmax", "softmax"])
    task = AttentionAlignmentModule(config, conversion=AlignmentOptions(f"runs/teacher/{LAST}"))
    task.model.load_state_dict(convert(teacher, config).state_dict())
    data = attached(here / "corpus.txt")
    batch = next(iter(data.train_dataloader()))
    x = teacher.blocks[0].attention_norm(teacher.embedding(batch["inputs"]))
    expected = teacher.blocks[0].attention(x)
    error = (task.model.blocks[0].attention(x) - expected).square().mean() / expected.square().mean()
    loss = task.batch_loss(batch)
    assert loss.total.item() == pytest.approx(error.item() * 64, rel=1e-5)
    assert loss.n_targets.item() == loss.n_positions == 64
    assert {name for name, p in task.model.named_parameters() if p.requires_grad} == {
        name for name, _ in task.model.named_parameters() if name.startswith("blocks.0.attention.")
    }


@pytest.mark.exhaustive
def test_distillation_lowers_the_divergence_from_the_teacher(here):
    assert main(run("distillation", "--run.name=distilled")) == 0  # from new weights, which are far from the teacher
    found = Path("runs/distilled/version_0")
    values = {step: float(value) for step, value in losses(found, "train_divergence").items()}
    assert values[40] < 0.25 * values[1]
    assert set(losses(found, "train_bpb")) == set(values)
    teacher, rows = LanguageModel.from_pretrained(f"runs/teacher/{LAST}"), rows_of_text()
    end = LanguageModel.from_pretrained(f"runs/distilled/{LAST}")
    assert divergence(end, teacher, rows) < 0.25 * divergence(end.config.build(), teacher, rows)
    weights = torch.load(found / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert all(name.startswith("model.") for name in weights)  # without the teacher's


def test_the_loss_of_distillation_by_its_definition(here):
    teacher = LanguageModel.from_pretrained(f"runs/teacher/{LAST}")
    options = DistillationOptions(f"runs/teacher/{LAST}", cross_entropy=0.25)
    task = DistillationModule(hybrid_config(teacher.config, "linear"), OptimizerConfig(), options)
    batch = next(iter(attached(here / "corpus.txt").train_dataloader()))
    batch["targets"][:, :7] = -100
    kept = batch["targets"] != -100
    p, log_q = teacher(batch["inputs"])[kept].softmax(-1), task.model(batch["inputs"])[kept].log_softmax(-1)
    kl = (p * (p.log() - log_q)).sum()
    nats = -log_q.gather(-1, batch["targets"][kept][:, None]).sum()
    loss = task.batch_loss(batch)
    torch.testing.assert_close(loss.total, kl + 0.25 * nats, rtol=1e-4, atol=0)
    assert (loss.n_targets.item(), loss.n_positions) == (2 * 25, 64)
    sums = {"loss": loss.total.item(), "targets": 50.0, **{name: value.item() for name, value in loss.sums.items()}}
    assert task.training_metrics(sums)["train_divergence"] == pytest.approx(kl.item() / 50, rel=1e-4)


def test_a_task_is_measured_and_resumed(here, capsys):
    ckpt = f"runs/align/{LAST}"
    assert main(["validate", f"--ckpt_path={ckpt}"]) == 0
    assert re.match(r"val_loss 0\.\d+  val_error/layer_0 \S+  val_error/layer_1 \S+  val_err", capsys.readouterr().out)
    more = run("attention_alignment", "--run.name=align-more", f"--ckpt_path={ckpt}", "--trainer.max_steps=42")
    assert main(more) == 0
    assert list(losses(Path("runs/align-more/version_0")))[-2:] == [41, 42]


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("distillation", ["--conversion.teacher=null"], "conversion.teacher is missing"),
        ("distillation", ["--conversion.teacher=nowhere"], "conversion.teacher='nowhere': checkpoint 'nowhere' does"),
        ("distillation", ["--conversion.cross_entropy=-1"], "conversion.cross_entropy=-1"),
        ("distillation", ["--segment_length=8"], "segment_length=8: distillation reads whole rows"),
        ("distillation", ["--data.contiguous=true"], "data.contiguous=True is for language modeling"),
        ("distillation", ["--model.d_model=64"], "has d_model=32, and the model has 64"),
        ("attention_alignment", [], "the model's weights are not those of conversion.teacher='runs/teacher"),
        ("attention_alignment", ["--conversion.train=old"], "conversion.train"),
        ("attention_alignment", ["--model.attention=softmax", "--model.window=null"], "leaves nothing to align"),
        ("attention_alignment", ["--model.n_layers=4"], "has n_layers=3, and the model has 4"),
    ],
)
def test_what_does_not_fit_is_named(here, task, options, message, error_of):
    assert message in " ".join(error_of(*run(task, *options, "--run.name=refused")).split())


def test_the_plan_reads_and_counts_the_teacher(here, error_of, monkeypatch):
    plan = ["plan", *run("distillation")[1:]]
    assert "conversion.teacher='nowhere': checkpoint 'nowhere' does" in error_of(*plan, "--conversion.teacher=nowhere")
    options = DistillationOptions(teacher=f"runs/teacher/{LAST}")
    task = DistillationModule(LanguageModel.from_pretrained("hybrid").config, conversion=options)
    batch = {"inputs": rows_of_text()[:1, :16], "targets": rows_of_text()[:1, 1:17]}
    step = task_plan.measure_step(task, batch, None)
    monkeypatch.setattr(task_plan, "WithTeacher", ())
    assert step.memory - task_plan.measure_step(task, batch, None).memory == 4 * task.teacher.n_parameters


def test_layers_that_are_called_one_by_one_are_not_divided(here, tmp_path):
    args = run("attention_alignment", "--trainer.strategy=fsdp2", "--run.name=refused")
    code, _, err = Run(args, tmp_path).wait()
    assert code == 2
    assert "set trainer.strategy to ddp" in " ".join(err.split())


def test_a_teacher_of_another_tokenizer_is_refused(here, tmp_path):
    teacher = LanguageModel.from_pretrained(f"runs/teacher/{LAST}")
    teacher.tokenizer = {"kind": "tokenizers", "json": write_tokenizer(tmp_path).read_text()}
    teacher.save_pretrained(tmp_path / "other")
    task = DistillationModule(teacher.config, conversion=DistillationOptions(str(tmp_path / "other")))
    assert_input_errors((lambda: task.require_data(attached(here / "corpus.txt")), "tokenizer"))
