"""RoPE: the rotation, its exactness at any position, and the pairings."""

import math
import re
from fractions import Fraction
from functools import partial
from itertools import product

import pytest
import torch

from linrope import (
    LinearAttention,
    RotaryConfig,
    RotaryEmbedding,
    SoftmaxAttention,
    linear_attention,
    permute_pairing,
)
from linrope.rotary import MAX_POSITION, RotaryScaling, unit_rotations
from tests.conftest import assert_input_errors, covering

PAIRINGS = {"interleaved": True, "half-split": False}


def block_diagonal(rope: RotaryEmbedding, position: int) -> torch.Tensor:
    """R_t as the matrix of RoFormer's eq. 15, float64."""
    matrix = torch.eye(rope.dim, dtype=torch.float64)
    for m in range(rope.rotary_dim // 2):
        angle = torch.tensor(position * rope.base ** (-2 * m / rope.rotary_dim), dtype=torch.float64)
        i, j = (2 * m, 2 * m + 1) if rope.interleaved else (m, m + rope.rotary_dim // 2)
        matrix[i, i] = matrix[j, j] = angle.cos()
        matrix[i, j], matrix[j, i] = -angle.sin(), angle.sin()
    return matrix


@pytest.mark.parametrize("rotary_dim", [None, 4])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_the_elementwise_form_is_the_block_diagonal_matrix(pairing, rotary_dim):
    rope = RotaryEmbedding(10, 100.0, interleaved=PAIRINGS[pairing], rotary_dim=rotary_dim)
    x = torch.randn(2, 3, 7, 10, dtype=torch.float64)
    rotated = rope.rotate(x, offset=5)
    for t in range(7):
        expected = x[:, :, t] @ block_diagonal(rope, 5 + t).T
        torch.testing.assert_close(rotated[:, :, t], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("pairing", "rotary_dim", "length"),
    covering([*product(PAIRINGS, (None, 4), (1, 7))], [("interleaved", None, 1), ("half-split", 4, 7)]),
)
def test_compiled_it_is_the_same_with_its_gradients(pairing, rotary_dim, length):
    torch._dynamo.reset()
    rope = RotaryEmbedding(8, rotary_dim=rotary_dim, interleaved=PAIRINGS[pairing], trainable=True).double()
    x = torch.randn(2, 3, length, 8, dtype=torch.float64, requires_grad=True)
    inputs, weight = (x, *rope.parameters()), torch.randn(2, 3, length, 8, dtype=torch.float64)

    def rotated_and_gradients(rotate):
        y = rotate(x, offset=5)
        return y, *torch.autograd.grad((y * weight).sum(), inputs)

    compiled = torch.compile(rope.rotate, backend="aot_eager", fullgraph=True)
    found, expected = rotated_and_gradients(compiled), rotated_and_gradients(rope.rotate)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)  # float64, four products a pair


@pytest.mark.parametrize(
    "view",
    [
        lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),  # begins at an odd float
        lambda x: torch.as_strided(torch.cat((x.flatten(), x.new_zeros(9))), x.shape, (145, 72, 8, 1))[:1],
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.stack((x, x), dim=-1)[..., 1],
    ],
)
def test_a_view_is_rotated_as_its_copy(view):
    x = torch.randn(1, 2, 9, 8)
    rope, there = RotaryEmbedding(8), view(x).requires_grad_()
    assert torch.equal(there, x)
    torch.testing.assert_close(rope.rotate(there), rope.rotate(x))
    weight = view(torch.randn(1, 2, 9, 8))
    expected = torch.autograd.grad((rope.rotate(x.requires_grad_()) * weight).sum(), x)
    torch.testing.assert_close(torch.autograd.grad((rope.rotate(there) * weight).sum(), there), expected)


def test_on_the_device_meta_it_computes_shapes():
    x = torch.empty(2, 3, 7, 8, device="meta")
    rope = RotaryEmbedding(8)
    for options in ({}, {"offset": 3}, {"positions": torch.zeros(2, 7, dtype=torch.int64, device="meta")}):
        assert (rope.rotate(x, **options).shape, rope.rotate(x, **options).device) == (x.shape, x.device)


def test_a_single_head_of_an_odd_size_is_rotated():
    """Queries, keys and values then begin at odd floats, with odd strides."""
    torch.manual_seed(0)
    for layer in (LinearAttention, SoftmaxAttention):
        layer = layer(7, 1, rope=RotaryConfig(rotary_dim=6))
        x = torch.randn(1, 2, 7)
        first, state = layer(x[:, :1], return_state=True)
        torch.testing.assert_close(torch.cat((first, layer(x[:, 1:], state)), dim=1), layer(x))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_inner_products_depend_on_the_difference_of_positions_and_norms_stay(pairing):
    """(R_m q)ᵀ(R_n k) = qᵀ R_{n-m} k (eq. 16)."""
    rope = RotaryEmbedding(8, interleaved=PAIRINGS[pairing])
    q, k = torch.randn(2, 1, 8, dtype=torch.float64).unbind()
    for m, n in ((0, 3), (17, 5), (10**6, 10**6 + 40), (10**9, 10**9 - 7)):
        product = rope.rotate(q, m) @ rope.rotate(k, n).T
        torch.testing.assert_close(product, q @ rope.rotate(k, n - m).T, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(rope.rotate(q, m).norm(), q.norm(), rtol=1e-14, atol=0)


# π to 60 digits, for reducing an exact rational angle into one below 2π
PI = Fraction(3141592653589793238462643383279502884197169399375105820974945, 10**60)


@pytest.mark.parametrize("position", [0, 1, -12, 65_537, 10**6, 10**9, 10**12 + 1, 2**53 - 1, -(10**9)])
def test_angles_are_exact_at_any_position(position):
    """Against exact rational arithmetic: 1e-15 from the start of the range to its end."""
    theta = RotaryEmbedding(64).frequencies()
    rotation = unit_rotations(torch.tensor(position), theta)
    remainders = [Fraction(value) * position % (2 * PI) for value in theta.tolist()]
    angle = torch.tensor([float(remainder) for remainder in remainders], dtype=torch.float64)
    torch.testing.assert_close(rotation, torch.polar(torch.ones_like(angle), angle), rtol=0, atol=2e-15)


def test_float32_is_as_accurate_at_a_billion_as_at_zero():
    rope, x = RotaryEmbedding(64), torch.randn(1, 2, 500, 64)
    for offset in (0, 10**9):
        exact = rope.rotate(x.double(), offset)
        error = (rope.rotate(x, offset) - exact).norm() / exact.norm()
        assert error < 1e-7  # float32 rounds each of the two products and their sum to 6e-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precisions_are_rounded_once_and_autocast_changes_nothing(dtype):
    rope, x = RotaryEmbedding(16), torch.randn(1, 2, 300, 16).to(dtype)
    expected = rope.rotate(x.float(), 10**6).to(dtype)
    assert torch.equal(rope.rotate(x, 10**6), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rope.rotate(x, 10**6), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.int32])
def test_positions_may_be_of_any_integer_type(dtype):
    rope, x = RotaryEmbedding(4), torch.randn(2, 5, 4)
    found = rope.rotate(x, positions=torch.tensor([7, 0, 200, 3, 4]).to(dtype))
    assert torch.equal(found, rope.rotate(x, positions=torch.tensor([7, 0, 200, 3, 4])))


def test_given_positions():
    """Within a few float64 roundings: a vectorised cosine and a single one may differ in the last bit."""
    rope, exact = RotaryEmbedding(6), {"rtol": 0, "atol": 4e-15}
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    torch.testing.assert_close(rope.rotate(x, positions=torch.arange(9, 13)), rope.rotate(x, offset=9), **exact)
    positions = torch.tensor([[0, 5, 2, 7], [3, 3, 10**9, 1]])
    rotated = rope.rotate(x, positions=positions)
    for row in range(2):
        for t in range(4):
            alone = rope.rotate(x[row, :, t : t + 1], offset=int(positions[row, t]))
            torch.testing.assert_close(rotated[row, :, t : t + 1], alone, **exact)
    flat = rope.rotate(x[:, 0], positions=positions)  # (B, T, D)
    torch.testing.assert_close(flat, rotated[:, 0], **exact)
    assert rope.rotate(x[:0], positions=positions[:0]).shape == (0, 3, 4, 6)  # no rows


@pytest.mark.parametrize("rotary_dim", [None, 4])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_base_for_each_head_rotates_each_head_by_its_own(pairing, rotary_dim):
    """Against one RotaryEmbedding for each head, within a few roundings; a head without a base stays as it is."""
    options = {"interleaved": PAIRINGS[pairing], "rotary_dim": rotary_dim}
    bases = [10.0, None, 10000.0]
    rope = RotaryEmbedding(6, bases, **options)
    x, positions = torch.randn(2, 3, 5, 6, dtype=torch.float64), torch.randint(10**9, (2, 5))
    for rotated, where in (
        (rope.rotate(x, offset=10**6), {"offset": 10**6}),
        (rope.rotate(x[0], offset=7)[None], {"offset": 7}),
        (rope.rotate(x, positions=positions), {"positions": positions}),
    ):
        for h, base in enumerate(bases):
            head = x[: len(rotated), h]
            alone = head if base is None else RotaryEmbedding(6, base, **options).rotate(head, **where)
            torch.testing.assert_close(rotated[:, h], alone, rtol=0, atol=4e-15)
    assert torch.equal(rope.rotate(x)[:, 1], x[:, 1])


def scaled(base=10000.0, rotary_dim=8, **scaling) -> torch.Tensor:
    return RotaryEmbedding(rotary_dim, base, scaling=RotaryScaling(**scaling)).frequencies()


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rule": "linear", "factor": 4.0}, [0.25, 0.025, 0.0025, 0.00025]),
        # base 10⁴ · 4^(8/6) = 63496.042; its powers -1/4, -1/2, -3/4 by hand
        ({"rule": "ntk", "factor": 4.0}, [1.0, 0.0629960525, 0.00396850263, 0.00025]),
        # 2048 tokens: 325.9, 32.6, 3.26 and 0.33 rotations; the third keeps (3.2594932 - 1) / 31 = 0.07288688 of its θ
        ({"rule": "yarn", "factor": 4.0, "original_context": 2048}, [1.0, 0.1, 0.00304665159, 0.00025]),
        # of the same rotations the third keeps (3.2594932 - 1) / 3 = 0.75316441 of its θ
        ({"rule": "llama3", "factor": 4.0, "original_context": 2048}, [1.0, 0.1, 0.00814873308, 0.00025]),
    ],
    ids=["linear", "ntk", "yarn", "llama3"],
)
def test_scaling_rules_give_the_numbers_worked_out_by_hand(scaling, expected):
    theta = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(scaled(**scaling), theta, rtol=1e-8, atol=0)  # the digits given
    trained = RotaryEmbedding(8, scaling=RotaryScaling(**scaling), trainable=True)
    torch.testing.assert_close(trained.theta.detach(), theta.float())  # training starts from the scaled ones


def test_yarn_leaves_fast_pairs_and_slows_slow_ones_wholly():
    """Exactly, on both sides of the ramp; in between ever less is kept as the rotations become fewer."""
    theta, context, factor = RotaryEmbedding(128).frequencies(), 4096, 8.0
    changed = scaled(rotary_dim=128, rule="yarn", factor=factor, original_context=context)
    rotations = context * theta / (2 * math.pi)
    assert torch.equal(changed[rotations >= 32], theta[rotations >= 32])
    assert torch.equal(changed[rotations <= 1], theta[rotations <= 1] / factor)
    between = (rotations > 1) & (rotations < 32)
    assert min(between.sum(), (rotations >= 32).sum(), (rotations <= 1).sum()) > 10
    kept = (changed / theta)[between]
    assert ((kept < 1) & (kept > 1 / factor)).all()
    assert (kept.diff() < 0).all()


@pytest.mark.parametrize("rule", ["linear", "ntk", "yarn", "llama3"])
def test_scaling_by_one_changes_nothing_and_heads_scale_by_themselves(rule):
    same = scaled(rule=rule, factor=1.0, original_context=500)
    torch.testing.assert_close(same, RotaryEmbedding(8).frequencies(), rtol=1e-15, atol=0)
    scaling = {"rule": rule, "factor": 3.0, "original_context": 500}
    heads = scaled([10.0, None, 10000.0], **scaling)
    assert torch.equal(heads, torch.stack([scaled(10.0, **scaling), torch.zeros(4).double(), scaled(**scaling)]))


def test_only_yarn_has_a_temperature():
    """0.1 ln 32 + 1, for each of q and k."""
    rules = [RotaryScaling(rule, 32.0, 4096) for rule in ("yarn", "linear", "ntk", "llama3")]
    yarn, *others = (RotaryEmbedding(8, scaling=rule).logit_scale for rule in (*rules, None))
    assert (yarn, others) == (pytest.approx(1.3465735903, rel=1e-10), [1.0, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_permuted_weights_give_the_other_pairing_the_same_attention(rotary_dim):
    torch.manual_seed(0)
    d_model, n_heads, head_dim = 12, 3, 8
    x = torch.randn(2, 20, d_model, dtype=torch.float64)
    w_q, w_k, w_v = torch.randn(3, n_heads * head_dim, d_model, dtype=torch.float64)

    def attend(w_q, w_k, interleaved):
        rope = RotaryEmbedding(head_dim, interleaved=interleaved, rotary_dim=rotary_dim)
        q, k, v = ((x @ w.T).unflatten(-1, (n_heads, head_dim)).transpose(1, 2) for w in (w_q, w_k, w_v))
        return linear_attention(q, k, v, rope)

    half_split = attend(w_q, w_k, interleaved=False)
    permuted = [permute_pairing(w, n_heads, to_interleaved=True, rotary_dim=rotary_dim) for w in (w_q, w_k)]
    torch.testing.assert_close(attend(*permuted, interleaved=True), half_split, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(attend(w_q, w_k, interleaved=True), half_split)
    back = permute_pairing(permuted[0], n_heads, to_interleaved=False, rotary_dim=rotary_dim)
    assert torch.equal(back, w_q)


def test_trainable_frequencies_have_the_right_gradient():
    rope, x = RotaryEmbedding(6, [100.0, None], trainable=True).double(), torch.randn(2, 9, 6, dtype=torch.float64)
    assert (rope.theta.shape, rope.frequencies()[1].any()) == ((2, 3), False)
    assert torch.autograd.gradcheck(lambda theta: rope.rotate(x, offset=3), rope.theta)  # θ is changed in place


def test_frequencies_are_computed_not_loaded_and_survive_a_cast():
    """Nothing to clobber in a checkpoint, nothing for bfloat16 to round."""
    assert RotaryEmbedding(8).state_dict() == {}
    layer = LinearAttention(16, 2, rope=RotaryConfig(trainable=True))
    layer(torch.randn(1, 5, 16)).sum().backward()
    layer = layer.to(torch.bfloat16)
    assert layer.rope.theta.grad.dtype == torch.float32
    assert layer.qkv.weight.dtype == torch.bfloat16
    assert layer.rope.theta.dtype == torch.float32
    assert torch.equal(layer.rope.theta.detach(), RotaryEmbedding(8).frequencies().float())


def test_bad_calls_are_named():
    rope, x, make, from_dict = RotaryEmbedding(4), torch.randn(2, 3, 5, 4), RotaryEmbedding, RotaryConfig.from_dict

    def scale(*scaling):
        return RotaryEmbedding(8, rotary_dim=2, scaling=RotaryScaling(*scaling))

    for base in (0.0, math.nan, None, [], [10.0, -1.0]):
        message = f"base={base} must be a positive number, or a list with one, or None, for each head"
        assert_input_errors((partial(make, 8, base), re.escape(message)))
    for factor in (0.5, math.inf, "2"):
        message = f"scaling.factor={factor!r} must be a finite number, at least 1"
        assert_input_errors((partial(scale, "ntk", factor), message))
    assert_input_errors(
        (lambda: make(7), "dim=7 cannot be split into pairs"),
        (lambda: make(8, rotary_dim=3), "rotary_dim=3 cannot be split into pairs"),
        (lambda: make(8, rotary_dim=0), "rotary_dim=0"),
        (lambda: make("4"), "dim='4' must be a whole number, at least 1"),
        (lambda: make(4.0), "dim=4.0 must be a whole number"),
        (lambda: make(8, rotary_dim=4.0), "rotary_dim=4.0 must be a whole number"),
        (lambda: make(8, rotary_dim=10), "rotary_dim=10 is larger than dim=8"),
        (lambda: make(3, signed=True), "dim=0 cannot be split into pairs"),
        (lambda: from_dict({"bass": 10.0}), "'bass' is not an option of RotaryConfig. Did you mean 'base'"),
        (lambda: from_dict({"scaling": {"rul": "ntk", "factor": 2}}), "'rul' .* of RotaryScaling. Did you mean 'rule'"),
        (lambda: from_dict({"scaling": {"rule": "ntk"}}), "needs 'factor'"),
        (lambda: from_dict({"scaling": 2.0}), "2.0 cannot be the options of RotaryScaling"),
        (lambda: from_dict([]), r"\[\] cannot be the options of RotaryConfig"),
        (lambda: scale("yarm", 2), "scaling.rule='yarm' is unknown.*Did you mean 'yarn'"),
        (lambda: scale("yarn", 2.0), "scaling.original_context=None, and rule='yarn'"),
        (lambda: scale("llama3", 2.0), "scaling.original_context=None, and rule='llama3'"),
        (lambda: scale("yarn", 2.0, 0), "scaling.original_context=0"),
        (lambda: scale("linear", 2.0, 1.5), "scaling.original_context=1.5"),
        (lambda: scale("ntk", 2.0), "scaling.rule='ntk' needs more than rotary_dim=2"),
        (lambda: make(8, scaling={"rule": "ntk", "factor": 2}), "scaling={'rule': .* must be a linrope.RotaryScaling"),
        (lambda: rope.rotate(x[..., :3]), r"pass \(\.\.\., T, 4\)"),
        (lambda: rope.rotate(x.long()), "int64"),
        (lambda: rope.rotate(x, MAX_POSITION - 4), "offset=9007199254740988 with 5 tokens"),
        (lambda: rope.rotate(x, 10**30), "2\\^53"),
        (lambda: rope.rotate(x, 1e9), r"offset=1000000000\.0 must be an int"),
        (lambda: make(4, interleaved="half"), "interleaved='half' must be True, .*or False"),
        (lambda: rope.rotate(x, positions=torch.arange(4)), r"positions of shape \(4,\)"),
        (lambda: rope.rotate(x, positions=torch.arange(5.0)), "must be integers"),
        (lambda: rope.rotate(x, positions=[*range(5)]), "positions is a list: pass a tensor of integers"),
        (lambda: rope.rotate(x, 3, positions=torch.arange(5)), "offset=3 and positions"),
        (lambda: rope.rotate(x, positions=torch.full((5,), 2**60)), "1152921504606846976"),
        (lambda: rope.rotate(x, positions=torch.full((5,), -(2**63))), "-9223372036854775808"),
        (lambda: make(4, [10.0, None]).rotate(x), "rope.base has 2 entries.*3 heads"),
        (lambda: make(4, [10.0, None]).rotate(x[0, 0]), "rope.base has 2 entries.*0 heads"),
        (lambda: permute_pairing(torch.zeros(9, 2), 2, to_interleaved=True), "n_heads=2"),
        (lambda: permute_pairing(torch.zeros(6, 2), 2, to_interleaved=True), "rotary_dim=3"),
        (lambda: permute_pairing(x[0, 0], 1, to_interleaved=True, rotary_dim=2.0), "rotary_dim=2.0 must be an even"),
        (
            lambda: permute_pairing(torch.tensor(1.0), 1, to_interleaved=True),
            r"weight=tensor\(1\.\) must be a tensor of",
        ),
        (
            lambda: permute_pairing([1.0, 2.0], 1, to_interleaved=True),
            r"weight=\[1\.0, 2\.0\] must be a tensor of shape",
        ),
        (lambda: permute_pairing(x[0, 0], 1.0, to_interleaved=True), "n_heads=1.0 must be a whole number"),
    )


@pytest.mark.exhaustive
def test_a_symbolic_length_gets_no_largest_value():
    """An exported graph would take rows of at most 2^53 tokens, which torch.export refuses for a named dimension."""
    rope, x = RotaryEmbedding(4), torch.randn(1, 9, 4)

    class Rotate(torch.nn.Module):
        def forward(self, x):
            return rope.rotate(x)

    graph = torch.export.export(Rotate(), (x,), dynamic_shapes={"x": {1: torch.export.Dim("length", min=4)}}).module()
    longer = torch.randn(1, 50, 4)
    torch.testing.assert_close(graph(longer), rope.rotate(longer))
