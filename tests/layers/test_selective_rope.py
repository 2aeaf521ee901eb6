"""Selective rotation: angles that the input decides, their sums and gradients, and their states."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from linrope import LinearAttention, RotaryEmbedding
from linrope.feature_maps import elu1
from linrope.layers.state import reset_rows
from tests.conftest import assert_input_errors
from tests.layers.cases import CLOSE, D_MODEL, HEADS, SELECTIVE, assert_outputs, layer_and_input, projected, weighted


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("base", [10000.0, [9.0, None, 100.0]], ids=str)
def test_a_selective_rotation_by_its_definition(interleaved, base):
    """Tokens i and j meet, in each pair of the rotated dimensions, at the sum of the angles of tokens j + 1 to i:
    θ (1 + tanh(W x)) each."""
    config = replace(SELECTIVE, base=base, interleaved=interleaved)
    layer, x = layer_and_input("linear", {"rope": config})
    q, k, v = projected(layer, x)
    angle = torch.zeros(2, HEADS, 2, dtype=torch.float64)
    angles = []
    for token in x.unbind(1):
        pace = 1 + (layer.selective.linear.weight @ token.mT).mT.tanh().view(2, HEADS, 2)
        angle = angle + pace * RotaryEmbedding(4, base).frequencies()
        angles.append(angle)
    between = torch.stack(angles, 2)[:, :, :, None] - torch.stack(angles, 2)[:, :, None]  # (B, H, i, j, pair)
    assert between.diff(dim=2).std() > 0.05  # tokens do not rotate alike
    first, second = ([0, 2], [1, 3]) if interleaved else ([0, 1], [2, 3])
    (q1, q2), (k1, k2) = ((y[..., first], y[..., second]) for y in (q, k))
    q1, q2, k1, k2 = q1[..., None, :], q2[..., None, :], k1[:, :, None], k2[:, :, None]
    rotated = ((q1 * k1 + q2 * k2) * between.cos() + (q1 * k2 - q2 * k1) * between.sin()).sum(-1)
    plain = elu1(q[..., 4:]) @ elu1(k[..., 4:]).mT
    assert_outputs(layer, x, weighted(rotated + plain, v, plain))


def test_a_selective_rotation_starts_as_rope():
    torch.manual_seed(0)
    layer = LinearAttention(D_MODEL, HEADS, rope=SELECTIVE).double()
    plain = LinearAttention(D_MODEL, HEADS, rope=replace(SELECTIVE, placement="signed")).double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(2, 90, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(layer(x), plain(x), **CLOSE)


def test_selective_angles_are_sums_in_float64():
    """Of paces in float32, as autocast leaves them too; and the angle of a far token is as good as that of a near one:
    a million rotations further on, a layer computes the same."""
    torch.manual_seed(0)
    layer, x = LinearAttention(D_MODEL, HEADS, rope=SELECTIVE), torch.randn(2, 20_000, D_MODEL)
    torch.nn.init.normal_(layer.selective.linear.weight)
    theta = layer.rope.frequencies()
    pace = 1 + F.linear(x, layer.selective.linear.weight).tanh()
    expected = (pace.double().view(2, -1, HEADS, 2).transpose(1, 2) * theta).cumsum(2)
    assert expected.max() > 10_000  # where float32 has 3 digits after the point
    torch.testing.assert_close(layer.selective.angles(x, theta), expected, rtol=1e-12, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(layer.selective.angles(x, theta), expected, rtol=1e-12, atol=0)
    _, state = layer(x[:, :70], return_state=True)
    far = replace(state, angle=state.angle + 2 * torch.pi * 10**6)
    # float64 has 1e-9 of an angle of 6e6; float32 would have 0.5
    torch.testing.assert_close(layer(x[:, :70], far), layer(x[:, :70], state), rtol=1e-5, atol=1e-6)


def test_gradients_of_selective_angles_keep_their_digits_in_bfloat16():
    """A token's angle rotates all that comes after it, in later documents of the row too, whose gradients cancel unless
    they were rounded."""
    torch.manual_seed(0)
    layer = LinearAttention(D_MODEL, HEADS, rope=SELECTIVE, forget_gate=True)
    torch.nn.init.normal_(layer.selective.linear.weight, std=0.3)
    x, weight = torch.randn(1, 8192, D_MODEL), torch.randn(1, 8192, D_MODEL)
    documents = torch.arange(8192)[None] // 500

    def gradient(layer, x, weight):
        return torch.autograd.grad((layer(x, segment_ids=documents) * weight).sum(), layer.selective.linear.weight)[0]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradient(layer, x, weight)
    exact = gradient(layer.double(), x.double(), weight.double())
    # q, k, v and the outputs were bfloat16, of a relative error of 0.004 each
    assert (found - exact).norm() <= 0.01 * exact.norm()


def test_a_row_that_forgot_has_the_angle_of_a_new_one():
    layer, x = layer_and_input("linear", {"rope": SELECTIVE})
    x[0, 5] = torch.nan
    _, state = layer(x, return_state=True)
    (forgot,) = reset_rows((state,), torch.tensor([True, False]))
    y = torch.randn_like(x)
    torch.testing.assert_close(layer(y, forgot)[0], layer(y)[0], **CLOSE)
    torch.testing.assert_close(layer(y, forgot)[1], layer(y, state)[1], **CLOSE)


def test_a_state_of_another_rotation_is_named():
    plain, x = layer_and_input("linear", {"rope": replace(SELECTIVE, placement="signed")})
    layer, _ = layer_and_input("linear", {"rope": SELECTIVE})
    (_, of_plain), (_, state) = plain(x, return_state=True), layer(x, return_state=True)
    assert_input_errors(
        (lambda: layer(x, of_plain), r"state.angle is None, this call needs \(2, 3, 2\)"),
        (lambda: layer(x, replace(state, angle=state.angle[:1])), r"state.angle is \(1, 3, 2\)"),
        (lambda: plain(x, state), r"state.angle is \(2, 3, 2\), this call needs None: .* the same rope.placement"),
    )
