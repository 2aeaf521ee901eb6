"""Points are measured; dashes are not, and say so."""

import pytest

from benchmarks.harness.pictures import Quantity, against_length
from benchmarks.harness.sweep import OVER_BUDGET, Point

pytest.importorskip("matplotlib")

LINEAR = [Point("linear-rope", n, 1, seconds=n / 1000, tokens_per_second=1000.0, memory_bytes=n) for n in (1, 2, 4, 8)]
SOFTMAX = [Point("softmax-rope", n, 1, tokens_per_second=2000.0 / n, memory_bytes=n) for n in (1, 2)]
SOFTMAX += [Point("softmax-rope", n, 1, OVER_BUDGET) for n in (4, 8)]
SPEED = Quantity("tokens_per_second", "tokens per second", "count", {"linear-rope": 0, "softmax-rope": -1})
SIZE = Quantity("memory_bytes", "peak memory", "bytes", {"linear-rope": 1, "softmax-rope": 1})


def test_what_was_not_run_is_dashed_and_has_no_points():
    (axes,) = against_length("title", SOFTMAX + LINEAR, SPEED, marks={"linear-rope is faster": 2.0}).axes
    points = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines if line.get_marker() != "None"]
    assert points == [([1, 2], [2000, 1000]), ([1, 2, 4, 8], [1000] * 4)]
    dashes = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in dashes] == [([2, 4, 8], [1000, 500, 250])]
    assert all(line.get_marker() == "None" for line in dashes)
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert len(legend) == 3
    assert legend[2] == "softmax-rope,\nextrapolated ∝ 1/T"  # the order in which the lines end
    assert [text.get_text() for text in axes.texts] == ["linear-rope is faster"]


def test_axes_are_logarithmic_and_labelled():
    for quantity in (SPEED, SIZE):
        (axes,) = against_length("title", LINEAR, quantity).axes
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("length (tokens)", quantity.label)


def test_a_picture_is_drawn_even_of_nothing():
    against_length("title", [Point("linear-rope", 8, 1, OVER_BUDGET)], SPEED)
