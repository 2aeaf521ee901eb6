"""What is launched without Triton's look at each argument is what Triton would launch. Run by `test_plan.py`, in a
process without the interpreter."""

from __future__ import annotations

import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import pytest
import torch
import triton

from benchmarks.speed.dry_gpu import DryGPU, Launched, dry_gpu, without_addresses
from benchmarks.speed.gpu_correctness import Case, all_cases, plain_call, results_of, with_first_configuration
from benchmarks.speed.host_time import HostTime
from benchmarks.speed.launches import call_of, launch
from linrope import RotaryEmbedding, State, linear_attention
from linrope.ops.call import Call
from linrope.ops.triton_kernel import kernel, plan, self_check
from linrope.ops.triton_kernel import launch as launching
from linrope.utils import kept_tensors


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(kept_tensors, "_kept", {})
    monkeypatch.setattr(plan, "stretch_of", lambda *sizes: 64)
    with dry_gpu() as gpu:
        yield gpu


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """x with the same strides, at an address that is no multiple of 16."""
    whole = x.new_zeros(x.untyped_storage().nbytes() // x.itemsize + 8)
    return whole.as_strided(x.shape, x.stride(), 1)


def strided(x: torch.Tensor) -> torch.Tensor:
    """x with its heads and tokens in the other order in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def variants(call: Call) -> dict[str, Call]:
    """Calls that Triton compiles for in another way, and others that have a plan of their own."""
    found = {
        "as it is": call,
        "unaligned q": replace(call, q=unaligned(call.q)),
        "unaligned v": replace(call, v=unaligned(call.v)),
        "strided k": replace(call, k=strided(call.k)),
        "another eps": replace(call, eps=0.5),
        "without a denominator": replace(call, normalize="none"),
        "far away": replace(call, start=2**31 + 5),
        "float32 q": replace(call, q=call.q.float(), k=call.k.float(), v=call.v.float()),
    }
    if call.theta is not None:
        found["unaligned theta"] = replace(call, theta=unaligned(call.theta.detach()))
        found["other pairs"] = replace(call, interleaved=not call.interleaved)
    if call.log_decay is not None:
        found["without decay"] = replace(call, log_decay=None)
        found["unaligned decay"] = replace(call, log_decay=unaligned(call.log_decay))
        found["strided decay"] = replace(call, log_decay=call.log_decay.mT.contiguous().mT)
    if call.state is not None:
        moved = replace(call.state, kv=unaligned(call.state.kv), k_sum=unaligned(call.state.k_sum))
        found |= {"unaligned state": replace(call, state=moved), "without a state": replace(call, state=None)}
    return found


def launches(gpu: DryGPU, call: Call) -> list[Launched]:
    gpu.launched.clear()
    kept_tensors._kept.clear()  # tables that nothing writes
    launch(call)
    return without_addresses(gpu.launched)


CASES = {"everything": Case(length=300, decay=0.1, masked=True, packed=True, past=77)}
CASES["one token"] = Case(length=1, decay=0.1, masked=True, past=77)
CASES["no options"] = Case(length=300)
CASES["float32, wide"] = Case(length=100, dim=128, width=256, dtype="float32", decay=0.1)
CASES["trained θ"] = Case(length=100, rope={"trainable": True, "base": (10000.0, 100.0)})
CASES["all keys"] = Case(length=100, options={"causal": False}, masked=True, past=77)


@pytest.mark.parametrize("name", CASES)
def test_known_launches_are_those_of_triton(gpu, name):
    """Each variant many times in any order, of which Triton's own way is taken the first time of all only."""
    calls = variants(call_of(CASES[name]))
    exact = {}
    for known, call in calls.items():
        plan._plans.clear()
        exact[known] = launches(gpu, call)
    plan._plans.clear()
    order = [known for known in calls for _ in range(3)]
    random.Random(0).shuffle(order)
    for known in order:
        assert launches(gpu, calls[known]) == exact[known], known
    with mock.patch.object(triton.JITFunction, "run", side_effect=AssertionError("Triton looks again")):
        for known in calls:
            assert launches(gpu, calls[known]) == exact[known], known


@pytest.mark.parametrize("name", CASES)
def test_all_kernels_fuse_products_and_sums_whatever_triton_does_unasked(gpu, name):
    plan._plans.clear()
    launch(call_of(CASES[name]))
    assert len(gpu.options) == gpu.compiled >= 1
    assert {options["enable_fp_fusion"] for _, options in gpu.options} == {True}


def test_kernels_that_march_through_pairs_may_take_all_registers(gpu):
    """Without a limit ptxas 13 gives them fewer."""
    plan._plans.clear()
    launch(call_of(CASES["everything"]))
    limits = {name: options.get("maxnreg") for name, options in gpu.options}
    assert {name for name, most in limits.items() if most == 255} == {"attend", "query_gradients", "key_gradients"}


def test_backwards_of_one_call_that_differ(gpu):
    """In the layout of the output's gradient, and in the gradients that are given and needed."""
    call = call_of(replace(CASES["everything"], rope={"trainable": True}))
    *saved, kv, k_sum = kernel.forward(call, call.state.kv, call.state.k_sum)
    o = saved[0]
    outputs = o, unaligned(o), strided(o), o[:1, :1, :1, :1].expand(o.shape), o.float()
    ends = (kv, k_sum), (None, k_sum), (kv, None), (None, None)
    options = list(itertools.product(outputs, ends, (False, True), (False, True)))

    def launched(option: tuple) -> list[Launched]:
        grad_o, end, d_decay, d_theta = option
        gpu.launched.clear()
        kept_tensors._kept.clear()
        kernel.backward(call, saved, grad_o, *end, d_decay, d_theta)
        return without_addresses(gpu.launched)

    exact = []
    for option in options:
        plan._plans.clear()
        exact.append(launched(option))
    assert len({str(one) for one in exact}) == len(options)
    for _ in range(2):
        for number in random.Random(0).sample(range(len(options)), len(options)):
            assert launched(options[number]) == exact[number]


def test_all_cases_of_the_check_on_a_gpu(gpu):
    for case in all_cases().values():
        call = call_of(replace(case, length=min(case.length, 300)))
        first = launches(gpu, call)
        assert launches(gpu, call) == first


def test_a_change_of_precision_reaches_the_kernels(gpu):
    call = call_of(Case(length=100, dtype="float32"))
    highest = launches(gpu, call)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        high = launches(gpu, call)
    finally:
        torch.set_float32_matmul_precision(before)
    assert [one.name for one in high] == [one.name for one in highest]
    assert sum("'tf32'" in one.code[1] for one in high) == 5
    assert not any("'tf32'" in one.code[1] for one in highest)


def test_decoding_compiles_once_for_all_positions(gpu, monkeypatch):
    monkeypatch.setattr(launching, "why_not", lambda call: None)
    x = [torch.zeros(1, 2, 1, 16, dtype=torch.bfloat16) for _ in range(3)]
    state, rope = State.zeros(1, 2, 16, 16), RotaryEmbedding(16)
    with torch.no_grad():
        for _ in range(18):  # 1 and multiples of 16 among them
            _, state = linear_attention(*x, rope, state=state, return_state=True, backend="triton")
    assert (len(gpu.launched), gpu.compiled) == (18, 1)
    assert [one.args[9] for one in gpu.launched] == list(range(18))


def test_checks_on_a_gpu_launch_as_users_do(gpu, monkeypatch):
    """Not with stand-ins for the kernels, whose launches are not planned."""
    monkeypatch.setattr(launching, "why_not", lambda call: None)
    attend, tensors = plain_call(100, device="cpu")

    def measure() -> dict[str, float]:
        results_of(attend, tensors)
        with mock.patch.object(triton.JITFunction, "run", side_effect=AssertionError("Triton looks again")):
            results_of(attend, tensors)
        return {}

    assert with_first_configuration(measure) == {}
    assert len(gpu.launched) == 2 * 7 + 1


def test_first_launches_of_several_threads(gpu, monkeypatch):
    """Triton's autotuner is made for one."""

    def benchmark(call, quantiles):
        call()
        time.sleep(0.002)  # another thread goes on
        return [1.0] * len(quantiles)

    monkeypatch.setattr(gpu, "get_benchmarker", lambda: benchmark)
    calls = [call_of(Case(length=100, batch=batch)) for batch in (1, 2, 4, 8, 16, 32)]
    with ThreadPoolExecutor(len(calls)) as threads:
        assert len(list(threads.map(launch, calls))) == len(calls)


def test_the_plans_that_are_kept_are_the_latest(gpu, monkeypatch):
    monkeypatch.setattr(plan, "MOST_PLANS", 3)
    calls = [call_of(Case(length=length)) for length in (10, 20, 30, 40)]
    for call in (*calls[:3], calls[0], calls[3]):
        launch(call, backward=False)
    assert [one.queries for one in plan._plans.values()] == [30, 10, 40]


def test_the_time_of_the_host_is_measured():
    run = HostTime(HostTime.parse(["--rounds", "1"]))
    run.measure()
    assert [len(column._cells) for column in run.table().columns] == [2] * 5
    known, new = (run.samples["forward and backward", known].median for known in (True, False))
    assert known < new


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("case", [Case(), Case(rope={"trainable": True}, decay=0.1, packed=True, masked=True)], ids=str)
def test_a_check_of_the_kernels_compiles_all_of_them_ahead(gpu, case, training):
    """On all cores at once: one after the other they take a minute of a user's first step."""
    call = call_of(case)
    small = self_check.small_call(call)
    self_check._compile_ahead(small, call, training)
    ahead = gpu.compiled
    assert ahead >= 7
    assert not gpu.launched
    assert not kept_tensors._kept or all(key[0][0] != "angles" for key in kept_tensors._kept)  # they were not written
    for _, operator in self_check._operators(call, training):
        operator(small)
    assert gpu.launched
    assert gpu.compiled == ahead


def test_what_does_not_compile_ahead_is_left_to_the_launch(gpu, monkeypatch):
    call = call_of(Case())
    small, compiled = self_check.small_call(call), gpu.compile

    def fail(*args, **options):
        compiled(*args, **options)
        raise RuntimeError("no assembler")

    monkeypatch.setattr("triton.compiler.compile", fail)
    self_check._compile_ahead(small, call, True)
    assert gpu.compiled >= 10
    with pytest.raises(RuntimeError, match="no assembler"):
        launch(call)
