"""The run on a GPU without one: its checks through Triton's interpreter, all else on the CPU."""

import io
import json
import time
from argparse import Namespace
from functools import partial

import pytest
import torch
from rich.console import Console

from benchmarks.harness import runner
from benchmarks.speed import gpu_check, gpu_correctness
from benchmarks.speed.gpu_check import BOTH, COPY, FORWARD, FormPoint, GpuCheck
from benchmarks.speed.gpu_correctness import Case, Outcome, check, errors_of
from benchmarks.speed.methods import FLA, LINEAR, SOFTMAX, Inputs, Method, Setting, linear
from linrope.ops.triton_kernel import kernel as triton
from tests.benchmarks.commands import refusal
from tests.interpreter import interpret_kernels

SMALL = {"dim": 16, "width": 16, "length": 70, "batch": 1}


def size(length: int, rows: int, dim: int, mode: str = BOTH) -> Setting:
    return Setting(length, heads=rows, head_dim=dim, dtype="bfloat16", mode=mode)


@pytest.fixture
def run(tmp_path) -> GpuCheck:
    options = Namespace(settings=[], seconds=100.0, quick=False, output=tmp_path, device="cpu", repeats=2)
    run = GpuCheck(options, "a device")
    run.console = Console(file=io.StringIO(), width=200)
    return run


def written(run: GpuCheck) -> dict:
    return json.loads((run.options.output / "gpu_check.json").read_text())


def judged(run: GpuCheck, sizes: list[Setting]) -> int:
    run.sizes = sizes
    run.judge()
    return run.finish()


def test_on_a_gpu_results_go_to_its_name(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(runner, "make_folder", lambda option, folder: None)
    options = GpuCheck.parse([])
    assert options.output.parts[-3:] == ("benchmarks", "results", "nvidia-h200")
    assert options.seconds < 9 * 60
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET=1 is set, which runs no kernel on the GPU: unset it" in refusal(GpuCheck, [], capsys)


@pytest.mark.parametrize(("quick", "n_sizes"), [(False, 12), (True, 4)])
def test_everything_runs_in_order_and_is_finished(monkeypatch, run, quick, n_sizes):
    profiled = []
    run.options.quick = quick
    passes = lambda work, seconds, cache: [Outcome(name, "pass") for name, *_ in work]  # noqa: E731
    monkeypatch.setattr(gpu_correctness, "in_processes", passes)
    monkeypatch.setattr(run, "measure_all", lambda: None)
    monkeypatch.setattr(run, "profile_all", profiled.extend)
    run.measure()
    assert run.finish() == 0
    assert len(run.sizes) == n_sizes
    assert [size.length for size in profiled] == [4096, 65_536, 65_536]
    assert len(written(run)["checks"]) == len(gpu_correctness.checks(quick))
    assert {row["result"] for row in written(run)["goals"]} == {"skipped: not measured"}


@pytest.mark.parametrize(
    "case",
    [
        Case(**SMALL, decay=0.1, masked=True, packed=True, past=77, rope={"trainable": True}),
        Case(**SMALL, dtype="float32", options={"causal": False}),
        Case(**SMALL, steps=3, past=1000),
    ],
    ids=["everything", "noncausal", "steps"],
)
def test_cases_run_through_the_interpreter(monkeypatch, case):
    interpret_kernels(monkeypatch)
    outcome = check("a case", case.tolerance, partial(errors_of, case, "cpu"))
    assert outcome.result == "pass"
    assert 0 < outcome.worst <= outcome.tolerance
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("wrong", "result", "tensor", "worst"),
    [
        (lambda o: o * 1.02, "FAIL", "o", pytest.approx(0.02, rel=0.2)),  # and bfloat16's own rounding
        (torch.empty_like, "FAIL: not finite", "o", None),
        (lambda o: o.view(-1, 7777), "failed: RuntimeError: shape '[-1, 7777]' is invalid", "", None),
    ],
    ids=["off by two percent", "unwritten", "broken"],
)
def test_a_wrong_kernel_is_found(monkeypatch, wrong, result, tensor, worst):
    def forward(*args, real=triton.forward):
        o, *others = real(*args)
        return wrong(o), *others

    interpret_kernels(monkeypatch)
    monkeypatch.setattr(triton, "forward", forward)
    case = Case(**SMALL, heads=1)
    outcome = check("a case", case.tolerance, partial(errors_of, case, "cpu"))
    assert outcome.result.startswith(result)
    assert (outcome.tensor, outcome.worst) == (tensor, worst)


def test_errors_are_of_norms_and_of_the_same_tensors():
    exact = {"o": torch.tensor([3.0, 4.0]), "grad q": torch.tensor([1e-9]), "grad k": torch.tensor([1.0])}
    actual = {"o": torch.tensor([3.0, 4.5]), "grad q": torch.tensor([2e-4]), "grad k": torch.tensor([1.0])}
    found = gpu_correctness.errors(actual, exact)
    assert found == pytest.approx({"o": 0.1, "grad q": 0.2, "grad k": 0.0}, rel=1e-5)  # q: of a thousandth of k's
    with pytest.raises(AssertionError, match="grad k"):
        gpu_correctness.errors({"o": actual["o"]}, exact)
    # gradients may be twice as far off
    assert check("", 0.1, lambda: {"o": 0.09, "grad q": 0.19}).result == "pass"
    outcome = check("", 0.1, lambda: {"o": 0.11, "grad q": 0.19})
    assert (outcome.result, outcome.tensor, outcome.tolerance) == ("FAIL", "o", 0.1)
    assert check("", 0.0, lambda: {"o": 0.0}).result == "pass"


def test_the_list_covers_what_it_should():
    cases = gpu_correctness.all_cases()
    assert gpu_correctness.all_cases(quick=True).items() <= cases.items()
    kinds = (("bfloat16", "highest"), ("float16", "highest"), ("float32", "highest"), ("float32", "high"))
    for kind in kinds:
        of_kind = [case for case in cases.values() if (case.dtype, case.precision) == kind]
        assert {case.dim for case in of_kind} == {case.width for case in of_kind} == {16, 64, 80, 128, 256}
        assert any(case.steps for case in of_kind)
    assert {1, 63, 1000, 4097} <= {case.length for case in cases.values()}
    assert {1, 16} <= {case.batch * case.heads for case in cases.values()}


def test_outcomes_are_written_as_they_come(run):
    def outcomes():
        yield Outcome("a", "pass", 0.1, 0.01, "o")
        assert [one["name"] for one in written(run)["checks"]] == ["a"]
        yield Outcome("b", "FAIL", 0.1, 0.2, "o")
        assert [one["result"] for one in written(run)["checks"]] == ["pass", "FAIL"]

    run.check_all([("a",), ("b",), ("c",)], outcomes())
    assert written(run)["checks"][-1]["result"] == "failed: no answer in its time"
    assert "1 of 3 checks gave no answer" in written(run)["notes"][0]
    assert "check 2 of 3: b: FAIL, o off by 2.0e-01" in run.console.file.getvalue()
    assert judged(run, []) == 1


def test_checks_run_in_processes_and_end_with_their_time(tmp_path):
    work, slow = [("a", 0.1, partial(dict, o=0.05))], [("a", 0.1, partial(time.sleep, 600))]
    (outcome,) = gpu_correctness.in_processes(work, 120.0, str(tmp_path))
    assert (outcome.name, outcome.result, outcome.worst) == ("a", "pass", 0.05)
    begin = time.monotonic()
    assert list(gpu_correctness.in_processes(slow, 0.1, str(tmp_path))) == []
    assert time.monotonic() - begin < 60


def fails(x: Inputs) -> torch.Tensor:
    raise torch.OutOfMemoryError("out of memory")


def test_a_size_is_measured_and_what_fails_is_said(run, monkeypatch):
    peers = {SOFTMAX: Method(SOFTMAX, fails, quadratic=True), FLA: Method(FLA, fails, absent="not installed")}
    monkeypatch.setattr(gpu_check, "gpu_forms", lambda: {LINEAR: Method(LINEAR, linear), **peers})
    monkeypatch.setattr(gpu_check, "LONG", 128)
    run.sizes = [size(0, 2, 16), size(128, 2, 16)]  # the first fails as a whole
    run.measure_all()
    assert run.points.pop(0).status == "failed"
    points = {(p["method"], p["setting"]["mode"]): p for p in written(run)["points"]}
    assert points[LINEAR, BOTH]["seconds"] > 0
    assert points[LINEAR, BOTH]["memory_share"] is not None
    assert points[LINEAR, FORWARD]["seconds"] < 2 * points[LINEAR, BOTH]["seconds"]
    assert points[COPY, COPY]["seconds"] > 0
    assert (points[SOFTMAX, BOTH]["status"], points[SOFTMAX, BOTH]["seconds"]) == ("out of memory", None)
    assert (points[FLA, BOTH]["status"], points[FLA, BOTH]["detail"]) == ("absent", "not installed")
    assert "attention, forward+backward, B·H=2, D=16, T=128: absent (not installed)" in run.console.file.getvalue()


@pytest.mark.parametrize(("quadratic", "expected"), [(True, 6400.0), (False, 80.0)])
def test_what_takes_too_long_is_extrapolated_or_called_once(run, monkeypatch, quadratic, expected):
    run.points = [FormPoint.of(SOFTMAX, size(100, rows, 64), seconds=s) for rows, s in ((16, 1.0), (64, 9.0))]
    point = FormPoint.of(SOFTMAX, size(8000, 16, 64))
    assert run.prepared(point, pytest.fail, quadratic) is None
    assert (point.status, point.seconds) == ("extrapolated", expected)
    calls = []
    monkeypatch.setattr(gpu_check, "clock", lambda call, device: call() or 2.0)
    point = FormPoint.of(SOFTMAX, size(200, 16, 64))
    assert run.prepared(point, lambda: calls.append(1), quadratic) is None
    assert (len(calls), point.seconds, point.detail) == (1, 2.0, "one call")


def test_the_rest_is_skipped_when_the_time_is_over(run, monkeypatch):
    run.sizes = [size(100, 16, 64), size(200, 16, 64)]
    run.options.seconds = 10.0  # less than is kept for the profile
    monkeypatch.setattr(run, "points_of", pytest.fail)
    run.measure_all()
    assert "not measured, the time is over: B·H=16, D=64, T=100; B·H=16, D=64, T=200" in written(run)["notes"]
    run.options.seconds = 0.0
    run.profile_all(run.sizes[:1])
    assert written(run)["notes"][-1] == "profile of B·H=16, D=64, T=100: skipped, the time is over"


def test_a_profile_names_what_ran():
    lines = gpu_check.profile(lambda: torch.ones(8, 8) @ torch.ones(8, 8), "cpu").splitlines()
    assert lines[0].split() == ["calls", "µs", "kernel"]
    assert [line.split()[0] for line in lines if line.endswith("aten::mm")] == ["1"]
    parts = [float(line.split()[1].replace(",", "")) for line in lines[1:-1]]
    assert float(lines[-1].split()[0].replace(",", "")) == pytest.approx(sum(parts), abs=0.1 * len(parts))  # as printed


def at(length: int, softmax: float, fla: float | None, status: str = "measured") -> list[FormPoint]:
    """Points of B·H = 16, D = 64 where our call takes 1 ms, its forward a third, and 128 MiB are copied in 64 µs."""
    both = size(length, 16, 64)
    failure = {} if fla else {"status": "failed", "detail": "out of memory"}
    return [
        FormPoint.of(LINEAR, both, seconds=1e-3, memory_share=0.1),
        FormPoint.of(LINEAR, size(length, 16, 64, FORWARD), seconds=1e-3 / 3),
        FormPoint.of(COPY, size(length, 16, 64, COPY), seconds=64e-6),
        FormPoint.of(SOFTMAX, both, status=status, seconds=softmax),
        FormPoint.of(FLA, both, seconds=fla, **failure),
    ]


def test_goals_are_ratios_with_their_bounds(run, monkeypatch):
    monkeypatch.setattr(gpu_check.timing, "COPY_ELEMENTS", 2**24)
    run.points = at(65_536, 0.041, 2.9e-3)
    assert judged(run, [size(65_536, 16, 64)]) == 1
    values = {row.name.split(",")[0]: (row.value, row.goal, row.result) for row in run.goals}
    tensor, rate = 2 * 65_536 * 16 * 64, 2**27 / 64e-6
    assert values == {
        "RoPE + SDPA flash / linear": (pytest.approx(41.0), "≥ 40", "pass"),
        "flash-linear-attention / linear": (pytest.approx(2.9), "≥ 3", "FAIL"),
        "forward / limit of memory": (pytest.approx(1e-3 / 3 * rate / (4 * tensor)), "≤ 2", "pass"),
        "forward+backward / limit of memory": (pytest.approx(1e-3 * rate / (8 * tensor)), "≤ 2.5", "pass"),
        "extra memory": (0.1, "≤ 0.15", "pass"),
    }
    missed = "flash-linear-attention / linear, B·H=16, D=64, T=65,536"
    assert written(run)["notes"][-1] == f"4 of 5 goals met; missed: ['{missed}']"
    assert "a device" in run.console.file.getvalue()


def test_a_peer_that_cannot_is_skipped_and_our_own_failure_is_one(run):
    run.points = at(524_288, 0.31, None, status="extrapolated")
    assert judged(run, [size(524_288, 16, 64)]) == 0
    softmax, fla = run.goals
    assert (softmax.result, softmax.goal) == ("pass", "≥ 300")
    assert softmax.name.endswith("T=524,288, extrapolated")
    assert fla.result == "skipped: flash-linear-attention: failed out of memory"
    run.points[0] = FormPoint.of(LINEAR, size(524_288, 16, 64), status="failed", detail="a fault")
    assert judged(run, [size(524_288, 16, 64)]) == 1
    assert run.goals[0].result == "failed: RuntimeError: linear: failed a fault"
