"""RoPE: the rotation, its exactness at any position, and the pairings."""

from fractions import Fraction

import pytest
import torch

from linrope import InputError, LinearAttention, RotaryConfig, RotaryEmbedding, linear_attention, permute_pairing
from linrope.rotary import MAX_POSITION, unit_rotations

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
    turned = rope.rotate(x, offset=5)
    for t in range(7):
        expected = x[:, :, t] @ block_diagonal(rope, 5 + t).T
        torch.testing.assert_close(turned[:, :, t], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_inner_products_depend_on_the_difference_of_positions_and_norms_stay(pairing):
    """(R_m q)ᵀ(R_n k) = qᵀ R_{n-m} k (eq. 16)."""
    rope = RotaryEmbedding(8, interleaved=PAIRINGS[pairing])
    q, k = torch.randn(2, 1, 8, dtype=torch.float64).unbind()
    for m, n in ((0, 3), (17, 5), (10**6, 10**6 + 40), (10**9, 10**9 - 7)):
        product = rope.rotate(q, m) @ rope.rotate(k, n).T
        torch.testing.assert_close(product, q @ rope.rotate(k, n - m).T, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(rope.rotate(q, m).norm(), q.norm(), rtol=1e-14, atol=0)


# π to 60 digits, for turning an exact rational angle into one below 2π
PI = Fraction(3141592653589793238462643383279502884197169399375105820974945, 10**60)


@pytest.mark.parametrize("position", [0, 1, -12, 65_537, 10**6, 10**9, 10**12 + 1, 2**53 - 1, -(10**9)])
def test_angles_are_exact_at_any_position(position):
    """Against exact rational arithmetic: 1e-15 from the start of the range to its end."""
    theta = RotaryEmbedding(64).frequencies()
    turn = unit_rotations(torch.tensor(position), theta)
    remainders = [Fraction(value) * position % (2 * PI) for value in theta.tolist()]
    angle = torch.tensor([float(remainder) for remainder in remainders], dtype=torch.float64)
    torch.testing.assert_close(turn, torch.polar(torch.ones_like(angle), angle), rtol=0, atol=2e-15)


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


def test_neighbouring_positions_differ_in_half_precision():
    """Positions in bfloat16 would collide above 256."""
    rope = RotaryEmbedding(2)
    turned = rope.rotate(torch.tensor([[1.0, 0.0]] * 20, dtype=torch.bfloat16), offset=100_000)
    assert (turned[1:] != turned[:-1]).any(dim=-1).all()


def test_given_positions():
    """Within a few float64 roundings: a vectorised cosine and a single one may differ in the last bit."""
    rope, exact = RotaryEmbedding(6), {"rtol": 0, "atol": 4e-15}
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    torch.testing.assert_close(rope.rotate(x, positions=torch.arange(9, 13)), rope.rotate(x, offset=9), **exact)
    positions = torch.tensor([[0, 5, 2, 7], [3, 3, 10**9, 1]])
    turned = rope.rotate(x, positions=positions)
    for row in range(2):
        for t in range(4):
            alone = rope.rotate(x[row, :, t : t + 1], offset=int(positions[row, t]))
            torch.testing.assert_close(turned[row, :, t : t + 1], alone, **exact)
    flat = rope.rotate(x[:, 0], positions=positions)  # (B, T, D)
    torch.testing.assert_close(flat, turned[:, 0], **exact)


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


def test_trainable_frequencies_learn_with_the_right_gradient():
    rope = RotaryEmbedding(6, 100.0, trainable=True).double()
    x, target = torch.randn(2, 1, 9, 6, dtype=torch.float64).unbind()

    def turned(theta):
        return torch.func.functional_call(_Rotate(rope), {"rope.theta": theta}, (x,))

    assert torch.autograd.gradcheck(turned, (rope.theta.detach().clone().requires_grad_(),))
    optimizer = torch.optim.SGD(rope.parameters(), lr=1e-3)
    losses = []
    for _ in range(20):
        loss = (rope.rotate(x) - target).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


class _Rotate(torch.nn.Module):
    def __init__(self, rope):
        super().__init__()
        self.rope = rope

    def forward(self, x):
        return self.rope.rotate(x, offset=3)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 7}, "dim=7 cannot be split into pairs"),
        ({"dim": 8, "rotary_dim": 3}, "rotary_dim=3 cannot be split into pairs"),
        ({"dim": 8, "rotary_dim": 0}, "rotary_dim=0"),
        ({"dim": 8, "rotary_dim": 10}, "rotary_dim=10 is larger than dim=8"),
        ({"dim": 8, "base": 0.0}, "base=0.0 must be a positive number"),
        ({"dim": 8, "base": float("nan")}, "base=nan"),
    ],
)
def test_bad_sizes_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        RotaryEmbedding(**arguments)


def test_bad_calls_are_named():
    rope, x = RotaryEmbedding(4), torch.randn(2, 3, 5, 4)
    for call, message in [
        (lambda: rope.rotate(x[..., :3]), r"pass \(\.\.\., T, 4\)"),
        (lambda: rope.rotate(x.long()), "int64"),
        (lambda: rope.rotate(x, MAX_POSITION - 4), "offset=9007199254740988 with 5 tokens"),
        (lambda: rope.rotate(x, 10**30), "2\\^53"),
        (lambda: rope.rotate(x, positions=torch.arange(4)), r"positions of shape \(4,\)"),
        (lambda: rope.rotate(x, positions=torch.arange(5.0)), "must be integers"),
        (lambda: rope.rotate(x, 3, positions=torch.arange(5)), "offset=3 and positions"),
        (lambda: rope.rotate(x, positions=torch.full((5,), 2**60)), "1152921504606846976"),
        (lambda: permute_pairing(torch.zeros(9, 2), 2, to_interleaved=True), "n_heads=2"),
        (lambda: permute_pairing(torch.zeros(6, 2), 2, to_interleaved=True), "rotary_dim=3"),
    ]:
        with pytest.raises(InputError, match=message):
            call()
