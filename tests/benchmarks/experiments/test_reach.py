"""How far each head sees, against a gate whose decays are known; and the pass key benchmark from end to end."""

import json
import math

import torch

from benchmarks.experiments import passkey, reach
from linrope import LanguageModel, LanguageModelConfig


def test_reach_is_that_of_the_gates(tmp_path, capsys):
    model = LanguageModel(LanguageModelConfig(d_model=16, n_layers=2, n_heads=2, forget_gate=True))
    for block, biases in zip(model.blocks, ([4.0, 0.0], [2.0, -3.0])):
        block.attention.forget.bias.data = torch.tensor(biases)  # its matrix is 0 at the start: the same at each token
    model.save_pretrained(tmp_path / "some.model")
    args = ["--model", str(tmp_path / "some.model"), "--context", "128", "--rows", "2", "--output", str(tmp_path)]
    assert reach.main(args) == 0
    found = json.loads((tmp_path / "reach.json").read_text())["points"]
    assert [(head["layer"], head["head"]) for head in found] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for head, bias in zip(found, (4.0, 0.0, 2.0, -3.0)):
        expected = math.ceil(1 / math.log1p(math.exp(-bias)))  # -1 / logsigmoid, in whole tokens
        assert head["tokens"] == head["low"] == head["high"] == expected
    assert (tmp_path / "reach.png").stat().st_size > 10_000


def test_a_gate_that_clears_at_times_has_the_lifetimes_of_what_it_cleared():
    log_decay = torch.zeros(3, 100)
    log_decay[0, 30] = -5.0  # what was written before is gone at token 30, what was written since stays
    log_decay[1] = -1 / 7.5
    log_decay[2, 90] = -0.5
    expected = [[30 - t if t < 30 else 100 for t in range(50)], [8] * 50, [100] * 50]
    assert reach.lifetimes(log_decay).tolist() == expected


def test_a_model_learns_and_is_asked(tmp_path, capsys):
    sizes = ["--steps", "2", "--d_model", "16", "--layers", "1", "--heads", "2"]
    asked = ["--lengths", "128", "1024", "--depths", "0", "100", "--rows", "2"]
    assert passkey.main([*sizes, *asked, "--output", str(tmp_path)]) == 0
    contents = json.loads((tmp_path / "recall.json").read_text())
    assert [(case["length"], case["depth"]) for case in contents["cases"]] == [
        (128, 0), (128, 100), (1024, 0), (1024, 100)
    ]  # fmt: skip
    assert contents["trained_to"] == 512
    assert len(contents["train_losses"]) == 2
    assert contents["command"].startswith("python -m benchmarks.passkey --steps 2")
    assert LanguageModel.from_pretrained(tmp_path / "passkey.model").config.d_model == 16
    assert (tmp_path / "recall.png").stat().st_size > 10_000
