"""What the layers of a graph share of the new tokens: positions, rotations, which keys a softmax layer sees."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np

from linrope.interop.onnx.graph import Graph, Value

PI = Fraction("3.14159265358979323846264338327950288419716939937510")
LOW_BITS = 2**26
"""Positions are split there into two parts, each with at most 27 significant bits below 2^53."""


class Rotation(NamedTuple):
    """Cosines and sines, float32 (B, T, R/2), or (B, T·H, R/2) if each head has its own."""

    cos: Value
    sin: Value
    per_head: bool


class Tokens:
    """The new tokens of a call, of which each row has its own position.

    Attributes:
        ids: (B, T) int64.
        positions: (B, T) int64.
        size: [B, T] int64.
    """

    def __init__(self, g: Graph) -> None:
        self.g = g
        self.ids = g.input("tokens", np.int64, ("batch", "length"))
        self.size = g.op("Shape", self.ids)
        length = g.slice(self.size, 0, 1)
        self._length = g.op("Squeeze", length)
        past = g.past("position", (), np.int64)
        self._first = g.op("Unsqueeze", past, np.array([1]))  # (B, 1)
        self.positions = g.op("Add", self._first, g.op("Range", np.array(0), self._length, np.array(1)))
        g.present("position", g.op("Add", past, length), (), np.int64)
        self._rotations: dict[tuple[bytes, tuple[int, ...]], Rotation] = {}
        self._visible: dict[tuple[Value | int, int | None], Value] = {}
        self._ones: dict[int, Value] = {}

    def ones(self, n_heads: int) -> Value:
        """(B, T, H) ones, the values whose sums are the denominators."""
        if n_heads not in self._ones:
            shape = self.g.op("Concat", self.size, np.array([n_heads]), axis=0)
            one = np.ones(1, np.float32)
            self._ones[n_heads] = self.g.op("Expand", one, shape)
        return self._ones[n_heads]

    def rotation(self, theta: np.ndarray) -> Rotation:
        """The rotation by the angles t·θ.

        In full rotations an angle is t·u, u = θ/2π, of which only the fraction matters. Both factors are sums of two,
        t = t₁ + t₂ and u = u₁ + u₂, whose products are exact in float64 but for t·u₂, and u₂ ≤ 2^-24 u.

        Args:
            theta: (R/2,) or (H, R/2) float64.
        """
        key = theta.tobytes(), theta.shape
        if key not in self._rotations:
            self._rotations[key] = self._rotation(theta)
        return self._rotations[key]

    def _rotation(self, theta: np.ndarray) -> Rotation:
        g = self.g
        low = g.op("Mod", self.positions, np.array(LOW_BITS))
        parts = g.op("Concat", *(g.op("Unsqueeze", x, np.array([2, 3, 4])) for x in self._parts(low)), axis=2)
        turns = g.op("Mul", g.cast(parts, np.float64), _full_rotations(theta))  # (B, T, 2, 2, R/2 or H·R/2)
        turns = _fraction(g, g.op("ReduceSum", _fraction(g, turns), np.array([2, 3]), keepdims=0))
        return _rotation_by(g, turns, theta.shape)

    def _parts(self, low: Value) -> tuple[Value, Value]:
        return low, self.g.op("Sub", self.positions, low)

    def visible(self, slots: Value | int, window: int | None) -> Value:
        """Which keys each query sees, booleans (B, 1, T, S + T): those of its row, not after it, within the window.

        The S keys of the cache stand right before the new tokens. Those with a position below 0 are empty.

        Args:
            slots: S, a number or a value of shape ().
        """
        if (slots, window) not in self._visible:
            g = self.g
            first = np.array(-slots) if isinstance(slots, int) else g.op("Neg", slots)
            keys = g.op("Add", self._first, g.op("Range", first, self._length, np.array(1)))
            keys, queries = (
                g.op("Unsqueeze", keys, np.array([1, 2])),
                g.op("Unsqueeze", self.positions, np.array([1, 3])),
            )
            seen = g.op("And", g.op("GreaterOrEqual", keys, np.array(0)), g.op("LessOrEqual", keys, queries))
            if window is not None:
                seen = g.op("And", seen, g.op("Greater", keys, g.op("Sub", queries, np.array(window))))
            self._visible[slots, window] = seen
        return self._visible[slots, window]


def _fraction(g: Graph, x: Value) -> Value:
    """x - floor(x)."""
    return g.op("Sub", x, g.op("Floor", x))


def _rotation_by(g: Graph, turns: Value, shape: tuple[int, ...]) -> Rotation:
    """The rotation by parts of a full one in [0, 1), float64 (B, T, R/2) or (B, T, H·R/2), whose `shape` is (R/2,) or
    (H, R/2)."""

    def sine(turns: Value) -> Value:
        y = g.op("Sin", g.op("Mul", turns, np.float64(2 * np.pi)))
        return g.reshape(g.cast(y, np.float32), 0, -1, shape[-1])

    # the cosine as a sine: onnxruntime 1.23 to 1.28 have no Cos of float64
    return Rotation(sine(g.op("Add", turns, np.float64(0.25))), sine(turns), per_head=len(shape) > 1)


def _full_rotations(theta: np.ndarray) -> np.ndarray:
    """u = θ/2π as a sum of two float64, of which the first has 24 significant bits: (2, R/2 or H·R/2)."""
    exact = [Fraction(float(angle)) / (2 * PI) for angle in theta.flat]
    high = [float(np.float32(float(u))) for u in exact]
    return np.array([high, [float(u - Fraction(first)) for u, first in zip(exact, high)]])
