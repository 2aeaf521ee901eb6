"""The short convolution: its formula, its fast path, and SiLU on the values alone."""

import pytest
import torch
import torch.nn.functional as F

from linrope.layers.short_convolution import ShortConvolution
from tests.layers.cases import CLOSE, LAYERS, layer_and_input


@pytest.mark.parametrize("without_silu", [0, 3])
@pytest.mark.parametrize(("length", "dtype"), [(11, torch.float64), (300, torch.float64), (300, torch.float32)])
def test_the_short_convolution_is_its_formula(length, dtype, without_silu):
    """Short and long, fast or not: Σ_i w_i x_{t - width + 1 + i}, outputs and gradients, and the tail it leaves."""
    torch.manual_seed(0)
    conv = ShortConvolution(5, 4, without_silu).to(dtype)
    x = torch.randn(2, length, 5, dtype=dtype, requires_grad=True)
    tail = torch.randn(2, 3, 5, dtype=dtype, requires_grad=True)
    y, after = conv(x, tail)
    padded = torch.cat((tail, x), dim=1)
    expected = sum(conv.weight[:, i] * padded[:, i : i + length] for i in range(4))
    expected = torch.where(torch.arange(5) < without_silu, expected, F.silu(expected))
    close = CLOSE if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}  # sums of 600 terms in the weights' share
    torch.testing.assert_close(y, expected, **close)
    assert torch.equal(after, x[:, -3:])
    _, short = conv(x[:, :1], tail)
    assert torch.equal(short, padded[:, 1:4])
    inputs = [x, tail, conv.weight]
    gradients = torch.autograd.grad(expected.sum(), inputs)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), inputs), gradients, **close)


def test_other_devices_than_cpus_take_the_sum_of_taps(monkeypatch):
    """cuDNN's convolution, which would take TF32 for float32, is not asked; "meta" stands for them here."""
    monkeypatch.setattr(F, "conv2d", lambda *args, **options: pytest.fail("conv2d was called"))
    y, tail = ShortConvolution(5, 4).to("meta")(torch.empty(2, 300, 5, device="meta"))
    assert (y.shape, tail.shape) == ((2, 300, 5), (2, 3, 5))


@pytest.mark.parametrize("kind", LAYERS)
def test_silu_on_the_values_alone_leaves_queries_and_keys_their_sign(kind):
    layer, x = layer_and_input(kind, {"short_conv": 4, "conv_silu": "v"})
    q, k, v = layer.conv(layer.qkv(x))[0].chunk(3, dim=-1)
    assert max(q.min(), k.min()) < -0.3
    assert v.min() > -0.279  # the least that silu takes
