"""Feature maps: their values where precision is short, and each hand-written derivative."""

from functools import partial

import pytest
import torch

from linrope import LanguageModel, LanguageModelConfig, feature_maps, linear_attention, register_feature_map
from linrope.errors import InputError
from linrope.feature_maps import EXP_CEILING, FEATURE_MAPS, MAP_MODULES, Favor, elu1, get_feature_map, make_feature_map
from tests.conftest import assert_input_errors


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_each_vjp_is_the_derivative(name):
    phi = FEATURE_MAPS[name]
    x = torch.randn(4, 7, 9, dtype=torch.float64).mul(8).requires_grad_()  # on both sides of 0 and of the ceiling
    grad = torch.randn(4, 7, 9, dtype=torch.float64)
    (expected,) = torch.autograd.grad(phi.forward(x), x, grad)
    for source in (x.detach(), x.detach().clone()):  # read where it lies, or replaced in its own buffer
        y = torch.empty_like(source) if source.data_ptr() == x.data_ptr() else source
        derivative, out = torch.empty_like(y), torch.empty_like(y)
        phi.load(source, y, derivative)
        torch.testing.assert_close(y, phi.forward(x).detach(), rtol=1e-14, atol=0)  # two ways to round exp
        phi.vjp(grad.clone(), y, derivative, out)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(phi.forward, x)


def test_elu1_is_elu_plus_one():
    x = torch.linspace(-20, 20, 1001, dtype=torch.float64).requires_grad_()
    expected = torch.nn.functional.elu(x) + 1
    torch.testing.assert_close(elu1(x), expected, rtol=1e-12, atol=3e-16)  # elu + 1 itself loses to 1e-16
    derivative = torch.autograd.grad(elu1(x).sum(), x)[0]
    torch.testing.assert_close(derivative, torch.autograd.grad(expected.sum(), x)[0], rtol=1e-12, atol=1e-15)
    at_zero = torch.zeros(1, requires_grad=True)  # padding; PyTorch 2.15 gives clamp the derivative 0 at its bound
    assert torch.autograd.grad(elu1(at_zero), at_zero)[0] == 1


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
    expected = torch.tensor([-1e30, 0.0, 5.0, EXP_CEILING, EXP_CEILING]).exp()
    torch.testing.assert_close(FEATURE_MAPS["exp"].forward(x), expected)


def test_softmax_features_sum_to_one():
    features = FEATURE_MAPS["softmax"].forward(torch.randn(3, 5) * 50)
    torch.testing.assert_close(features.sum(-1), torch.ones(3))


def test_names_are_looked_up_and_callables_taken():
    assert get_feature_map("relu") is FEATURE_MAPS["relu"]
    square = get_feature_map(torch.square)
    assert square.load is None
    assert torch.equal(square.forward(torch.tensor([3.0])), torch.tensor([9.0]))
    assert_input_errors(
        (lambda: get_feature_map("softmx"), r"feature_map='softmx' is unknown.*Did you mean 'softmax'"),
        (lambda: get_feature_map(3), "feature_map=3 is neither a name nor a callable"),
    )


def test_favor_is_the_softmax_kernel_on_average():
    """4,000 heads are as many draws of the random directions for one pair of vectors."""
    torch.manual_seed(0)
    q, k = torch.tensor([[1.0, -0.5, 0.3, 0.8], [0.6, -0.2, -1.0, 0.4]])
    phi = Favor(4000, 4)
    weights = (phi(q.expand(1, 4000, 1, 4)) * phi(k.expand(1, 4000, 1, 4))).sum(-1)
    expected = (q @ k / 2).exp()
    assert abs(weights.mean() - expected) < 4 * weights.std() / 4000**0.5 + 1e-3  # four deviations, and the floor
    assert weights.std() > 0.1


def test_favors_directions_are_orthogonal_and_saved():
    torch.manual_seed(0)
    phi, other = Favor(3, 6), Favor(3, 6)
    products = phi.weight @ phi.weight.mT
    torch.testing.assert_close(products, torch.diag_embed(products.diagonal(dim1=1, dim2=2)), rtol=0, atol=1e-5)
    assert not list(phi.parameters())
    x = torch.randn(2, 3, 5, 6)
    assert not torch.equal(phi(x), other(x))
    other.load_state_dict(phi.state_dict())
    assert torch.equal(phi(x), other(x))


def test_favor_is_bounded_and_positive():
    phi = Favor(1, 8)
    longest = phi.weight[0, :1] * 8**0.25  # where an exponent is largest, |w|² / 2
    features = phi(torch.cat((longest * 5, longest, -longest * 5))[None, None])
    assert (features > 0).all()
    assert features.max() <= (torch.tensor(EXP_CEILING).exp() + 1e-4) / 8**0.5 * 1.001
    assert torch.isfinite(phi(torch.full((1, 1, 1, 8), 1e4))).all()


def test_hedgehog_starts_from_the_identity():
    x = torch.randn(2, 3, 5, 4)
    phi = MAP_MODULES["hedgehog"](3, 4)
    torch.testing.assert_close(phi(x), torch.cat((x, -x), dim=-1).softmax(-1))
    torch.nn.init.normal_(phi.weight)
    y = torch.einsum("bhtd,hrd->bhtr", x, phi.weight)
    torch.testing.assert_close(phi(x), torch.cat((y, -y), dim=-1).softmax(-1))


@pytest.mark.parametrize("head_dim", [5, 16, 24])
def test_taylor_is_the_series_of_the_exponential(head_dim):
    torch.manual_seed(0)
    phi = MAP_MODULES["taylor"](3, head_dim).double()
    q, k = torch.randn(2, 2, 3, 5, head_dim, dtype=torch.float64)
    y, z = (torch.einsum("bhtd,hrd->bhtr", x, phi.weight) for x in (q, k))
    s = y @ z.mT / min(head_dim, 16) ** 0.5
    torch.testing.assert_close(phi(q) @ phi(k).mT, 1 + s + s**2 / 2)
    if head_dim <= 16:  # an orthogonal start changes no inner product
        torch.testing.assert_close(s, q @ k.mT / head_dim**0.5, rtol=0, atol=1e-5)  # W is of float32


@pytest.mark.parametrize("name", MAP_MODULES)
def test_learned_maps_keep_float32_and_say_their_size(name):
    phi = MAP_MODULES[name](2, 6).to(torch.bfloat16)
    for dtype, expected in [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]:
        features = phi(torch.randn(1, 2, 7, 6, dtype=dtype))
        assert features.shape == (1, 2, 7, phi.n_features)
        assert features.dtype == expected
        assert (features > 0).all() or name == "taylor"
    message = rf"{type(phi).__name__}\(2, 6\) got \(1, 3, 7, 6\): pass \(B, 2, T, 6\)"
    assert_input_errors((lambda: phi(torch.randn(1, 3, 7, 6)), message))


@pytest.mark.parametrize("name", MAP_MODULES)
def test_the_operator_takes_the_module_and_not_its_name(name):
    q, k, v = torch.randn(3, 1, 2, 9, 4)
    phi = make_feature_map(name, 2, 4)
    weights = (phi(q) @ phi(k).mT).tril()
    expected = weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(linear_attention(q, k, v, feature_map=phi), expected, rtol=1e-4, atol=1e-5)
    message = rf"feature_map='{name}' has weights.*pass linrope.feature_maps.*\(n_heads, head"
    assert_input_errors(
        (lambda: linear_attention(q, k, v, feature_map=name), message),
        (lambda: make_feature_map(name, 2, 0), rf"feature_map='{name}' has no dimensions left"),
    )
    assert make_feature_map(elu1, 2, 4) is elu1
    assert make_feature_map("relu", 2, 4) == "relu"


@pytest.fixture
def registered(monkeypatch):
    """Maps of a user: x², with its derivative from autograd and from a function."""
    monkeypatch.setattr(feature_maps, "_REGISTERED", {})
    register_feature_map("square", torch.square)
    register_feature_map("square_by_hand", torch.square, lambda x: 2 * x)


@pytest.mark.parametrize("backend", ["auto", "reference", "chunked"])
@pytest.mark.parametrize("name", ["square", "square_by_hand"])
def test_a_registered_map_is_a_name_as_any_other(registered, name, backend):
    q, k, v = torch.randn(3, 1, 2, 70, 4).requires_grad_()
    o = linear_attention(q, k, v, feature_map=name, backend=backend)
    expected = linear_attention(q.square(), k.square(), v, feature_map="identity", backend=backend)
    torch.testing.assert_close(o, expected)
    gradients = [torch.autograd.grad(y.square().sum(), (q, k), retain_graph=True) for y in (o, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_transforms_take_a_registered_map(registered):
    q, k, v = torch.randn(3, 1, 2, 5, 4)

    def loss(name, q):
        return linear_attention(q, k, v, feature_map=name, backend="reference").square().sum()

    expected, found = (torch.func.grad(partial(loss, name))(q) for name in ("square", "square_by_hand"))
    torch.testing.assert_close(found, expected)
    rows = torch.func.vmap(torch.func.grad(partial(loss, "square_by_hand")))(torch.stack((q, -q)))
    torch.testing.assert_close(rows, torch.stack((expected, -expected)))
    for backend in ("auto", "reference"):
        tangents = [
            torch.func.jvp(lambda q: linear_attention(q, k, v, feature_map=name, backend=backend), (q,), (v,))[1]  # noqa: B023
            for name in ("square", "square_by_hand")
        ]
        torch.testing.assert_close(*tangents)


@pytest.mark.exhaustive
def test_a_graph_takes_the_derivative_of_a_registered_map(monkeypatch):
    """Also where autograd finds none: the map detaches its argument."""
    monkeypatch.setattr(feature_maps, "_REGISTERED", {})
    register_feature_map("detached", lambda x: x.detach().square(), lambda x: 2 * x)
    phi = torch.compile(feature_maps.get_feature_map("detached").forward, fullgraph=True, backend="eager")
    x = torch.randn(2, 3).requires_grad_()
    y = phi(x)
    y.sum().backward()
    assert torch.equal(y, x.square())
    assert torch.equal(x.grad, 2 * x)


def test_a_model_has_a_registered_map_and_its_checkpoint_needs_it(registered, tmp_path, monkeypatch):
    config = LanguageModelConfig(d_model=16, n_layers=1, n_heads=2, feature_map="square")
    model, tokens = LanguageModel(config).eval(), torch.arange(9)[None]
    model.save_pretrained(tmp_path)
    before = model(tokens)
    assert torch.equal(LanguageModel.from_pretrained(tmp_path)(tokens), before)
    register_feature_map("square", torch.exp)  # a name registered again has the new map
    assert not torch.equal(model(tokens), before)
    monkeypatch.setattr(feature_maps, "_REGISTERED", {})
    message = r"feature_map='square' is unknown.* needs linrope.register_feature_map first, .* --import FILE.py"
    assert_input_errors((lambda: LanguageModel.from_pretrained(tmp_path), message))


def test_a_map_of_ones_own_writes_nothing_into_the_queries():
    q = torch.randn(1, 2, 5, 4)
    before, expected = q.clone(), linear_attention(q, q, q, feature_map="relu")
    in_place = torch.nn.ReLU(inplace=True)
    with pytest.raises(InputError, match="writes into its argument, the caller's q: use one without inplace=True"):
        linear_attention(q.clone(), q, q, feature_map=in_place)
    with torch.inference_mode():  # which counts no writing
        q = q.clone()
        torch.testing.assert_close(linear_attention(q, q, q, feature_map=in_place), expected)
    assert torch.equal(q, before)


def test_a_map_that_cannot_be_registered_is_named():
    def register(*arguments):
        return lambda: register_feature_map(*arguments)

    assert_input_errors(
        (register("elu1", torch.exp), "name='elu1' is a feature map of linrope's own: choose another name"),
        (register("", torch.exp), "name='' must be a string that is not empty"),
        (register("mine", 3), "forward=3 is no function"),
        (register("mine", torch.nn.ReLU()), r"forward=ReLU\(\) is a module"),
        (register("mine", torch.exp, 3), "derivative=3 is no function"),
        (register("mine", torch.sum), r"forward makes \(1, 2, 3, 4\) to \(\) torch.float32: .* keep the shape"),
        (register("mine", torch.relu_), "forward writes into its argument, the caller's queries: make a new tensor"),
        (register("mine", torch.exp, lambda x: 1.0), r"derivative makes \(1, 2, 3, 4\) to float: it must"),
        (register("mine", torch.square, lambda x: 3 * x), r"derivative\(-2.97\) is -8.91, autograd finds -5.94"),
    )
    assert "mine" not in feature_maps.feature_map_names()
