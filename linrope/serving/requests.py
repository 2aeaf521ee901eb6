"""What is asked of the server, and what has come of it so far."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from linrope.data.tokenizers.base import Tokenizer
from linrope.generation.sampling import Sampler, Sampling
from linrope.generation.text import StopStrings

FinishReason = Literal["stop", "length"]


class RequestError(Exception):
    """An answer that is an error: the fields of OpenAI's errors, and the status of HTTP."""

    def __init__(
        self, message: str, status: int = 400, type: str = "invalid_request_error", param: str | None = None,
        code: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.message, self.status, self.type, self.param, self.code = message, status, type, param, code


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a prompt is to be continued; checked by who makes it."""

    max_tokens: int = 16
    """0 reads the prompt only, which the cache then has."""
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    """Number of continuations. Continuation i has seed + i."""
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """Number of likeliest tokens whose log probabilities are wanted beside that of each token; None for none."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token that was drawn, and what the model said of it, before temperature, top_k and top_p."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]
    """(token, log probability), the likeliest first."""
    offset: int
    """Number of characters of the continuation before the token."""


@dataclass(frozen=True)
class Piece:
    """A part of a continuation that is ready to be sent."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class Choice:
    """One continuation of a prompt. The scheduler adds to it; `pieces` may be taken away by another thread.

    Attributes:
        tokens: all that were drawn.
        pieces: what was not sent yet.
        finish_reason: None until the last piece is there.
    """

    def __init__(self, request: Request, index: int) -> None:
        options = request.options
        self.request, self.index = request, index
        self.sampler = Sampler(options.sampling, first_row=index)
        self.tokens: list[int] = []
        self.pieces: deque[Piece] = deque()
        self.finish_reason: FinishReason | None = None
        self._decoder = request.tokenizer.decoder(request.prompt)
        self._stops = StopStrings(options.stop)
        self._decoded = self._shown = 0  # characters
        self._unsent: list[TokenLogprob] = []

    def add(self, token: int, logprob: float = 0.0, likeliest: tuple[tuple[int, float], ...] = ()) -> None:
        """Take the next token: it may end the continuation."""
        options = self.request.options
        self.tokens.append(token)
        if token == self.request.tokenizer.separator:
            return self._finish("stop")
        if options.logprobs is not None:
            self._unsent.append(TokenLogprob(token, logprob, likeliest, self._decoded))
        text = self._decoder.feed((token,))
        self._decoded += len(text)
        self._show(self._stops.feed(text) if options.stop else text)
        if self._stops.found is not None:
            self.finish_reason = "stop"
        elif len(self.tokens) == options.max_tokens:
            self._finish("length")

    def _finish(self, reason: FinishReason) -> None:
        """The end, without a stop string so far: what was held back is shown."""
        text = self._decoder.finish()
        self._decoded += len(text)
        self._show(self._stops.finish(text), is_last=self._stops.found is None)
        self.finish_reason = "stop" if self._stops.found is not None else reason

    def _show(self, text: str, is_last: bool = False) -> None:
        self._shown += len(text)
        ready = len(self._unsent)
        if not is_last:  # those that may be part of a stop string wait
            ready = next((i for i, one in enumerate(self._unsent) if one.offset >= self._shown), ready)
        if text or ready:
            self.pieces.append(Piece(text, tuple(self._unsent[:ready])))
            del self._unsent[:ready]

    def take(self) -> Piece | None:
        """All that is ready, as one piece; None if nothing is."""
        taken = []
        while self.pieces:
            taken.append(self.pieces.popleft())
        if len(taken) < 2:
            return taken[0] if taken else None
        return Piece("".join(one.text for one in taken), tuple(x for one in taken for x in one.logprobs))


class Request:
    """A prompt to be continued.

    Args:
        prompt: (T,) tokens, T ≥ 1.
        options: how.
        tokenizer: the model's.
        streams: whether each token is news, or the end alone.

    Attributes:
        choices: the continuations.
        cached_tokens: number of tokens of the prompt that the cache had.
        error: why it failed; None if it has not.
        is_cancelled: nobody waits for it any more.
        submitted_at, first_token_at: in seconds, by `time.monotonic`.
    """

    def __init__(self, prompt: np.ndarray, options: Options, tokenizer: Tokenizer, streams: bool = False) -> None:
        self.prompt, self.options, self.tokenizer, self.streams = prompt, options, tokenizer, streams
        self.choices = [Choice(self, index) for index in range(options.n)]
        self.cached_tokens = 0
        self.error: RequestError | None = None
        self.is_cancelled = False
        self.is_read = False
        self.submitted_at = time.monotonic()
        self.first_token_at: float | None = None

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        if self.error is not None or (self.is_read and self.options.max_tokens == 0):
            return True
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def n_generated(self) -> int:
        """Number of tokens drawn, the separators that ended a document included."""
        return sum(len(choice.tokens) for choice in self.choices)
