"""Sampling: probabilities from logits, and the next token of each row drawn from them."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linrope.errors import InputError, NonFiniteError
from linrope.generation.prompt_state import PromptState
from linrope.utils.options import check_types


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw a token from the logits. Order: repetition penalty, temperature, top_k, top_p."""

    temperature: float = 1.0
    """Below 1 text is more predictable, above 1 more random; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only; null for all."""
    top_p: float | None = None
    """Draw from the likeliest tokens whose probabilities add up to this; null for all."""
    repetition_penalty: float = 1.0
    """Above 1, the last 1,024 tokens become less likely to be repeated (CTRL, arXiv 1909.05858, section 4.1)."""
    seed: int | None = None
    """The same seed gives the same text; null gives a new text each time. Row i of a batch has seed + i."""

    def __post_init__(self) -> None:
        check_types(self)
        if not (self.temperature >= 0 and _is_finite(self.temperature)):
            shown = reprlib.repr(self.temperature)
            raise InputError(f"temperature={shown} must be a finite number, at least 0 (0 takes the likeliest token).")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k={self.top_k} must be at least 1, or None for all tokens.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p} must be above 0 and at most 1, or None for all tokens.")
        if not 1e-6 <= self.repetition_penalty <= 1e6:  # beyond, float32 logits may overflow
            raise InputError(
                f"repetition_penalty={self.repetition_penalty} must be a number from 1e-6 to 1e6 (1 for no penalty)."
            )
        if self.seed is not None and not abs(self.seed) < 2**63:
            raise InputError(f"seed={self.seed} must be a number of at most 63 bits, or None for a new draw each time.")


def _is_finite(number: float) -> bool:
    """Whether a number is finite as a float, which a whole number may exceed."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def require_finite(logits: Tensor) -> None:
    """Raise NonFiniteError unless all logits are finite."""
    if not torch.isfinite(logits).all():
        raise NonFiniteError(
            "the model's logits are not finite: its weights are damaged, or its training diverged. Give another "
            "checkpoint."
        )


class Sampler:
    """Draws the next token of each row.

    Row i has its own random generator on the CPU, seeded with `seed + first_row + i`, so its text depends neither on
    the other rows nor on the device.
    """

    def __init__(self, sampling: Sampling, first_row: int = 0) -> None:
        self.sampling, self.first_row = sampling, first_row
        self._generators: list[torch.Generator] = []

    def draw(self, state: PromptState) -> Tensor:
        """The next token of each row, (B,) int64. NonFiniteError if the logits are not finite; InputError on "meta"."""
        sampling, logits = self.sampling, state.logits.float()
        if logits.is_meta:
            raise InputError("the model is on the device meta, where logits have no values: load its weights first.")
        require_finite(logits)
        if sampling.repetition_penalty != 1:
            logits = _penalised(logits, state.recent, sampling.repetition_penalty)
        if sampling.temperature == 0:
            return logits.argmax(dim=-1)
        uniform = self._uniform(len(logits)).to(logits.device)
        return _inverse(probabilities_of(logits, sampling), uniform)

    def _uniform(self, rows: int) -> Tensor:
        """(rows,) float64 in [0, 1)."""
        if self.sampling.seed is None:
            return torch.rand(rows, dtype=torch.float64, device="cpu")
        for row in range(len(self._generators), rows):
            self._generators.append(torch.Generator("cpu").manual_seed(int(self.sampling.seed) + self.first_row + row))
        options = {"dtype": torch.float64, "device": "cpu"}
        return torch.stack([torch.rand((), **options, generator=generator) for generator in self._generators[:rows]])


def draw_each(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """The next token (B,) of each row of logits (B, V), drawn by a sampler of its own as it draws for its first row,
    without a repetition penalty. The logits are finite."""
    groups: dict[tuple, list[int]] = {}
    for row, sampler in enumerate(samplers):
        options = sampler.sampling
        alike = (0.0,) if options.temperature == 0 else (options.temperature, options.top_k, options.top_p)
        groups.setdefault(alike, []).append(row)
    logits, drawn = logits.float(), torch.empty(len(samplers), dtype=torch.int64)
    for (temperature, *_), rows in groups.items():
        of_rows = logits if len(rows) == len(samplers) else logits[rows]
        if temperature == 0:
            drawn[rows] = of_rows.argmax(dim=-1).cpu()
        else:
            uniform = torch.cat([samplers[row]._uniform(1) for row in rows]).to(logits.device)
            drawn[rows] = _inverse(probabilities_of(of_rows, samplers[rows[0]].sampling), uniform).cpu()
    return drawn


def _penalised(logits: Tensor, recent: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of recent tokens by the penalty, multiply negative ones with it."""
    places = recent.masked_fill(recent < 0, logits.shape[1])  # padding goes to an extra column
    seen = torch.zeros(len(logits), logits.shape[1] + 1, dtype=torch.bool, device=logits.device)
    seen = seen.scatter(1, places, True)[:, :-1]
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def probabilities_of(logits: Tensor, sampling: Sampling) -> Tensor:
    """(B, V) float32 logits -> (B, V) float64 probabilities, 0 for tokens excluded by top_k or top_p."""
    # at most 0, and in float64: no temperature can overflow it
    logits = (logits - logits.amax(dim=-1, keepdim=True)).double() / float(sampling.temperature)
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
