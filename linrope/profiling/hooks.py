"""Looking at what attention layers compute, without changing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from linrope.layers.linear_attention import LinearAttention
    from linrope.models.language_model import LanguageModel
    from linrope.ops.state import State


@dataclass(frozen=True)
class Seen:
    """One call of a linear layer's operator.

    Attributes:
        layer: which of the model's blocks, counted from 0.
        attention: the layer itself.
        q, k, v: (B, H, T, D), as the operator was given them: with `rope.placement="selective"` already rotated.
        options: the operator's keyword arguments, `rope`, `log_decay`, `state` and `segment_ids` among them.
        o: (B, H, T, D), what came out.
        final: the state after the last token.
    """

    layer: int
    attention: LinearAttention
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    o: Tensor
    final: State


@contextmanager
def watched(model: LanguageModel, watch: Callable[[Seen], None]) -> Iterator[None]:
    """Inside, `watch` is called with what every linear layer computes, as it computes it."""
    layers = [
        (number, block.attention)
        for number, block in enumerate(model.blocks)
        if model.config.attention_types[number] == "linear"
    ]
    for number, attention in layers:
        attention.watch = lambda *seen, number=number, attention=attention: watch(Seen(number, attention, *seen))
    try:
        yield
    finally:
        for _, attention in layers:
            attention.watch = None
