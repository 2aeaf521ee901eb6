"""How far each precision is from the exact result, at lengths and positions where it is easily lost.

Errors are ‖actual - exact‖ / ‖exact‖ over a whole tensor, against the chunked form in float64 (which test_backends
holds to the definition). float32 rounds to 6e-8; bounds of 2e-6 leave room for the sums. Half precisions are summed
in float32 too, so that what is left is the rounding of inputs and outputs: 2^-9 and 2^-12 relative.
"""

import pytest
import torch

from linrope import RotaryEmbedding, State, linear_attention, summarize

LENGTH = 8192


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def call(
    dtype, *, exact=False, decay=0.0, past=0, scale=1.0, length=LENGTH, grad=True, rope=None, backend="auto", **options
):
    """{name: tensor} of the output and the gradients, on the same inputs whatever the dtype they are brought to."""
    inputs = {name: scale * random(1, 2, length, 32, seed=i).to(dtype) for i, name in enumerate("qkvg")}
    if decay:
        inputs["log_decay"] = -decay * random(1, 2, length, seed=5).abs().to(dtype)
    inputs = {name: (x.double() if exact else x).requires_grad_(grad) for name, x in inputs.items()}
    g, rope = inputs.pop("g").detach(), RotaryEmbedding(32, **(rope or {}))
    if past:
        kv, k_sum = 30 * random(1, 2, 32, 32, seed=6), 1000 * random(1, 2, 32, seed=7).abs()
        options["state"] = State(kv, k_sum, past).to(torch.float64 if exact else torch.float32)
    options |= {"log_decay": inputs.get("log_decay"), "backend": "chunked" if exact else backend}
    o = linear_attention(*(inputs[name] for name in "qkv"), rope, **options)
    results = {"o": o.detach()}
    if rope.trainable:
        inputs["theta"] = rope.theta
    if grad:
        gradients = torch.autograd.grad(o, list(inputs.values()), g.to(o.dtype))
        results |= {"grad " + name: gradient for name, gradient in zip(inputs, gradients)}
    return results


def assert_close(bound, dtype, **case):
    exact = call(dtype, exact=True, **case)
    for name, tensor in call(dtype, **case).items():
        error = ((tensor.double() - exact[name]).norm() / exact[name].norm()).item()
        assert error < bound, f"{name}: relative error {error:.1e}"


TRAINABLE = {"rope": {"trainable": True}}
SIGNED = {"rope": {"rotary_dim": 16, "signed": True}, "decay": 0.05}
CASES = {
    (torch.float32, 2e-6): [
        {}, {"past": 10**9}, {"scale": 4.0}, {"decay": 0.05}, {"decay": 1e-6}, TRAINABLE,
        {"feature_map": "softmax"}, {"normalize": "none"}, SIGNED,
    ],
    (torch.bfloat16, 1e-2): [
        {}, {"past": 10**9}, {"decay": 0.05}, {"causal": False}, TRAINABLE,
        {"normalize": "rotary", "eps": 1.0, "length": 300}, SIGNED,
    ],
    (torch.float16, 2e-3): [{}, {"decay": 0.05}],  # sums kept in float16 overflow near 5,000 tokens
}  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "bound", "case"), [(*precision, case) for precision, cases in CASES.items() for case in cases], ids=str
)
def test_each_precision_is_near_the_exact_result(dtype, bound, case):
    assert_close(bound, dtype, **case)


@pytest.mark.parametrize("length", [32_768, pytest.param(262_144, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("decay", [30.0, 1e-6])
def test_float32_keeps_its_digits_over_a_long_sequence(decay, length):
    """Running sums of -30 a token reach thousands within a chunk; only their differences may count. The gradients of q
    and k almost cancel then, each query seeing little but its own key, and are not bounded here."""
    assert_close(2e-6, torch.float32, decay=decay, length=length, grad=decay < 1)


def test_the_denominator_keeps_growing_while_decoding():
    """A key sum kept in bfloat16 stops growing after about 1,000 tokens."""
    ones = torch.ones(1, 1, 1, 4, dtype=torch.bfloat16)
    state = None
    for _ in range(1500):
        _, state = linear_attention(ones, ones, ones, state=state, return_state=True)
    assert state.k_sum.dtype == torch.float32
    assert (state.k_sum == 3000).all()  # φ(1) = 2, and integers are exact in float32 up to 2^24


def test_autocast_takes_the_lower_precision_and_sums_in_float32():
    q, k, v = (random(1, 2, 700, 16, seed=i) for i in range(3))
    rope = RotaryEmbedding(16)
    expected, state = linear_attention(*(x.bfloat16() for x in (q, k, v)), rope, return_state=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, final = linear_attention(q, k, v, rope, return_state=True)
        summary = summarize(k, v, rope)
    assert o.dtype == torch.bfloat16
    assert final.kv.dtype == torch.float32
    assert torch.equal(o, expected)
    assert torch.equal(final.kv, state.kv)
    assert torch.equal(summary.kv, summarize(k.bfloat16(), v.bfloat16(), rope).kv)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_inside_autocast_is_the_same(dtype, causal):
    tensors = [random(1, 2, 150, 8, seed=i).to(dtype).requires_grad_() for i in range(3)]

    def loss():
        return linear_attention(*tensors, causal=causal).float().square().sum()

    outside, later = torch.autograd.grad(loss(), tensors), loss()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(later, tensors)
    assert all(torch.equal(a, b) for a, b in zip(outside, inside))


def test_short_rows_in_half_precision_are_rounded_once():
    """Taken in the other order of the product, numerator and denominator are float32 all the same."""
    q, v = torch.full((1, 1, 32, 64), 8.0, dtype=torch.float16), torch.ones(1, 1, 32, 64, dtype=torch.float16)
    o = linear_attention(q, q, v, RotaryEmbedding(64, base=1e9), causal=False, normalize="rotary", eps=0.0)
    torch.testing.assert_close(o, v, rtol=2e-3, atol=0)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_float64_stays_float64(backend):
    o, state = linear_attention(*(random(1, 1, 70, 4).double() for _ in range(3)), return_state=True, backend=backend)
    assert (o.dtype, state.kv.dtype, state.log_decay.dtype) == (torch.float64,) * 3
