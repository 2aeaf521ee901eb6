"""Reading a prompt and writing on from it, in memory that does not grow with either.

    context = read(model, tokens)                     # the prompt, segment by segment
    token = Sampler(Sampling(top_p=0.9)).draw(context)
    context = read(model, token[:, None], context)    # one token more

`stream` is this loop. A `PromptState` is immutable: it can be kept, forked for several continuations, and saved.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linrope.errors import InputError
from linrope.generation.prompt_state import PromptState
from linrope.layers.state import state_before

if TYPE_CHECKING:
    from linrope.models.language_model import LanguageModel
from linrope.generation.sampling import Sampler, Sampling

SEGMENT_LENGTH = 2048


REPETITION_WINDOW = 1024
"""Tokens that the repetition penalty looks back over, the prompt's among them."""


Prompts = Tensor | Sequence[Tensor]


@torch.no_grad()
def read(
    model: LanguageModel, tokens: Prompts, context: PromptState | None = None, *, segment_length: int = SEGMENT_LENGTH
) -> PromptState:
    """Read tokens, segment by segment: only the state passes from one to the next, so memory does not grow with the
    length (but for the keys and values of softmax layers without a window).

    Prompts of different lengths become rows that end together. Each stands behind a document of padding, which no
    layer looks past, so that it is read as if it were alone.

    Args:
        model: in evaluation mode, or dropout applies.
        tokens: (B, T), T ≥ 1, on the model's device, or a list of (T_b,).
        context: what was read before; the tokens continue it.
        segment_length: tokens that are read at once.

    Raises:
        InputError: no tokens, tokens of another shape or out of range, a list of different lengths with a context, a
            context of another batch or model.
    """
    if segment_length < 1:
        raise InputError(f"segment_length={segment_length} must be at least 1.")
    tokens, ids = _rows(tokens)
    if ids is not None and context is not None:
        raise InputError("tokens are prompts of different lengths, which only a new context can hold: read each alone.")
    state, logits = (None, None) if context is None else (context.state, context.logits)
    for start in range(0, tokens.shape[1], segment_length):
        piece = slice(start, start + segment_length)
        of_piece = None if ids is None else ids[:, piece]
        state = state_before(start, ids, state)
        logits, state = model(tokens[:, piece], state, of_piece, return_state=True, logits_to_keep=1)
    recent = tokens[:, -REPETITION_WINDOW:].long()
    if ids is not None:
        recent = recent.masked_fill(ids[:, -REPETITION_WINDOW:] == 0, -1)
    if context is not None:
        recent = torch.cat((context.recent, recent), dim=1)[:, -REPETITION_WINDOW:]
    return PromptState(state, logits[:, -1], recent)


def _rows(prompts: Prompts) -> tuple[Tensor, Tensor | None]:
    """(B, T) tokens, and (B, T) the number of each one's document: 0 is padding, 1 the prompt; None without padding."""
    if isinstance(prompts, Tensor):
        if prompts.ndim != 2 or prompts.shape[1] == 0:
            raise InputError(f"tokens is {tuple(prompts.shape)}: pass a prompt (B, T) of at least one token.")
        return prompts, None
    if not prompts or any(not isinstance(prompt, Tensor) or prompt.ndim != 1 for prompt in prompts):
        raise InputError("tokens is no list of prompts: pass tensors (T_b,), one at least.")
    if empty := [row for row, prompt in enumerate(prompts) if len(prompt) == 0]:
        raise InputError(f"tokens[{empty[0]}] is empty: each prompt needs at least one token.")
    longest = max(map(len, prompts))
    padded = torch.stack([torch.nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    if all(len(prompt) == longest for prompt in prompts):
        return padded, None
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=padded.device)
    return padded, (torch.arange(longest, device=padded.device) >= longest - lengths[:, None]).long()


def require_memory(model: LanguageModel, n_tokens: int) -> None:
    """Raise InputError where the keys and values of so many tokens are more than the device's whole memory."""
    parameter = next(model.parameters())
    needed = model.state_bytes(n_tokens, parameter.dtype)
    if parameter.device.type == "cuda":
        there = torch.cuda.mem_get_info(parameter.device)[1]
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise InputError(
            f"a text of {n_tokens:,} tokens needs {needed / 2**30:,.1f} GiB for the keys and values of softmax layers "
            f"without a window, and there are {there / 2**30:,.1f}: give a shorter prompt, or a model whose layers are "
            "linear or have a window, which reads any length."
        )


def stream(
    model: LanguageModel,
    tokens: Prompts | PromptState,
    max_new_tokens: int,
    *,
    segment_length: int = SEGMENT_LENGTH,
    **sampling,
) -> Iterator[Tensor]:
    """Read the prompt once, then write: each new token costs one step from the state, however long the past.

    Args:
        model: in evaluation mode, or dropout applies.
        tokens: (B, T) prompt, T ≥ 1, on the model's device; or a list of (T_b,), of which each is continued as if it
            were alone; or a context, from `read` or a file.
        max_new_tokens: how many to write.
        segment_length: tokens of the prompt that are read at once.
        sampling: the fields of `Sampling`.

    Yields:
        (B,) int64, the next token of each row.

    Raises:
        InputError: an empty prompt, or an option outside its range; raised at the call.
    """
    check_max_new_tokens(max_new_tokens)
    sampler = Sampler(Sampling(**sampling))
    context = tokens if isinstance(tokens, PromptState) else read(model, tokens, segment_length=segment_length)
    return _steps(model, context, max_new_tokens, sampler)


def _steps(model: LanguageModel, context: PromptState, max_new_tokens: int, sampler: Sampler) -> Iterator[Tensor]:
    for step in range(max_new_tokens):
        token = sampler.draw(context)
        yield token
        if step + 1 < max_new_tokens:
            context = read(model, token[:, None], context)


def generate(
    model: LanguageModel, tokens: Prompts | PromptState, max_new_tokens: int, **options
) -> Tensor | list[Tensor]:
    """The prompts (B, T), or a list of (T_b,), each with the tokens that `stream` adds to it; these alone, (B,
    max_new_tokens), after a context."""
    new = list(stream(model, tokens, max_new_tokens, **options))
    if isinstance(tokens, PromptState):
        tokens = tokens.recent[:, :0]
    if isinstance(tokens, Tensor):
        return torch.cat([tokens, *(token[:, None] for token in new)], dim=1)
    return [torch.cat([prompt, *(token[row, None] for token in new)]) for row, prompt in enumerate(tokens)]


def check_max_new_tokens(max_new_tokens: int) -> None:
    """Raise InputError for less than none, and for what is no number of them."""
    if not isinstance(max_new_tokens, Integral) or max_new_tokens < 0:
        raise InputError(f"max_new_tokens={max_new_tokens!r} must be a whole number, at least 0.")
