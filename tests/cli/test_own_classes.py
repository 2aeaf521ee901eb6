"""Model, optimizer and data of a user's own classes, named by `class_path`."""

import sys
from pathlib import Path

import pytest
import torch

from linrope import EncoderConfig, LanguageModel
from linrope.cli import imports
from linrope.cli.main import main
from linrope.cli.parser import require_choices
from linrope.utils.options import class_path_of, loaded_subclass
from tests.conftest import assert_input_errors
from tests.training.test_resume import TRAINED, equal, load

SOURCE = '''
from dataclasses import dataclass

import torch
from linrope import LanguageModel, LanguageModelConfig
from linrope.training import OptimizerConfig, TextDataModule, text_of_documents

@dataclass(frozen=True)
class ScaledConfig(LanguageModelConfig):
    scale: float = 1.0
    """Factor of the logits."""

    def build(self):
        return Scaled(self)

class Scaled(LanguageModel):
    def forward(self, *args, targets=None, **options):
        if targets is not None:
            return super().forward(*args, targets=targets, **options)
        logits, state = super().forward(*args, **{**options, "return_state": True})
        logits = self.config.scale * logits
        return (logits, state) if options.get("return_state") else logits

@dataclass(frozen=True)
class SGDConfig(OptimizerConfig):
    momentum: float = 0.9

    def make(self, groups, fused):
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum)

@dataclass(frozen=True)
class OneGroup(OptimizerConfig):
    def make(self, groups, fused):
        return torch.optim.SGD(groups[0]["params"])

class CountingAdamW(torch.optim.AdamW):
    def step(self, closure=None):
        for group in self.param_groups:
            group["n_steps"] += 1
        return super().step(closure)

@dataclass(frozen=True)
class TwoRates(OptimizerConfig):
    eps: float = 1e-8

    def make(self, groups, fused):
        groups[1]["lr"] = 0.1 * self.lr
        counted = [{**group, "n_steps": 0} for group in groups]
        return CountingAdamW(counted, lr=self.lr, betas=(0.8, 0.99), eps=self.eps, fused=fused)

class Rows(TextDataModule):
    """Rows.

    Args:
        rows: How many.
    """

    def __init__(self, rows: int = 60, **options):
        super().__init__(**options)
        self.rows = rows

    def read(self):
        lines = [f"row {number}: the quick brown fox jumps" for number in range(self.rows)]
        return text_of_documents(lines, lines, origin="my rows")
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The file my_classes.py, to be imported by --import."""
    file = tmp_path / "my_classes.py"
    file.write_text(SOURCE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield f"--import={file}"
    sys.modules.pop("my_classes", None)
    imports.imported.clear()


@pytest.fixture
def options(tiny) -> list[str]:
    return [option for option in tiny if not option.startswith("--data.path")]


def config_of(folder: Path, text: str) -> str:
    (folder / "own.yaml").write_text(text)
    return f"--config={folder / 'own.yaml'}"


def test_a_run_of_own_classes_is_trained_resumed_and_measured(own, options, run_folder, tmp_path, capsys):
    config = config_of(
        tmp_path,
        "model: {class_path: my_classes.ScaledConfig, scale: 3.0}\n"
        "optimizer: {class_path: my_classes.SGDConfig, momentum: 0.5}\n"
        "data: {class_path: my_classes.Rows}\n",
    )
    assert main(["fit", own, config, *options, "--data.rows=70"]) == 0
    assert "my rows" in capsys.readouterr().out
    last = run_folder / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(last, weights_only=True)
    assert checkpoint["optimizer_states"][0]["param_groups"][0]["momentum"] == 0.5
    assert checkpoint["linrope"]["config"]["class_path"] == "my_classes.ScaledConfig"
    model, tokens = LanguageModel.from_pretrained(last), torch.arange(9)[None]
    assert type(model).__name__ == "Scaled"
    torch.testing.assert_close(model(tokens), 3 * LanguageModel.forward(model, tokens))

    again = ["--trainer.max_steps=4", "--optimizer.lr=0.5", f"--ckpt_path={last}"]
    assert main(["fit", own, config, *options, "--data.rows=70", *again]) == 0
    capsys.readouterr()
    assert main(["validate", own, f"--ckpt_path={last}"]) == 0  # the run's config.yaml names the classes
    assert capsys.readouterr().out.startswith("val_loss 5.")
    assert main(["generate", own, f"--ckpt_path={last}", "--prompt=a", "--max_new_tokens=2"]) == 0


@pytest.mark.exhaustive
def test_an_own_optimizer_resumes_with_the_options_that_this_run_makes(own, tiny, run_folder):
    options = ["fit", own, *tiny, "--optimizer.class_path=my_classes.TwoRates", "--optimizer.lr=0.01"]
    options += ["--trainer.max_steps=4", "--run.checkpoint_every_n_steps=2", "--run.keep_checkpoints=2"]
    assert main(options) == 0
    at_two, runs = run_folder / "checkpoints" / "step_2.ckpt", run_folder.parents[1]
    assert main([*options, "--run.name=resumed", f"--ckpt_path={at_two}"]) == 0
    whole, resumed = load(run_folder), load(runs / "resumed" / "version_0")
    assert equal([whole[name] for name in TRAINED], [resumed[name] for name in TRAINED])

    others = ["--optimizer.eps=0.001", "--optimizer.lr=0.02", "--optimizer.weight_decay=0.5"]
    assert main([*options, *others, "--run.name=others", f"--ckpt_path={at_two}"]) == 0
    groups = load(runs / "others" / "version_0")["optimizer_states"][0]["param_groups"]
    names = ("initial_lr", "betas", "eps", "weight_decay", "n_steps")
    found = [tuple(group[name] for name in names) for group in groups]
    assert found == [(0.02, (0.8, 0.99), 0.001, 0.5, 4), (0.1 * 0.02, (0.8, 0.99), 0.001, 0.0, 4)]


@pytest.mark.exhaustive
def test_an_optimizer_does_not_resume_with_the_states_of_another_class(own, tiny, run_folder, error_of):
    sgd, resumed = "--optimizer.class_path=my_classes.SGDConfig", ["--ckpt_path=last", "--trainer.max_steps=4"]
    start = "or start a new run with its weights: --run.start_from"
    assert main(["fit", own, *tiny]) == 0
    err = error_of("fit", own, *tiny, sgd, *resumed)
    assert "optimizer.class_path=my_classes.SGDConfig, but checkpoint" in err
    assert f"has the states of adamw: set adamw, {start}" in err
    assert main(["fit", own, *tiny, sgd]) == 0
    err = error_of("fit", own, *tiny, *resumed)
    assert "optimizer.name=adamw, but checkpoint" in err
    assert f"has the states of my_classes.SGDConfig: set my_classes.SGDConfig, {start}" in err
    assert main(["fit", own, *tiny, sgd, *resumed]) == 0

    last = run_folder.with_name("version_1") / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(last, weights_only=True)
    del checkpoint["linrope"]["optimizer_class"]
    torch.save(checkpoint, last)
    err = error_of("fit", own, *tiny, sgd, *resumed, "--trainer.max_steps=6")
    assert "is of another version of linrope: it does not hold optimizer_class. Read it with that version" in err


def test_a_class_alone_and_its_options_as_flags(own, options, capsys):
    assert main(["fit", own, *options, "--data.class_path=my_classes.Rows", "--data.rows", "80"]) == 0
    assert "in 80 documents" in capsys.readouterr().out
    assert main(["fit", own, *options, "--config=data: {class_path: my_classes.Rows}"]) == 0
    assert "in 60 documents" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["fit", own, "--data.class_path=my_classes.Rows", "--help"])
    assert "--data.rows ROWS" in capsys.readouterr().out


def test_what_cannot_be_a_class_is_named(own, options, tmp_path, error_of):
    for args, message in [
        (["--data.class_path=nowhere.Rows"], "data.class_path='nowhere.Rows' is no class (No module named 'nowhere')"),
        (["--data.class_path=my_classes.Row"], "give MODULE.CLASS, and --import FILE.py"),
        (["--data.class_path=Rows"], "data.class_path='Rows' is no class"),
        (
            ["--data.class_path=torch.nn.Linear"],
            "must be a subclass of linrope.training.data_modules.text.TextDataModule",
        ),
        (["--data.class_path=my_classes.Rows", "--data.row=3"], "unknown option 'data.row'. Did you mean 'data.rows'?"),
        (
            ["--data.class_path=my_classes.Rows", "--config=data: {class_path: my_classes.ScaledConfig}"],
            "must be a subclass of linrope.training",
        ),
        (
            ["--optimizer.class_path=my_classes.SGDConfig", "--config=optimizer: {class_path: my_classes.OneGroup}"],
            "optimizer.class_path names two classes, my_classes.SGDConfig and my_classes.OneGroup: give one",
        ),
        (["--optimizer.class_path=my_classes.OneGroup", "--data.path=x"], "data.path='x' does not exist"),
        (
            ["--optimizer.class_path=my_classes.OneGroup", "--data.class_path=my_classes.Rows"],
            "OneGroup.make changed the number of parameter groups",
        ),
        (["--data.class_path=my_classes.Rows", "--data.init_args.rows=3"], "unknown option 'data.init_args.rows'"),
    ]:
        assert message in error_of("fit", own, *options, *args)


def test_a_checkpoint_imports_nothing():
    class Other(LanguageModel):
        pass

    assert loaded_subclass(LanguageModel, f"{__name__}.{Other.__qualname__}") is Other
    message = r"class_path='os.system' is no imported subclass of LanguageModel: import it first, .* --import FILE.py"
    assert_input_errors(
        (lambda: loaded_subclass(LanguageModel, "os.system"), message),
        (
            lambda: loaded_subclass(LanguageModel, class_path_of(EncoderConfig)),
            "EncoderConfig' is no LanguageModel: give a model of that class",
        ),
    )


def test_types_that_cannot_be_evaluated_hide_no_other_error():
    class Own:
        def __init__(self, extra: "Imported" = None) -> None:  # noqa: F821 (for type checkers only)
            pass

    require_choices(["--model.extra=x"], "model.", Own)
