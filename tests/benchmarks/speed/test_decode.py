"""Decoding is measured at every context, and a cache that is too large is said to be."""

from functools import partial

import pytest

from benchmarks.harness.sweep import Point
from benchmarks.speed import decode
from tests.benchmarks import commands

SMALL = ["--heads", "1", "--head_dim", "8", "--steps", "2", "--repeats", "2"]
run = partial(commands.run, decode.Decode, SMALL, stem="decode-float32")


def test_both_methods_at_every_context_and_batch(tmp_path, capsys):
    points, contents = run(tmp_path, "--contexts", "10", "1000", "--batch", "1", "2")
    names = [f"{kind}-rope, batch {batch}" for batch in (1, 2) for kind in ("linear", "softmax")]
    assert list(points) == [(name, context) for name in names for context in (10, 1000)]
    for point in points.values():
        assert point["status"] == "measured"
        assert point["tokens_per_second"] == pytest.approx(point["batch"] / point["seconds"])
    assert points[names[0], 10]["memory_bytes"] == points[names[0], 1000]["memory_bytes"]
    assert points[names[1], 1000]["memory_bytes"] == 2 * 1001 * 8 * 4
    assert contents["settings"]["contexts"] == [10, 1000]
    printed = capsys.readouterr().out
    assert "linear-rope, batch 1: a token at 1,000 takes" in printed


def test_one_context_has_no_ratio_in_the_title():
    for contexts, title in (
        (["10"], "Time of a token"),
        (["10", "1000"], "Time of a token, longest context over shortest: linear-rope 2.00×"),
    ):
        options = decode.Decode.parser().parse_args([*SMALL, "--contexts", *contexts, "--batch", "1"])
        points = [Point("linear-rope, batch 1", n, 1, seconds=s) for n, s in zip(options.contexts, (1.0, 2.0))]
        assert decode.Decode(options, "some", points).figures()[""].get_suptitle() == title


def test_a_cache_over_the_budget_is_not_made(tmp_path, capsys):
    points, _ = run(tmp_path, "--contexts", "10", "1000000", "--batch", "1", "--memory", "1MB")
    too_long = points["softmax-rope, batch 1", 1_000_000]
    assert (too_long["status"], too_long["seconds"]) == ("over budget", None)
    assert points["softmax-rope, batch 1", 10]["status"] == "measured"
    assert points["linear-rope, batch 1", 1_000_000]["status"] == "measured"
    assert "over budget, the cache takes 61 MiB of 977 KiB" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("part", "at"), [("__init__", 0), ("__call__", 3)])
def test_a_failure_keeps_what_was_measured(part, at, tmp_path, monkeypatch, capsys):
    """Where tensors cannot be made, and in the middle of the samples."""
    calls, real = [], getattr(decode.SoftmaxDecoding, part)

    def failing(self, *args):
        calls.append(None)
        if len(calls) > at:
            raise RuntimeError("can't allocate memory")
        return real(self, *args)

    monkeypatch.setattr(decode.SoftmaxDecoding, part, failing)
    points, _ = run(tmp_path, "--contexts", "10", "--batch", "1")
    assert points["linear-rope, batch 1", 10]["status"] == "measured"
    assert points["softmax-rope, batch 1", 10]["status"] == "out of memory"
    assert "softmax-rope, batch 1 at 10: out of memory, " in " ".join(capsys.readouterr().out.split())
