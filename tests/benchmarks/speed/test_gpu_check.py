"""The run on a GPU without one: its checks and times through Triton's interpreter, its processes on the CPU."""

import io
import json
import os
import re
import signal
from argparse import Namespace
from dataclasses import replace
from functools import partial

import pytest
import torch
from rich.console import Console

from benchmarks.harness import runner
from benchmarks.harness.processes import TIME_IS_OVER, Answer
from benchmarks.speed import gpu_check, gpu_correctness, gpu_report, gpu_sizes, gpu_timing
from benchmarks.speed.gpu_check import GpuCheck, plan
from benchmarks.speed.gpu_correctness import Outcome
from benchmarks.speed.gpu_sizes import Size
from benchmarks.speed.gpu_timing import EAGER, GRAPHED, Timing
from benchmarks.speed.methods import FLA, LINEAR, SOFTMAX
from linrope.ops.triton_kernel import kernel
from tests.benchmarks.commands import refusal
from tests.interpreter import interpret_kernels

pytest.importorskip("triton", reason="Triton is there for Linux only")

PASSES = Outcome("a", "pass", 0.1, 0.05, "o")


@pytest.fixture
def run(tmp_path, monkeypatch) -> GpuCheck:
    options = Namespace(settings=[], seconds=100.0, quick=True, output=tmp_path, device="cpu")
    run = GpuCheck(options, "a device")
    run.console = Console(file=io.StringIO(), width=200)
    run.environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    return run


def written(run: GpuCheck) -> tuple[str, dict]:
    folder = run.options.output
    return (folder / "gpu_check.md").read_text(), json.loads((folder / "gpu_check.json").read_text())


# --- the parent process ----------------------------------------------------------------------------------------------


def test_on_a_gpu_results_go_to_its_name(monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(runner, "make_folder", lambda option, folder: None)
    options = GpuCheck.parse([])
    assert options.output.parts[-3:] == ("benchmarks", "results", "nvidia-h200")
    assert options.seconds <= 10 * 60
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET=1 is set, which runs no kernel on the GPU: unset it" in refusal(GpuCheck, [], capsys)


def gives(value: float) -> dict[str, float]:
    return {"o": value}


def dies() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def of_environment() -> dict[str, float]:
    return {"o": 0.0 if os.environ.get("DISABLE_MMA_V3") == "1" else 1.0}


@pytest.mark.exhaustive
def test_checks_run_in_processes_and_what_is_wrong_runs_again_without_wgmma(run):
    work = [
        ("right", 0.1, partial(gives, 0.05)), ("by the compiler", 0.1, of_environment), ("dead", 0.1, dies),
        ("not finite", 0.1, partial(gives, float("nan"))),
    ]  # fmt: skip
    run.check_all(work)
    run.check_again(work)
    found = {one.name: (one.result, one.without_mma_v3) for one in run.checks}
    assert found == {
        "right": ("pass", ""), "by the compiler": ("FAIL", "pass"), "not finite": ("FAIL: not finite",) * 2,
        "dead": ("failed: the process was ended by SIGSEGV",) * 2,
    }  # fmt: skip
    assert "dead: failed: the process was ended by SIGSEGV" in run.console.file.getvalue()
    assert run.finish() == 1
    page, contents = written(run)
    assert "| all checks | 1 pass, 3 wrong, 0 not run | **wrong** |" in page
    assert "| by the compiler | FAIL | o 1.0e+00 (1.0e-01) | pass |" in page
    assert contents["notes"] == ["3 checks are wrong; they ran again with DISABLE_MMA_V3=1"]


def test_checks_without_time_are_not_run(run):
    run.options.seconds = 0.0
    run.check_all([("late", 0.1, partial(gives, 0.0))])
    assert [one.result for one in run.checks] == [f"not run: {TIME_IS_OVER}"]
    run.check_again([])
    assert run.finish() == 0
    assert "| 0 pass, 0 wrong, 1 not run | **not run** |" in written(run)[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_whole_run_without_a_gpu_says_why_of_everything(run, monkeypatch):
    monkeypatch.setattr(gpu_correctness, "checks", lambda quick: [("right", 0.1, partial(gives, 0.05))])
    monkeypatch.setattr(gpu_check, "plan", lambda quick: [(LINEAR, gpu_sizes.GOALS[0])])
    run.measure()
    assert run.finish() == 1
    page, contents = written(run)
    assert "| all checks | 1 pass, 0 wrong, 0 not run | **pass** |" in page
    (timing,) = contents["timings"]
    assert timing["status"] == "failed"
    assert f"| {SOFTMAX} / linear, {gpu_sizes.GOALS[0]} | ≥ 2 |  | **wrong** | {timing['detail']} |" in page
    assert contents["versions"]["ptxas"][0].isdigit()


def answering(monkeypatch, *answers):
    """The answers of the processes in their order: a value, or an error as text."""
    given = iter(answers)

    def run_jobs(jobs, workers, deadline):
        assert workers == 1
        for job in jobs:
            answer = next(given)
            yield Answer(job, error=answer) if isinstance(answer, str) else Answer(job, answer)

    monkeypatch.setattr(gpu_check, "run_jobs", run_jobs)


def test_each_form_at_each_size_is_timed_and_a_dead_one_spoils_no_other(run, monkeypatch):
    size, longer = gpu_sizes.GOALS[:2]
    of = partial(Timing, status="measured", copy_rate=1e12)
    answering(
        monkeypatch,
        of(LINEAR, size, seconds=1e-3), "the process ended with status 7",
        "the process was ended by SIGABRT", of(SOFTMAX, longer, seconds=1.0),
        of(EAGER, longer, seconds=1e-5), Timing(GRAPHED, longer, "wrong"),
        Timing(FLA, size, detail="not installed"), "tried to allocate 3 GiB",
    )  # fmt: skip
    run.checks = [PASSES]
    run.time_all()
    assert [(one.method, one.size) for one in run.timings] == plan(quick=True)
    rows = {row.goal: (row.verdict, row.why) for row in gpu_report.all_rows(run.checks, run.timings)}
    assert rows[f"{SOFTMAX} / linear, {size}"] == ("not run", f"{SOFTMAX}: the process was ended by SIGABRT")
    assert rows[f"{FLA} / linear, {size}"] == ("not run", f"{FLA}: not installed")
    assert rows[f"{SOFTMAX} / linear, {longer}"] == ("wrong", "the process ended with status 7")
    assert rows[f"{SOFTMAX} / linear, {gpu_sizes.GOALS[2]}"] == ("not run", "not measured")
    assert run.finish() == 1


def test_what_takes_too_long_is_extrapolated(run, monkeypatch):
    answering(monkeypatch)
    short, long = gpu_sizes.GOALS[1:]
    run.timings = [Timing(SOFTMAX, short, "measured", seconds=1.0), Timing(FLA, short, "measured", seconds=10.0)]
    found = run.time_one(SOFTMAX, long)
    assert (found.status, found.seconds, found.detail) == ("extrapolated", 64.0, "by the square of the length")
    assert run.time_one(FLA, long).seconds == 80.0


def test_the_plan_has_everything_once():
    every = plan()
    assert len(set(every)) == len(every)
    assert every[0] == (LINEAR, Size(4096))  # the first answers come for the goals
    ours = {size for method, size in every if method == LINEAR}
    assert {size.dtype for size in ours} == {"bfloat16", "float32"}
    assert {size.interleaved for size in ours} == {size.decay for size in ours} == {True, False}
    assert {method for method, _ in every} == {LINEAR, SOFTMAX, FLA, EAGER, GRAPHED}


# --- what the processes do -------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_our_form_is_verified_timed_and_profiled(monkeypatch):
    interpret_kernels(monkeypatch)
    monkeypatch.setattr(gpu_timing.timing, "COPY_ELEMENTS", 2**16)
    monkeypatch.setattr(gpu_timing.timing, "TURN_CALLS", 1)
    monkeypatch.setattr(gpu_timing, "SHORT", 1e9)
    monkeypatch.setattr(gpu_timing, "HOST_CALLS", 1)
    monkeypatch.setattr(gpu_timing, "graphed_seconds", lambda *args: None)
    found = gpu_timing.time_form(LINEAR, Size(20, 1, 16, decay=True), "cpu", 1)
    assert found.status == "measured"
    assert found.seconds > 0
    assert 0.1 * found.seconds < found.host_seconds < 10 * found.seconds  # a CPU does all before it returns
    assert found.copy_rate > 1e6
    roles = [one["role"] for one in found.kernels]
    assert roles[-5:] == ["query_gradients", "stretch_sums later", "scan later", "key_gradients", "finish_log_decay"]
    attend = found.kernels[roles.index("attend")]
    assert attend["configuration"].startswith("CHUNK: 64, STAGES: 1, num_warps: 4")
    assert attend["bytes"] > 4 * 20 * 16 * 2


@pytest.mark.exhaustive
def test_a_wrong_form_is_not_timed(monkeypatch):
    def wrong(*args, real=kernel.forward):
        o, *others = real(*args)
        return o * 1.1, *others

    interpret_kernels(monkeypatch)
    monkeypatch.setattr(kernel, "forward", wrong)
    found = gpu_timing.time_form(LINEAR, Size(20, 2, 16), "cpu", 1)
    assert (found.status, found.seconds) == ("wrong", None)
    assert re.fullmatch(r"the last head: o is off by \d\.\de-0\d of its norm", found.detail)


def test_a_token_is_timed(monkeypatch):
    interpret_kernels(monkeypatch)
    monkeypatch.setattr(gpu_timing, "STEPS", 2)
    found = gpu_timing.time_step(Size(1000, 2, 16), False, "cpu", 1)
    assert (found.method, found.status) == (EAGER, "measured")
    assert found.seconds > 0


def test_sizes_beyond_memory_say_so(monkeypatch):
    monkeypatch.setattr(gpu_timing.memory, "available", lambda device: 10**9)
    found = gpu_timing.time_form(LINEAR, Size(524_288), "cpu")
    assert (found.status, found.seconds) == ("not run", None)
    assert found.detail == "it needs 9.9 GB of memory, and 1.0 GB are free"


# --- the page --------------------------------------------------------------------------------------------------------

ABOUT = {"machine": {"device": "NVIDIA H200"}, "versions": {"torch": "2.13", "ptxas": "12.8.93"}, "commit": "abc"}


def timings_at(size: Size, softmax: float, fla: float | None) -> list[Timing]:
    """Ours takes 1 ms at the size, and the copy of its tensors a fifth of that."""
    rate = 8 * size.tensor / 2e-4
    return [
        Timing(LINEAR, size, "measured", seconds=1e-3, host_seconds=4e-4, copy_rate=rate, extra_memory=0.1),
        Timing(SOFTMAX, size, "extrapolated", "by the square of the length", softmax),
        Timing(FLA, size, "measured" if fla else "failed", "" if fla else "a fault", fla),
    ]


def test_goals_pass_or_are_slow_by_their_bounds():
    size = Size(65_536)
    rows = {row.goal: row for row in gpu_report.all_rows([PASSES], timings_at(size, 0.041, 2.9e-3))}
    softmax, fla = (rows[f"{peer} / linear, {size}"] for peer in (SOFTMAX, FLA))
    assert (softmax.bound, softmax.measured, softmax.verdict, softmax.why) == ("≥ 40", "41.00", "pass", "extrapolated")
    assert (fla.bound, fla.measured, fla.verdict) == ("≥ 3", "2.90", "slow")
    limit = rows[f"linear / copy of its tensors, {size}"]
    assert (limit.bound, limit.measured, limit.verdict) == ("≤ 2.8", "5.00", "slow")
    assert [gpu_report.TIMES_FASTER[SOFTMAX][length] for length in (4096, 65_536, 524_288)] == [2, 40, 300]


def test_the_page_says_all_of_it():
    size = Size(65_536)
    kernel = {
        "role": "attend", "configuration": "CHUNK: 16, num_warps: 4, num_ctas: 1, num_stages: 2, maxnreg: 128",
        "registers": 128, "spills": 0, "bytes": 6 * 10**8, "flops": 4 * 10**10, "seconds": 3e-4, "count": 1,
    }  # fmt: skip
    others = kernel | {"role": "kernels of PyTorch", "configuration": "", "count": 3, "bytes": None, "flops": None}
    timings = timings_at(size, 0.041, None)
    timings[0].kernels = [kernel, others | {"registers": None, "spills": None}]
    checks = [
        PASSES, Outcome(gpu_correctness.SAME, "pass", 0.1, 2e-3, "o"), Outcome("large", "not run: out of memory"),
        Outcome("x, 8 warps", gpu_correctness.FITS_NOTHING),
    ]  # fmt: skip
    page = gpu_report.page(ABOUT, checks, timings)
    assert page.startswith("# gpu_check: NVIDIA H200\n\ntorch 2.13, ptxas 12.8.93; commit abc\n")
    assert (
        "| attend | chunk 16, 4 warps, 2 stages, ≤ 128 registers | 128 | 0 | 300 | 600 | 2,000 | 40 | 133.3 |" in page
    )
    assert "| kernels of PyTorch × 3 |  |  |  | 300 |" in page
    assert "- large: not run: out of memory" in page
    assert "Configurations that fit none of the kernels of their size, which autotuning leaves out: 1." in page
    assert "The results of all configurations are at most 2.0e-03 apart (o)." in page
    assert "each time" not in page
    assert f"| {FLA} | {size} |  |  |  |  | failed | a fault |" in page
    assert f"| linear | {size} | 1.00 | 0.400 |  | 10% | measured |  |" in page
    same = [replace(checks[1], worst=0.0), Outcome(gpu_correctness.TWICE, "FAIL", 0.0, 1.0, "o")]
    page = gpu_report.page(ABOUT, same * 20, [])
    assert "configurations are equal to the bit." in page
    assert "the same call DIFFERS each time" in page
    assert page.count("| the same twice | FAIL |") == gpu_report.MOST
    assert "More of them are in gpu_check.json." in page
