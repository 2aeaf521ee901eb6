"""Goals are measured, judged both ways, and told by the exit status; what measures them works at small sizes."""

import math
from functools import partial

import pytest
import torch

from benchmarks.harness.timing import Sample
from benchmarks.speed import goals
from benchmarks.speed.goals import Goal, Goals, Measured, Skipped
from benchmarks.speed.methods import softmax, whole_sequence


def use(monkeypatch, **measures) -> None:
    """Goals of at least 2, with these measurements."""
    rows = [Goal(name, "made up", measure, at_least=2) for name, measure in measures.items()]
    monkeypatch.setattr(goals, "all_goals", lambda: rows)


def raising(error: BaseException):
    def measure():
        raise error

    return measure


@pytest.mark.parametrize(
    ("measures", "status", "printed"),
    [
        ([lambda: Measured(2.0), lambda: Measured(3.456, 3.1, 3.9)], 0, ["3.46", "3.1 – 3.9", "2 of 2 goals met"]),
        ([lambda: Measured(1.99), lambda: Measured(3.0)], 1, ["1 of 2 goals met; missed: a"]),
        ([raising(Skipped("4 GiB are free, it needs 10"))], 0, ["skipped: 4 GiB are free, it needs 10"]),
        ([raising(RuntimeError("broken"))], 1, ["failed: RuntimeError: broken"]),
    ],
    ids=["met", "missed", "skipped", "failed"],
)
def test_goals_are_judged(measures, status, printed, monkeypatch, capsys):
    use(monkeypatch, **dict(zip("ab", measures)))
    assert Goals.main([]) == status
    said = " ".join(capsys.readouterr().out.split())
    assert all(text in said for text in printed)


def test_ctrl_c_keeps_what_was_measured_and_one_goal_can_run_alone(monkeypatch, tmp_path):
    use(monkeypatch, a=lambda: Measured(3.0), b=raising(KeyboardInterrupt()), c=lambda: Measured(3.0))
    assert Goals.main(["--output", str(tmp_path)]) == 130
    assert Goals.main(["--only", "c"]) == 0
    assert (tmp_path / "goals.csv").read_text().splitlines()[1:] == ["a,made up,≥ 2,pass,3.0,,"]


def test_bounds_go_both_ways():
    least, most = Goal("a", "", lambda: None, at_least=2), Goal("b", "", lambda: None, at_most=1.5)
    assert [least.met(1.9), least.met(2), most.met(1.5), most.met(1.6)] == [False, True, True, False]
    assert (least.bound, most.bound) == ("≥ 2", "≤ 1.5")
    assert not least.met(math.nan)
    assert not most.met(math.nan)


def test_a_ratio_is_of_medians_and_its_quartiles_of_rounds():
    found = Measured.ratio(Sample((2.0, 4.0, 9.0)), Sample((1.0, 2.0, 3.0)), scale=10)
    assert (found.value, found.low, found.high) == (20.0, 20.0, 25.0)


def test_names_are_listed(capsys):
    with pytest.raises(SystemExit) as exit_:
        Goals.main(["--list"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    names = [goal.name for goal in goals.all_goals()]
    assert len(set(names)) == len(names)
    assert all(name in printed for name in names)


SMALL_CASES = {
    "softmax": partial(goals.over_linear, softmax, 64, rounds=1),
    "whole-sequence": partial(goals.over_linear, whole_sequence, 64, rounds=1),
    "roofline": partial(goals.over_roofline, 64, rounds=1),
    "linear": partial(goals.per_token, 64, 32, rounds=1),
    "bf16": partial(goals.time_over, {"dtype": "float32"}, {"dtype": "bfloat16"}, 64, rounds=1),
    "chunked": partial(goals.over_chunked, 64, rounds=1),
    "softmax-avx2": partial(goals.softmax_over_avx2, 64, rounds=1),
    "token-overhead": partial(goals.one_token_overhead, rounds=5, count=50),  # a difference of two times
    "phi": partial(goals.time_over, {"feature_map": "identity", "normalize": "none"}, {"normalize": "none"}, 64, 1),
    "head-256": partial(goals.per_flop, lambda: {"heads": 2, "head_dim": 256}, 64, 64, rounds=1),
    "masked": partial(goals.per_flop, lambda: {"key_mask": goals.key_mask(64)}, 64, 64, rounds=1),
    "packed": partial(goals.per_flop, lambda: {"segment_ids": goals.packed_documents(64)}, 64, 64, rounds=1),
    "memory": partial(goals.extra_memory, 1024, heads=1),
    "decay-memory": partial(goals.extra_memory, 1024, heads=1, decay=True),
    "process": partial(goals.process_memory, 64, heads=1, needs_gib=0),
    "decode-flat": partial(goals.flat_decoding, 1, 10, 1000, steps=2, rounds=3),
}


@pytest.mark.parametrize("name", SMALL_CASES)
def test_measurements_work_at_small_sizes(name):
    found = SMALL_CASES[name]()
    assert math.isfinite(found.value)
    if "memory" not in name:
        assert found.value > 0


def test_threads_are_as_before_after_their_goal():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert goals.threads_of_one_head(64, rounds=1).value > 0
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        with pytest.raises(Skipped, match="there is one thread"):
            goals.threads_of_one_head(64, rounds=1)
    finally:
        torch.set_num_threads(threads)


def test_what_cannot_be_measured_is_an_error():
    with pytest.raises(Skipped, match="GiB are free, it needs 1e"):
        goals.process_memory(64, needs_gib=1e9)
    with pytest.raises(RuntimeError, match="needs a registered formula"):
        goals.counted(0)


def test_packed_documents_have_about_the_length_they_should():
    documents = goals.packed_documents(100_000)
    assert (documents.diff() >= 0).all()
    assert 250 < 100_000 / int(documents[0, -1] + 1) < 350
    assert 0.65 < goals.key_mask(10_000).float().mean() < 0.75
