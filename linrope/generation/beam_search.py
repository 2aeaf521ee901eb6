"""Beam search: the most probable translations that a few hypotheses of each source find."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol

import torch
from torch import Tensor

from linrope.errors import InputError
from linrope.generation.sampling import require_finite


class TranslationModel(Protocol):
    """What beam search needs of a model. `EncoderDecoder` is one."""

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> Any:
        """What `step` reads of a source (B, S); its `select_rows(rows)` chooses rows."""

    def step(self, tokens: Tensor, memory: Any, state: Any = None) -> tuple[Tensor, Any]:
        """Logits (B, T, V) of the tokens after `tokens` (B, T), and the next state, which has `select_rows` too."""


@dataclass(frozen=True)
class Hypothesis:
    """One translation.

    Attributes:
        tokens: (T,) int64, without the tokens of beginning and end.
        score: log p(tokens and end | source) / ((5 + n) / 6)^length_penalty, n the number of tokens with the end.
        ended: False if the end was not reached in `max_new_tokens`.
    """

    tokens: Tensor
    score: float
    ended: bool


def length_divisor(n: int, length_penalty: float) -> float:
    """((5 + n) / 6)^α of a hypothesis of n tokens (GNMT, arXiv 1609.08144, eq. 14)."""
    return ((5 + n) / 6) ** length_penalty


@torch.no_grad()
def beam_search(
    model: TranslationModel,
    source: Tensor,
    source_mask: Tensor | None = None,
    *,
    begin: int,
    end: int,
    max_new_tokens: int | Tensor,
    n_beams: int = 4,
    length_penalty: float = 0.6,
) -> list[Hypothesis]:
    """The best translation of each source that the search finds.

    Each row keeps `n_beams` open hypotheses. A step extends all by all tokens; of the best `n_beams` extensions those
    that end are finished, and the best that do not end stay open. A row is done when no open hypothesis can reach the
    best finished score, or when `n_beams` have finished and none of the open ones has a higher score so far. Its answer
    is the finished hypothesis of the best score; if none finished within `max_new_tokens`, the best open one. One beam
    is greedy decoding. Rows do not depend on the others of their batch.

    Args:
        model: in evaluation mode, or dropout applies.
        source: (B, S) integers.
        source_mask: (B, S) booleans, False for padding.
        begin: the token that the decoder reads first.
        end: the token that ends a translation.
        max_new_tokens: tokens of a translation at most, the end counted: a number, or (B,) integers for each row.
        n_beams: open hypotheses of each row; more are slower.
        length_penalty: α ≥ 0, see `Hypothesis`. 0 compares log probabilities, which prefers short translations.

    Raises:
        InputError: an option out of range.
        NonFiniteError: logits that are not finite.
    """
    limits = _checked_limits(max_new_tokens, len(source))
    if not isinstance(n_beams, Integral) or n_beams < 1:
        raise InputError(f"n_beams={n_beams!r} must be a whole number, 1 or more.")
    if not isinstance(length_penalty, Real) or not 0 <= length_penalty < math.inf:
        raise InputError(f"length_penalty={length_penalty!r} must be a finite number, 0 or more.")
    rows = [_Row(limit, n_beams, length_penalty) for limit in limits]
    if not rows:
        return []
    memory = model.encode(source, source_mask)
    memory = memory.select_rows(torch.arange(len(rows), device=source.device).repeat_interleave(n_beams))
    prefixes = source.new_full((len(rows), n_beams, 1), begin, dtype=torch.int64)
    scores, state, open_rows = None, None, rows
    while True:
        logits, state = model.step(prefixes[..., -1].reshape(-1, 1), memory, state)
        log_p = logits[:, -1].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        require_finite(log_p.clamp(min=-1))  # a token may be impossible
        if not 0 <= end < log_p.shape[1]:
            raise InputError(f"end={end} is no token of this model: pass 0 … {log_p.shape[1] - 1}.")
        found = _extended(scores, log_p.unflatten(0, (len(open_rows), n_beams)))
        n = prefixes.shape[2]  # tokens of each hypothesis after this step
        ends = found[2][:, :n_beams] == end
        for (i, j), score in zip(ends.nonzero().tolist(), found[0][:, :n_beams][ends].tolist(), strict=True):
            open_rows[i].finish(prefixes[i, found[1][i, j], 1:], score)
        prefixes, scores, parents = _kept(prefixes, end, *found)
        highest = scores[:, 0].tolist()
        going = [i for i, row in enumerate(open_rows) if not row.is_done(n, prefixes[i, 0, 1:], highest[i])]
        if not going:
            return [row.best for row in rows]
        parents = parents[going].flatten()
        if len(going) < len(open_rows):  # the beams of a row have the same memory
            memory = memory.select_rows(parents)
        open_rows, prefixes, scores = [open_rows[i] for i in going], prefixes[going], scores[going]
        state = state.select_rows(parents)


def _checked_limits(max_new_tokens: int | Tensor, n_rows: int) -> list[int]:
    message = f"max_new_tokens={max_new_tokens!r} must be a whole number, 1 or more, or one for each row."
    try:
        limits = torch.as_tensor(max_new_tokens)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(message) from error
    if limits.is_floating_point() or limits.shape not in ((), (n_rows,)) or (limits < 1).any():
        raise InputError(message)
    return limits.expand(n_rows).tolist()


def _extended(scores: Tensor | None, log_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The best 2 · n_beams extensions of each row, best first: their scores, beams and tokens, (B, 2 · n_beams).

    At most n_beams of these end, one for each beam, so that n_beams others can stay open. `scores` (B, n_beams) is None
    at the start, where all beams are the same; `log_p` is (B, n_beams, V).
    """
    n_beams, n_tokens = log_p.shape[1:]
    if scores is None:
        scores = log_p.new_full((1, n_beams), -math.inf)
        scores[:, 0] = 0
    best, index = (scores[..., None] + log_p).flatten(1).topk(min(2 * n_beams, n_beams * n_tokens))
    return best, index // n_tokens, index % n_tokens


def _kept(prefixes: Tensor, end: int, scores: Tensor, beams: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The best n_beams extensions that do not end: their prefixes, their scores, and the rows of the state before."""
    n_rows, n_beams, _ = prefixes.shape
    chosen = (tokens == end).byte().argsort(dim=1, stable=True)[:, :n_beams]
    scores, beams, tokens = (values.gather(1, chosen) for values in (scores, beams, tokens))
    scores = scores.masked_fill(tokens == end, -math.inf)  # of a vocabulary of one token
    first = torch.arange(n_rows, device=beams.device)[:, None]
    return torch.cat((prefixes[first, beams], tokens[..., None]), dim=2), scores, first * n_beams + beams


class _Row:
    """The finished hypotheses of one source."""

    def __init__(self, limit: int, n_beams: int, length_penalty: float) -> None:
        self.limit, self.n_beams, self.length_penalty = limit, n_beams, length_penalty
        self.best: Hypothesis | None = None
        self.n_finished = 0

    def finish(self, tokens: Tensor, log_p: float) -> None:
        """Take a hypothesis whose next token is the end."""
        if log_p == -math.inf:  # an extension of a beam that there is not, at the start
            return
        self.n_finished += 1
        score = self._score(log_p, len(tokens) + 1)
        if self.best is None or score > self.best.score:
            self.best = Hypothesis(tokens, score, ended=True)

    def is_done(self, n: int, tokens: Tensor, log_p: float) -> bool:
        """Whether the search ends after n tokens, with the best open hypothesis and its log probability."""
        if n >= self.limit:
            if self.best is None:
                self.best = Hypothesis(tokens, self._score(log_p, n), ended=False)
            return True
        if self.best is None:
            return False
        # a log probability only falls, and the divisor is largest at the limit
        cannot_win = self.best.score >= self._score(log_p, self.limit)
        return cannot_win or (self.n_finished >= self.n_beams and self.best.score >= self._score(log_p, n))

    def _score(self, log_p: float, n: int) -> float:
        return log_p / length_divisor(n, self.length_penalty)
