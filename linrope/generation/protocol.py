"""What generation needs of a model; `linrope.models.language_model.LanguageModel` has all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from linrope.layers.state import ModelState


class CausalModel(Protocol):
    """A causal language model with a state, in evaluation mode (in training mode dropout applies)."""

    config: Any  # with `vocab_size` and `to_dict()`
    tokenizer: dict[str, str] | None  # serialized; None if unknown

    def __call__(
        self, tokens: Tensor, state: ModelState | None, ids: Tensor | None, *, return_state: bool, logits_to_keep: int
    ) -> tuple[Tensor, ModelState]: ...

    def state_bytes(self, context: int, dtype: torch.dtype) -> int: ...

    def parameters(self) -> Iterator[Tensor]: ...

    def state_dict(self) -> dict[str, Tensor]: ...
