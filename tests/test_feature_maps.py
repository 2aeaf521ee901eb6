"""Feature maps: their values where precision is short, and each hand-written slope."""

import pytest
import torch

from linrope import InputError
from linrope.feature_maps import EXP_CEILING, FEATURE_MAPS, elu1, get_feature_map


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_each_slope_is_the_derivative(name):
    phi = FEATURE_MAPS[name]
    x = torch.randn(4, 7, 9, dtype=torch.float64).mul(8).requires_grad_()  # on both sides of 0 and of the ceiling
    grad = torch.randn(4, 7, 9, dtype=torch.float64)
    (expected,) = torch.autograd.grad(phi.forward(x), x, grad)
    for source in (x.detach(), x.detach().clone()):  # read where it lies, or replaced in its own buffer
        y = torch.empty_like(source) if source.data_ptr() == x.data_ptr() else source
        slope, out = torch.empty_like(y), torch.empty_like(y)
        phi.load(source, y, slope)
        torch.testing.assert_close(y, phi.forward(x).detach(), rtol=1e-14, atol=0)  # two ways to round exp
        phi.pull(grad.clone(), y, slope, out)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(phi.forward, x)


def test_elu1_is_elu_plus_one():
    x = torch.linspace(-20, 20, 1001, dtype=torch.float64).requires_grad_()
    expected = torch.nn.functional.elu(x) + 1
    torch.testing.assert_close(elu1(x), expected, rtol=1e-12, atol=3e-16)  # elu + 1 itself loses to 1e-16
    slope = torch.autograd.grad(elu1(x).sum(), x)[0]
    torch.testing.assert_close(slope, torch.autograd.grad(expected.sum(), x)[0], rtol=1e-12, atol=1e-15)
    assert torch.autograd.grad(elu1(z := torch.zeros(1, requires_grad=True)), z)[0] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_elu1_stays_positive_in_half_precision(dtype):
    """`elu(x) + 1` in bfloat16 is exactly 0 from x ≈ -8 down."""
    x = torch.tensor([-16.0, -12.0, -9.0, -8.0], dtype=dtype)
    y = elu1(x)
    assert (y > 0).all()
    torch.testing.assert_close(y.double(), x.double().exp(), rtol=torch.finfo(dtype).eps, atol=1e-7)
    if dtype == torch.bfloat16:
        assert (torch.nn.functional.elu(x) + 1 == 0).any()


def test_exp_cannot_overflow():
    x = torch.tensor([-1e30, 0.0, 5.0, 1e30, float("inf")])
    ceiling = torch.tensor(EXP_CEILING).exp().item()
    expected = torch.tensor([0.0, 1.0, torch.tensor(5.0).exp().item(), ceiling, ceiling])
    torch.testing.assert_close(FEATURE_MAPS["exp"].forward(x), expected)


def test_softmax_features_sum_to_one():
    features = FEATURE_MAPS["softmax"].forward(torch.randn(3, 5) * 50)
    torch.testing.assert_close(features.sum(-1), torch.ones(3))


def test_names_are_looked_up_and_callables_taken():
    assert get_feature_map("relu") is FEATURE_MAPS["relu"]
    square = get_feature_map(torch.square)
    assert square.load is None
    assert torch.equal(square.forward(torch.tensor([3.0])), torch.tensor([9.0]))
    with pytest.raises(InputError, match=r"feature_map='softmx' is unknown.*Did you mean 'softmax'"):
        get_feature_map("softmx")
    with pytest.raises(InputError, match="feature_map=3 is neither a name nor a callable"):
        get_feature_map(3)
