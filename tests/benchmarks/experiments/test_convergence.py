"""Convergence curves, of runs whose losses are known."""

import csv
import json
import math

import pytest

from benchmarks.experiments import convergence
from tests.benchmarks.commands import refusal

TITLE = convergence.read_grid(convergence.GRID).title


def write_run(folder, variant, seed, losses, steps=100, title=TITLE, diverged=None):
    run = {"variant": variant, "steps": steps, "tokens": steps * 10, "training": {"losses": losses}}
    run |= {"measured": {"title": title}, "diverged": diverged}
    (folder / "runs").mkdir(exist_ok=True)
    (folder / "runs" / f"{variant}-seed{seed}.json").write_text(json.dumps(run))


def test_means_of_twentieths_over_seeds(tmp_path, capsys):
    nats = [float(100 - i) for i in range(100)]
    write_run(tmp_path, "numerator", 0, nats)
    write_run(tmp_path, "numerator", 1, [2 * x for x in nats])
    write_run(tmp_path, "numerator", 2, nats[:40], steps=40, diverged="the loss is nan at step 41")
    write_run(tmp_path, "softmax.none", 0, nats)
    write_run(tmp_path, "before_map", 0, nats)  # no line of the picture
    assert convergence.Convergence.main(["--runs", str(tmp_path)]) == 0
    rows = list(csv.DictReader((tmp_path / "convergence.csv").open()))
    assert {(row["attention"], row["positions"]) for row in rows} == {("softmax", "none"), ("linear", "RoPE")}
    first = next(row for row in rows if row["attention"] == "linear")
    bits = 98 / math.log(2)  # the mean of 100, 99, 98, 97 and 96
    assert (first["seeds"], first["tokens"]) == ("2", "25")  # the middle of five steps of ten tokens
    assert float(first["low"]) == pytest.approx(bits)
    assert float(first["mean"]) == pytest.approx(1.5 * bits)
    assert float(first["high"]) == pytest.approx(2 * bits)
    assert len(rows) == 2 * convergence.POINTS
    assert (tmp_path / "convergence.png").stat().st_size > 10_000
    assert "linear" in capsys.readouterr().out


def curve_of(steps, losses):
    return convergence.curve_of({"steps": steps, "tokens": 10 * steps, "training": {"losses": losses}})


def test_the_last_recorded_mean_may_be_of_fewer_steps():
    *_, before, last = curve = curve_of(45, [1.0] * 22 + [7.0])  # in means of two: the last is of one step
    assert before == (410, pytest.approx(1 / math.log(2)))  # steps 40 and 41
    assert last == (435, pytest.approx((2 * 1 + 1 * 7) / 3 / math.log(2)))  # steps 42, 43 and 44
    assert len(curve) == convergence.POINTS


def test_a_short_run_has_as_many_points_as_losses():
    points = [(tokens, pytest.approx(nats / math.log(2))) for tokens, nats in ((5, 3), (15, 2), (25, 1))]
    assert curve_of(3, [3.0, 2.0, 1.0]) == points


def test_its_variants_are_those_of_the_grid():
    grid = convergence.read_grid(convergence.GRID)
    named = {name for variants in convergence.PANELS.values() for name in variants}
    assert len(named) == 9
    assert named <= grid.variants.keys()


def test_runs_of_another_grid_are_named(tmp_path, capsys):
    write_run(tmp_path, "none", 0, [1.0] * 100, title="Forms of RoPE")
    assert "holds results of 'Forms of RoPE'" in refusal(convergence.Convergence, ["--runs", str(tmp_path)], capsys)
