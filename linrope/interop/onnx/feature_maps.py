"""Feature maps φ as nodes: queries or keys (B, T, H, D) to features (B, T, H, F)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from linrope.feature_maps import EXP_CEILING, Favor, Hedgehog, MapModule, Taylor
from linrope.interop.onnx.graph import Graph, Value


def _elu1(g: Graph, x: Value) -> Value:
    return g.op("Add", g.op("Exp", g.op("Min", x, np.float32(0))), g.op("Relu", x))


def _exp(g: Graph, x: Value) -> Value:
    return g.op("Exp", g.op("Min", x, np.float32(EXP_CEILING)))


def _softmax(g: Graph, x: Value) -> Value:
    return g.op("Softmax", x, axis=-1)


BY_NAME: dict[str, Callable[[Graph, Value], Value]] = {
    "elu1": _elu1,
    "relu": lambda g, x: g.op("Relu", x),
    "exp": _exp,
    "identity": lambda g, x: x,
    "softmax": _softmax,
}
"""Those without weights."""


def _favor(g: Graph, x: Value, phi: Favor, weight: Value) -> Value:
    y = g.op("Mul", x, np.float32(phi.weight.shape[-1] ** -0.25))
    half_square = g.op("Mul", _sum_of_squares(g, y), np.float32(0.5))
    exponentials = _exp(g, g.op("Sub", _project(g, y, weight), half_square))
    return g.op("Mul", g.op("Add", exponentials, np.float32(phi.FLOOR)), np.float32(phi.n_features**-0.5))


def _hedgehog(g: Graph, x: Value, phi: Hedgehog, weight: Value) -> Value:
    y = _project(g, x, weight)
    return _softmax(g, g.op("Concat", y, g.op("Neg", y), axis=-1))


def _taylor(g: Graph, x: Value, phi: Taylor, weight: Value) -> Value:
    y = g.op("Mul", _project(g, x, weight), np.float32(phi.weight.shape[1] ** -0.25))
    row, column = (g.op("Unsqueeze", y, np.array([axis])) for axis in (4, 3))
    products = g.reshape(g.op("Mul", g.op("Mul", row, column), np.float32(0.5**0.5)), 0, 0, 0, -1)
    one = g.op("Add", g.op("Mul", g.slice(y, 3, 0, 1), np.float32(0)), np.float32(1))
    return g.op("Concat", y, products, one, axis=-1)


WITH_WEIGHTS: dict[type, Callable[[Graph, Value, MapModule, Value], Value]] = {
    Favor: _favor,
    Hedgehog: _hedgehog,
    Taylor: _taylor,
}
"""By their class."""


def features(g: Graph, x: Value, phi: str | MapModule) -> Value:
    """φ(x): (B, T, H, D) -> (B, T, H, F), with φ by its name or its module."""
    if isinstance(phi, str):
        return BY_NAME[phi](g, x)
    return WITH_WEIGHTS[type(phi)](g, x, phi, g.weight("feature_map.weight", phi.weight))


def _project(g: Graph, x: Value, weight: Value) -> Value:
    """W x for each head: (B, T, H, D), (H, R, D) -> (B, T, H, R)."""
    return g.op("Einsum", x, weight, equation="bthd,hrd->bthr")


def _sum_of_squares(g: Graph, x: Value) -> Value:
    """(B, T, H, D) -> (B, T, H, 1)."""
    return g.op("ReduceSumSquare", x, np.array([3]), keepdims=1)
