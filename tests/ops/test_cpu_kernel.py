"""The compiled kernel against the definition in float64, in every precision it takes; and its library's errors.

Its sums are float32. An error may be 1e-5 of the tensor's largest entry, or 20 times that of the definition in float32:
gradients that cancel lose digits in any float32.
"""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from linrope import InputError, RotaryEmbedding, State, linear_attention
from linrope.ops.cpu_kernel import kernel
from linrope.ops.cpu_kernel import library as libraries
from linrope.ops.cpu_kernel.library import Products
from linrope.ops.torch_kernel.memory import Pool
from linrope.utils.machine import instructions
from tests.ops.cases import CASES, by_name, make, named, on_tokens, run
from tests.ops.test_precision import assert_close

pytestmark = pytest.mark.skipif(libraries.why_none() is not None, reason=f"no library: {libraries.why_none()}")


@pytest.fixture(autouse=True)
def nan_in_what_is_not_written():
    Pool.of_thread.__dict__.clear()  # workspace is kept from call to call
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def in_float32(q, k, v, rope, *, log_decay=None, state=None, **options):
    """`linear_attention` on the inputs in float32, with float64 results."""
    if state is not None:
        options["state"] = state.to(torch.float32)
    if log_decay is not None:
        options["log_decay"] = log_decay.float()
    o, final = linear_attention(q.float(), k.float(), v.float(), rope, **options)
    return o.double(), final.to(torch.float64)


def assert_near(actual, single, exact):
    """Within the bound above. `single`: the definition in float32."""
    assert actual.keys() == exact.keys()
    largest = max(tensor.abs().max().item() for name, tensor in exact.items() if name.startswith("grad"))
    for name, right in exact.items():
        scale = max(right.abs().max().item(), 1e-3 * largest if name.startswith("grad") else 0.0)
        bound = 1e-5 * scale + 20 * (single[name] - right).abs().max().item()
        error = (actual[name] - right).abs().max().item()
        assert error <= bound, f"{name}: off by {error:.2e}, at most {bound:.2e}"


@pytest.mark.parametrize("case", named(CASES))
def test_it_agrees_with_the_definition(case):
    assert_near(run(case, in_float32, "cpu"), run(case, in_float32), run(case))


PRECISION = {
    (torch.float32, 2e-6): [
        {}, {"past": 10**9}, {"scale": 4.0}, {"decay": 0.05}, {"decay": 1e-6}, {"rope": {"trainable": True}},
        {"feature_map": "softmax"}, {"normalize": "none"}, {"rope": {"rotary_dim": 16, "signed": True}, "decay": 0.05},
        {"causal": False},
    ],
    (torch.bfloat16, 1e-2): [
        {}, {"past": 10**9}, {"decay": 0.05}, {"decay": 5e-4, "length": 2000}, {"causal": False},
        {"rope": {"trainable": True}}, {"normalize": "rotary", "eps": 1.0, "length": 300},
    ],
    (torch.float16, 2e-3): [{}, {"decay": 0.05}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "bound", "case"),
    [(*precision, case) for precision, cases in PRECISION.items() for case in cases],
    ids=str,
)
def test_each_precision_is_near_the_exact_result(dtype, bound, case):
    assert_close(bound, dtype, backend="cpu", **case)


@pytest.fixture(params=Products, ids=lambda products: products.name)
def products(request, monkeypatch):
    """The fastest way to multiply bfloat16 depends on the processor: each that can be had is tested."""
    library, runs_v4 = libraries.library(), "v4" in libraries.supported()
    can = {
        Products.OF_FLOAT32: True,
        Products.IN_VECTORS: runs_v4 and "avx512_bf16" in instructions(),
        Products.IN_TILES: library.products is Products.IN_TILES,
    }
    if not can[request.param]:
        pytest.skip("this processor has no such instructions")
    monkeypatch.setattr(libraries, "_found", replace(library, products=request.param))


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("case", PRECISION[torch.bfloat16, 1e-2], ids=str)
def test_bfloat16_inputs_are_multiplied_as_such_or_as_float32(case):
    assert_close(1e-2, torch.bfloat16, backend="cpu", **case)


@pytest.mark.parametrize("decay", [30.0, 1e-6])
def test_float32_keeps_its_digits_over_a_long_sequence(decay):
    assert_close(2e-6, torch.float32, decay=decay, length=32_768, grad=decay < 1, backend="cpu")


def results(inputs, rope=None, weights=None, **options):
    """Outputs, the final state and gradients, of outputs and states weighted by `weights` if they are given."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    o, state = linear_attention(*inputs, rope, return_state=True, backend=options.pop("backend", "cpu"), **options)
    of_o, of_kv = (o, 1) if weights is None else weights
    return [o, state.kv, state.k_sum, *torch.autograd.grad((o * of_o).sum() + (state.kv * of_kv).sum(), inputs)]


ANY_SIZES = [
    (1, 1, 77, 256, 300), (2, 1, 130, 3, 1), (1, 2, 65, 17, 33), (1, 3, 64, 48, 16), (3, 1, 5, 96, 80),
    (1, 1, 1030, 8, 4),
]  # fmt: skip


@pytest.mark.parametrize("sizes", ANY_SIZES, ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_any_sizes(sizes, interleaved, causal):
    batch, heads, length, features, width = sizes
    torch.manual_seed(0)
    inputs = [torch.randn(batch, heads, length, size) for size in (features, features, width)]
    rope = RotaryEmbedding(features, interleaved=interleaved, rotary_dim=features // 2 * 2) if features > 1 else None
    exact = results([x.double() for x in inputs], rope, causal=causal, backend="reference")
    for actual, expected in zip(results(inputs, rope, causal=causal), exact):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("options", [{}, {"decay": True}, {"causal": False}], ids=str)
@pytest.mark.parametrize("sizes", ANY_SIZES, ids=str)
def test_bfloat16_of_any_sizes(sizes, options):
    """Rows, columns and terms of products that are no multiples of a tile's."""
    batch, heads, length, features, width = sizes
    torch.manual_seed(0)
    inputs = [torch.randn(batch, heads, length, size).bfloat16() for size in (features, features, width)]
    rope = RotaryEmbedding(features, rotary_dim=features // 2 * 2) if features > 1 else None
    call = {"causal": options.get("causal", True)}
    if "decay" in options:
        call["log_decay"] = -0.05 * torch.rand(batch, heads, length)
    call["weights"] = torch.randn(batch, heads, length, width).bfloat16(), torch.randn(features, width)
    exact = results([x.double() for x in inputs], rope, backend="reference", **call)
    for actual, expected in zip(results(inputs, rope, **call), exact):
        assert (actual.double() - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize("options", [
    {}, {"causal": False}, {"decay": True}, {"decay": True, "packed": True, "masked": True}, {"trainable": True},
], ids=str)  # fmt: skip
def test_few_heads_are_computed_in_stripes(options, monkeypatch):
    """Threads share the tokens of a head: the results are those of one thread, and the same to the bit each time."""
    torch.manual_seed(0)
    shape, call = (1, 1, 8200), {"causal": options.get("causal", True)}
    inputs = [torch.randn(*shape, 16) for _ in range(3)]
    rope = RotaryEmbedding(16, trainable="trainable" in options)
    if "decay" in options:
        call["log_decay"] = -0.01 * torch.rand(shape)
    if "packed" in options:
        call["segment_ids"] = (torch.arange(8200) // 1500)[None]
    if "masked" in options:
        call["key_mask"] = torch.rand(1, 8200) > 0.2
    call["state"] = State(torch.randn(1, 1, 16, 16), torch.rand(1, 1, 16), 100)
    found = {}
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3, 3):
            torch.set_num_threads(n)
            again = results(inputs, rope, **call)
            if n in found:
                assert all(map(torch.equal, again, found[n]))
            found[n] = again
    finally:
        torch.set_num_threads(threads)
    for n in (2, 3):
        for actual, expected in zip(found[n], found[1]):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def test_gradients_of_theta_add_up_over_rows_heads_and_stripes():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1, 9000, 8) for _ in range(3))

    def gradient(q, k, v, backend, base):
        rope = RotaryEmbedding(8, base, trainable=True)
        o = linear_attention(q, k, v, rope, backend=backend)
        return torch.autograd.grad(o.square().sum(), rope.theta)[0].double()

    for base in (100.0, [100.0]):
        exact = gradient(q.double(), k.double(), v.double(), "chunked", base)
        torch.testing.assert_close(
            gradient(q, k, v, "cpu", base), exact, rtol=1e-3, atol=1e-4 * exact.abs().max().item()
        )


@pytest.mark.parametrize("causal", [True, False])
def test_strides_are_read_as_they_are(causal):
    torch.manual_seed(0)
    q, k, v = (x.transpose(1, 2) for x in torch.randn(2, 70, 3, 3, 8).unbind(2))
    mask = (torch.rand(70, 2) > 0.4).T
    for inputs in (
        (q, k, v),
        (q, k, torch.randn(1, 1, 70, 8).expand(2, 3, 70, 8)),
        (q, k, torch.randn(2, 3, 8, 70).mT),
    ):
        found = results(inputs, key_mask=mask, causal=causal)
        expected = results([x.contiguous() for x in inputs], key_mask=mask, causal=causal)
        assert all(map(torch.equal, found, expected))


def test_rotations_of_long_calls_are_not_kept(monkeypatch):
    """A table of them grows with the length, and there is one for each length."""
    rope, x = RotaryEmbedding(4), torch.randn(1, 1, 321, 4)
    expected = linear_attention(x, x, x, rope, backend="cpu")
    Pool.of_thread.__dict__.clear()
    monkeypatch.setattr(kernel, "KEPT_CHUNKS", 2)
    for length in (65, 128, 129, 321):
        y = x[:, :, :length]
        torch.testing.assert_close(linear_attention(y, y, y, rope, backend="cpu"), expected[:, :, :length])
    kept = Pool.on(x.device).made["cpu frames"].values()
    assert [frames.shape[0] for frames in kept] == [2]


@pytest.mark.parametrize("name", ["T=321", "everything at once", "normalize=rotary", "phi=callable"])
def test_later_tokens_change_nothing_earlier(name):
    """Bit for bit."""
    _, call = make(by_name(name))
    q, k, v, rope = call.pop("args")
    call["backend"] = "cpu"
    before = in_float32(q, k, v, rope, return_state=True, **call)[0]
    for t in (1, 30, 63, 64):
        changed = [x.detach().clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, t:] = torch.randn_like(x[:, :, t:]) * 100
        after = in_float32(*changed, rope, return_state=True, **call)[0]
        assert torch.equal(before[:, :, :t], after[:, :, :t])


@pytest.mark.parametrize("strongest", [-1e3, torch.finfo(torch.float32).min])
def test_forgetting_everything_at_once_is_a_fresh_start(strongest):
    """However strong one decay, those after it keep their digits."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 100, 4) for _ in range(3))
    log_decay = torch.full((1, 2, 100), -0.5)
    log_decay[:, :, 70] = strongest
    o = linear_attention(q, k, v, log_decay=log_decay, backend="cpu")
    alone = on_tokens(slice(70, 100), q, k, v, None, log_decay=log_decay.clamp(min=-1), backend="cpu")
    torch.testing.assert_close(o[:, :, 70:], alone, rtol=1e-5, atol=1e-6)


def test_a_document_boundary_is_a_fresh_start():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 300, 6) for _ in range(3))
    rope, log_decay = RotaryEmbedding(6), -torch.rand(2, 2, 300)
    ids = (torch.arange(300) >= 140).long().expand(2, -1)
    whole, final = linear_attention(
        q, k, v, rope, log_decay=log_decay, segment_ids=ids, backend="cpu", return_state=True
    )
    alone = on_tokens(slice(140, 300), q, k, v, rope, log_decay=log_decay, backend="cpu")
    torch.testing.assert_close(whole[:, :, 140:], alone, rtol=1e-4, atol=1e-5)
    assert (final.log_decay == -torch.inf).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("feature_map", ["exp", "softmax"])
def test_masked_keys_change_nothing(causal, feature_map):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 150, 4) for _ in range(3))
    mask = torch.rand(1, 150) > 0.3

    def with_fill(fill):
        b, c = k.clone(), v.clone()
        b[:, :, ~mask[0]], c[:, :, ~mask[0]] = fill, fill
        return results((q, b, c), key_mask=mask, causal=causal, feature_map=feature_map)

    plain = with_fill(0.0)
    for fill in (torch.nan, torch.inf, 1e30):
        assert all(map(torch.equal, with_fill(fill), plain))
    assert all((gradient[:, :, ~mask[0]] == 0).all() for gradient in plain[4:])


@pytest.mark.parametrize("feature_map", ["elu1", "relu", "exp", "identity", "softmax"])
def test_nan_is_carried_on_and_features_are_those_of_the_table(feature_map):
    q = torch.ones(1, 1, 70, 4)
    q[0, 0, 3, 1] = torch.nan
    v = torch.ones(1, 1, 70, 4)
    o = linear_attention(q, q, v, feature_map=feature_map, backend="cpu", normalize="none")
    assert o[0, 0, 3:].isnan().all()
    assert o[0, 0, :3].isfinite().all()
    x = torch.tensor([-1e4, -100.0, -20.0, -1.0, -1e-8, 0.0, 1e-8, 1.0, 9.99, 10.0, 10.01, 30.0])
    k = x.expand(1, 1, 1, -1)
    k = torch.cat((k, k), dim=2).requires_grad_()  # two tokens: one has a path of its own
    _, state = linear_attention(k, k, k[..., :1], feature_map=feature_map, backend="cpu", return_state=True)
    _, exact = linear_attention(*(y.double() for y in (k, k, k[..., :1])), feature_map=feature_map, return_state=True)
    torch.testing.assert_close(state.k_sum.double(), exact.k_sum, rtol=1e-6, atol=1e-37)
    weights = torch.arange(1.0, 13)
    found, expected = (torch.autograd.grad((s.k_sum * weights).sum(), k)[0] for s in (state, exact))
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", [
    lambda x: x.double(), lambda x: x.repeat(1, 1, 1, 40),
], ids=["float64", "320 features"])  # fmt: skip
def test_what_it_does_not_take_is_refused(change):
    x = change(torch.randn(1, 1, 70, 8))
    with pytest.raises(InputError, match=r"backend='cpu' cannot take this call: .*(float64|320 features).*'chunked'"):
        linear_attention(x, x, x, backend="cpu")


def test_a_library_that_cannot_serve_says_why(tmp_path, monkeypatch):
    def reason(choice):
        found = libraries.find(choice)
        assert isinstance(found, str)
        return found

    own = libraries.supported()[0]
    assert libraries.find(own).target == own
    assert reason("off") == "LINROPE_CPU=off"
    with pytest.raises(InputError, match=r"LINROPE_CPU='v5' is unknown: set it to one of v3, v4, neon, off, or unset"):
        libraries.find("v5")
    foreign = "neon" if own != "neon" else "v3"
    assert reason(foreign) == f"LINROPE_CPU={foreign}, and this processor runs {' and '.join(libraries.supported())}"
    path = libraries.FOLDER / "lib" / f"linear_attention_{own}{libraries.SUFFIX}"
    monkeypatch.setattr(libraries, "FOLDER", tmp_path)
    (tmp_path / "lib").mkdir()
    assert "is missing (install linrope again" in reason(own)
    (tmp_path / "lib" / "why_missing.txt").write_text("the compiler failed: no space")
    assert "not compiled when linrope was installed: the compiler failed: no space" in reason(own)
    copy = tmp_path / "lib" / path.name
    copy.write_bytes(path.read_bytes()[:5000])
    assert "cannot be loaded, FileNotFoundError" in reason(own)
    checksums = path.with_name("checksums.json").read_text()
    copy.with_name("checksums.json").write_text(checksums)
    assert "is damaged (install linrope again" in reason(own)
    copy.write_bytes(path.read_bytes())
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "call.h").write_text("// another record")
    assert "was compiled from other source files" in reason(own)
    copy.with_name("checksums.json").write_text(checksums[:20])
    assert "cannot be loaded, JSONDecodeError" in reason(own)


def test_auto_falls_back_with_one_warning_that_names_the_reason(monkeypatch):
    q = torch.randn(1, 1, 70, 8)
    expected = linear_attention(q, q, q, backend="chunked")
    assert torch.equal(linear_attention(q, q, q), linear_attention(q, q, q, backend="cpu"))
    monkeypatch.setattr(libraries, "_found", "of a test")
    with pytest.warns(UserWarning, match=r"slower backend 'chunked': .*of a test") as warned:
        both = [linear_attention(q, q, q) for _ in range(2)]
    assert len(warned) == 1
    assert all(torch.equal(o, expected) for o in both)
    with pytest.raises(InputError, match=r"backend='cpu' cannot take this call: of a test"):
        linear_attention(q, q, q, backend="cpu")
    monkeypatch.setattr(libraries, "_found", libraries.OFF)  # asked for: no warning
    assert torch.equal(linear_attention(q, q, q), expected)


def test_a_processor_without_avx2_has_none(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert libraries.find(None) == "this processor has no AVX2"


@pytest.mark.skipif("v4" not in libraries.supported(), reason="this processor runs one target only")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_target_computes_the_same(dtype):
    torch.manual_seed(0)
    inputs = torch.randn(3, 1, 2, 700, 40, dtype=dtype).unbind()
    found, before = [], libraries.library()
    for target in ("v3", "v4"):
        with libraries.used(target):
            assert libraries.library().target == target
            found.append(results(inputs, RotaryEmbedding(40)))
    assert libraries.library() is before
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6  # each rounds bfloat16 at other places: 2^-7 each
    for actual, expected in zip(*found):
        assert (actual - expected).norm() <= tolerance * expected.norm()


def test_a_library_that_is_not_there_is_not_used():
    with (
        pytest.raises(InputError, match="there is no library 'off' to use: LINROPE_CPU=off"),
        libraries.used("off"),
    ):
        pass


@pytest.mark.exhaustive
def test_the_environment_chooses_the_library():
    program = "from linrope.ops.cpu_kernel import library; print(library.why_none() or library.library().target)"
    for choice, expected in (("off", libraries.OFF), (libraries.supported()[-1],) * 2):
        said = subprocess.check_output([sys.executable, "-c", program], env={**os.environ, "LINROPE_CPU": choice})
        assert said.decode().strip() == expected
