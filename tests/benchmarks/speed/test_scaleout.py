"""Sequence parallelism: counts are those of the formulas, steps are timed on processes, and the model adds up."""

from __future__ import annotations

import csv
import json
import os
from copy import deepcopy
from functools import partial

import pytest
import torch._dynamo  # noqa: F401  (each forked process would import it, at its first call of an operator)

from benchmarks.speed.scaleout import counted, measured, model, ranks, row, volumes
from benchmarks.speed.scaleout.__main__ import PARTS, main
from benchmarks.speed.scaleout.counted import Sizes, counts, traffic
from benchmarks.speed.scaleout.model import LASP2, LINROPE, RING, ULYSSES, Machine, Transformer
from benchmarks.speed.scaleout.modelled import Modelled, span_text
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
    rows = {(one.layer, one.part, one.direction): one for one in counts(SIZES, *sent)}
    # B = 2, H = 3, D = E = 6: 4 bytes a number
    by_hand = {
        ("linear", "state"): 2 * 3 * (6 * 6 + 6 + 1) * 4,
        ("linear, convolution", "state"): 2 * 3 * (6 * 6 + 6 + 1) * 4,
        ("linear, convolution", "tail"): 2 * 3 * 54 * 4,
        ("softmax, window", "window"): 2 * 8 * 3 * 12 * 4,
    }
    assert len(rows) == 2 * len(by_hand)
    for (layer, part), nbytes in by_hand.items():
        for direction in ("forward", "backward"):
            one = rows[layer, part, direction]
            assert (one.formula_bytes, one.bytes_at_length, one.bytes_at_16_times) == (nbytes,) * 3


def test_another_count_is_an_error(sent):
    short, long = deepcopy(sent)
    name, nbytes = long[1]["linear", "backward"][0]
    long[1]["linear", "backward"] = [(name, nbytes + 4)]
    with pytest.raises(InputError, match=r"linear, backward: rank 1 of 3 sent .*1036.*the formulas say .*1032"):
        counts(SIZES, short, long)
    del long[1]["linear", "backward"][0]
    with pytest.raises(InputError, match=r"rank 1 of 3 sent \[\]"):
        counts(SIZES, short, long)


def run(command, folder):
    return main([*command.split(), "--output", str(folder)])


def read(folder, name):
    with (folder / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file)), json.loads((folder / f"{name}.json").read_text())


def test_the_command_counts(tmp_path, capsys):
    assert run("counted --processes 2 --length 9 --rows 1 --d_model 18 --heads 3", tmp_path) == 0
    rows, contents = read(tmp_path, "counted")
    assert contents["command"].startswith("python -m benchmarks.scaleout counted --processes 2")
    assert rows[0]["formula_bytes"] == rows[0]["bytes_at_16_times"] == str(3 * 43 * 4)
    assert "the same with 9 and 144 tokens a rank" in capsys.readouterr().out


def test_the_command_measures(tmp_path, capsys):
    assert run("measured --quick --processes 2", tmp_path) == 0
    rows, _ = read(tmp_path, "measured")
    assert [(r["scaling"], r["processes"], r["tokens"]) for r in rows] == [
        ("strong", "1", "256"),
        ("strong", "2", "256"),
        ("weak", "1", "64"),
        ("weak", "2", "128"),
    ]
    for one in rows:
        assert float(one["seconds_q1"]) <= float(one["seconds"]) <= float(one["seconds_q3"])
        assert int(one["cores"]) == os.cpu_count()
        assert float(one["cpu_seconds"]) > 0
    assert "cores" in capsys.readouterr().out


def test_the_command_trains_on_a_long_row(tmp_path, capsys):
    small = "row --processes 2 --length 600 --segment_length 256 --layers 1 --d_model 8 --heads 2 --memory 1MiB"
    assert run(small, tmp_path) == 1
    rows, _ = read(tmp_path, "row")
    assert [int(one["tokens"]) for one in rows] == [300, 300]
    assert rows[0]["loss"] == rows[1]["loss"]
    assert 4 < float(rows[0]["loss"]) < 7
    assert "more than 1 MiB a process" in capsys.readouterr().out


SMALL = Transformer(layers=2, d_model=8, heads=2, vocab=10, chunk=4)
ROUND = Machine(peak=2e6, utilisation=0.5, node=4, nvlink=100, network=10, start=5, nvlink_step=1, network_step=3)
"""Rates and latencies for which times can be worked out by hand."""


def test_volumes_of_one_layer():
    # B = 1, H = 2, D = E = 4: 2·(16 + 4 + 1) numbers of 4 bytes
    assert volumes.state_bytes(1, 2, 4, 4) == 168
    assert volumes.lasp2_bytes(1, 2, 4, 4) == 128
    # 64 tokens on 4 ranks, d = 8, 2 bytes a number: keys and values of 16 tokens are 512 bytes, passed on 3 times
    assert volumes.ring_bytes(64, 4, 8) == (1536, 3072)
    assert volumes.ulysses_bytes(64, 4, 8) == (1024, 1024)


def test_flops_of_a_step():
    assert SMALL.parameters == 2 * 12 * 64 + 80 == 1616
    # 6·N·T, and for 2 layers three times 2·T²·d, or T·d·(4·D + 2·C)
    assert SMALL.flops(100, is_linear=False) == 6 * 1616 * 100 + 2 * 3 * 2 * 100**2 * 8
    assert SMALL.flops(100, is_linear=True) == 6 * 1616 * 100 + 2 * 3 * 100 * 8 * (16 + 8)


def test_times_of_collectives():
    # in a node of 4 by NVLink: 3 states of 200 bytes at 100 a second; a tree of 2 steps, a ring of 3
    assert ROUND.gather(4, 200) == (3 * 2 + 5 + 2, 3 * 2 + 5 + 3)
    # two nodes: 4 adapters of 10 a second let in 40; a tree of 2 steps inside and 1 between, a ring of 6 and 1
    assert ROUND.gather(8, 200) == (7 * 5 + 5 + 2 + 3, 7 * 5 + 5 + 6 + 3)
    assert ROUND.all_reduce(4, 800) == (2 * 13, 2 * 14)
    assert ROUND.pass_on(4, 300) == (3 + 3 * 1, 3 + 3 * (1 + 5))
    assert ROUND.pass_on(8, 800) == (20 + 7 * 3, 80 + 7 * (3 + 5))
    # an eighth to each: three inside, 300 bytes, four outside, 400 bytes
    assert ROUND.all_to_all(8, 800) == (40 + 10, 3 + 40 + 14)


@pytest.mark.parametrize(
    ("method", "sent", "low", "high"),
    [
        # by layer and direction: (3·168 bytes at 100 a second, with 7 and 8 seconds of latency)
        (LINROPE, 2 * 2 * 504, 4 * (5.04 + 7), 4 * (5.04 + 8)),
        (LASP2, 2 * 2 * 384, 4 * (3.84 + 7), 4 * (3.84 + 8)),
        (RING, 2 * 4608, 2 * (46.08 + 6), 2 * (46.08 + 36)),
    ],
)
def test_a_step_is_bounded_by_what_overlaps(method, sent, low, high):
    step = model.step(method, SMALL, ROUND, 4, 64)
    assert step.computation == SMALL.flops(64, method != RING) / 4e6
    gradients = 2 * 3 * (1616 * 4 / 4) / 100
    assert step.bytes_sent == pytest.approx(sent)
    assert step.communication_low == pytest.approx(low + gradients + 14)
    assert step.communication_high == pytest.approx(high + gradients + 16)
    assert step.seconds_low == max(step.computation, step.communication_low)
    assert step.seconds_high == step.computation + step.communication_high


def test_ulysses_exchanges_twice_a_direction_and_needs_heads():
    step = model.step(ULYSSES, SMALL, ROUND, 2, 64)
    # of 4·32·8·2 bytes half goes to the other GPU; one step of latency in each of two exchanges
    assert step.bytes_sent == 2 * 2 * 1024
    assert step.communication_low == pytest.approx(2 * 2 * (10.24 + 2 * 6) + 2 * 1616 * 4 / 2 / 100 + 12)
    assert model.is_possible(ULYSSES, SMALL, 2)
    assert not model.is_possible(ULYSSES, SMALL, 4)


def test_the_communication_of_linear_attention_does_not_grow_with_the_row():
    short, long = (model.step(LINROPE, Transformer(), Machine(), 64, 2**n) for n in (20, 30))
    assert long.bytes_sent == short.bytes_sent
    assert long.communication_high == short.communication_high
    assert Transformer().parameters == pytest.approx(1.31e9, rel=0.01)


def test_the_command_models(tmp_path, capsys):
    assert run("modelled --gpus 8 16 32 --tokens 1024 4096", tmp_path) == 0
    rows, contents = read(tmp_path, "modelled")
    assert contents["kind"] == "modelled, not measured"
    assert {r["gpus"] for r in rows if r["method"] == ULYSSES} == {"8", "16"}
    assert len(rows) == 3 * 2 * 3 + 2 * 2
    assert "Modelled, not measured" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert len(Modelled.redraw(tmp_path / "modelled.json")) == 2


def test_times_in_words():
    assert span_text(0.165, 0.234) == "165 – 234 ms"
    assert span_text(5.29, 5.30) == "5.30 s"
    assert span_text(30, 90) == "0.50 – 1.50 min"
    assert span_text(86400 * 1243, 86400 * 1243) == "1,243 days"


def test_an_error_of_one_process_ends_the_others():
    with pytest.raises(Exception, match="no such rank"):
        ranks.on_ranks(2, fail)


@pytest.mark.parametrize("part", ["counted", "measured", "row", "modelled"])
def test_ctrl_c_ends_a_run(part, tmp_path, monkeypatch, capsys):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    for module in (counted, measured, row):
        monkeypatch.setattr(module, "on_ranks", interrupt)
    monkeypatch.setattr(model, "step", interrupt)
    assert run(part, tmp_path) == 130
    assert "interrupted" in capsys.readouterr().out


def test_without_a_part_all_but_the_long_one_run(tmp_path, monkeypatch):
    calls = []
    for part in PARTS.values():
        monkeypatch.setattr(part, "main", lambda args: calls.append(args) or len(calls) - 1)
    assert main(["--output", str(tmp_path)]) == 2
    assert calls == [[part, "--output", str(tmp_path)] for part in ("counted", "measured", "modelled")]


def fail(report):
    if ranks.dist.get_rank() == 1:
        raise ValueError("no such rank")
    ranks.dist.barrier()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("counted --processes 1", "one process sends nothing"),
        ("counted --length 8", "--length 8: must be the window of 9 tokens at least"),
        ("counted --heads 5", "--d_model 96 must be a multiple of 2 times it"),
        ("measured --length 3", "--length 3: each of 4 processes needs a token"),
        ("measured --heads 3", "--heads 3: --d_model 128 must be a multiple of 2 times it"),
        ("row --length 4194306", "leaves 2 tokens to the last segment"),
        ("row --memory much", "'much' is no size"),
        ("modelled --gpus 1", "--gpus 1: one GPU sends nothing"),
        ("modelled --gpus 12", "--gpus 12: must be whole nodes of 8"),
        ("modelled --utilisation 1.5", "--utilisation 1.5: must be at most 1"),
        ("measure", "invalid choice: 'measure'"),
    ],
)
def test_bad_options_are_named(args, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(args.split())
    assert exit_.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
