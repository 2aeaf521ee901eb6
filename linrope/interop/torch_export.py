"""The decoding step as a graph (`torch.export`), for programs without this package.

    program = export_decoding_step(model)
    torch.export.save(program, "step.pt2")

A step takes a token, its position and the state's tensors, and returns logits and the new tensors:

    tensors = tensors_of(initial_state(model))  # or of prompts of the same length: tensors_of(read(...).state)
    logits, tensors = program.module()(token, position, tensors)

The position is a dynamic integer of the graph, so angles are exact at any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from linrope.errors import InputError
from linrope.layers import state as states
from linrope.layers.state import ModelState, map_state
from linrope.models.language_model import LanguageModel
from linrope.utils.options import require_whole


class DecodingStep(nn.Module):
    """One token through a model with linear layers only, with the state as a list of tensors in the order of `like`."""

    def __init__(self, model: LanguageModel, like: ModelState):
        super().__init__()
        self.model, self.like = model, like

    def forward(self, token: Tensor, position: int, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Token (B,) int64, number of tokens before it, state -> logits (B, vocab_size), new state."""
        given = iter(tensors)
        state = _at_position(map_state(lambda name, x: next(given), self.like), position)
        logits, state = self.model(token[:, None], state, return_state=True)
        return logits[:, 0], states.tensors_of(state)


def tensors_of(state: ModelState) -> list[Tensor]:
    """The state's tensors, as a step takes and returns them. InputError if the rows have different positions."""
    if any(layer.document_start is not None and layer.document_start.any() for layer in state):
        raise InputError(
            "state comes from prompts of different lengths, or from rows that were reset: the decoding step has one "
            "position for all rows. Read prompts of different lengths one by one."
        )
    return states.tensors_of(state)


def _at_position(state: ModelState, position: int) -> ModelState:
    return ModelState(replace(layer, past=replace(layer.past, length=position)) for layer in state)


@torch.no_grad()
def initial_state(model: LanguageModel, batch: int = 1) -> ModelState:
    """The state before the first token of `batch` rows, all zeros. InputError for a model with softmax layers, whose
    caches grow."""
    require_whole("batch", batch)
    if "softmax" in model.config.attention_types:
        raise InputError(
            f"attention={model.config.attention!r}: the decoding step is exported for linear layers only, whose states "
            "have a fixed size."
        )
    token = torch.zeros(batch, 1, dtype=torch.int64, device=next(model.parameters()).device)
    _, state = model(token, return_state=True)
    return _at_position(map_state(lambda name, x: torch.zeros_like(x), state), 0)


@torch.no_grad()
def export_decoding_step(model: LanguageModel, batch: int = 1) -> torch.export.ExportedProgram:
    """The exported program of a `DecodingStep` on `batch` rows. InputError for a model in training mode, and as
    `initial_state`."""
    if model.training:
        raise InputError("model is in training mode, where dropout is active: call model.eval() first.")
    like = initial_state(model, batch)
    tensors = states.tensors_of(like)
    token = torch.zeros(batch, dtype=torch.int64, device=tensors[0].device)
    # the example's position is 2: export would make a constant of 0 or 1
    return torch.export.export(
        DecodingStep(model, like),
        (token, 2, tensors),
        dynamic_shapes=(None, torch.export.Dim.DYNAMIC, [None] * len(tensors)),
    )
