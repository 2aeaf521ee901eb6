"""Feature maps φ, which replace the exponential of softmax attention. Three tables list them by name.

Maps in `FEATURE_MAPS` keep the shape, and write into a kernel's buffers: a backward saves raw queries and keys only.
Maps in `MAP_MODULES` have weights for each head. A layer creates them and passes them to the operator as callables.
`register_feature_map` adds maps of your own, which run before a kernel, as callables do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linrope.errors import InputError, require_choice
from linrope.utils.filling import fill

EXP_CEILING = 10.0
"""`exp` is constant above this: e¹⁰·e¹⁰ summed over 64 features and 10⁹ tokens is far below float32's 3·10³⁸."""


@dataclass(frozen=True)
class FeatureMap:
    """A feature map φ: its definition, and the same for buffers of one shape (..., D).

    `forward(x) -> y` is the definition, differentiable by autograd.
    `load(x, y, derivative)` writes φ(x) into y, and what `vjp` needs into derivative. x may be y.
    `vjp(grad, y, derivative, out)` writes the vector-Jacobian product into out. It may overwrite grad; out may be grad.
    Both are None for a map given as a callable, which may change the number of features.
    """

    name: str
    forward: Callable[[Tensor], Tensor]
    load: Callable[[Tensor, Tensor, Tensor], None] | None = None
    vjp: Callable[[Tensor, Tensor, Tensor, Tensor], None] | None = None


def _vjp_elementwise(grad: Tensor, y: Tensor, derivative: Tensor, out: Tensor) -> None:
    torch.mul(grad, derivative, out=out)


def _at_most(x: Tensor, bound: float) -> Tensor:
    """`min(x, bound)` with derivative 1 at the bound, where that of `clamp` depends on PyTorch's version."""
    return x.masked_fill(x > bound, bound)


def elu1(x: Tensor) -> Tensor:
    """`elu(x) + 1`, positive everywhere (Katharopoulos et al., arXiv 2006.16236).

    `elu(x) + 1` as written is exactly 0 in bfloat16 from x ≈ -8 down. Here it is `exp(min(x, 0)) + max(x, 0)`.
    """
    return _at_most(x, 0).exp() + x.relu()


def exp_below_zero(x: Tensor, out: Tensor) -> Tensor:
    """`exp(min(x, 0))` in one pass, faster than `exp` alone: PyTorch has a kernel for it, the derivative of elu."""
    one = torch.ones((), dtype=x.dtype, device=x.device)
    return torch.ops.aten.elu_backward.grad_input(one, 1.0, 1.0, 1.0, False, x, grad_input=out)


def _load_elu1(x: Tensor, y: Tensor, derivative: Tensor) -> None:
    exp_below_zero(x, out=derivative)
    torch.clamp_min(x, 0, out=y).add_(derivative)


def relu(x: Tensor) -> Tensor:
    """`max(x, 0)`."""
    return x.relu()


def _load_relu(x: Tensor, y: Tensor, derivative: Tensor) -> None:
    torch.sign(torch.clamp_min(x, 0, out=y), out=derivative)


def exp(x: Tensor) -> Tensor:
    """`exp(min(x, 10))`: bounded, so that neither it nor a sum of its products overflows (derivative 0 above 10)."""
    return _at_most(x, EXP_CEILING).exp()


def _load_exp(x: Tensor, y: Tensor, derivative: Tensor) -> None:
    torch.le(x, EXP_CEILING, out=derivative)
    derivative.mul_(torch.clamp_max(x, EXP_CEILING, out=y).exp_())


def identity(x: Tensor) -> Tensor:
    """`x` itself: for features that the caller computes. Nothing keeps the denominator positive."""
    return x


def _load_identity(x: Tensor, y: Tensor, derivative: Tensor) -> None:
    y.copy_(x)


def _vjp_identity(grad: Tensor, y: Tensor, derivative: Tensor, out: Tensor) -> None:
    out.copy_(grad)


def softmax(x: Tensor) -> Tensor:
    """Softmax over the D features of each token: positive, and each token's features sum to 1."""
    return x.softmax(dim=-1)


def _load_softmax(x: Tensor, y: Tensor, derivative: Tensor) -> None:
    y.copy_(x.softmax(dim=-1))


def _vjp_softmax(grad: Tensor, y: Tensor, derivative: Tensor, out: Tensor) -> None:
    weighted = grad.mul_(y)
    torch.addcmul(weighted, y, weighted.sum(dim=-1, keepdim=True), value=-1, out=out)


FEATURE_MAPS: dict[str, FeatureMap] = {
    "elu1": FeatureMap("elu1", elu1, _load_elu1, _vjp_elementwise),
    "relu": FeatureMap("relu", relu, _load_relu, _vjp_elementwise),
    "exp": FeatureMap("exp", exp, _load_exp, _vjp_elementwise),
    "identity": FeatureMap("identity", identity, _load_identity, _vjp_identity),
    "softmax": FeatureMap("softmax", softmax, _load_softmax, _vjp_softmax),
}


def skip_first(phi: FeatureMap, n: int) -> FeatureMap:
    """φ applied to all but the first n dimensions, which stay as they are (those of `rope.signed`)."""
    if n == 0:
        return phi

    def forward(x: Tensor) -> Tensor:
        return torch.cat((x[..., :n], phi.forward(x[..., n:])), dim=-1)

    def load(x: Tensor, y: Tensor, derivative: Tensor) -> None:
        phi.load(*(part[..., n:] for part in (x, y, derivative)))
        y[..., :n].copy_(x[..., :n])

    def vjp(grad: Tensor, y: Tensor, derivative: Tensor, out: Tensor) -> None:
        phi.vjp(*(part[..., n:] for part in (grad, y, derivative, out)))
        out[..., :n].copy_(grad[..., :n])

    return FeatureMap(phi.name, forward, *(None, None) if phi.load is None else (load, vjp))


class MapModule(nn.Module):
    """A feature map that first multiplies by a matrix for each head: (B, H, T, D) -> (B, H, T, F).

    It is made as `Map(n_heads, head_dim)`, with H and D.
    """

    n_features: int  # F
    weight: Tensor  # (H, R, D)

    def initial_weight(self) -> Tensor:
        """(H, R, D) of a new map, on the device of `weight`."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """The weights of a new map."""
        fill(self.weight, self.initial_weight())

    def project(self, x: Tensor) -> Tensor:
        """(B, H, T, D) -> (B, H, T, R), in float32 at least: exponentials and squares follow.

        Raises:
            InputError: x has another number of heads or another head size.
        """
        n_heads, _, head_dim = self.weight.shape
        if x.ndim != 4 or x.shape[1] != n_heads or x.shape[3] != head_dim:
            name = type(self).__name__
            raise InputError(f"{name}({n_heads}, {head_dim}) got {tuple(x.shape)}: pass (B, {n_heads}, T, {head_dim}).")
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x @ self.weight.to(x.dtype).mT


def _orthogonal(n_heads: int, size: int, head_dim: int, device: torch.device) -> Tensor:
    """(H, size, head_dim) float32, size ≤ head_dim: each head's rows orthonormal and uniformly random."""
    empty = torch.empty(size, head_dim, device=device, dtype=torch.float32)  # there is no QR decomposition in bfloat16
    return torch.stack([nn.init.orthogonal_(empty.clone()) for _ in range(n_heads)])


class Favor(MapModule):
    """Positive random features of the softmax kernel, `E[φ(q)ᵀφ(k)] = exp(qᵀk / √D)` (Performer, arXiv 2009.14794).

        φ(x)_f = (exp(w_fᵀy - |y|² / 2) + 10⁻⁴) / √F        y = x / D^¼,  F = D

    The w_f are drawn once: orthogonal to each other, with the lengths of normal vectors. They are saved with the model.
    Performer's code subtracts a maximum over all keys to bound the exponential, so that later tokens change earlier
    outputs. Here the exponent has a ceiling instead, `EXP_CEILING`. The 10⁻⁴ is Performer's: it keeps features
    positive when all exponentials vanish, as for large inputs. Each key then adds 10⁻⁸ to the denominator, and the
    layer's ε of 10⁻⁶ shrinks the outputs: by half after 100 tokens, by more before. Each head has its own directions.
    """

    FLOOR = 1e-4

    def __init__(self, n_heads: int, head_dim: int):
        super().__init__()
        self.n_features = head_dim
        self.register_buffer("weight", torch.empty(n_heads, head_dim, head_dim))
        self.reset_parameters()

    def initial_weight(self) -> Tensor:
        lengths = torch.randn(self.weight.shape, device=self.weight.device).norm(dim=-1, keepdim=True)
        return lengths * _orthogonal(*self.weight.shape, self.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.promote_types(x.dtype, torch.float32)) * x.shape[-1] ** -0.25
        exponent = self.project(y) - y.square().sum(dim=-1, keepdim=True) / 2
        return (exp(exponent) + self.FLOOR) * self.n_features**-0.5


class Hedgehog(MapModule):
    """`softmax([W x ; -W x])`, 2D features, with W learned for each head (Hedgehog, arXiv 2402.04347).

    W starts as the identity. Queries and keys share it.
    """

    def __init__(self, n_heads: int, head_dim: int):
        super().__init__()
        self.n_features = 2 * head_dim
        self.weight = nn.Parameter(torch.empty(n_heads, head_dim, head_dim))
        self.reset_parameters()

    def initial_weight(self) -> Tensor:
        return torch.eye(self.weight.shape[-1], device=self.weight.device).expand(self.weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)
        return torch.cat((y, -y), dim=-1).softmax(dim=-1)


class Taylor(MapModule):
    """The exponential's series up to the second order, which is positive (Based, arXiv 2402.18668).

        φ(q)ᵀφ(k) = 1 + s + s² / 2        s = (W q)ᵀ(W k) / √R,  F = R + R² + 1,  R = min(D, 16)

    W (R, D) is learned for each head. It limits the number of features: 273 for R = 16.
    """

    SIZE = 16

    def __init__(self, n_heads: int, head_dim: int):
        super().__init__()
        size = min(head_dim, self.SIZE)
        self.n_features = size + size**2 + 1
        self.weight = nn.Parameter(torch.empty(n_heads, size, head_dim))
        self.reset_parameters()

    def initial_weight(self) -> Tensor:
        return _orthogonal(*self.weight.shape, self.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x) * self.weight.shape[1] ** -0.25
        products = (y.unsqueeze(-1) * y.unsqueeze(-2)).flatten(-2)
        # the constant is last, where the rotation of pairs does not reach it
        return torch.cat((y, products * 0.5**0.5, torch.ones_like(y[..., :1])), dim=-1)


MAP_MODULES: dict[str, type[MapModule]] = {"favor": Favor, "hedgehog": Hedgehog, "taylor": Taylor}
_REGISTERED: dict[str, FeatureMap] = {}


def register_feature_map(
    name: str, forward: Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Add a feature map of your own, which `feature_map=name` then means everywhere: in the operator, layers, models
    and configurations. Every backend takes it. A name that was registered before gets the new map.

    A checkpoint holds the name only: register the map again before the model is loaded (`linrope COMMAND --import
    FILE.py` imports the file that does it).

    Args:
        name: how it is called; not the name of one of linrope's own maps.
        forward: (..., D) -> (..., D), floats. Nothing but a positive φ keeps the denominator positive.
        derivative: φ'(x) of an elementwise map, (..., D) -> (..., D): the backward then keeps x alone, and multiplies.
            None leaves the derivative to autograd.

    Raises:
        InputError: no name, or one of linrope's own; no function, a module (it has weights: pass it as
            `LinearAttention(feature_map=module)`), or one that changes the shape; a derivative that is not autograd's.
    """
    if not isinstance(name, str) or not name:
        raise InputError(f"name={name!r} must be a string that is not empty.")
    if name in FEATURE_MAPS or name in MAP_MODULES:
        raise InputError(f"name={name!r} is a feature map of linrope's own: choose another name.")
    _check_function("forward", forward)
    if derivative is not None:
        _check_function("derivative", derivative)
        _check_derivative(forward, derivative)

    def with_derivative(x: Tensor) -> Tensor:
        function = _WithDerivative if torch.compiler.is_compiling() else _WithBothModes
        return function.apply(x, forward, derivative)

    _REGISTERED[name] = FeatureMap(name, forward if derivative is None else with_derivative)


def _check_function(argument: str, function: Callable[[Tensor], Tensor]) -> None:
    """Raise InputError unless it is a function without weights that keeps the shape of a tensor, and the tensor."""
    if not callable(function) or isinstance(function, nn.Module):
        what = "a module" if isinstance(function, nn.Module) else "no function"
        raise InputError(f"{argument}={function!r} is {what}: pass a function of one tensor, without weights.")
    x = torch.linspace(-1, 1, 24).view(1, 2, 3, 4)
    y = function(given := x.clone())
    if not torch.equal(given, x):
        raise InputError(f"{argument} writes into its argument, the caller's queries: make a new tensor.")
    if not isinstance(y, Tensor) or not y.is_floating_point() or y.shape != x.shape:
        got = f"{tuple(y.shape)} {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
        raise InputError(f"{argument} makes {tuple(x.shape)} to {got}: it must return floats and keep the shape.")


def _check_derivative(forward: Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor]) -> None:
    """Raise InputError unless it is what autograd finds, where the map is differentiable by autograd."""
    x = torch.linspace(-2.97, 2.96, 24, dtype=torch.float64).view(1, 2, 3, 4).requires_grad_()  # no kink is likely here
    with torch.enable_grad():
        y = forward(x)
    if not y.requires_grad:
        return
    (exact,) = torch.autograd.grad(y.sum(), x)
    given = derivative(x.detach())
    wrong = ~torch.isclose(given.double(), exact, rtol=1e-3, atol=1e-3)
    if wrong.any():
        at, one, other = (values[wrong][0].item() for values in (x, given, exact))
        raise InputError(f"derivative({at:.3g}) is {one:.3g}, autograd finds {other:.3g}: fix it, or leave it out.")


class _WithDerivative(torch.autograd.Function):
    """A function of a tensor whose derivative is another function of it."""

    @staticmethod
    def forward(x: Tensor, forward: Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor]) -> Tensor:
        return forward(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, _, ctx.derivative = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return grad * ctx.derivative(x), None, None


class _WithBothModes(_WithDerivative):
    """The same, with what forward mode and transforms of torch.func need, which no graph of torch.compile takes."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _WithDerivative.setup_context(ctx, inputs, output)
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *unused: None) -> Tensor:
        (x,) = ctx.saved_tensors
        return tangent * ctx.derivative(x)


def feature_map_names() -> list[str]:
    """The names of all feature maps, registered ones last."""
    return [*FEATURE_MAPS, *MAP_MODULES, *_REGISTERED]


def require_feature_map(name: object) -> None:
    """Raise InputError unless there is a feature map of that name."""
    try:
        require_choice("feature_map", name, feature_map_names())
    except InputError as error:
        more = "A map of your own needs linrope.register_feature_map first, on the command line --import FILE.py."
        raise InputError(f"{error} {more}") from None


def get_feature_map(feature_map: str | Callable[[Tensor], Tensor]) -> FeatureMap:
    """The map of that name, built in or registered, or the callable (..., D) -> (..., F) as a FeatureMap.

    Raises:
        InputError: an unknown name, the name of a map with weights, or neither a name nor a callable.
    """
    if callable(feature_map):
        return FeatureMap(getattr(feature_map, "__name__", type(feature_map).__name__), feature_map)
    if not isinstance(feature_map, str):
        raise InputError(f"feature_map={feature_map!r} is neither a name nor a callable: pass one of the two.")
    if feature_map in MAP_MODULES:
        module = f"linrope.feature_maps.{MAP_MODULES[feature_map].__name__}(n_heads, head_dim)"
        raise InputError(f"feature_map={feature_map!r} has weights, which LinearAttention creates: pass {module} here.")
    require_feature_map(feature_map)
    return FEATURE_MAPS.get(feature_map) or _REGISTERED[feature_map]


def make_feature_map(
    feature_map: str | Callable[[Tensor], Tensor], n_heads: int, head_dim: int
) -> str | Callable[[Tensor], Tensor]:
    """What a layer passes to the operator: a new module for a name in `MAP_MODULES`, else the argument, checked.

    Raises:
        InputError: an unknown name, or neither a name nor a callable; a map with weights when head_dim is 0.
    """
    if isinstance(feature_map, str):
        require_feature_map(feature_map)
        if feature_map in MAP_MODULES:
            if head_dim < 1:
                raise InputError(
                    f"feature_map={feature_map!r} has no dimensions left: with signed rotation, rope.rotary_dim "
                    "dimensions skip it. Lower rope.rotary_dim."
                )
            return MAP_MODULES[feature_map](n_heads, head_dim)
    get_feature_map(feature_map)
    return feature_map
