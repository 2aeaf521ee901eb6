"""Peak memory of training steps: flat in segments, growing without."""

from functools import partial

import pytest

from benchmarks.speed import beyond_memory
from tests.benchmarks import commands

SMALL = ["--layers", "1", "--d_model", "16", "--heads", "2", "--segment_length", "1024"]
run = partial(commands.run, beyond_memory.BeyondMemory, SMALL, stem="beyond_memory")


@pytest.fixture
def only_linear(monkeypatch):
    """Softmax attention over long rows takes its time, and shows nothing more."""
    monkeypatch.setattr(beyond_memory, "METHODS", beyond_memory.METHODS[1:])


@pytest.mark.exhaustive
def test_memory_grows_with_the_length_and_not_in_segments(tmp_path, capsys, only_linear):
    points, contents = run(tmp_path, "--lengths", "2048", "16384", "--seconds", "30", "--cost", "0")
    methods = ("linear", "linear in segments")
    growth = {m: points[m, 16384]["memory_bytes"] - points[m, 2048]["memory_bytes"] for m in methods}
    # at once, a token keeps its 257 logits and their gradients at least; in segments its number of 8 bytes, and what
    # a process's memory varies by
    assert growth["linear"] > 14_336 * 2 * 257 * 4
    assert growth["linear in segments"] < growth["linear"] / 3
    assert contents["cost_ratio"] is None
    assert "peak memory of the process" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_what_does_not_fit_is_left_out_and_drawn_as_dashes(tmp_path, only_linear):
    args = ("--lengths", "1024", "65536", "--memory", "500MiB", "--cost", "2048", "--repeats", "1")
    points, contents = run(tmp_path, *args)
    assert points["linear", 65536]["status"] in ("over budget", "out of memory")
    assert points["linear in segments", 65536]["status"] == "measured"
    assert contents["cost_ratio"] > 0


def test_a_cost_that_cannot_be_measured_costs_nothing_that_was(tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise RuntimeError("no room")

    monkeypatch.setattr(beyond_memory, "segmented_loss", fail)
    points, contents = run(tmp_path, "--lengths", "256", "--cost", "512", "--repeats", "1")
    assert points["linear", 256]["status"] == "measured"
    assert contents["cost_ratio"] is None
    assert contents["cost_failure"] == "cost at 512: RuntimeError: no room"
    assert "cost at 512: RuntimeError: no room" in capsys.readouterr().out


def test_all_models_have_the_same_sizes():
    options = beyond_memory.BeyondMemory.parse(["--output", "/tmp"])
    configs = [beyond_memory.config_of(method, options) for method in beyond_memory.METHODS]
    assert configs[1] == configs[2] != configs[0]
    assert {(c.d_model, c.n_layers, c.n_heads) for c in configs} == {(128, 4, 4)}
    assert options.segment_length == 8192
