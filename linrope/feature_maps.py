"""Feature maps φ: what stands in for the exponential of softmax attention, one table of names.

Every map in the table acts on the last dimension (the head's) and keeps the shape. Besides its definition each map
comes as a kernel's pair of passes, writing into buffers the kernel holds: φ and its slope on the way in, the product
with the slope on the way back. So an operator with a hand-written backward saves raw queries and keys only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linrope.errors import InputError, require_choice

EXP_CEILING = 10.0
"""`exp` stops growing here: e¹⁰·e¹⁰ summed over 64 features and 10⁹ tokens is still far below float32's 3·10³⁸."""


@dataclass(frozen=True)
class FeatureMap:
    """A feature map φ: its definition, and the same in passes over given buffers, all of one shape (..., D).

    `forward(x) -> y` is the definition, differentiable by autograd.
    `load(x, y, slope)` writes φ(x) into y and what `pull` needs into slope; x may be y itself.
    `pull(grad, y, slope, out)` writes the vector-Jacobian product into out, and may overwrite grad; out may be grad.
    The two are None for a map that came as a plain callable: it may change the number of features.
    """

    name: str
    forward: Callable[[Tensor], Tensor]
    load: Callable[[Tensor, Tensor, Tensor], None] | None = None
    pull: Callable[[Tensor, Tensor, Tensor, Tensor], None] | None = None


def _pull_elementwise(grad: Tensor, y: Tensor, slope: Tensor, out: Tensor) -> None:
    torch.mul(grad, slope, out=out)


def elu1(x: Tensor) -> Tensor:
    """`elu(x) + 1`, positive everywhere (Katharopoulos et al., arXiv 2006.16236).

    Written without the `- 1 + 1`, which rounds to exactly 0 in bfloat16 from x ≈ -8 down: `exp(min(x, 0))` is 1 where
    x is positive, `max(x, 0)` is 0 where it is not.
    """
    return x.clamp(max=0).exp() + x.relu()


def exp_below_zero(x: Tensor, out: Tensor) -> Tensor:
    """`exp(min(x, 0))` in one pass, faster than `exp` alone: it is the slope of elu, for which PyTorch has a kernel."""
    one = torch.ones((), dtype=x.dtype, device=x.device)
    return torch.ops.aten.elu_backward.grad_input(one, 1.0, 1.0, 1.0, False, x, grad_input=out)


def _load_elu1(x: Tensor, y: Tensor, slope: Tensor) -> None:
    exp_below_zero(x, out=slope)
    torch.clamp_min(x, 0, out=y).add_(slope)


def relu(x: Tensor) -> Tensor:
    """`max(x, 0)`."""
    return x.relu()


def _load_relu(x: Tensor, y: Tensor, slope: Tensor) -> None:
    torch.sign(torch.clamp_min(x, 0, out=y), out=slope)


def exp(x: Tensor) -> Tensor:
    """`exp(min(x, 10))`: bounded, so that neither it nor a sum of its products overflows (slope 0 above the bound)."""
    return x.clamp(max=EXP_CEILING).exp()


def _load_exp(x: Tensor, y: Tensor, slope: Tensor) -> None:
    torch.le(x, EXP_CEILING, out=slope)
    slope.mul_(torch.clamp_max(x, EXP_CEILING, out=y).exp_())


def identity(x: Tensor) -> Tensor:
    """`x` itself: for features computed by the caller. Nothing keeps the denominator positive then."""
    return x


def _load_identity(x: Tensor, y: Tensor, slope: Tensor) -> None:
    if x is not y:
        y.copy_(x)


def _pull_identity(grad: Tensor, y: Tensor, slope: Tensor, out: Tensor) -> None:
    out.copy_(grad)


def softmax(x: Tensor) -> Tensor:
    """Softmax over the D features of each token: positive, and each token's features sum to 1."""
    return x.softmax(dim=-1)


def _load_softmax(x: Tensor, y: Tensor, slope: Tensor) -> None:
    y.copy_(x.softmax(dim=-1))


def _pull_softmax(grad: Tensor, y: Tensor, slope: Tensor, out: Tensor) -> None:
    weighted = grad.mul_(y)
    torch.addcmul(weighted, y, weighted.sum(dim=-1, keepdim=True), value=-1, out=out)


FEATURE_MAPS: dict[str, FeatureMap] = {
    "elu1": FeatureMap("elu1", elu1, _load_elu1, _pull_elementwise),
    "relu": FeatureMap("relu", relu, _load_relu, _pull_elementwise),
    "exp": FeatureMap("exp", exp, _load_exp, _pull_elementwise),
    "identity": FeatureMap("identity", identity, _load_identity, _pull_identity),
    "softmax": FeatureMap("softmax", softmax, _load_softmax, _pull_softmax),
}


def get_feature_map(feature_map: str | Callable[[Tensor], Tensor]) -> FeatureMap:
    """The feature map of that name, or the given callable as one.

    Args:
        feature_map: a key of `FEATURE_MAPS`, or a callable from (..., D) to (..., F), differentiable by autograd.

    Raises:
        InputError: unknown name, or neither a name nor callable.
    """
    if callable(feature_map):
        return FeatureMap(getattr(feature_map, "__name__", "callable"), feature_map)
    if not isinstance(feature_map, str):
        raise InputError(f"feature_map={feature_map!r} is neither a name nor a callable: pass one of the two.")
    require_choice("feature_map", feature_map, FEATURE_MAPS)
    return FEATURE_MAPS[feature_map]
