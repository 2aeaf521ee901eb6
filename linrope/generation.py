"""Reading a prompt and writing on from it, in memory that does not grow with either.

    context = read(model, tokens)                     # the prompt, segment by segment
    token = Sampler(Sampling(top_p=0.9)).draw(context)
    context = read(model, token[:, None], context)    # one token more

`stream` is this loop. A `Context` is immutable: it can be kept, forked for several continuations, and saved.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linrope.context import Context
from linrope.errors import InputError, NonFiniteError, check_kinds
from linrope.states import state_before

if TYPE_CHECKING:
    from linrope.model import LanguageModel

SEGMENT_LENGTH = 2048
REPETITION_WINDOW = 1024
"""Tokens that the repetition penalty looks back over, the prompt's among them."""

Prompts = Tensor | Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw a token from the model's logits; the options apply in the order of penalty, temperature, k, p."""

    temperature: float = 1.0
    """Below 1 the model writes more predictably, above 1 more wildly; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Choose among the k likeliest tokens only."""
    top_p: float | None = None
    """Choose among the likeliest tokens that together have this probability."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that stand among the last 1,024 are less likely (CTRL, arXiv 1909.05858, section 4.1)."""
    seed: int | None = None
    """Names the draw: the same seed gives the same text. null draws anew each time. In a batch row i has seed + i."""

    def __post_init__(self) -> None:
        check_kinds(self)
        if not 0 <= self.temperature < float("inf"):
            raise InputError(
                f"temperature={self.temperature} must be a number, at least 0 (0 takes the likeliest token)."
            )
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k={self.top_k} must be at least 1, or None for all tokens.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p} must be above 0 and at most 1, or None for all tokens.")
        if not 1e-6 <= self.repetition_penalty <= 1e6:  # beyond, float32 logits may overflow
            raise InputError(
                f"repetition_penalty={self.repetition_penalty} must be a number from 1e-6 to 1e6 (1 is none)."
            )
        if self.seed is not None and not abs(self.seed) < 2**63:
            raise InputError(f"seed={self.seed} must be a number of at most 63 bits, or None for a new draw each time.")


# --- reading ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def read(
    model: LanguageModel, tokens: Prompts, context: Context | None = None, *, segment_length: int = SEGMENT_LENGTH
) -> Context:
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
    return Context(state, logits[:, -1], recent)


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


# --- writing ---------------------------------------------------------------------------------------------------------


def stream(
    model: LanguageModel,
    tokens: Prompts | Context,
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
    context = tokens if isinstance(tokens, Context) else read(model, tokens, segment_length=segment_length)
    return _steps(model, context, max_new_tokens, sampler)


def _steps(model: LanguageModel, context: Context, max_new_tokens: int, sampler: Sampler) -> Iterator[Tensor]:
    for step in range(max_new_tokens):
        token = sampler.draw(context)
        yield token
        if step + 1 < max_new_tokens:
            context = read(model, token[:, None], context)


def generate(model: LanguageModel, tokens: Prompts | Context, max_new_tokens: int, **options) -> Tensor | list[Tensor]:
    """The prompts (B, T), or a list of (T_b,), each with the tokens that `stream` adds to it; these alone, (B,
    max_new_tokens), after a context."""
    new = list(stream(model, tokens, max_new_tokens, **options))
    if isinstance(tokens, Context):
        tokens = tokens.recent[:, :0]
    if isinstance(tokens, Tensor):
        return torch.cat([tokens, *(token[:, None] for token in new)], dim=1)
    return [torch.cat([prompt, *(token[row, None] for token in new)]) for row, prompt in enumerate(tokens)]


def check_max_new_tokens(max_new_tokens: int) -> None:
    """Raise InputError for less than none, and for what is no number of them."""
    if not isinstance(max_new_tokens, Integral) or max_new_tokens < 0:
        raise InputError(f"max_new_tokens={max_new_tokens!r} must be a whole number, at least 0.")


class Sampler:
    """Draws the next token of each row.

    Row i draws by a generator of its own, seeded by `seed + i`, on the CPU: neither its neighbours nor the device
    change its text. With `first_row` the rows are counted from there.
    """

    def __init__(self, sampling: Sampling, first_row: int = 0) -> None:
        self.sampling, self.first_row = sampling, first_row
        self._generators: list[torch.Generator] = []

    def draw(self, context: Context) -> Tensor:
        """(B,) int64.

        Raises:
            NonFiniteError: logits that are not finite.
        """
        sampling, logits = self.sampling, context.logits.float()
        if not torch.isfinite(logits).all():
            raise NonFiniteError(
                "the model's logits are not finite: its weights are damaged, or its training diverged. Give another "
                "checkpoint."
            )
        if sampling.repetition_penalty != 1:
            logits = _penalised(logits, context.recent, sampling.repetition_penalty)
        if sampling.temperature == 0:
            return logits.argmax(dim=-1)
        uniform = self._uniform(len(logits)).to(logits.device)
        return _inverse(probabilities_of(logits, sampling), uniform)

    def _uniform(self, rows: int) -> Tensor:
        """(rows,) float64 in [0, 1)."""
        if self.sampling.seed is None:
            return torch.rand(rows, dtype=torch.float64)
        for row in range(len(self._generators), rows):
            self._generators.append(torch.Generator().manual_seed(self.sampling.seed + self.first_row + row))
        draws = [torch.rand((), dtype=torch.float64, generator=generator) for generator in self._generators[:rows]]
        return torch.stack(draws)


def _penalised(logits: Tensor, recent: Tensor, penalty: float) -> Tensor:
    """Positive logits of recent tokens divided by the penalty, negative ones multiplied with it."""
    places = recent.masked_fill(recent < 0, logits.shape[1])  # one more column, for what is no token
    seen = torch.zeros(len(logits), logits.shape[1] + 1, dtype=torch.bool, device=logits.device)
    seen = seen.scatter(1, places, True)[:, :-1]
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def probabilities_of(logits: Tensor, sampling: Sampling) -> Tensor:
    """(B, V) float32 logits -> (B, V) float64 probabilities, 0 for tokens that top_k or top_p leave out."""
    # at most 0, and in float64: no temperature can overflow it
    logits = (logits - logits.amax(dim=-1, keepdim=True)).double() / sampling.temperature
    if sampling.top_k is not None:
        kept = logits.topk(min(sampling.top_k, logits.shape[-1]))
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, kept.values)
    probabilities = logits.softmax(dim=-1)
    return probabilities if sampling.top_p is None else _nucleus(probabilities, sampling.top_p)


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Keep the likeliest tokens up to and including the one that brings their sum to top_p (arXiv 1904.09751)."""
    ordered, order = probabilities.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    return torch.zeros_like(probabilities).scatter(-1, order, ordered.masked_fill(before >= top_p, 0))


def _inverse(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """(B,) tokens: in each row the first at which the running sum of the probabilities (B, V) exceeds `uniform` (B,)
    of their total. A token of probability 0 does not raise the sum, so it is never the first."""
    total = probabilities.cumsum(dim=-1)
    return torch.searchsorted(total, uniform[:, None] * total[:, -1:], right=True)[:, 0]
