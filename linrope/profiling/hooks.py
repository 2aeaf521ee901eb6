"""Hooks on linear attention layers: see what their operator computes, without changing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from linrope.layers.linear_attention import LinearAttention
from linrope.models.language_model import LanguageModel
from linrope.ops.state import State


@dataclass(frozen=True)
class OperatorCall:
    """One call of a layer's operator. q, k, v and o are (B, H, T, D)."""

    layer: int  # the block's number, counted from 0
    attention: LinearAttention
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]  # the operator's keyword arguments, such as `rope`, `log_decay`, `state` and `segment_ids`
    o: Tensor
    final: State  # after the last token


@contextmanager
def operator_hook(model: LanguageModel, hook: Callable[[OperatorCall], None]) -> Iterator[None]:
    """Inside, `hook` is called after each call of the operator in a linear layer of the model."""
    layers = {
        n: block.attention for n, block in enumerate(model.blocks) if isinstance(block.attention, LinearAttention)
    }
    for number, attention in layers.items():
        attention.watch = lambda *call, n=number, attention=attention: hook(OperatorCall(n, attention, *call))
    try:
        yield
    finally:
        for attention in layers.values():
            attention.watch = None
