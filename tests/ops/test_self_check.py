"""The check of the CUDA kernels by themselves, in Triton's interpreter in place of a GPU."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from linrope import RotaryEmbedding, State, linear_attention
from linrope.errors import InputError
from linrope.ops import linear_attention as ops
from linrope.ops.call import check_call
from linrope.ops.triton_kernel import kernel, plan, self_check
from linrope.ops.triton_kernel.plan import Chosen

triton = pytest.importorskip("triton", reason="Triton is there for Linux only")
from triton.runtime.errors import OutOfResources  # noqa: E402

from linrope.ops.triton_kernel import configurations, kernels, one_configuration  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_found(monkeypatch):
    monkeypatch.setattr(self_check, "_found", {})
    monkeypatch.setattr(plan, "stretch_of", lambda *sizes: 64)


def call_of(length=70, dtype=torch.bfloat16, rope=None, transposed=False, device=None, **options):
    q, k, v = torch.randn(3, 1, 2, length, 16, device=device).to(dtype).unbind()
    if transposed:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    return check_call(q, k, v, rope or RotaryEmbedding(16), eps=1e-6, **options)


STATE = State(torch.ones(1, 2, 16, 16), torch.ones(1, 2, 16), 5)
EVERYTHING = {
    "log_decay": -0.1 * torch.rand(1, 2, 70), "key_mask": torch.ones(1, 70, dtype=torch.bool), "state": STATE,
    "segment_ids": torch.arange(70)[None] // 40,
}  # fmt: skip

MORE = [
    ({"rope": RotaryEmbedding(16, trainable=True), **EVERYTHING}, True),
    ({"dtype": torch.float32, "causal": False}, True),
    ({"length": 1, "state": replace(STATE, length=torch.tensor(5))}, False),
    ({"normalize": "rotary", "dtype": torch.float16}, False),
    ({"feature_map": "identity"}, False),
]


@pytest.mark.parametrize(
    ("options", "training"),
    [
        ({}, False),
        ({"length": 1, "state": STATE}, False),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE),
    ],
    ids=["plain", "one token", "everything", "noncausal", "position on the device", "rotary", "identity"],
)
def test_right_kernels_pass(options, training):
    assert self_check.checked(call_of(**options), training) is None


def wrong_forward(*args, real=kernel.forward, **options):
    o, *others = real(*args, **options)
    return o * 1.1, *others


def test_a_wrong_kernel_is_named_once_with_device_and_compilers(monkeypatch):
    monkeypatch.setattr(kernel, "forward", wrong_forward)
    reason = self_check.checked(call_of(), False)
    assert "its kernels failed their check of themselves on cpu (Triton " in reason
    assert f"Triton {triton.__version__}, ptxas {self_check.ptxas_version(0)})" in reason
    assert "CHUNK: 64" in reason
    assert "o is off by 9." in reason
    monkeypatch.setattr(kernel, "forward", lambda *args, **options: pytest.fail("checked again"))
    assert self_check.checked(call_of(), False) == reason


@pytest.mark.exhaustive
def test_a_kernel_that_does_not_compile_is_an_answer_too(monkeypatch):
    def fails(*args, **options):
        raise RuntimeError("ptxas fatal")

    monkeypatch.setattr(kernel, "backward", fails)
    assert self_check.checked(call_of(), False) is None
    assert self_check.checked(call_of(), True).endswith("RuntimeError: ptxas fatal")


def test_an_error_that_does_not_come_again_is_no_answer(monkeypatch):
    """Such as the driver's, that PyTorch has left no memory for a kernel's code: its type says nothing of that."""
    emptied = []

    def needs_memory(*args, real=kernel.forward, **options):
        if not emptied:
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        return real(*args, **options)

    monkeypatch.setattr(kernel, "forward", needs_memory)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    assert self_check.checked(call_of(), False) is None
    assert len(emptied) == 1


@pytest.mark.exhaustive
def test_a_check_within_a_backward_needs_no_engine(monkeypatch):
    """On a GPU the engine's one thread for it waits for the check: a second backward would never begin."""
    for name in ("grad", "backward"):
        monkeypatch.setattr(torch.autograd, name, lambda *args, **options: pytest.fail("autograd's engine is used"))
    call = call_of(rope=RotaryEmbedding(16, trainable=True), **EVERYTHING)
    assert self_check.checked(call, True) is None


@pytest.fixture
def two(monkeypatch):
    """In place of the interpreter's one configuration."""
    two = [triton.Config({"CHUNK": chunk, "STAGES": 1}) for chunk in (32, 64)]
    monkeypatch.setattr(configurations, "CONFIGS", two)
    monkeypatch.setattr(configurations, "INTERPRETED", two)
    return two


def launched(monkeypatch, *, fails=()):
    """The kernel and the tokens of a chunk of each launch that has such; those in `fails` take too much memory."""
    seen = []
    for name in plan.MARCHING:
        function = getattr(kernels, name).fn

        def run(*args, name=name, function=function, **options):
            seen.append((name, options["CHUNK"]))
            if seen[-1] in fails:
                raise OutOfResources(100_000, 99_000, "shared memory")
            return type(function).run(function, *args, **options)

        monkeypatch.setattr(function, "run", run, raising=False)
    return seen


@pytest.mark.exhaustive
def test_each_configuration_runs_in_turn(two, monkeypatch):
    seen = launched(monkeypatch)
    assert self_check.checked(call_of(), True) is None
    of_each = ("stretch_sums", "attend", "query_gradients", "stretch_sums", "key_gradients")
    assert seen == [(name, chunk) for chunk in (32, 64) for name in of_each]


@pytest.mark.exhaustive
def test_a_configuration_that_does_not_fit_one_kernel_is_skipped_there(two, monkeypatch):
    seen = launched(monkeypatch, fails={("attend", 64)})
    assert self_check.checked(call_of(), False) is None
    assert seen[2:] == [("stretch_sums", 64), ("attend", 64), ("attend", 32)]
    kernel_of_64 = one_configuration.OneConfiguration(two[1])
    kernel.forward(call_of(), None, None, Chosen(64, kernel_of_64))
    assert kernel_of_64.ran == {"stretch_sums"}


def test_a_check_that_cannot_be_made_is_a_warning(monkeypatch):
    """Such as one without memory: a call that needs less is not to fail by it, nor to try again each time."""

    def no_memory(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernel, "forward", no_memory)
    with pytest.warns(UserWarning, match="uses its CUDA kernels unchecked: OutOfMemoryError: CUDA out of memory"):
        assert self_check.checked(call_of(), False) is None
    monkeypatch.setattr(kernel, "forward", wrong_forward)
    assert self_check.checked(call_of(), False) is None


def test_threads_wait_for_one_check(monkeypatch):
    made = []

    def check(call, training):
        made.append(call)
        time.sleep(0.1)
        return "wrong"

    monkeypatch.setattr(self_check, "_in_a_thread", check)
    call = call_of()
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: self_check.checked(call, False), range(4))) == ["wrong"] * 4
    assert len(made) == 1


@pytest.mark.exhaustive
def test_modes_of_the_caller_do_not_reach_it():
    counter = FlopCounterMode(display=False)
    with torch.inference_mode(), counter, torch.device("meta"):
        assert self_check.checked(call_of(device="cpu"), True) is None
    assert counter.get_total_flops() == 0


def test_what_is_another_check():
    calls = {
        "plain": {}, "masked": {"key_mask": EVERYTHING["key_mask"]}, "noncausal": {"causal": False},
        "float16": {"dtype": torch.float16}, "a past": {"state": STATE}, "one token": {"length": 1},
        "decay": {"log_decay": EVERYTHING["log_decay"]}, "no rope": {"normalize": "none"},
        "a past on the device": {"state": replace(STATE, length=torch.tensor(5))},
    }  # fmt: skip
    keys = {name: self_check.key_of(call_of(**options), False) for name, options in calls.items()}
    keys["training"] = self_check.key_of(call_of(), True)
    assert len(set(keys.values())) == len(keys)
    assert self_check.key_of(call_of(length=96, transposed=True), False) == keys["plain"]


@pytest.mark.parametrize("length", [64, 70])
def test_the_small_call_is_compiled_as_the_real_one(length):
    """Its code is then that of the real one, which Triton compiles once for both."""
    call = call_of(length=length, transposed=True, log_decay=-torch.rand(1, length, 2).transpose(1, 2))
    small = self_check.small_call(call)
    assert small.q.shape[2] > 64
    for name in ("q", "k", "v", "log_decay"):
        real, other = (getattr(one, name).stride()[1:] for one in (call, small))
        assert [*map(self_check._special, other)] == [*map(self_check._special, real)], name


def test_only_on_a_gpu_and_unless_turned_off(monkeypatch):
    class OnGpu:
        q, is_empty = type("Q", (torch.Tensor,), {"device": torch.device("cuda")})(), False

    asked = []
    monkeypatch.setattr(self_check, "checked", lambda call, training: asked.append(training) or "wrong")
    monkeypatch.setattr(self_check, "Tensor", type(OnGpu.q))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert self_check.why_wrong(call_of(), False) is None
    assert asked == []
    assert self_check.why_wrong(OnGpu, True) == "wrong"
    assert asked == [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert self_check.why_wrong(OnGpu, True) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("LINROPE_SELF_CHECK", "0")
    assert self_check.why_wrong(OnGpu, True) is None


def test_the_default_falls_back_with_a_warning_and_a_wish_is_an_error(monkeypatch):
    monkeypatch.setattr(self_check, "why_wrong", lambda call, training: "its kernels failed")
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(InputError, match=r"backend='triton' cannot take this call: its kernels failed"):
        linear_attention(q, q, q, backend="triton")

    class OnGpu:
        q = type("Q", (), {"device": torch.device("cuda"), "dtype": torch.bfloat16, "shape": (1, 1, 4, 8)})
        v, normalize, state, log_decay, theta = q, "plain", None, None, None
        k = q

    ops._warn_once.cache_clear()
    monkeypatch.setattr("linrope.ops.backends.needs_gradient", lambda call: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.warns(UserWarning, match="takes its slower backend 'chunked' on this GPU: its kernels failed"):
        assert ops._fastest(OnGpu) == "chunked"


def test_the_version_of_an_assembler(tmp_path):
    tool = tmp_path / "ptxas"
    tool.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    tool.chmod(0o755)
    assert self_check.version_of(str(tool)) == "12.8.93"
    assert self_check.version_of(str(tmp_path / "none")) == "unknown"
