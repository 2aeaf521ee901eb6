"""Compiled training steps: the same run, the same names, and what stays as it is."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from linrope import EncoderConfig, LanguageModel
from linrope.cli.main import main
from linrope.errors import InputError
from linrope.training.callbacks.compiled import CompiledTraining, require_compiler
from linrope.training.tasks.classification import ClassificationModule
from tests.training.test_resume import load, losses, version

STEPS = ["--trainer.max_steps=4", "--trainer.log_every_n_steps=1", "--run.checkpoint_every_n_steps=2"]


@pytest.fixture
def compiled_graphs(monkeypatch):
    """The number of graphs that are compiled, by a compiler that only traces, so that no C++ compiler is needed."""
    graphs, compile_ = [], nn.Module.compile

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(nn.Module, "compile", lambda module: compile_(module, backend=count))
    monkeypatch.setattr("linrope.cli.fit.require_compiler", lambda device: None)
    torch._dynamo.reset()
    yield graphs
    torch._dynamo.reset()


def test_a_compiled_run_is_the_same_run_with_one_graph(tiny, run_folder, compiled_graphs, capsys):
    """Also with a validation, measured health, an evaluation of other lengths and a sample: none is compiled."""
    others = ["--run.health_every_n_steps=2", "--sample.prompt=for"]
    assert main(["fit", *tiny, *STEPS, *others, "--run.compile=true"]) == 0
    assert len(compiled_graphs) == 1
    assert main(["fit", *tiny, *STEPS, *others]) == 0
    compiled, plain = (list(map(float, losses(folder).values())) for folder in (run_folder, version(run_folder, 1)))
    assert compiled == pytest.approx(plain, rel=1e-5)
    weights = load(run_folder)["state_dict"]
    assert weights.keys() == load(version(run_folder, 1))["state_dict"].keys()
    last = run_folder / "checkpoints" / "last.ckpt"
    assert LanguageModel.from_pretrained(last)(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, 257)
    assert main(["validate", *tiny, f"--ckpt_path={last}", "--lengths", "2x"]) == 0
    assert main(["generate", f"--ckpt_path={last}", "--prompt=for", "--max_new_tokens=3"]) == 0
    assert main(["fit", *tiny, *STEPS, "--trainer.max_steps=6", "--run.compile=true", f"--ckpt_path={last}"]) == 0


@pytest.mark.exhaustive
def test_rows_of_many_lengths_and_segments_are_compiled_a_few_times(tiny, compiled_graphs):
    stages = '[{"seq_len": 8, "tokens": 64}, {"seq_len": 16, "tokens": 64}, {"seq_len": 32, "tokens": 64}]'
    options = ["--trainer.max_steps=3", "--run.compile=true"]
    assert main(["fit", *tiny, *options, f"--data.curriculum={stages}"]) == 0
    assert len(compiled_graphs) == 2  # for the first length, and for all others
    compiled_graphs.clear()
    torch._dynamo.reset()
    assert main(["fit", *tiny, *options, "--data.context=96", "--segment_length=8"]) == 0
    assert len(compiled_graphs) <= 8  # PyTorch's limit; the lengths of states are numbers


def test_a_model_without_blocks_is_named():
    model = EncoderConfig(d_model=16, n_layers=1, n_heads=2, head="classification").build()
    with pytest.raises(InputError, match="compiles the blocks of a LanguageModel, and SequenceClassifier has none"):
        CompiledTraining().on_fit_start(None, SimpleNamespace(model=model))
    with pytest.raises(InputError, match=r"whose weights have other names: pass the model itself\.$"):
        ClassificationModule(torch.compile(model))


def test_without_a_compiler_the_run_does_not_begin(tiny, run_folder, error_of, monkeypatch):
    def fails(function):
        raise RuntimeError("No working C++ compiler found\nand more")

    monkeypatch.setattr(torch, "compile", fails)
    with pytest.raises(InputError, match=r"does not work here \(No working .* found\)\. Install Triton, or remove the"):
        require_compiler("cuda")
    error = error_of("fit", *tiny, "--run.compile=true")
    assert "run.compile=True: torch.compile does not work here (No working C++ compiler found). Install a C++" in error
    assert not run_folder.exists()
