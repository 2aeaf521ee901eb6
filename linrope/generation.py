"""Sampling from a language model, one token after another, through its state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linrope.errors import InputError

if TYPE_CHECKING:
    from linrope.model import LanguageModel


def stream(
    model: LanguageModel,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> Iterator[Tensor]:
    """Read the prompt once, then write: each new token costs one step from the state, however long the past.

    Args:
        model: in evaluation mode, or dropout applies.
        tokens: (B, T) prompt, T ≥ 1, on the model's device.
        max_new_tokens: how many to write.
        temperature: divides the logits; 0 takes the likeliest token each time.
        top_k: sample among the k likeliest only.
        top_p: sample among the likeliest that together have this probability.
        seed: of the draws; None takes torch's global generator.

    Yields:
        (B,) int64, the next token of each row.

    Raises:
        InputError: an empty prompt, or an option outside its range; raised at the call, before anything is read.
    """
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise InputError(f"tokens is {tuple(tokens.shape)}: pass a prompt (B, T) of at least one token.")
    check_sampling(max_new_tokens, temperature, top_k, top_p)
    generator = None if seed is None else torch.Generator(tokens.device).manual_seed(seed)
    return _steps(model, tokens, max_new_tokens, temperature, top_k, top_p, generator)


def check_sampling(max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise InputError where an option of `stream` is outside its range."""
    if max_new_tokens < 0:
        raise InputError(f"max_new_tokens={max_new_tokens} must be at least 0.")
    if not 0 <= temperature < float("inf"):
        raise InputError(f"temperature={temperature} must be a number, at least 0 (0 takes the likeliest token).")
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k={top_k} must be at least 1, or None for all tokens.")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"top_p={top_p} must be above 0 and at most 1, or None for all tokens.")


def _steps(model, tokens, max_new_tokens, temperature, top_k, top_p, generator) -> Iterator[Tensor]:
    state = None
    for _ in range(max_new_tokens):
        with torch.no_grad():
            logits, state = model(tokens, state=state, return_state=True)
            token = _sample(logits[:, -1].float(), temperature, top_k, top_p, generator)
        yield token
        tokens = token[:, None]


def _sample(logits: Tensor, temperature: float, top_k, top_p, generator) -> Tensor:
    """(B, vocabulary) logits -> (B,) tokens."""
    if not torch.isfinite(logits).all():
        raise RuntimeError("The model's logits are not finite: its weights are damaged, or its training diverged.")
    if temperature == 0:
        return logits.argmax(dim=-1)
    # at most 0, and in float64: no temperature can overflow it
    logits = (logits - logits.amax(dim=-1, keepdim=True)).double() / temperature
    if top_k is not None:
        kept = logits.topk(min(top_k, logits.shape[-1]))
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, kept.values)
    probabilities = logits.softmax(dim=-1)
    if top_p is not None:
        probabilities = _nucleus(probabilities, top_p)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Keep the likeliest tokens up to and including the one that brings their sum to top_p (arXiv 1904.09751)."""
    ordered, order = probabilities.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    return torch.zeros_like(probabilities).scatter(-1, order, ordered.masked_fill(before >= top_p, 0))
