"""The CUDA backend where there is no GPU: in Triton's interpreter. `test_backends.py` holds it to the definition."""

import inspect
import itertools
import json
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.speed.gpu_correctness import Case as Compilable
from benchmarks.speed.launches import Recorder, call_of, launches_of
from linrope import RotaryEmbedding, State, linear_attention
from linrope.errors import InputError
from linrope.ops import linear_attention as ops
from linrope.ops.backends import BACKENDS
from linrope.ops.call import check_call
from linrope.ops.triton_kernel import kernel, launch, plan, self_check
from linrope.utils import kept_tensors
from tests.conftest import assert_input_errors
from tests.ops.cases import CASES, COVERING, assert_agree, by_name, in_pieces, make, run, smaller

triton = pytest.importorskip("triton", reason="Triton is there for Linux only")
import triton.language as tl  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402

from linrope.ops.triton_kernel import configurations, kernels  # noqa: E402


def gradients_and_output(dtype, backend, *, features, width, length=150, heads=1, rope=None, **options):
    """o, and the gradients of q, k and v, of one call in that dtype on inputs rounded to bfloat16; in float64."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, g = (
        torch.randn(1, heads, length, size, generator=draw).bfloat16().to(dtype)
        for size in (features, features, width, width)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    o = linear_attention(*inputs, rope, backend=backend, **options)
    return [x.detach().double() for x in (o, *torch.autograd.grad((o * g).sum(), inputs))]


def errors(actual, expected):
    return [((x - y).norm() / y.norm()).item() for x, y in zip(actual, expected, strict=True)]


@pytest.mark.parametrize(
    ("features", "width", "rope"),
    [
        # no powers of two
        (80, 96, {"interleaved": False, "rotary_dim": 40}),
        # the widest, whose values are split among programs
        (256, 144, {}),
        (16, 256, {"signed": True}),
    ],
)
@pytest.mark.parametrize("length", [20, 150])
@pytest.mark.exhaustive
def test_wide_and_odd_heads(features, width, rope, length, monkeypatch):
    monkeypatch.setattr(plan, "stretch_of", lambda *sizes: 64)
    options = {"features": features, "width": width, "length": length, "rope": RotaryEmbedding(features, **rope)}
    found = gradients_and_output(torch.float64, "triton", **options)
    assert max(errors(found, gradients_and_output(torch.float64, "chunked", **options))) < 1e-12


@pytest.mark.exhaustive
@pytest.mark.parametrize("chunk", [16, 32])
def test_chunks_as_a_gpu_takes_them(chunk, monkeypatch):
    """The interpreter's other tests have chunks of 64 tokens, which is quicker."""
    monkeypatch.setattr(plan, "stretch_of", lambda *sizes: 64)
    for name in ("stretch_sums", "attend", "query_gradients", "key_gradients"):
        monkeypatch.setattr(getattr(kernels, name), "configs", [triton.Config({"CHUNK": chunk, "STAGES": 1})])
    case = replace(smaller(by_name("everything at once")), length=150)
    assert_agree(run(case, backend="triton"), run(case), 1e-10)


# float32 sums of some hundred terms; bfloat16 rounds inputs of products to 2^-9 each and the interpreter cuts outputs
# off at 2^-8; float16 outputs are cut off at 2^-11
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)]
)
@pytest.mark.parametrize("decay", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_precision(dtype, tolerance, decay):
    log_decay = -0.05 * torch.rand(1, 1, 70, generator=torch.Generator().manual_seed(1)) if decay else None
    options = {"features": 32, "width": 32, "length": 70, "rope": RotaryEmbedding(32), "log_decay": log_decay}
    found = gradients_and_output(dtype, "triton", **options)
    options["log_decay"] = None if log_decay is None else log_decay.double()
    assert max(errors(found, gradients_and_output(torch.float64, "chunked", **options))) < tolerance


def test_the_gradient_of_a_decay_keeps_its_digits_in_bfloat16():
    """It is a sum of differences, and as exact as the other gradients: weak decays over several stretches."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, g = torch.randn(4, 1, 1, 150, 32, generator=draw).bfloat16().unbind()
    log_decay = -0.002 * torch.rand(1, 1, 150, generator=draw)

    def gradient(dtype, backend):
        trained = log_decay.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        o = linear_attention(*(x.to(dtype) for x in (q, k, v)), log_decay=trained, backend=backend)
        return torch.autograd.grad((o * g.to(dtype)).sum(), trained)[0].double()

    exact = gradient(torch.float64, "reference")
    assert ((gradient(torch.bfloat16, "triton") - exact).norm() / exact.norm()).item() < 2**-6


@pytest.mark.parametrize(
    "name",
    ["a base for each head, everything", pytest.param("normalize=none, continued", marks=pytest.mark.exhaustive)],
)
def test_token_by_token_is_the_whole(name):
    """By the kernel of decoding, one launch for each token."""
    _, call = make(replace(by_name(name), length=20, packed=False))
    args = call.pop("args")
    with torch.no_grad():
        expected, state = linear_attention(*args, **call, return_state=True)
        found, final = in_pieces(-3, -2, -1)(*args, **call, return_state=True, backend="triton")
    for actual, right in ((found, expected), (final.kv, state.kv), (final.k_sum, state.k_sum)):
        torch.testing.assert_close(actual, right, rtol=1e-10, atol=1e-12)


def test_a_replayed_step_reads_its_position_from_memory():
    """As a captured CUDA graph would: the same tensors again and again, equal to steps with numbers for positions."""
    rope, steps = RotaryEmbedding(16), 20
    q, k, v = torch.randn(3, steps, 1, 1, 1, 16).unbind()
    log_decay = -0.1 * torch.rand(steps, 1, 1, 1)
    zero = State.zeros(1, 1, 16)
    eager, buffers = zero, [x[0].clone() for x in (q, k, v, log_decay)]
    state = State(zero.kv.clone(), zero.k_sum.clone(), torch.tensor(0))
    for t in range(steps):
        options = {"return_state": True, "backend": "triton"}
        expected, eager = linear_attention(q[t], k[t], v[t], rope, state=eager, log_decay=log_decay[t], **options)
        for buffer, x in zip(buffers, (q, k, v, log_decay)):
            buffer.copy_(x[t])
        o, new = linear_attention(*buffers[:3], rope, state=state, log_decay=buffers[3], **options)
        assert torch.equal(o, expected)
        for name in ("kv", "k_sum", "length"):
            getattr(state, name).copy_(getattr(new, name))
    assert state.length == eager.length == steps
    assert torch.equal(state.kv, eager.kv)


def test_a_step_writes_a_state_of_its_own():
    """The programs of a head all read k_sum, and one writes it: in place they would race."""
    q = torch.randn(1, 1, 1, 64)
    state = State(torch.randn(1, 1, 64, 64), torch.rand(1, 1, 64), 3)
    before = state.kv.clone(), state.k_sum.clone()
    _, new = linear_attention(q, q, q, state=state, return_state=True, backend="triton")
    assert {new.kv.data_ptr(), new.k_sum.data_ptr()}.isdisjoint({state.kv.data_ptr(), state.k_sum.data_ptr()})
    assert torch.equal(state.kv, before[0])
    assert torch.equal(state.k_sum, before[1])


def test_a_position_on_the_device_is_refused_where_nothing_reads_it():
    q, state = torch.randn(1, 1, 1, 4), replace(State.zeros(1, 1, 4), length=torch.tensor(3))
    long = torch.randn(1, 1, 2, 4)
    cases = [
        (lambda: linear_attention(q, q, q, state=state), r"state\.length is a tensor, which backend='cpu'"),
        (
            lambda: linear_attention(long, long, long, state=state, backend="triton"),
            r"one causal token without gradients",
        ),
        (lambda: linear_attention(q, q, q.requires_grad_(), state=state, backend="triton"), "pass int"),
        (lambda: linear_attention(q, q, q, state=replace(state, length=torch.tensor([3]))), r"state\.length is \(1,\)"),
    ]
    assert_input_errors(*cases)


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on the CPU")
@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_compiled_by_inductor_with_a_decay_as_the_model_lays_it_out(backend):
    """PyTorch's own compiler, which looks at strides and at names of arguments, forward and backward."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 70, 8, generator=draw).unbind()
    gate = torch.randn(1, 70, 2, generator=draw)

    def gradients(gate, operator=linear_attention):
        x = gate.clone().requires_grad_()
        o = operator(q, k, v, log_decay=torch.nn.functional.logsigmoid(x).transpose(1, 2), backend=backend)
        return o.detach(), torch.autograd.grad(o.sum(), x)[0]

    torch._dynamo.reset()
    compiled = gradients(gate, torch.compile(linear_attention, fullgraph=True))
    for actual, expected in zip(compiled, gradients(gate)):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)  # float32, fused elementwise passes


@pytest.mark.parametrize("switch", ["high", "tf32"])
def test_float32_takes_tf32_where_pytorch_allows_it(switch, monkeypatch):
    """By either of PyTorch's switches; operands are then rounded to the nearest of 10 binary digits."""
    options = {"features": 32, "width": 32, "length": 20, "rope": RotaryEmbedding(32)}
    exact = gradients_and_output(torch.float64, "chunked", **options)
    matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    if switch == "high":
        torch.set_float32_matmul_precision("high")
    else:
        matmul.fp32_precision = "tf32"
    try:
        found = errors(gradients_and_output(torch.float32, "triton", **options), exact)
    finally:
        torch.set_float32_matmul_precision("highest") if switch == "high" else setattr(matmul, "fp32_precision", before)
    assert 1e-5 < max(found) < 2**-9
    assert max(errors(gradients_and_output(torch.float32, "triton", **options), exact)) < 2e-6


# --- what is launched, and what it takes -----------------------------------------------------------------------------


def recording(monkeypatch) -> Recorder:
    """In place of the kernels; tables that it leaves unwritten are not kept."""
    recorder = Recorder()
    monkeypatch.setattr(plan, "all_kernels", lambda: recorder)
    monkeypatch.setattr(kept_tensors, "_kept", {})
    return recorder


def recorded(case: Compilable, monkeypatch, device: str = "cpu") -> tuple[list[str], Recorder]:
    recorder = recording(monkeypatch)
    with torch.no_grad():
        BACKENDS["triton"](call_of(case, device))
    return [launched.kernel for launched in recorder.launches], recorder


def test_a_forward_is_four_launches_and_a_token_one(monkeypatch):
    assert recorded(Compilable(), monkeypatch)[0] == ["write_angles", "stretch_sums", "scan", "attend"]
    assert recorded(Compilable(decay=True, packed=True), monkeypatch)[0] == recorded(Compilable(), monkeypatch)[0]
    assert recorded(Compilable(length=1, decay=True), monkeypatch)[0] == ["decode"]


@pytest.mark.exhaustive
def test_the_states_take_an_eighth_of_q_and_are_kept_for_the_backward(monkeypatch):
    monkeypatch.undo()  # the real stretches
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    case = Compilable(dim=128, width=128, length=65_536, batch=1, heads=8)
    _, recorder = recorded(case, monkeypatch)
    states = next(launched.args[4] for launched in recorder.launches if launched.kernel == "stretch_sums")
    q = next(launched.args[0] for launched in recorder.launches if launched.kernel == "attend")
    assert states.nbytes <= 0.14 * q.nbytes  # one sum of keys to 128 columns of kv, and one state more than stretches
    small = torch.zeros(1, 1, 512, 16)
    kept = kernel.outputs(check_call(small, small, small), torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 16))[2]
    assert kept.shape == (1, 512 // 256 + 1, 16 * 17)


def test_stretches_by_shape(monkeypatch):
    monkeypatch.undo()
    long = {(128, False): 2048, (64, False): 1024, (64, True): 512, (256, False): 2048}
    assert {sizes: plan.stretch_of(16, 65_536, *sizes) for sizes in long} == long
    assert plan.stretch_of(1, 4096, 128, False) == 256  # few programs: shorter stretches make more of them
    assert plan.stretch_of(1, 524_288, 128, False) == 2048


def test_a_kernel_is_tuned_by_arguments_of_its_own():
    tuned = kernels.stretch_sums, kernels.attend, kernels.query_gradients, kernels.key_gradients
    for kernel_ in tuned:  # later releases of Triton refuse other names
        assert set(kernel_.keys) == set(configurations.TUNED_BY) & set(kernel_.arg_names)
    assert [("LATER" in k.keys, "CAUSAL" in k.keys, "SUMS" in k.keys) for k in tuned] == [
        (True, False, False), (False, True, False), (False, True, False), (False, True, True),
    ]  # fmt: skip


def test_a_state_has_only_configurations_that_fit():
    shapes = (1, 32), (2, 64), (3, 64), (4, 128)
    sizes = [{"P": 16, "TILES": tiles, "BLOCK_E": columns, "LOW": tl.bfloat16} for tiles, columns in shapes]
    found = [configurations.fitting(configurations.ON_GPUS, {}, **one) for one in sizes]
    assert [{config.num_warps for config in one} for one in found] == [{2}, {2}, {4, 8}, {4, 8}]
    assert configurations.fitting(configurations.ON_GPUS, sizes[0])[0] == configurations.ON_GPUS[0]
    of_pairs = [configurations.fitting(configurations.ON_GPUS, one, CAUSAL=True) for one in sizes]
    assert [{config.kwargs["CHUNK"] for config in one} for one in of_pairs] == [{16, 32}, {16}, {16}, {16}]
    assert [len(one) for one in of_pairs] == [3, 2, 4, 4]
    assert configurations.ON_GPUS[0].kwargs["CHUNK"] == plan.CHUNK
    exact = [configurations.fitting(configurations.ON_GPUS, one | {"LOW": tl.float32}) for one in sizes]
    assert [{config.num_warps for config in one} for one in exact] == [{2}, {4, 8}, {4, 8}, {8}]


@pytest.mark.parametrize("dim", [8, 16, 24, 32, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("width", [8, 32, 64, 96, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_product_of_more_than_two_warps_has_64_rows(dim, width, dtype):
    """Hopper would compute it by WGMMA."""
    q, v = (torch.zeros(1, 1, 3, size, dtype=dtype) for size in (dim, width))
    made = plan.plan_of(check_call(q, q, v))
    sizes = made.features_of | made.sizes | made.products
    tried = configurations.fitting(configurations.ON_GPUS, sizes)
    assert tried
    assert sizes["P"] * sizes["TILES"] >= dim / 2
    rows = [2 * sizes["P"], *(config.kwargs["CHUNK"] for config in tried)]
    if 2 * sizes["P"] * sizes["TILES"] * sizes["BLOCK_E"] <= plan.SMALL and (sizes["P"] == 32 or sizes["BLOCK_E"] < 64):
        rows.append(sizes["BLOCK_E"])  # `attend` keeps the state's transpose
    assert max(rows) < 64 or {config.num_warps for config in tried} == {2}


def test_every_constant_that_changes_the_code_is_in_the_key():
    for name in ("stretch_sums", "attend", "query_gradients", "key_gradients"):
        function = getattr(kernels, name)
        parameters = inspect.signature(function.fn.fn).parameters.values()
        constants = {parameter.name for parameter in parameters if parameter.annotation == "tl.constexpr"}
        assert constants - set(function.keys) == {"CHUNK", "STAGES", "EMULATED", "LOW", "ACC"}


def test_the_key_can_be_kept_on_disk_and_tells_exact_products_apart(request):
    """Triton writes it as JSON; LOW and ACC, which are no JSON, follow from the others and the tensors' dtypes."""
    request.addfinalizer(partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()))
    keys: dict[tuple, tuple] = {}
    for dtype, precision in (
        ("bfloat16", "highest"),
        ("float16", "highest"),
        ("float32", "highest"),
        ("float32", "high"),
    ):
        torch.set_float32_matmul_precision(precision)
        for rope in ({}, {"trainable": True}):
            for launched in launches_of(Compilable(length=300, dtype=dtype, rope=rope)):
                known, tuned = launched.constants, getattr(kernels, launched.kernel)
                if not hasattr(tuned, "keys"):
                    continue
                key = json.dumps([known[name] for name in tuned.keys if name in known])
                dtypes = tuple(x.dtype for x in launched.args if isinstance(x, torch.Tensor))
                products = known["LOW"], known["ACC"]
                assert keys.setdefault((launched.kernel, key, dtypes), products) == products
    assert len(set(keys.values())) == 2


def test_a_configuration_that_does_not_fit_is_skipped():
    def too_much(*args, **kwargs):
        raise OutOfResources(100_000, 99_000, "shared memory")

    tuner = kernels.attend
    fake = SimpleNamespace(
        fn=SimpleNamespace(run=too_much), pre_hook=lambda *args, **kwargs: None, post_hook=lambda *args, **kwargs: None,
        do_bench=lambda call, quantiles: call(), nargs={}, arg_names=tuner.arg_names, base_fn=tuner.base_fn,
    )  # fmt: skip
    assert type(tuner)._bench(fake, config=configurations.ON_GPUS[0]) == [float("inf")] * 3


INTERACTING = {"PLAIN", "DECAY", "DOCUMENTS", "MASKED", "CAUSAL", "SUMS", "WEIGHTED", "LATER", "D_THETA", "D_DECAY"}
INTERACTING |= {"R", "SIGNED", "GIVEN_KV", "GIVEN_SUM"}
SIZES = {"D", "E", "P", "TILES", "BLOCK_E", "STRETCH", "BLOCK", "KV", "X", "SCAN_BLOCK", "PIPELINED", "CHUNK", "STAGES"}


def branches(case, monkeypatch) -> set[tuple]:
    """The values of the kernels' flags in one case's launches, and the pairs of those that interact."""
    recorder, found = recording(monkeypatch), set()
    run(smaller(case), backend="triton")
    for launched in recorder.launches:
        flags = {name: value for name, value in launched.constants.items() if name not in SIZES}
        flags |= {name: flags[name] > 0 for name in ("R", "SIGNED") if name in flags}
        values = sorted((name, str(value)) for name, value in flags.items())
        pairs = itertools.combinations([value for value in values if value[0] in INTERACTING], 2)
        found |= {(launched.kernel, *pair) for pair in [*((value,) for value in values), *pairs]}
    return found


def test_the_default_cases_reach_every_branch(monkeypatch):
    reached = {case.name: branches(case, monkeypatch) for case in CASES}
    assert reached.keys() >= COVERING
    everything = set().union(*reached.values())
    assert len(everything) > 200
    assert everything - set().union(*(reached[name] for name in COVERING)) == set()


# --- where it cannot run ---------------------------------------------------------------------------------------------


def test_without_a_gpu_it_is_refused_with_the_reason(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(InputError, match=r"backend='triton' cannot take this call: the tensors are on cpu.*'chunked'"):
        linear_attention(q, q, q, backend="triton")
    assert linear_attention(q, q, q).isfinite().all()


def test_a_triton_that_refuses_the_kernels_is_a_reason_and_no_crash(monkeypatch):
    def refused():
        raise ValueError("key contains names that are not kernel arguments")

    q = torch.randn(1, 1, 4, 8)
    monkeypatch.setattr(launch, "all_kernels", refused)
    launch.why_refused.cache_clear()
    try:
        with pytest.raises(InputError, match=rf"Triton {triton.__version__} refuses its kernels, ValueError: key con"):
            linear_attention(q, q, q, backend="triton")
    finally:
        launch.why_refused.cache_clear()


def test_heads_that_are_too_wide_are_refused():
    wide, widest = torch.randn(1, 1, 4, 257), torch.randn(1, 1, 4, 256)
    with pytest.raises(InputError, match=r"q has 257 features and v 257 values, it takes at most 256"):
        linear_attention(wide, wide, wide, backend="triton")
    with pytest.raises(InputError, match=r"v 257 values"):  # one more for the denominator
        linear_attention(widest, widest, widest, normalize="rotary", backend="triton")


def test_a_nan_is_carried_on_and_hidden_by_nothing():
    for name in ("q", "k", "v", "log_decay"):
        inputs = {name: torch.randn(1, 1, 70, 4) for name in "qkv"} | {"log_decay": -torch.rand(1, 1, 70)}
        inputs[name][0, 0, 40] = torch.nan
        log_decay = inputs.pop("log_decay")
        call = replace(check_call(**inputs), log_decay=log_decay)
        o = kernel.forward(call, torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4))[0]
        later = o[0, 0, 40 if name == "q" else 41 :]
        assert (later[0] if name == "q" else later).isnan().all()


def test_on_a_gpu_it_is_the_default_and_does_without_with_one_warning(monkeypatch):
    def inputs(width):
        q = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 1, 4, width))
        return SimpleNamespace(q=q, v=q, normalize="plain")

    ops._warn_once.cache_clear()
    monkeypatch.setattr(self_check, "why_wrong", lambda call, training: None)
    monkeypatch.setattr("linrope.ops.backends.needs_gradient", lambda call: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert ops._fastest(inputs(64)) == "triton"
    with pytest.warns(UserWarning, match=r"slower backend 'chunked' on this GPU: q has 300 features"):
        assert ops._fastest(inputs(300)) == "chunked"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ops._fastest(inputs(300)) == "chunked"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    with pytest.warns(UserWarning, match=r"T4 is older than compute capability 8\.0"):
        assert ops._fastest(inputs(64)) == "chunked"
    monkeypatch.setattr(launch, "INSTALLED", False)
    with pytest.warns(UserWarning, match="Triton is not installed: pip install triton"):
        assert ops._fastest(inputs(64)) == "chunked"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("size", "targets", "assembler"),
    [
        ("16", ["90"], None),
        *(("64", ["80", "86", "90", "100", "120"], assembler) for assembler in ("ptxas", "ptxas-blackwell")),
    ],
)
def test_every_kernel_compiles_for_gpus_that_are_not_there(monkeypatch, tmp_path, size, targets, assembler):
    """What the interpreter does not see: layouts, shared memory, names that Triton's compiler lacks. Triton brings two
    versions of the assembler, and each takes all architectures."""
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("COLUMNS", "200")
    if assembler is not None:
        tool = str(Path(triton.__file__).parent / "backends/nvidia/bin" / assembler)
        monkeypatch.setenv("TRITON_PTXAS_PATH", tool)
        monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", tool)
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compile_kernels", "--target", *targets, "--case"]
    cases = [f"{size}, everything, trained θ", "64, one token", "256, split values"]
    done = subprocess.run([*command, *cases], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in (
        "write_angles", "stretch_sums", "scan", "attend", "query_gradients", "key_gradients", "finish_features",
        "finish_log_decay", "decode",
    ):  # fmt: skip
        assert done.stdout.count(name) >= len(targets), name
