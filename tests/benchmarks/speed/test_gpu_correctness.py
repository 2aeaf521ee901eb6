"""The checks of the CUDA backend on a GPU, here through Triton's interpreter, and the times of its kernels."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.speed import gpu_correctness, gpu_sizes
from benchmarks.speed.gpu_correctness import Case, check, errors, errors_of
from benchmarks.speed.gpu_profile import OTHERS, Profiled, with_times
from benchmarks.speed.gpu_sizes import Size
from benchmarks.speed.launches import Recorded
from linrope.ops.triton_kernel import kernel as triton
from tests.interpreter import interpret_kernels

pytest.importorskip("triton", reason="Triton is there for Linux only")
from linrope.ops.triton_kernel import configurations, launch, one_configuration

SMALL = {"dim": 16, "width": 16, "length": 70, "batch": 1}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(**SMALL, decay=0.1, masked=True, packed=True, past=77, rope={"trainable": True}),
            marks=pytest.mark.exhaustive,
        ),
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


def no_memory() -> dict[str, float]:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. More")


def test_errors_are_of_norms_and_of_the_same_tensors():
    exact = {"o": torch.tensor([3.0, 4.0]), "grad q": torch.tensor([1e-9]), "grad k": torch.tensor([1.0])}
    actual = {"o": torch.tensor([3.0, 4.5]), "grad q": torch.tensor([2e-4]), "grad k": torch.tensor([1.0])}
    found = errors(actual, exact)
    assert found == pytest.approx({"o": 0.1, "grad q": 0.2, "grad k": 0.0}, rel=1e-5)  # q: of a thousandth of k's
    with pytest.raises(AssertionError, match="grad k"):
        errors({"o": actual["o"]}, exact)
    # gradients may be twice as far off
    assert check("", 0.1, lambda: {"o": 0.09, "grad q": 0.19}).result == "pass"
    outcome = check("", 0.1, lambda: {"o": 0.11, "grad q": 0.19})
    assert (outcome.result, outcome.tensor, outcome.tolerance) == ("FAIL", "o", 0.1)
    assert check("", 0.0, lambda: {"o": 0.0}).result == "pass"
    assert check("", 0.1, dict).result == "fits no kernel"
    assert check("", 0.1, no_memory).result == "not run: Tried to allocate 9.00 GiB"


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
    names = [name for name, *_ in gpu_correctness.checks()]
    assert len(set(names)) == len(names)


def test_each_size_of_production_is_checked_with_each_configuration_that_fits(monkeypatch):
    monkeypatch.setattr(configurations, "CONFIGS", configurations.ON_GPUS)
    names = [name for name, *_ in gpu_correctness.production_checks()]
    sizes = gpu_sizes.sizes_of_all_code()
    assert len(set(names)) == len(names)
    usual = [(size, config) for size in sizes for config in configurations.ON_GPUS]
    small = {"bfloat16": (2,), "float32": (4, 8)}  # states of 64 features
    fitting = [one for one in usual if one[1].num_warps in (small[one[0].dtype] if one[0].dim == 64 else (4, 8))]
    assert names == [f"{size}, {gpu_sizes.short(str(config))}" for size, config in fitting]
    code = {(size.dim, size.stretch, size.decay, size.interleaved, size.dtype) for size in sizes}
    assert len(code) == len(sizes)
    for size in gpu_sizes.sizes():
        assert (size.dim, size.stretch, size.decay, size.interleaved, size.dtype) in code
    assert (128, 1024, False, True, "bfloat16") in code  # of B·H = 64 and T = 4,097
    assert {stretch for dim, stretch, *_ in code if dim == 128} == {256, 512, 1024, 2048}
    assert {stretch for dim, stretch, *_ in code if dim == 64} == {256, 512, 1024}


@pytest.mark.exhaustive
def test_a_size_is_checked_with_its_stretch_on_a_short_row(monkeypatch):
    interpret_kernels(monkeypatch)
    monkeypatch.setattr(Size, "stretch", 64)
    found = gpu_correctness.errors_at(Size(65_536, 2, 16, decay=True), 0, "cpu")
    assert found.keys() == {"o", "kv", "k_sum", "grad q", "grad k", "grad v", "grad log_decay"}
    assert 0 < max(found.values()) < 2**-6
    monkeypatch.setattr(one_configuration.OneConfiguration, "_run", lambda *args, **constants: None)
    assert gpu_correctness.errors_at(Size(65_536, 2, 16), 0, "cpu") == {}


@pytest.mark.exhaustive
def test_configurations_are_compared_with_the_first(monkeypatch):
    interpret_kernels(monkeypatch)
    assert set(gpu_correctness.across_configurations("cpu", 70).values()) == {0.0}


@pytest.mark.exhaustive
def test_known_launches_are_compared_with_new_ones(monkeypatch):
    interpret_kernels(monkeypatch)
    compared = partial(gpu_correctness.with_first_configuration, partial(gpu_correctness.known_launches, "cpu", 20))
    assert compared() == {"o": 0.0, "grad q": 0.0, "grad k": 0.0, "grad v": 0.0}
    attend = launch.Launch.attend

    def wrong_the_first_time(self, state, o, den):
        attend(self, state, o, den)
        o.mul_(1.0 if "attended" in self.plan.sites else 1.5)
        self.plan.sites["attended"] = None

    monkeypatch.setattr(launch.Launch, "attend", wrong_the_first_time)
    assert compared()["o"] == 1.0


@pytest.mark.exhaustive
def test_a_replayed_step_is_found_wrong_if_its_position_stands_still(monkeypatch):
    """Where calls stand in for the replays of a graph."""
    interpret_kernels(monkeypatch)
    replayed = partial(gpu_correctness.replayed_steps, 4, "cpu", lambda function: function)
    assert replayed() == {"o": 0.0, "kv": 0.0}

    def stands_still(call, *past, real=triton.one_token):
        return real(call if call.position is None else replace(call, position=0 * call.position), *past)

    monkeypatch.setattr(triton, "one_token", stands_still)
    assert replayed() == {"o": 3.0, "kv": 1.0}


def test_times_go_to_launches_of_the_same_name_in_their_order():
    launches = [("attend", False), ("stretch_sums", False), ("stretch_sums", True)]
    seen = [(Recorded(name, 1, (), {"LATER": later}), Profiled(name)) for name, later in launches]
    ran = [("stretch_sums", 30.0, 3e-6), ("attend", 10.0, 1e-6), ("stretch_sums", 20.0, 2e-6), ("fill", 5.0, 4e-6)]
    found = with_times(seen, [*ran, ("fill", 6.0, 5e-6)])
    assert [one.seconds for one in found] == pytest.approx([1e-6, 2e-6, 3e-6, 9e-6])
    assert (found[-1].role, found[-1].count) == (OTHERS, 2)
    assert with_times([(Recorded("attend", 1, (), {}), Profiled("attend"))], []) == [Profiled("attend")]
