"""A run of a benchmark in a test, and what it wrote."""

import csv
import importlib.util
import json
from pathlib import Path

from benchmarks.harness.runner import Benchmark


def run(benchmark: type[Benchmark], small: list[str], folder: Path, *args: str, stem: str) -> tuple[int, dict, dict]:
    """Exit status, points by method and length, and the JSON. The CSV holds the same points; a picture is there where
    it can be."""
    status = benchmark.main([*small, *args, "--output", str(folder)])
    with (folder / f"{stem}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    contents = json.loads((folder / f"{stem}.json").read_text())
    assert [row["method"] for row in rows] == [point["method"] for point in contents["points"]]
    if importlib.util.find_spec("matplotlib"):
        assert (folder / f"{stem}.png").stat().st_size > 10_000
    return status, {(p["method"], p["length"]): p for p in contents["points"]}, contents
