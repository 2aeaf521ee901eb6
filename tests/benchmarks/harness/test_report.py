"""Options, numbers as text, and what is written."""

import argparse
import csv
import json

import pytest
from rich.console import Console

from benchmarks.harness import report
from benchmarks.harness.sweep import Point


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4GiB", 2**32), ("500MB", 500_000_000), ("1.5 kib", 1536), ("77", 77), ("2g", 2_000_000_000)]
)
def test_sizes_are_read(text, nbytes):
    assert report.parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "4Gob"])
def test_what_is_no_size_is_named(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no size: give one such as 4GiB"):
        report.parse_bytes(text)


def test_numbers_as_text():
    assert [report.bytes_text(n) for n in (0, 100, 1024, 1536, 2**30, 123 * 2**20)] == [
        "0 B",
        "100 B",
        "1 KiB",
        "1.5 KiB",
        "1 GiB",
        "123 MiB",
    ]
    assert [report.count_text(n) for n in (999, 12_345, 1.5e9)] == ["999", "12.3k", "1.5G"]
    assert [report.seconds_text(s) for s in (0.0001, 0.005, 6.4861)] == ["0.100", "5.00", "6,486.1"]


def test_a_run_says_where_it_ran():
    found = report.surroundings("cpu", "scaling", ["--lengths", "8"])
    assert found["command"] == "python -m benchmarks.scaling --lengths 8"
    assert found["machine"]["device"]
    assert set(found["versions"]) == {"python", "torch", "linrope"}


def test_results_are_written_and_an_interruption_is_said(tmp_path, capsys):
    points = [Point("a", 8, 1, seconds=0.5), Point("b", 8, 1, "over budget", "predicted 2 s of 1 s")]
    assert report.finish(Console(), tmp_path, "run", points, {"interrupted": False}) == 0
    assert report.finish(Console(), tmp_path, "run", points, {"interrupted": True}) == 130
    assert "interrupted: what was measured until then is kept" in capsys.readouterr().out
    with (tmp_path / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["seconds"] for row in rows] == ["0.5", ""]
    assert json.loads((tmp_path / "run.json").read_text())["points"][1]["detail"] == "predicted 2 s of 1 s"


def test_nothing_measured_is_written_too(tmp_path):
    assert report.finish(Console(), tmp_path, "run", [], {"interrupted": True}) == 130
    assert json.loads((tmp_path / "run.json").read_text())["points"] == []
