"""The short convolution: its formula, its fast path, and SiLU on the values alone."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from linrope.layers.short_convolution import ShortConvolution
from linrope.ops.cpu_kernel.library import why_none
from linrope.ops.documents import number_documents
from linrope.ops.short_convolution import by_definition, is_compiled, short_convolution
from tests.conftest import assert_input_errors
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


@pytest.mark.parametrize(
    ("sizes", "width", "without_silu", "dtype", "bound"),
    [
        ((2, 100, 37), 4, 0, torch.float32, 1e-6),
        ((1, 200, 64), 4, 40, torch.float32, 1e-6),
        ((2, 70, 16), 3, 5, torch.float32, 1e-6),
        ((1, 16, 9), 8, 0, torch.float32, 1e-6),
        ((2, 300, 64), 4, 0, torch.bfloat16, 8e-3),
        ((1, 130, 40), 2, 0, torch.float16, 1e-3),
        ((1, 600, 300), 4, 270, torch.float32, 1e-6),  # several tasks in tokens and in channels
        ((2, 258, 260), 3, 0, torch.float32, 1e-6),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_the_compiled_form_agrees_with_the_definition(sizes, width, without_silu, dtype, bound, packed):
    """Outputs and gradients, strided inputs, relative to the whole tensor's norm: sums are float32."""
    torch.manual_seed(0)
    batch, length, channels = sizes
    x = torch.randn(batch, length, 2, channels)[:, :, 1]
    inputs = x, torch.randn(batch, width - 1, channels), torch.randn(channels, width)
    grad, documents = torch.randn(batch, channels, length).mT, None
    if packed:
        documents = number_documents((torch.rand(batch, length) < 0.05).cumsum(1))

    def results(form, dtype):
        given = [y.detach().to(dtype).requires_grad_() for y in inputs]
        y = form(*given, documents, without_silu)
        return [y, *torch.autograd.grad(y, given, grad.to(dtype))]

    assert why_none() is not None or is_compiled(inputs[0].to(dtype), *inputs[1:])
    for found, exact in zip(results(short_convolution, dtype), results(by_definition, torch.float64)):
        assert found.dtype == dtype
        assert (found.double() - exact).norm() < bound * exact.norm()


def test_another_shape_is_refused():
    conv, x = ShortConvolution(8, 4), torch.randn(4, 40, 8)
    assert_input_errors(
        (lambda: conv(x, torch.zeros(4, 1, 8)), r"tail is \(4, 1, 8\), this call needs \(4, 3, 8\)"),
        (lambda: conv(x, None, torch.zeros(1, 40, dtype=torch.int64)), r"segment_ids is \(1, 40\)"),
    )


@pytest.mark.exhaustive
@pytest.mark.skipif(why_none() is not None, reason=f"no library: {why_none()}")
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed):
    x, tail, weight = (torch.randn(*shape, requires_grad=True) for shape in ((2, 20, 6), (2, 3, 6), (6, 4)))
    documents = number_documents((torch.arange(20) // 7).expand(2, -1)) if packed else None
    torch.library.opcheck(torch.ops.linrope.short_convolution.default, (x, tail, weight, documents, 2))


def test_transforms_take_the_definition():
    conv, x = ShortConvolution(5, 4), torch.randn(3, 2, 30, 5)
    expected = torch.stack([conv(one)[0] for one in x])
    torch.testing.assert_close(torch.vmap(lambda one: conv(one)[0])(x), expected)
    tangent = torch.func.jvp(lambda one: conv(one)[0], (x[0],), (x[0],))[1]
    assert tangent.abs().max() > 0
    tail = torch.randn(2, 3, 5)
    given = partial(short_convolution, x[0], weight=conv.weight, documents=None, without_silu=0)
    exact = partial(by_definition, x[0], weight=conv.weight, documents=None, without_silu=0)
    torch.testing.assert_close(*(torch.func.jvp(one, (tail,), (tail,))[1] for one in (given, exact)))


def test_second_derivatives_are_those_of_the_definition():
    torch.manual_seed(0)
    inputs = torch.randn(2, 30, 6, requires_grad=True), torch.randn(2, 3, 6), torch.randn(6, 4, requires_grad=True)
    documents = number_documents((torch.arange(30) // 13).expand(2, -1))

    def penalty(function, dtype):
        x, tail, weight = (one.detach().to(dtype).requires_grad_(one.requires_grad) for one in inputs)
        once = function(x, tail, weight, documents, 2)
        twice = function(once, tail, weight, documents, 2)  # whose gradient of the weight goes through `once` too
        first = torch.autograd.grad(twice.square().sum(), (x, weight), create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), (x, weight))

    for found, exact in zip(penalty(short_convolution, torch.float32), penalty(by_definition, torch.float64)):
        assert (found - exact).norm() < 1e-5 * exact.norm()


@pytest.mark.parametrize("example", [10, 100])
def test_an_exported_graph_takes_rows_shorter_and_longer_than_its_example(example):
    """On either side of the length from which on the compiled form is faster."""
    torch.manual_seed(0)
    conv = ShortConvolution(5, 4)
    lengths = {"x": {1: torch.export.Dim.DYNAMIC}}
    graph = torch.export.export(conv, (torch.randn(2, example, 5),), dynamic_shapes=lengths).module()
    for length in (4, 15, 16, 300):
        x = torch.randn(2, length, 5)
        torch.testing.assert_close(graph(x), conv(x))


def test_other_devices_take_the_definition():
    """cuDNN's convolution would take TF32 for float32; "meta" stands for other devices here."""
    y, tail = ShortConvolution(5, 4).to("meta")(torch.empty(2, 300, 5, device="meta"))
    assert (y.shape, tail.shape) == ((2, 300, 5), (2, 3, 5))


@pytest.mark.parametrize("kind", LAYERS)
def test_silu_on_the_values_alone_leaves_queries_and_keys_their_sign(kind):
    layer, x = layer_and_input(kind, {"short_conv": 4, "conv_silu": "v"})
    q, k, v = layer.conv(layer.qkv(x))[0].chunk(3, dim=-1)
    assert max(q.min(), k.min()) < -0.3
    assert v.min() > -0.279  # the least that silu takes
