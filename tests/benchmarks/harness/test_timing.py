"""Rounds alternate, a failure stops one call alone, and FLOPs are counted."""

import pytest
import torch

from benchmarks.harness import timing
from benchmarks.harness.timing import Sample, Several, alternate, copy, count_flops, gemm_rate
from benchmarks.speed.methods import Inputs, Setting, call_of, linear, softmax, softmax_materialised


def test_a_sample_gives_its_median_and_quartiles():
    sample = Sample((4.0, 1.0, 2.0, 3.0, 10.0))
    assert (sample.median, sample.quartiles, sample.spread) == (3.0, (2.0, 4.0), 2 / 3)
    assert Sample((5.0,)).quartiles == (5.0, 5.0)


def test_calls_run_in_turn_after_a_warm_up():
    order = []
    found = alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2)
    assert order == ["a", "b"] * 3
    assert {name: len(sample.rounds) for name, sample in found.samples.items()} == {"a": 2, "b": 2}


def test_an_error_is_raised_by_calls_that_must_all_succeed():
    with pytest.raises(ZeroDivisionError):
        alternate({"good": lambda: None, "bad": lambda: 1 / 0}, 1)


def test_flops_are_counted_in_every_form():
    heads, length, dim = 2, 64, 16
    x = Inputs.make(Setting(length, heads=heads, head_dim=dim))
    product = 2 * heads * length**2 * dim
    # PyTorch counts all pairs; a backward makes the scores again and has four products beside
    assert count_flops(call_of(softmax, x)) == 7 * product
    assert count_flops(call_of(softmax_materialised, x)) == 6 * product
    assert count_flops(call_of(linear, x)) > 0


def test_rates_are_positive():
    assert gemm_rate(torch.float32, rounds=1) > 0
    assert copy()[1] == 2 * 4 * 2**12


def test_several_calls_are_one():
    calls = []
    Several(lambda: calls.append(None), 3)()
    assert len(calls) == 3


def test_a_turn_is_a_few_short_calls_without_the_first_or_one_long(monkeypatch):
    monkeypatch.setattr(timing, "TURN_CALLS", 4)
    seconds = iter([9.0, 0.1, 0.3, 0.2, 0.1, 0.1, 0.1, 0.4])
    monkeypatch.setattr(timing, "clock", lambda call, device: next(seconds))
    assert timing.turn(None) == 9.0
    assert timing.turn(None) == 0.25  # of 0.1, 0.3, 0.2, which are over 0.5 seconds: without the first
    assert timing.turn(None) == 0.1  # of 0.1, 0.1, 0.1, 0.4, by the number of calls
