"""The compiled SwiGLU against its formula, outputs and gradients."""

import pytest
import torch

from linrope.errors import InputError
from linrope.ops import swiglu as ops
from linrope.ops.cpu_kernel import library

compiled = pytest.mark.skipif(library.why_none() is not None, reason=f"no library: {library.why_none()}")


@compiled
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)]
)
@pytest.mark.parametrize("shape", [(3, 70, 66), (1, 4100, 2), (2, 2, 1030), (64, 128)])
def test_it_is_the_formula(shape, dtype, tolerance):
    draw = torch.Generator().manual_seed(0)
    x, g = (3 * torch.randn(*shape[:-1], size, generator=draw) for size in (shape[-1], shape[-1] // 2))
    x, g = x.to(dtype).requires_grad_(), g.to(dtype)
    assert library.makes_one_pass(x, fewest=ops.FEWEST)
    y = ops.swiglu(x)
    exact_x = x.detach().double().requires_grad_()
    exact = ops.by_definition(exact_x)
    assert (y.dtype, y.shape) == (dtype, exact.shape)
    pairs = [(y, exact)]
    pairs += [(torch.autograd.grad(y, x, g)[0], torch.autograd.grad(exact, exact_x, g.double())[0])]
    for found, expected in pairs:
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=1e-6)


@compiled
def test_extreme_inputs():
    """silu(-1e4) is -0 and not NaN; NaN and infinities are carried on; columns are not mixed."""
    x = torch.ones(300, 20)
    x[:, 0], x[:, 1], x[:, 2], x[:, 13] = -1e4, 1e4, torch.nan, torch.inf
    y = ops.swiglu(x)
    torch.testing.assert_close(y, ops.by_definition(x), equal_nan=True)


@compiled
@pytest.mark.exhaustive
def test_opcheck_and_strides():
    x = torch.randn(60, 2, 80).transpose(0, 1).requires_grad_()
    torch.library.opcheck(torch.ops.linrope.swiglu, (x,))
    torch.testing.assert_close(ops.swiglu(x), ops.by_definition(x))


def test_rows_of_an_odd_length_have_no_halves():
    """The compiled form would write beyond its output."""
    for form in (ops.swiglu, torch.ops.linrope.swiglu):
        for shape in ((101, 101), (5, 1)):
            with pytest.raises(InputError, match=rf"x is \({shape[0]}, {shape[1]}\), and its last dimension must have"):
                form(torch.randn(shape))
    assert ops.swiglu(torch.randn(3, 0)).shape == torch.ops.linrope.swiglu(torch.randn(3, 0)).shape == (3, 0)


def test_derivatives_of_derivatives_and_transforms():
    x = torch.randn(40, 128, dtype=torch.float32, requires_grad=True)

    def penalty(function):
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    torch.testing.assert_close(penalty(ops.swiglu), penalty(ops.by_definition), rtol=1e-4, atol=1e-5)
    tangent = torch.func.jvp(ops.swiglu, (x.detach(),), (torch.ones_like(x),))[1]
    torch.testing.assert_close(tangent, torch.func.jvp(ops.by_definition, (x.detach(),), (torch.ones_like(x),))[1])
