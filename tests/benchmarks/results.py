"""What the tests of all commands share: reading back what a run wrote."""

import csv
import importlib.util
import json
from pathlib import Path


def read(folder: Path, stem: str) -> tuple[list[dict], dict]:
    """Rows of the CSV and contents of the JSON, which hold the same points; a picture is there where it can be."""
    with (folder / f"{stem}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    contents = json.loads((folder / f"{stem}.json").read_text())
    assert [row["method"] for row in rows] == [point["method"] for point in contents["points"]]
    if importlib.util.find_spec("matplotlib"):
        assert (folder / f"{stem}.png").stat().st_size > 10_000
    return rows, contents
