"""Sequence parallelism: counts are those of the formulas, steps are timed on processes, and the model adds up."""

from __future__ import annotations

import csv
import json
from copy import deepcopy
from functools import partial

import pytest
import torch._dynamo  # noqa: F401  (each forked process would import it, at its first call of an operator)

from benchmarks.speed.scaleout import ranks
from benchmarks.speed.scaleout.__main__ import main
from benchmarks.speed.scaleout.counted import Sizes, counts, traffic
from linrope.errors import InputError
from tests.distributed.ranks import run_on_ranks

SIZES = Sizes(rows=2, heads=3, width=18)


@pytest.fixture(autouse=True)
def fork(monkeypatch):
    """Processes fork from the tests', where all is imported."""
    monkeypatch.setattr(ranks, "METHOD", "fork")


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """What each of three ranks sends, with 11 and with 176 tokens each."""
    functions = {f"{n}": partial(traffic, lambda: None, SIZES, n) for n in (11, 176)}
    found = run_on_ranks(3, tmp_path_factory.mktemp("ranks"), functions)
    return [[one[n] for one in found] for n in functions]


def test_each_message_of_a_layer_has_its_row(sent):
    rows = {(row.layer, row.part, row.direction): row for row in counts(SIZES, *sent)}
    # B = 2, H = 3, D = E = 6: 4 bytes a number, angles 8
    by_hand = {
        ("linear", "state"): 2 * 3 * (6 * 6 + 6 + 1) * 4,
        ("linear, convolution", "state"): 2 * 3 * (6 * 6 + 6 + 1) * 4,
        ("linear, convolution", "tail"): 2 * 3 * 54 * 4,
        ("linear, selective", "state"): 2 * 3 * (6 * 6 + 6 + 1) * 4,
        ("linear, selective", "angles"): 2 * 3 * 2 * 8,
        ("softmax, window", "window"): 2 * 8 * 3 * 12 * 4,
    }
    assert len(rows) == 2 * len(by_hand)
    for (layer, part), nbytes in by_hand.items():
        for direction in ("forward", "backward"):
            row = rows[layer, part, direction]
            assert (row.formula_bytes, row.bytes_at_length, row.bytes_at_16_times) == (nbytes,) * 3


def test_another_count_is_an_error(sent):
    short, long = deepcopy(sent)
    name, nbytes = long[1]["linear", "backward"][0]
    long[1]["linear", "backward"] = [(name, nbytes + 4)]
    with pytest.raises(InputError, match=r"linear, backward: rank 1 of 3 sent .*1036.*the formulas say .*1032"):
        counts(SIZES, short, long)
    del long[1]["linear", "backward"][0]
    with pytest.raises(InputError, match=r"rank 1 of 3 sent \[\]"):
        counts(SIZES, short, long)


def read(folder, name):
    with (folder / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file)), json.loads((folder / f"{name}.json").read_text())


def test_the_command_counts(tmp_path, capsys):
    small = ["--processes", "2", "--length", "9", "--rows", "1", "--d_model", "18", "--heads", "3"]
    assert main(["counted", *small, "--output", str(tmp_path)]) == 0
    rows, contents = read(tmp_path, "counted")
    assert contents["command"].startswith("python -m benchmarks.scaleout counted --processes 2")
    assert rows[0]["formula_bytes"] == rows[0]["bytes_at_16_times"] == str(3 * 43 * 4)
    assert "the same with 9 and 144 tokens a rank" in capsys.readouterr().out


def test_the_command_measures(tmp_path, capsys):
    assert main(["measured", "--quick", "--processes", "2", "--output", str(tmp_path)]) == 0
    rows, _ = read(tmp_path, "measured")
    assert [(r["scaling"], r["processes"], r["tokens"]) for r in rows] == [
        ("strong", "1", "256"),
        ("strong", "2", "256"),
        ("weak", "1", "64"),
        ("weak", "2", "128"),
    ]
    for row in rows:
        assert float(row["tokens_per_second"]) == pytest.approx(int(row["tokens"]) / float(row["seconds"]))
        assert float(row["cpu_seconds"]) > 0
    assert "cores" in capsys.readouterr().out


def test_an_error_of_one_process_ends_the_others():
    with pytest.raises(Exception, match="no such rank"):
        ranks.on_ranks(2, fail)


def fail(report):
    if ranks.dist.get_rank() == 1:
        raise ValueError("no such rank")
    ranks.dist.barrier()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("counted --processes 1", "one process sends nothing"),
        ("counted --length 8", "--length 8: must be the window of 9 tokens at least"),
        ("counted --heads 5", "--d_model 96: must be 5 heads of an even size"),
        ("measured --length 3", "--length 3: each of 4 processes needs a token"),
        ("measured --heads 3", "--heads 3: --d_model 128 must be an even multiple"),
        ("measure", "invalid choice: 'measure'"),
    ],
)
def test_bad_options_are_named(args, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(args.split())
    assert exit_.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
