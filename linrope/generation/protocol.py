"""What generation needs of a model; `linrope.models.language_model.LanguageModel` has all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from linrope.layers.state import ModelState


class CausalModel(Protocol):
    """A causal language model with a state, in evaluation mode (in training mode dropout applies).

    Attributes:
        config: its configuration, with `vocab_size` and `to_dict()`.
        tokenizer: its serialized tokenizer; None if unknown.
    """

    config: Any
    tokenizer: dict[str, str] | None

    def __call__(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        segment_ids: Tensor | None = None,
        *,
        return_state: bool,
        logits_to_keep: int,
    ) -> tuple[Tensor, ModelState]:
        """Logits of the last `logits_to_keep` tokens, and the state after the last one."""

    def state_bytes(self, context: int, dtype: torch.dtype) -> int:
        """Bytes of the state of one sequence after `context` tokens."""

    def parameters(self) -> Iterator[Tensor]:
        """The model's weights; the first one gives its device and dtype."""

    def state_dict(self) -> dict[str, Tensor]:
        """The model's weights by name."""
