"""Whole models are trained at every length, with the same number of tokens in every step."""

import re
from functools import partial

import pytest

from benchmarks.harness.training_step import mean_loss, training_step
from benchmarks.speed import model_scaling
from tests.benchmarks import commands

SMALL = ["--layers", "2", "--d_model", "16", "--heads", "2", "--tokens", "64", "--repeats", "2"]
run = partial(commands.run, model_scaling.ModelScaling, SMALL, stem="model_scaling")


def test_every_kind_of_model_at_every_length(tmp_path, capsys):
    kinds = ["linear", "softmax", "hybrid", "linear"]
    points, contents = run(tmp_path, "--lengths", "16", "64", "--attention", *kinds)
    printed = capsys.readouterr().out
    assert re.search(r"rows +linear +softmax +hybrid +linear × +hybrid ×", printed)
    assert "64 tokens a step" in printed
    assert list(points) == [(kind, length) for length in (16, 64) for kind in ("linear", "softmax", "hybrid")]
    for (_, length), point in points.items():
        assert point["batch"] == 64 // length
        assert point["tokens_per_second"] == pytest.approx(64 / point["seconds"])
        assert point["flops"] > 0
    assert contents["model"]["d_model"] == 16


def test_a_hybrid_alternates():
    assert model_scaling.layers_of("hybrid", 5) == ["linear", "softmax", "linear", "softmax", "linear"]
    assert model_scaling.layers_of("softmax", 2) == ["softmax", "softmax"]


def test_a_step_trains_the_model():
    losses = []

    def remember(*args):
        losses.append(mean_loss(*args))
        return losses[-1]

    config = model_scaling.LanguageModelConfig(d_model=16, n_layers=1, n_heads=2)
    step = training_step(config, 2, 8, "cpu", remember)
    for _ in range(5):
        step()
    assert losses[-1] < losses[0]
