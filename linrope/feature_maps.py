"""Feature maps φ: what stands in for the exponential of softmax attention, one table of names.

Every map in the table acts on the last dimension (the head's) and keeps the shape. Besides its value each map knows
its own vector-Jacobian product, so that an operator with a hand-written backward saves raw queries and keys only.
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
    """A feature map φ and its vector-Jacobian product.

    `forward(x) -> y` and `backward(grad, x, y) -> ∂L/∂x`, all of one shape (..., D). `backward` is None for a map
    that came as a plain callable: autograd differentiates it then, and it may change the number of features.
    """

    name: str
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], Tensor] | None


def elu1(x: Tensor) -> Tensor:
    """`elu(x) + 1`, positive everywhere (Katharopoulos et al., arXiv 2006.16236).

    Written without the `- 1 + 1`, which rounds to exactly 0 in bfloat16 from x ≈ -8 down: `exp(min(x, 0))` is 1 where
    x is positive, `max(x, 0)` is 0 where it is not.
    """
    return x.clamp(max=0).exp() + x.relu()


def _elu1_backward(grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return grad * y.clamp(max=1)  # for x > 0: y > 1 and the slope is 1; for x <= 0: the slope is exp(x) = y


def relu(x: Tensor) -> Tensor:
    """`max(x, 0)`."""
    return x.relu()


def _relu_backward(grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return grad * (y > 0)


def exp(x: Tensor) -> Tensor:
    """`exp(min(x, 10))`: bounded, so that neither it nor a sum of its products overflows (slope 0 above the bound)."""
    return x.clamp(max=EXP_CEILING).exp()


def _exp_backward(grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x <= EXP_CEILING, grad * y, 0)


def identity(x: Tensor) -> Tensor:
    """`x` itself: for features computed by the caller. Nothing keeps the denominator positive then."""
    return x


def _identity_backward(grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return grad


def softmax(x: Tensor) -> Tensor:
    """Softmax over the D features of each token: positive, and each token's features sum to 1."""
    return x.softmax(dim=-1)


def _softmax_backward(grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
    weighted = grad * y
    return weighted - y * weighted.sum(dim=-1, keepdim=True)


FEATURE_MAPS: dict[str, FeatureMap] = {
    "elu1": FeatureMap("elu1", elu1, _elu1_backward),
    "relu": FeatureMap("relu", relu, _relu_backward),
    "exp": FeatureMap("exp", exp, _exp_backward),
    "identity": FeatureMap("identity", identity, _identity_backward),
    "softmax": FeatureMap("softmax", softmax, _softmax_backward),
}


def get_feature_map(feature_map: str | Callable[[Tensor], Tensor]) -> FeatureMap:
    """The feature map of that name, or the given callable as one.

    Args:
        feature_map: a key of `FEATURE_MAPS`, or a callable from (..., D) to (..., F), differentiable by autograd.

    Raises:
        InputError: unknown name, or neither a name nor callable.
    """
    if callable(feature_map):
        return FeatureMap(getattr(feature_map, "__name__", "callable"), feature_map, None)
    if not isinstance(feature_map, str):
        raise InputError(f"feature_map={feature_map!r} is neither a name nor a callable: pass one of the two.")
    require_choice("feature_map", feature_map, FEATURE_MAPS)
    return FEATURE_MAPS[feature_map]
