"""The scaling benchmark runs, says what it could not run, and keeps what it has measured."""

import sys
from functools import partial
from itertools import count

import pytest

from benchmarks.harness.memory import OutOfMemory
from benchmarks.speed import scaling
from benchmarks.speed.methods import Method, catalogue, linear, softmax
from tests.benchmarks import commands

SMALL = ["--heads", "1", "--head_dim", "8", "--repeats", "2"]


@pytest.fixture
def without_memory(monkeypatch):
    """No new processes, where a test is about time."""
    monkeypatch.setattr(scaling, "measure_memory", lambda *args: None)


def failing(error: BaseException, at: int):
    """An attention that raises at one of its calls."""
    numbers = count(1)

    def attend(x):
        if next(numbers) == at:
            raise error
        return linear(x)

    return attend


def use(monkeypatch, *methods: Method) -> None:
    monkeypatch.setattr(scaling, "catalogue", lambda device, dtype: {method.name: method for method in methods})


run = partial(commands.run, scaling.Scaling, SMALL, stem="scaling-forward-backward-float32")


def test_all_methods_are_measured_at_every_length(tmp_path, capsys):
    points, contents = run(tmp_path, "--lengths", "65", "33")
    methods = [name for name, method in catalogue("cpu", "float32").items() if not method.absent]
    assert [(p["method"], p["length"]) for p in contents["points"]] == [(m, t) for t in (33, 65) for m in methods]
    for point in contents["points"]:
        assert point["status"] == "measured"
        assert point["seconds_q1"] <= point["seconds"] <= point["seconds_q3"]
        assert point["tokens_per_second"] == pytest.approx(point["length"] / point["seconds"])
        assert point["rounds"] == 2
        assert point["memory_bytes"] >= 0
    assert points["softmax-rope", 65]["flops"] == 7 * 2 * 65**2 * 8
    assert points["softmax-rope", 65]["gemm_share"] > 0
    assert contents["settings"]["lengths"] == [33, 65]
    assert contents["gemm_flops_per_second"] > 0
    assert set(contents["absent"]) <= {"fast-transformers", "flash-linear-attention", "linear-rope[triton]"}
    printed = capsys.readouterr().out
    for word in (*methods, *contents["absent"], "33 tokens", "65 tokens", "softmax / linear", "forward+backward"):
        assert word in printed
    assert max(map(len, printed.replace("wrote", "\n").splitlines()[:20])) <= 80


@pytest.mark.parametrize("mode", ["forward", "decode"])
def test_other_modes(tmp_path, mode, without_memory):
    args = ("--lengths", "40", "--mode", mode, "--dtype", "bfloat16")
    points, contents = run(tmp_path, *args, stem=f"scaling-{mode}-bfloat16")
    assert {p["status"] for p in points.values()} == {"measured"}
    tokens = 40 if mode == "forward" else 1
    for point in points.values():
        assert point["tokens_per_second"] * point["seconds"] == pytest.approx(tokens)
    assert ("softmax-rope-materialised" in contents["absent"]) == (mode == "decode")


def test_ctrl_c_keeps_what_was_measured(tmp_path, monkeypatch, capsys, without_memory):
    # a warm-up and two rounds at each length: the sixth call is the last one at the second length
    impatient = failing(KeyboardInterrupt(), at=6)
    use(monkeypatch, Method("linear-rope", linear), Method("softmax-rope", impatient))
    points, contents = run(tmp_path, "--lengths", "16", "32", "64", status=130)
    assert "interrupted: the results so far are kept" in capsys.readouterr().out
    assert contents["interrupted"] is True
    assert points["softmax-rope", 16]["rounds"] == 2
    assert points["linear-rope", 32]["rounds"] == 2  # its share of the round that was cut short
    assert points["softmax-rope", 32]["rounds"] == 1
    assert ("linear-rope", 64) not in points


def test_running_out_of_memory_is_recorded_and_the_run_goes_on(tmp_path, monkeypatch, capsys, without_memory):
    hungry = failing(MemoryError("can't allocate memory"), at=5)
    use(monkeypatch, Method("linear-rope", hungry), Method("softmax-rope", softmax, quadratic=True))
    points, _ = run(tmp_path, "--lengths", "16", "32", "64")
    assert [points["linear-rope", n]["status"] for n in (16, 32, 64)] == ["measured", "out of memory", "over budget"]
    assert points["linear-rope", 32]["seconds"] is None
    assert points["linear-rope", 64]["detail"] == "as since 32"
    assert [points["softmax-rope", n]["status"] for n in (16, 32, 64)] == ["measured"] * 3
    assert "out of memory" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux can")
@pytest.mark.exhaustive
def test_memory_that_really_runs_out(tmp_path, capsys):
    methods = ["--methods", "linear", "softmax-rope-materialised"]
    points, contents = run(tmp_path, *methods, "--lengths", "128", "2048", "--memory", "6MiB", "--budget", "5")
    assert points["linear", 128]["status"] == "measured"
    assert points["softmax-rope-materialised", 2048]["status"] in ("out of memory", "over budget")
    largest = {name: found["length"] for name, found in contents["largest_length"].items()}
    assert 0 < largest["softmax-rope-materialised"] < largest["linear"]
    assert "tokens in 6 MiB (memory)" in " ".join(capsys.readouterr().out.split())


def test_a_child_that_ran_out_of_memory_is_not_timed(tmp_path, monkeypatch):
    def no_room(*args):
        raise OutOfMemory("killed by the system")

    monkeypatch.setattr(scaling, "in_new_process", no_room)
    use(monkeypatch, Method("linear-rope", pytest.fail))
    points, _ = run(tmp_path, "--lengths", "16")
    point = points["linear-rope", 16]
    assert (point["status"], point["detail"]) == ("out of memory", "killed by the system")


def test_what_would_exceed_the_budget_is_not_run(tmp_path, capsys, without_memory):
    methods = ["--methods", "softmax-rope", "--budget", "1e-6"]
    points, _ = run(tmp_path, *methods, "--lengths", "16", "32", "64")
    assert [points["softmax-rope", n]["status"] for n in (16, 32, 64)] == ["measured", "over budget", "over budget"]
    assert "over budget" in capsys.readouterr().out


def test_crossovers_of_every_backend():
    run = scaling.Scaling(None, "a device")
    for length in (256, 1024):
        seconds = {"linear-rope[a]": length, "linear-rope[b]": length / 4, "softmax-rope": length**2 / 512}
        seconds["linear-rope-decay"] = 1
        run.points += [scaling.Point(name, length, 1, seconds=s) for name, s in seconds.items()]
    assert run.crossovers() == {"linear-rope[a]": pytest.approx(512), "linear-rope[b]": 256}


def test_linear_rope_names_all_its_backends(tmp_path, monkeypatch):
    names = ("linear-rope[a]", "linear-rope[b]", "linear")
    use(monkeypatch, *(Method(name, partial(linear)) for name in names))
    options = scaling.Scaling.parse(["--methods", "linear-rope", "--output", str(tmp_path)])
    assert options.methods == ["linear-rope[a]", "linear-rope[b]"]
