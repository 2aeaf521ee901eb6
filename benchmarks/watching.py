"""Looking at what attention layers hand to the operator, without changing what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import linrope.attention
from linrope import RotaryEmbedding


@contextmanager
def watched(watch: Callable[..., None]) -> Iterator[None]:
    """Inside, `watch` is called with what every layer calls `linear_attention` with, in the layers' order."""
    real = linrope.attention.linear_attention

    def watching(*args: Any, **options: Any) -> Any:
        watch(*args, **options)
        return real(*args, **options)

    linrope.attention.linear_attention = watching
    try:
        yield
    finally:
        linrope.attention.linear_attention = real


def signed_dimensions(rope: RotaryEmbedding | None) -> int:
    """How many of the first dimensions skip the feature map and the denominator."""
    return 0 if rope is None else rope.signed_dim
