"""Points are measured; dashes are not, and say so."""

import pytest

from benchmarks.harness.pictures import Panel, draw, figure_of
from benchmarks.harness.sweep import OVER_BUDGET, Point

pytest.importorskip("matplotlib")

LINEAR = [Point("linear-rope", n, 1, seconds=n / 1000, tokens_per_second=1000.0, memory_bytes=n) for n in (1, 2, 4, 8)]
SOFTMAX = [Point("softmax-rope", n, 1, tokens_per_second=2000.0 / n, memory_bytes=n) for n in (1, 2)]
SOFTMAX += [Point("softmax-rope", n, 1, OVER_BUDGET) for n in (4, 8)]
PANELS = [
    Panel("tokens_per_second", "tokens/s", "tokens per second", "count", {"linear-rope": 0, "softmax-rope": -1}),
    Panel("memory_bytes", "memory", "peak memory", "bytes", {"linear-rope": 1, "softmax-rope": 1}),
]


def test_what_was_not_run_is_dashed_and_has_no_points():
    figure = figure_of("title", LINEAR + SOFTMAX, PANELS, faster_than="softmax-rope", marks={"linear-rope": 2.0})
    throughput = figure.axes[0].lines
    points = [(list(line.get_xdata()), list(line.get_ydata())) for line in throughput if line.get_marker() != "None"]
    assert points == [([1, 2, 4, 8], [1000] * 4), ([1, 2], [2000, 1000])]
    dashes = [line for line in throughput if line.get_linestyle() == "--"]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in dashes] == [([2, 4, 8], [1000, 500, 250])]
    assert all(line.get_marker() == "None" for line in dashes)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == [
        "linear-rope",
        "softmax-rope",
        "softmax-rope, extrapolated, not measured: tokens/s ∝ 1/T, memory ∝ T",
        "linear-rope is faster than softmax-rope from 2 tokens on",
    ]


def test_axes_are_logarithmic_and_labelled():
    for axes in figure_of("title", LINEAR, PANELS).axes:
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert axes.get_xlabel() == "length (tokens)"
        assert axes.get_ylabel()


def test_a_picture_is_written_even_of_nothing(tmp_path):
    draw(tmp_path / "picture.png", "title", [Point("linear-rope", 8, 1, OVER_BUDGET)], PANELS)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
