"""Sampling: probabilities from logits, and the next token of each row drawn from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linrope.errors import InputError, NonFiniteError
from linrope.generation.prompt_state import PromptState
from linrope.utils.options import check_types

if TYPE_CHECKING:
    pass


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
        check_types(self)
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


class Sampler:
    """Draws the next token of each row.

    Row i draws by a generator of its own, seeded by `seed + i`, on the CPU: neither its neighbours nor the device
    change its text. With `first_row` the rows are counted from there.
    """

    def __init__(self, sampling: Sampling, first_row: int = 0) -> None:
        self.sampling, self.first_row = sampling, first_row
        self._generators: list[torch.Generator] = []

    def draw(self, context: PromptState) -> Tensor:
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
