"""Benchmarks that run in a test, and those that refuse to."""

import csv
import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks.harness.runner import Benchmark


def refusal(benchmark: type[Benchmark], args: list[str], capsys: pytest.CaptureFixture) -> str:
    """The message with which a command ends before it runs."""
    with pytest.raises(SystemExit) as exit_:
        benchmark.main(args)
    assert exit_.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def run(benchmark: type[Benchmark], small: list[str], folder: Path, *args: str, stem: str, status: int = 0):
    """Points by method and length, and the JSON. The CSV holds the same points; a picture is there where it can be."""
    assert benchmark.main([*small, *args, "--output", str(folder)]) == status
    with (folder / f"{stem}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    contents = json.loads((folder / f"{stem}.json").read_text())
    assert [row["method"] for row in rows] == [point["method"] for point in contents["points"]]
    if importlib.util.find_spec("matplotlib"):
        assert (folder / f"{stem}.png").stat().st_size > 10_000
    return {(p["method"], p["length"]): p for p in contents["points"]}, contents
