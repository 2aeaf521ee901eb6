"""One run from options to files: checks, results, Ctrl-C, and pictures drawn again."""

import argparse
import csv
import json
import sys

import pytest

from benchmarks.harness import options
from benchmarks.harness.machine import surroundings
from benchmarks.harness.pictures import new_axes
from benchmarks.harness.runner import Benchmark
from benchmarks.harness.sweep import INTERRUPTED, Point
from benchmarks.harness.timing import milliseconds_text
from linrope.errors import InputError
from linrope.utils.terminal import new_table
from tests.benchmarks.commands import refusal

POINTS = [Point("a", 8, 1, seconds=0.5), Point("b", 8, 1, "over budget", "predicted 2 s of 1 s")]


class Some(Benchmark):
    name = "some"

    @classmethod
    def add_options(cls, add):
        add("--sizes", type=int, nargs="+", required=True)
        add("--device", default="cpu")

    def measure(self):
        for size, point in zip(self.options.sizes, POINTS, strict=False):
            if size == 13:
                raise KeyboardInterrupt
            if size == 15:  # as Lightning in its Trainer
                try:
                    raise KeyboardInterrupt
                except KeyboardInterrupt:
                    sys.exit(1)
            if size == 16:
                sys.exit(7)
            if size == 14:
                raise InputError("size=14 is no size: give another.")
            self.points.append(point)

    def table(self):
        return new_table("Some", "size")

    def remarks(self):
        return [f"{len(self.points)} points"]

    def figures(self):
        title = f"{self.points[0].method} of {self.options.sizes}"
        return {"": new_axes(title).figure, "-more": new_axes(title).figure}


def test_sizes_are_read():
    texts = ("4GiB", "500MB", "1.5 kib", "77", "2g")
    assert [options.parse_bytes(text) for text in texts] == [2**32, 500_000_000, 1536, 77, 2_000_000_000]
    for text in ("", "GiB", "-1GiB", "0", "4Gob"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no size: give one such as 4GiB"):
            options.parse_bytes(text)


def test_times_as_text():
    assert [milliseconds_text(s) for s in (0.0001, 0.005, 6.4861)] == ["0.100", "5.00", "6,486.1"]


def test_a_run_says_where_it_ran():
    found = surroundings("cpu", "scaling", ["--lengths", "8"])
    assert found["command"] == "python -m benchmarks.scaling --lengths 8"
    assert found["machine"]["device"]
    assert {"python", "torch", "linrope"} <= found["versions"].keys()


def test_results_are_written(tmp_path, capsys):
    assert Some.main(["--sizes", "1", "2", "--output", str(tmp_path)]) == 0
    with (tmp_path / "some.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["seconds"] for row in rows] == ["0.5", ""]
    contents = json.loads((tmp_path / "some.json").read_text())
    assert contents["points"][1]["detail"] == "predicted 2 s of 1 s"
    assert contents["interrupted"] is False
    assert "2 points" in capsys.readouterr().out


class InTurn(Some):
    name = "in_turn"
    error: BaseException

    @classmethod
    def add_options(cls, add):
        super().add_options(add)
        add("--repeats", type=int, default=2)

    def measure(self):
        calls = []

        def fails_third():
            calls.append(None)
            if len(calls) == 3:
                raise self.error

        works = {"first": lambda: None, "second": fails_third}
        points = {name: Point(name, 8, 1, INTERRUPTED) for name in works}
        self.points += points.values()
        self.time_in_turn(works, points, 8, self.progress("", 6), "{}")


@pytest.mark.parametrize(
    ("error", "status", "points"),
    [
        (KeyboardInterrupt(), 130, [("measured", 2, ""), ("measured", 1, "")]),
        (MemoryError("no room"), 0, [("measured", 2, ""), ("out of memory", 0, "MemoryError: no room")]),
        (TypeError("no such argument"), 0, [("measured", 2, ""), ("failed", 0, "TypeError: no such argument")]),
    ],
)
def test_a_failure_in_turn_ends_one_call_and_ctrl_c_all(tmp_path, monkeypatch, error, status, points):
    monkeypatch.setattr(InTurn, "error", error, raising=False)
    assert InTurn.main(["--sizes", "1", "--output", str(tmp_path)]) == status
    found = json.loads((tmp_path / "in_turn.json").read_text())["points"]
    assert [(p["status"], p["rounds"], p["detail"]) for p in found] == points
    assert found[0]["tokens_per_second"] == pytest.approx(8 / found[0]["seconds"])


@pytest.mark.parametrize(("sizes", "kept"), [(["1", "13"], 1), (["13"], 0), (["1", "15"], 1)])
def test_an_interruption_keeps_the_points_and_is_said(tmp_path, capsys, sizes, kept):
    assert Some.main(["--sizes", *sizes, "--output", str(tmp_path)]) == 130
    said = "the results so far are kept" if kept else "there were no results yet"
    assert f"interrupted: {said}" in capsys.readouterr().out
    contents = json.loads((tmp_path / "some.json").read_text())
    assert (len(contents["points"]), contents["interrupted"]) == (kept, True)
    assert (tmp_path / "some.csv").read_text().startswith("method,length,")


def test_an_exit_of_the_work_is_one(tmp_path):
    with pytest.raises(SystemExit) as caught:
        Some.main(["--sizes", "16", "--output", str(tmp_path)])
    assert caught.value.code == 7


def test_an_error_in_the_options_that_the_work_finds_is_one_line(tmp_path, capsys):
    assert "size=14 is no size" in refusal(Some, ["--sizes", "14", "--output", str(tmp_path)], capsys)


def test_an_error_that_comes_later_keeps_the_points(tmp_path, capsys):
    assert Some.main(["--sizes", "1", "14", "--output", str(tmp_path)]) == 1
    assert "error: size=14 is no size: give another." in capsys.readouterr().out
    assert len(json.loads((tmp_path / "some.json").read_text())["points"]) == 1


def test_pictures_are_drawn_again_from_the_json_file(tmp_path, capsys):
    Some.main(["--sizes", "1", "--output", str(tmp_path)])
    pictures = [tmp_path / "some.png", tmp_path / "some-more.png"]
    first = [picture.read_bytes() for picture in pictures]
    for picture in pictures:
        picture.unlink()
    with pytest.raises(SystemExit) as exit_:
        Some.main(["--redraw", str(tmp_path / "some.json")])
    assert exit_.value.code == 0
    assert [picture.read_bytes() for picture in pictures] == first
    message = refusal(Some, ["--redraw", str(tmp_path / "none.json")], capsys)
    assert "none.json: cannot be read as a result of some" in message
