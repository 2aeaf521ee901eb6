"""`Linear`: the numbers of PyTorch's layer by either library, and when which computes them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from linrope.layers import linear
from linrope.layers.linear import Linear


@pytest.fixture
def convolutions(monkeypatch):
    """The calls that are computed as convolutions, on any processor."""
    found, conv2d = [], F.conv2d
    monkeypatch.setattr(linear, "BY_CONVOLUTION", True)
    monkeypatch.setattr(linear.F, "conv2d", lambda *args: found.append(args[0].shape) or conv2d(*args))
    return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 65, 20), (130, 20), (20,)])
def test_outputs_and_gradients_are_those_of_pytorchs_layer(shape, bias, convolutions, monkeypatch):
    monkeypatch.setattr(linear, "SMALLEST", 1)
    torch.manual_seed(0)
    layer, plain = Linear(20, 7, bias=bias), nn.Linear(20, 7, bias=bias)
    plain.load_state_dict(layer.state_dict())  # the same names
    x = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]  # with gaps
    grad = torch.randn(*shape[:-1], 7)

    def results(module: nn.Module) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        return [y, *torch.autograd.grad(y, [leaf, *module.parameters()], grad)]

    for actual, expected in zip(results(layer), results(plain), strict=True):
        # sums of up to 195 products of normal numbers, in another order
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)
    assert len(convolutions) == 1


def test_only_large_float32_products_of_the_processors_in_question_are_convolutions(convolutions, monkeypatch):
    layer, rows = Linear(64, 64), linear.SMALLEST // 64**2
    large, small = torch.randn(rows, 64), torch.randn(rows - 1, 64)
    layer(small)
    layer.double()(large.double())
    layer.bfloat16()(large.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        layer.float()(large)
    torch.export.export(layer, (large,))
    assert convolutions == []
    layer(large)
    assert convolutions == [(1, 64, 1, rows)]
    monkeypatch.setattr(linear, "BY_CONVOLUTION", False)
    layer(large)
    assert len(convolutions) == 1
