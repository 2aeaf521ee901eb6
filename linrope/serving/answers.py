"""What the server sends: completions, parts of them, and errors, in OpenAI's form."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from linrope.data.tokenizers.base import Tokenizer
from linrope.serving.requests import Choice, Piece, Request, RequestError

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


class Answer:
    """The answer to one call: what its parts have in common.

    Args:
        model: the name of the model.
        tokenizer: for the names of tokens.
        requests: one for each prompt.
        echoes: what each continuation begins with, for each prompt.
        include_usage: whether a stream tells the number of tokens at its end.
    """

    def __init__(
        self, model: str, tokenizer: Tokenizer, requests: Sequence[Request], echoes: Sequence[str], include_usage: bool
    ) -> None:
        self.requests, self.tokenizer, self.include_usage = requests, tokenizer, include_usage
        self.common = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._numbered = list(enumerate(choice for request in requests for choice in request.choices))
        self._beginnings = {choice: echo for one, echo in zip(requests, echoes) for choice in one.choices}
        """What continuations begin with, until it is sent."""
        self._ended: set[Choice] = set()

    def whole(self) -> dict[str, Any]:
        """The completion, when all requests are done."""
        choices = [self._choice(number, choice, choice.take()) for number, choice in self._numbered]
        return {**self.common, "choices": choices, "usage": self._usage()}

    def events(self, is_last: bool) -> bytes:
        """The events of a stream that are ready, one for each continuation with news. `is_last`: all requests were done
        before."""
        parts = []
        for number, choice in self._numbered:
            if choice in self._ended:
                continue
            is_finished = self._finish_reason(choice) is not None  # before its pieces are taken, or one could be missed
            piece = choice.take()
            if piece is None and not is_finished and not self._beginnings.get(choice):
                continue
            part = self._choice(number, choice, piece, is_finished)
            parts.append({**self.common, "choices": [part], **({"usage": None} if self.include_usage else {})})
            if is_finished:
                self._ended.add(choice)
        if is_last and self.include_usage:
            parts.append({**self.common, "choices": [], "usage": self._usage()})
        return b"".join(event_of(part) for part in parts)

    def _finish_reason(self, choice: Choice) -> str | None:
        if choice.request.options.max_tokens == 0:
            return "length" if choice.request.is_read else None
        return choice.finish_reason

    def _choice(self, number: int, choice: Choice, piece: Piece | None, is_finished: bool = True) -> dict[str, Any]:
        piece = Piece("") if piece is None else piece
        text = self._beginnings.pop(choice, "") + piece.text
        logprobs = None if choice.request.options.logprobs is None else self._logprobs(piece)
        reason = self._finish_reason(choice) if is_finished else None
        return {"text": text, "index": number, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, piece: Piece) -> dict[str, list]:
        def name(token: int) -> str:
            return name_of(self.tokenizer, token)

        return {
            "tokens": [name(one.token) for one in piece.logprobs],
            "token_logprobs": [one.logprob for one in piece.logprobs],
            "top_logprobs": [{name(token): logprob for token, logprob in one.likeliest} for one in piece.logprobs],
            "text_offset": [one.offset for one in piece.logprobs],
        }

    def _usage(self) -> dict[str, Any]:
        prompt, new = (sum(ns) for ns in zip(*((len(one.prompt), one.n_generated) for one in self.requests)))
        cached = sum(request.cached_tokens for request in self.requests)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


@lru_cache(maxsize=100_000)
def name_of(tokenizer: Tokenizer, token: int) -> str:
    """A token as text, as it stands after a letter; a name that is no text for a part of a character, and for the
    separator."""
    if token == tokenizer.separator:
        return "<|endoftext|>"
    decoder = tokenizer.decoder()
    decoder.feed((_letter(tokenizer),))  # at the beginning of a text some tokenizers drop a space
    text = decoder.feed((token,)) + decoder.finish()
    if "\ufffd" not in text and text:
        return text
    return f"bytes:\\x{token:02x}" if tokenizer.name == "bytes" and token < 256 else f"token_id:{token}"


@lru_cache(maxsize=8)
def _letter(tokenizer: Tokenizer) -> int:
    """A token that is a letter or more; the separator, which is no text, if there is none."""
    for token in range(tokenizer.vocab_size):
        decoder = tokenizer.decoder()
        if (decoder.feed((token,)) + decoder.finish()).isalpha():
            return token
    return tokenizer.separator


def event_of(content: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def error_of(error: RequestError) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
