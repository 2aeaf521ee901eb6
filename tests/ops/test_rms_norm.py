"""The compiled RMSNorm against PyTorch's, outputs and gradients."""

from functools import partial

import pytest
import torch

from linrope.layers.norm import RMSNorm
from linrope.ops import rms_norm as ops
from linrope.ops.cpu_kernel import library

compiled = pytest.mark.skipif(library.why_none() is not None, reason=f"no library: {library.why_none()}")
EPS = 1e-5


def drawn(*shape):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=draw) * torch.logspace(-3, 3, shape[-2])[:, None]  # rows of all sizes
    return x, 1 + 0.3 * torch.randn(shape[-1], generator=draw), torch.randn(*shape, generator=draw)


@compiled
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)]
)
@pytest.mark.parametrize("shape", [(3, 70, 33), (1, 4100, 1), (2, 2, 1030), (130, 300), (64, 128)])
def test_it_is_the_definition(shape, dtype, tolerance):
    x, weight, g = (tensor.to(dtype) for tensor in drawn(*shape))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    assert library.makes_one_pass(x, weight, fewest=ops.FEWEST)
    y = ops.rms_norm(x, weight, EPS)
    exact_x, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    exact = ops.by_definition(exact_x, exact_weight, EPS)
    assert (y.dtype, y.shape) == (dtype, exact.shape)
    gradients = torch.autograd.grad(y, (x, weight), g)
    expected = torch.autograd.grad(exact, (exact_x, exact_weight), g.double())
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=1e-6)
    for found, wanted in zip(gradients, expected):
        off = (found.double() - wanted).norm(dim=-1) / (wanted.norm(dim=-1) + g.double().norm(dim=-1).max())
        assert found.dtype == dtype
        assert off.max() < tolerance


@compiled
def test_extreme_inputs():
    """Rows of 0 stay 0; NaN and infinities stay in their rows."""
    x, weight, _ = drawn(300, 20)
    x[0], x[1, 3], x[2, 5] = 0, torch.nan, torch.inf
    y = ops.rms_norm(x, weight, EPS)
    torch.testing.assert_close(y, ops.by_definition(x, weight, EPS), equal_nan=True)
    assert y[3:].isfinite().all()


@compiled
def test_any_number_of_threads_sums_in_the_same_order():
    x, weight, g = drawn(4, 200, 130)
    threads = torch.get_num_threads()
    found = []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            found.append(torch.ops.linrope.rms_norm_backward(g, x, weight, EPS))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*found))


@pytest.mark.exhaustive
@compiled
def test_opcheck_and_strides():
    x, weight, _ = drawn(60, 2, 80)
    x = x.transpose(0, 1).requires_grad_()
    torch.library.opcheck(torch.ops.linrope.rms_norm, (x, weight.requires_grad_(), EPS))
    torch.testing.assert_close(ops.rms_norm(x, weight, EPS), ops.by_definition(x, weight, EPS))


def test_derivatives_of_derivatives_and_transforms():
    x, weight, _ = drawn(40, 128)
    x, weight = x.requires_grad_(), weight.requires_grad_()

    def penalty(function):
        first = torch.autograd.grad(function(x, weight, EPS).pow(3).sum(), (x, weight), create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), (x, weight))

    for found, expected in zip(penalty(ops.rms_norm), penalty(ops.by_definition)):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    values, tangents = (x.detach(), weight.detach()), (torch.ones_like(x), torch.ones_like(weight))
    tangent, expected = (
        torch.func.jvp(partial(function, eps=EPS), values, tangents)[1]
        for function in (ops.rms_norm, ops.by_definition)
    )
    torch.testing.assert_close(tangent, expected)


def test_one_row_and_a_length_left_open():
    x, weight = torch.randn(4096, requires_grad=True), torch.ones(4096)
    (first,) = torch.autograd.grad(ops.rms_norm(x, weight, EPS).pow(2).sum(), x, create_graph=True)
    assert torch.autograd.grad(first.sum(), x)[0].isfinite().all()
    length = torch.export.Dim("length", min=2, max=4096)
    exported = torch.export.export(RMSNorm(128, EPS), (torch.randn(70, 128),), dynamic_shapes=({0: length},)).module()
    for rows in (3, 200):
        x = torch.randn(rows, 128)
        torch.testing.assert_close(exported(x), RMSNorm(128, EPS)(x))


def test_other_dtypes_take_the_definition():
    """float64, weights of another dtype, and few entries."""
    x, weight, _ = drawn(64, 128)
    for other in ((x.double(), weight.double()), (x.bfloat16(), weight), (x[:2], weight)):
        assert not library.makes_one_pass(*other, fewest=ops.FEWEST)
    torch.testing.assert_close(
        ops.rms_norm(x.double(), weight.double(), EPS), ops.by_definition(x.double(), weight.double(), EPS)
    )
