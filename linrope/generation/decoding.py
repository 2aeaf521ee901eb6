"""The decode loop: a prompt is read, then tokens are drawn and read one by one.

    state = read(model, tokens)                     # the prompt, segment by segment
    for token in stream(model, state, 100, top_p=0.9):
        ...

A step costs the same however long the text is. A `PromptState` is immutable: it can be kept, forked and saved.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from linrope.errors import InputError, suggest
from linrope.generation.prompt_state import CausalModel, PromptState
from linrope.generation.sampling import Sampler, Sampling
from linrope.layers.state import state_before
from linrope.utils.memory import memory_of
from linrope.utils.options import require_whole

SEGMENT_LENGTH = 2048
"""Default number of prompt tokens in one forward pass."""
REPETITION_WINDOW = 1024
"""The repetition penalty applies to this many last tokens, prompt included."""
Prompts = Tensor | Sequence[Tensor]
"""(B, T), or (T_b,) for each row."""


@torch.no_grad()
def read(
    model: CausalModel, tokens: Prompts, state: PromptState | None = None, *, segment_length: int = SEGMENT_LENGTH
) -> PromptState:
    """Read tokens, segment by segment, and return the state after the last one.

    Only the state passes from segment to segment, so memory does not grow with the length (except for the keys and
    values of softmax layers without a window).

    Prompts of different lengths are padded on the left. The padding is a document of its own, so each prompt is read as
    if it were alone.

    Args:
        model: in evaluation mode, or dropout applies.
        tokens: (B, T), T ≥ 1, on the model's device, or a list of (T_b,).
        state: what was read before; the tokens continue it. Not with prompts of different lengths.
        segment_length: tokens in one forward pass.

    Raises:
        InputError: tokens that are empty, of the wrong shape or out of range; prompts of different lengths with a
            state; a state of another batch size or model.
    """
    require_whole("segment_length", segment_length)
    tokens, segment_ids = _pad_left(tokens)
    if segment_ids is not None and state is not None:
        raise InputError("tokens are prompts of different lengths, and a state is given: read each prompt alone.")
    model_state, logits = (None, None) if state is None else (state.state, state.logits)
    for start in range(0, tokens.shape[1], segment_length):
        segment = slice(start, start + segment_length)
        ids = None if segment_ids is None else segment_ids[:, segment]
        model_state = state_before(start, segment_ids, model_state)
        logits, model_state = model(tokens[:, segment], model_state, ids, return_state=True, logits_to_keep=1)
    recent = tokens[:, -REPETITION_WINDOW:].long()
    if segment_ids is not None:
        recent = recent.masked_fill(segment_ids[:, -REPETITION_WINDOW:] == 0, -1)
    if state is not None:
        recent = torch.cat((state.recent, recent), dim=1)[:, -REPETITION_WINDOW:]
    return PromptState(model_state, logits[:, -1], recent)


def _pad_left(prompts: Prompts) -> tuple[Tensor, Tensor | None]:
    """(B, T) tokens, and their segment_ids (B, T): 0 for padding, 1 for the prompt; None without padding."""
    if isinstance(prompts, str) or (isinstance(prompts, Sequence) and any(isinstance(one, str) for one in prompts)):
        raise InputError("tokens is text: pass its tokens, [model.encode(text)].")
    if isinstance(prompts, Tensor):
        if prompts.ndim != 2 or prompts.shape[1] == 0:
            raise InputError(f"tokens is {tuple(prompts.shape)}: pass a prompt (B, T) of at least one token.")
        return prompts, None
    are_tensors = isinstance(prompts, Sequence) and all(isinstance(one, Tensor) and one.ndim == 1 for one in prompts)
    if not are_tensors or not prompts:
        raise InputError(
            f"tokens is {type(prompts).__name__} {reprlib.repr(prompts)}, not a list of prompts: pass a tensor (B, T), "
            "torch.tensor([[1, 2, 3]]) for example, or at least one tensor (T_b,) in a list."
        )
    if empty := [row for row, prompt in enumerate(prompts) if len(prompt) == 0]:
        raise InputError(f"tokens[{empty[0]}] is empty: each prompt needs at least one token.")
    longest = max(map(len, prompts))
    padded = torch.stack([torch.nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    if all(len(prompt) == longest for prompt in prompts):
        return padded, None
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=padded.device)
    return padded, (torch.arange(longest, device=padded.device) >= longest - lengths[:, None]).long()


def require_memory(model: CausalModel, n_tokens: int) -> None:
    """Raise InputError if the keys and values of `n_tokens` tokens exceed the device's total memory."""
    parameter = next(model.parameters())
    needed, total = model.state_bytes(n_tokens, parameter.dtype), memory_of(parameter.device)
    if needed > total:
        raise InputError(
            f"a text of {n_tokens:,} tokens needs {needed / 2**30:,.1f} GiB for the keys and values of softmax layers "
            f"without a window, and the device has {total / 2**30:,.1f}: give a shorter prompt, or a model whose "
            "layers are linear or have a window, which reads any length."
        )


def require_row(model: CausalModel, n_before: int, max_new_tokens: int, option: str = "max_new_tokens") -> None:
    """Raise InputError, naming the option, if the model has no positions for so many new tokens after `n_before`. The
    last one is not read."""
    longest = model.config.positions.longest_row
    if longest is not None and n_before + max_new_tokens - 1 > longest:
        raise InputError(
            f"{option}={max_new_tokens} after {n_before} tokens is too much for a model with positions.length={longest}"
            f": set {option} to at most {max(0, longest + 1 - n_before)}, or give a shorter prompt."
        )


def decode(
    model: CausalModel, state: PromptState, max_new_tokens: int, sampler: Sampler
) -> Iterator[tuple[Tensor, PromptState]]:
    """The decode loop: yields each new token (B,) together with the state before it.

    A token is read when the next one is asked for; the last one is not read.
    """
    for step in range(max_new_tokens):
        token = sampler.draw(state)
        yield token, state
        if step + 1 < max_new_tokens:
            state = read(model, token[:, None], state)


def stream(
    model: CausalModel,
    tokens: Prompts | PromptState,
    max_new_tokens: int,
    *,
    segment_length: int = SEGMENT_LENGTH,
    **sampling,
) -> Iterator[Tensor]:
    """Read the prompt once, then generate token by token.

    Args:
        model, tokens, segment_length: as `read` takes them; instead of tokens also a state, from `read` or a file.
        max_new_tokens: number of tokens to generate.
        sampling: the fields of `Sampling`.

    Yields:
        (B,) int64, the next token of each row.

    Raises:
        InputError: an empty prompt, an option out of range, or more tokens than the model has positions; raised by the
            call, before the first token.
    """
    require_whole("max_new_tokens", max_new_tokens, least=0)
    sampler = Sampler(sampling_of(sampling))
    state = tokens if isinstance(tokens, PromptState) else read(model, tokens, segment_length=segment_length)
    require_row(model, state.length, max_new_tokens)
    return (token for token, _ in decode(model, state, max_new_tokens, sampler))


def generate(
    model: CausalModel, tokens: Prompts | PromptState, max_new_tokens: int, **options
) -> Tensor | list[Tensor]:
    """The prompts (B, T), or a list of (T_b,), each followed by the tokens of `stream`. After a state: only the new
    tokens, (B, max_new_tokens)."""
    new = list(stream(model, tokens, max_new_tokens, **options))
    if isinstance(tokens, PromptState):
        tokens = tokens.recent[:, :0]
    if isinstance(tokens, Tensor):
        return torch.cat([tokens, *(token[:, None] for token in new)], dim=1)
    return [torch.cat([prompt, *(token[row, None] for token in new)]) for row, prompt in enumerate(tokens)]


def sampling_of(options: dict[str, Any]) -> Sampling:
    """The options of generation beside `segment_length`. InputError for an unknown one, with the nearest known one."""
    known = [field.name for field in fields(Sampling)]
    for name, value in options.items():
        if name not in known:
            raise InputError(
                f"{name}={value!r} is not an option of generation: choose among segment_length, {', '.join(known)}."
                + suggest(name, ["segment_length", *known])
            )
    return Sampling(**options)
