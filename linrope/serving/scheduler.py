"""The scheduler: one thread that owns the model, reads prompts in segments, and steps all texts together.

A turn reads at most one segment of prompts and makes one step of decoding, so that a long prompt delays each token of
the others by one segment. Prompts take turns, so that a short one need not wait for the end of a long one.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from linrope.errors import InputError
from linrope.generation.sampling import draw_each
from linrope.layers.state import ModelState
from linrope.models.language_model import LanguageModel
from linrope.serving.prefix_cache import PrefixCache, Snapshot
from linrope.serving.requests import Choice, Request, RequestError
from linrope.serving.rows import Rows
from linrope.utils.formatting import bytes_text
from linrope.utils.memory import memory_of

ENDS = "the server is shutting down: ask another one."


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much is done at a time, and how long a request may take."""

    rows: int = 32
    """Texts that are decoded together."""
    queue: int = 256
    """Requests that may wait for a row; the next one is refused."""
    seconds: float = 600.0
    """From the arrival of a request to its last token."""
    segment_length: int = 512
    """Tokens of prompts that are read between two steps of decoding."""
    snapshot_every: int = 1024
    """Tokens of a prompt between two snapshots. Where states grow with the text the distances double."""


class Events:
    """Who wants to know of what happens overrides these; they are called in the scheduler's thread."""

    def first_token(self, request: Request) -> None:
        """The prompt was read, and the first token is there."""

    def ended(self, request: Request) -> None:
        """The request was answered, failed, or its client went away."""


@dataclass(eq=False)
class _Reader:
    """A prompt that is being read."""

    request: Request
    position: int = 0
    state: ModelState | None = None
    logits: Tensor | None = None


class Scheduler:
    """Continues prompts with a model, in evaluation mode.

    Args:
        model: it is used by the thread of `run`, or by who calls `turn`.
        cache: of prefixes; it is used there too.
        limits: see `Limits`.
        listener: called there with the requests that have news, at most once a turn.
        events: for counting.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: PrefixCache,
        limits: Limits = Limits(),
        listener: Callable[[list[Request]], object] = lambda requests: None,
        events: Events | None = None,
    ) -> None:
        self.model, self.cache, self.limits, self.listener = model, cache, limits, listener
        self.events = Events() if events is None else events
        self.device = model.embedding.weight.device
        self._dtype, weights = model.embedding.weight.dtype, sum(x.nbytes for x in model.state_dict().values())
        self.memory = memory_of(self.device) - weights - cache.max_bytes
        self._states_grow = model.state_bytes(2**40) > model.state_bytes(2**39)
        if self._states_grow and self.memory <= 0:
            size = bytes_text(cache.max_bytes)
            raise InputError(f"the weights and a cache of {size} leave no memory for requests: lower --cache_gb.")
        self._wake = threading.Condition()
        self._waiting: deque[Request] = deque()  # under the lock of _wake, as is _is_closing
        self._is_closing = False
        self._is_cut = False  # set by a signal too, without the lock
        self._readers: deque[_Reader] = deque()
        self._joining: list[tuple[Choice, ModelState]] = []
        self._rows, self._choices = Rows(model), []  # type: Rows, list[Choice]
        self._news: dict[Request, None] = {}
        self._thread: threading.Thread | None = None

    # --- called by any thread ---------------------------------------------------------------------------------------

    def fits(self, n: int, length: int) -> bool:
        """Whether memory has room for n rows of that many tokens, beside the weights and the cache; a step has their
        states twice. States that do not grow always fit: they are small."""
        return not self._states_grow or 2 * n * self.model.state_bytes(length, self._dtype) <= self.memory

    def submit(self, requests: Sequence[Request]) -> None:
        """Put requests into the queue. RequestError, and none is in it, if there is no room or the server ends.

        None may have more continuations than there are rows, or need more memory than `fits`.
        """
        with self._wake:
            if self._is_closing:
                raise RequestError(ENDS, 503, "server_error")
            if len(requests) > self.limits.queue:
                message = (
                    f"prompt has {len(requests)} prompts, at most {self.limits.queue} may wait: send them in parts."
                )
                raise RequestError(message, param="prompt", code="invalid_value")
            if len(self._waiting) + len(requests) > self.limits.queue:
                raise RequestError(
                    f"{len(self._waiting)} requests are waiting, at most {self.limits.queue} may: try again later.",
                    429, "rate_limit_error", code="queue_full",
                )  # fmt: skip
            self._waiting.extend(requests)
            self._wake.notify()

    def cancel(self, request: Request) -> None:
        """Nobody waits for this request any more: its place becomes free with the next turn."""
        request.is_cancelled = True
        with self._wake:
            self._wake.notify()

    @property
    def n_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Continuations that are decoded, or whose prompt is being read."""
        return len(self._choices) + len(self._joining) + sum(one.request.options.n for one in list(self._readers))

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self.run, name="linrope scheduler", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """The requests that are under way or wait end with an error, in the next turn. Takes no lock."""
        self._is_cut = True

    def close(self, answer: bool = True) -> None:
        """Take nothing more, and end the thread once all is answered; without `answer` all is cut."""
        with self._wake:
            self._is_closing = True
            self._is_cut |= not answer
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    # --- the thread -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Turn after turn until `close`. An error in a turn is the answer to all requests under way; the next ones are
        not affected. However the thread ends, those that it leaves are answered, and no others are taken."""
        try:
            while self._wait_for_work():
                try:
                    self.turn()
                except Exception as error:
                    with suppress(OSError, ValueError):  # the log may have been closed
                        traceback.print_exc()
                    self._fail_all(RequestError(f"the server failed: {type(error).__name__}", 500, "server_error"))
        finally:
            with self._wake:
                self._is_closing = True
            self._is_cut = True
            self._drop()
            self._tell()

    def _wait_for_work(self) -> bool:
        """False if the thread is to end: all is answered, and nothing more is taken."""
        with self._wake:
            while not (self._waiting or self._is_busy or self._is_closing):
                self._wake.wait()
            return bool(self._waiting or self._is_busy)

    @property
    def _is_busy(self) -> bool:
        return bool(self._readers or self._joining or self._choices)

    @torch.inference_mode()
    def turn(self) -> bool:
        """One segment of prompts and one step of decoding; whether there is more to do."""
        self._drop()
        self._admit()
        self._read()
        self._arrange()
        if self._choices:
            self._step()
        self._tell()
        return self._is_busy or bool(self._waiting)

    def _under_way(self) -> list[Request]:
        """Requests that are read or decoded."""
        choices = [*(choice for choice, _ in self._joining), *self._choices]
        return list(dict.fromkeys((*(one.request for one in self._readers), *(one.request for one in choices))))

    def _drop(self) -> None:
        """End the requests that took too long; forget them, and those that nobody waits for."""
        late = time.monotonic() - self.limits.seconds
        with self._wake:
            waiting = list(self._waiting)
        for request in (*waiting, *self._under_way()):
            if request.is_done:
                continue
            if request.is_cancelled:
                request.error = RequestError("the client went away.", 499)
            elif self._is_cut:
                request.error = RequestError(ENDS, 503, "server_error")
            elif request.submitted_at < late:
                message = f"the request took longer than {self.limits.seconds:g} seconds."
                request.error = RequestError(message, 504, "timeout_error", code="timeout")
            else:
                continue
            self._ended(request)
        with self._wake:
            self._waiting = deque(one for one in self._waiting if one.error is None)
        self._readers = deque(one for one in self._readers if one.request.error is None)
        self._joining = [one for one in self._joining if one[0].request.error is None]

    def _ended(self, request: Request) -> None:
        self._news[request] = None
        self.events.ended(request)

    def _admit(self) -> None:
        """Requests for which there are rows and memory, the first ones first."""
        with self._wake:
            while self._waiting and self._has_place_for(self._waiting[0]):
                self._readers.append(_Reader(self._waiting.popleft()))

    def _has_place_for(self, request: Request) -> bool:
        """Whether there are rows, and memory for the caches of softmax layers, which have the length of the longest. A
        request alone has its place."""
        n = self.n_running + request.options.n
        longest = max(len(one.prompt) + one.options.max_tokens for one in (request, *self._under_way()))
        return n <= self.limits.rows and (self.n_running == 0 or self.fits(n, longest))

    def _read(self) -> None:
        """One segment of the prompts that wait to be read, or several short prompts."""
        budget = self.limits.segment_length
        while budget > 0 and self._readers:
            reader = self._readers[0]
            budget -= max(1, self._read_segment(reader, budget))
            if reader.position < len(reader.request.prompt):
                self._readers.rotate(-1)
            else:
                self._begin(reader)
                self._readers.popleft()

    def _read_segment(self, reader: _Reader, budget: int) -> int:
        """Read on, to the next snapshot at most; the number of tokens that the model read."""
        prompt, request = reader.request.prompt, reader.request
        if reader.position == 0:
            self.cache.recall(prompt)
        depth, found = self.cache.longest(prompt)  # others may have read the same meanwhile
        if depth > reader.position:
            request.cached_tokens += depth - reader.position
            reader.position, reader.state, reader.logits = depth, found.state, found.logits
        if reader.position == len(prompt):
            return 0
        start = reader.position
        end = min(len(prompt), start + budget, self._next_snapshot(start))
        tokens = torch.from_numpy(prompt[start:end].astype(np.int64))[None].to(self.device)
        logits, reader.state = self.model(tokens, reader.state, None, return_state=True, logits_to_keep=1)
        reader.position, reader.logits = end, logits[0, -1]
        if end == len(prompt):
            self.cache.put(prompt, Snapshot(reader.state, reader.logits))
        elif end == self._next_snapshot(start):
            self.cache.put(prompt[:end], Snapshot(reader.state))
        return end - start

    def _next_snapshot(self, position: int) -> int:
        """The first position after this one that has a snapshot."""
        every = self.limits.snapshot_every
        if not self._states_grow:
            return (position // every + 1) * every
        return every << (position // every).bit_length()

    def _begin(self, reader: _Reader) -> None:
        """The first tokens of the continuations of a prompt that was read."""
        request = reader.request
        request.is_read = True
        if request.options.max_tokens == 0:
            return self._ended(request)
        request.first_token_at = time.monotonic()
        self.events.first_token(request)
        self._draw(request.choices, reader.logits.expand(request.options.n, -1))
        self._joining += [(choice, reader.state) for choice in self._open(request.choices)]

    @staticmethod
    def _open(choices: Sequence[Choice]) -> list[Choice]:
        """Those that go on."""
        return [one for one in choices if one.finish_reason is None and one.request.error is None]

    def _arrange(self) -> None:
        """Rows without those that have ended, and with those whose prompt was read."""
        kept = [row for row, choice in enumerate(self._choices) if self._open([choice])]
        if len(kept) == len(self._choices) and not self._joining:
            return
        self._rows.replace(kept, [state for _, state in self._joining])
        self._choices = [*(self._choices[row] for row in kept), *(choice for choice, _ in self._joining)]
        self._joining = []

    def _step(self) -> None:
        """Read the last token of each continuation, and draw the next one."""
        self._draw(self._choices, self._rows.step([choice.tokens[-1] for choice in self._choices]))
        for row, choice in enumerate(self._choices):
            if choice.finish_reason is not None and choice.request.error is None:  # a second turn may follow
                # the last token was not read: the next prompt begins with it
                read = np.concatenate(
                    (choice.request.prompt, np.array(choice.tokens[:-1], choice.request.prompt.dtype))
                )
                self.cache.put(read, Snapshot(self._rows.state_of(row)))
        if not self._open(self._choices):
            self._arrange()

    def _draw(self, choices: Sequence[Choice], logits: Tensor) -> None:
        """Give each continuation its next token, of logits (B, vocab_size)."""
        if not torch.isfinite(logits).all():
            logits = self._without_broken(choices, logits)
        tokens = draw_each(logits, [choice.sampler for choice in choices]).tolist()
        said = self._logprobs(choices, logits, tokens)
        for row, (choice, token) in enumerate(zip(choices, tokens)):
            request = choice.request
            if request.error is not None:
                continue
            choice.add(token, *said.get(row, ()))
            if request.is_done:
                self._ended(request)
            elif request.streams:
                self._news[request] = None

    def _without_broken(self, choices: Sequence[Choice], logits: Tensor) -> Tensor:
        """Fail the requests whose logits are not finite; these become 0."""
        finite = torch.isfinite(logits).all(dim=-1)
        for choice, is_sound in zip(choices, finite.tolist()):
            if not is_sound and choice.request.error is None:
                choice.request.error = RequestError("the model's logits are not finite.", 500, "server_error")
                self._ended(choice.request)
        return logits.masked_fill(~finite[:, None], 0)

    @staticmethod
    def _logprobs(
        choices: Sequence[Choice], logits: Tensor, tokens: list[int]
    ) -> dict[int, tuple[float, tuple[tuple[int, float], ...]]]:
        """By row: the log probability of its token, and those of the likeliest, where they are wanted."""
        rows = [row for row, choice in enumerate(choices) if choice.request.options.logprobs is not None]
        if not rows:
            return {}
        said = {}
        logprobs = logits[rows].float().log_softmax(dim=-1).cpu()
        for row, of_row in zip(rows, logprobs):
            likeliest = of_row.topk(min(choices[row].request.options.logprobs, len(of_row)))
            pairs = tuple(zip(likeliest.indices.tolist(), likeliest.values.tolist()))
            said[row] = of_row[tokens[row]].item(), pairs
        return said

    def _tell(self) -> None:
        """Tell the listener which requests have news."""
        if self._news:
            news, self._news = list(self._news), {}
            self.listener(news)

    def _fail_all(self, error: RequestError) -> None:
        """Answer all requests under way with an error, and begin anew."""
        for request in self._under_way():
            if not request.is_done:
                request.error = error
                self._ended(request)
        self._readers.clear()
        self._joining, self._rows, self._choices = [], Rows(self.model), []
        self._tell()
