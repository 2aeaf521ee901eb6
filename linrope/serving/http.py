"""The HTTP interface: OpenAI's completions and models, /health and /metrics, as an application of FastAPI."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from linrope.data.tokenizers.base import Tokenizer
from linrope.serving import requests
from linrope.serving.answers import DONE, Answer, error_of, event_of
from linrope.serving.metrics import CONTENT_TYPE, Metrics
from linrope.serving.parameters import CompletionParameters, parse_body, tokens_of
from linrope.serving.requests import Options, RequestError
from linrope.serving.scheduler import ENDS, Scheduler

BYTES_OF_TOKEN = 32
"""Bytes of a body of JSON for each token that a prompt may have: a few characters, which may be escaped."""
REST_OF_BODY = 2**20
"""Bytes of a body beside its prompts, at most."""


@dataclass(eq=False)
class Service:
    """What the application needs.

    Attributes:
        scheduler: it runs, and tells this its news.
        model_name: as /v1/models has it.
        max_length: tokens of a prompt and its continuation, at most.
        api_key: without it only /health answers; None for no key.
    """

    scheduler: Scheduler
    tokenizer: Tokenizer
    metrics: Metrics
    model_name: str
    max_length: int
    api_key: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    _waiters: dict[requests.Request, asyncio.Event] = field(default_factory=dict)
    _bodies: set[asyncio.Task[bytes]] = field(default_factory=set)
    _loop: asyncio.AbstractEventLoop | None = None

    def __post_init__(self) -> None:
        self.scheduler.listener = self._tell

    def _tell(self, news: Sequence[requests.Request]) -> None:
        """Called in the scheduler's thread, once a turn."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                self._loop.call_soon_threadsafe(self._wake, news)

    def _wake(self, news: Sequence[requests.Request]) -> None:
        for request in news:
            if (waiter := self._waiters.get(request)) is not None:
                waiter.set()

    def cut(self) -> None:
        """End with an error the requests that are under way, that wait, and whose bodies have not come. Takes no
        lock: a signal may call it."""
        self.scheduler.cut()
        if self._loop is not None:
            with suppress(RuntimeError):  # as above
                self._loop.call_soon_threadsafe(lambda: [body.cancel() for body in self._bodies])

    def require_key(self, request: Request) -> None:
        """RequestError unless the request has the key."""
        if self.api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(key.strip().encode("latin-1"), self.api_key.encode())  # as it was sent
        if scheme.lower() != "bearer" or not is_right:
            raise RequestError(
                "the API key is missing or wrong: send the header 'Authorization: Bearer KEY'.",
                401, "authentication_error", code="invalid_api_key",
            )  # fmt: skip

    def require_model(self, name: str | None) -> None:
        """RequestError unless this is the name of the model."""
        if name is not None and name != self.model_name:
            raise RequestError(
                f"model {name!r} is not here: this server has {self.model_name!r}.",
                404, param="model", code="model_not_found",
            )  # fmt: skip

    @property
    def model(self) -> dict[str, Any]:
        """The model, as /v1/models has it."""
        return {"id": self.model_name, "object": "model", "created": self.created, "owned_by": "linrope"}

    def prepared(self, asked: CompletionParameters) -> list[requests.Request]:
        """One request for each prompt. RequestError for what is no prompt, or too long."""
        options, rows = asked.options, self.scheduler.limits.rows
        if options.n > rows:
            raise RequestError(f"n={options.n} must be at most {rows}.", param="n", code="invalid_value")
        vocab_size = self.scheduler.model.config.vocab_size
        prompts = [tokens_of(prompt, self.tokenizer, vocab_size) for prompt in asked.prompts]
        for prompt in prompts:
            self._require_length(prompt, options)
        return [requests.Request(prompt, options, self.tokenizer, asked.stream) for prompt in prompts]

    def _require_length(self, prompt: np.ndarray, options: Options) -> None:
        length, code = len(prompt) + options.max_tokens, "context_length_exceeded"
        message = f"the prompt has {len(prompt):,} tokens and max_tokens={options.max_tokens}: "
        if length > self.max_length:
            message += f"together they must be at most {self.max_length:,}."
            raise RequestError(message, param="prompt", code=code)
        if not self.scheduler.fits(options.n, length):
            message += f"n={options.n} such texts do not fit into memory: give a shorter prompt or smaller numbers."
            raise RequestError(message, param="prompt", code=code)

    def echoes(self, asked: CompletionParameters) -> list[str]:
        """What the continuations begin with: nothing, or with `echo` the text of the prompt."""
        if not asked.echo:
            return [""] * len(asked.prompts)
        texts = []
        for prompt in asked.prompts:
            decoder = self.tokenizer.decoder()
            texts.append(prompt if isinstance(prompt, str) else decoder.feed(prompt) + decoder.finish())
        return texts

    async def body_of(self, request: Request) -> bytes:
        """The body. RequestError if it is too long for any prompt, or does not come in time."""
        self._loop, seconds = asyncio.get_running_loop(), self.scheduler.limits.seconds
        body = asyncio.create_task(self._read_body(request))
        self._bodies.add(body)
        try:
            await asyncio.wait({body}, timeout=seconds)
        finally:
            self._bodies.discard(body)
            in_time = not body.cancel()
        if not in_time:
            message = f"the body has not come within {seconds:g} seconds."
            raise RequestError(message, 408, "timeout_error", code="timeout")
        if body.cancelled():
            raise RequestError(ENDS, 503, "server_error")
        return body.result()

    async def _read_body(self, request: Request) -> bytes:
        limit, parts, size = REST_OF_BODY + BYTES_OF_TOKEN * self.max_length, [], 0
        too_long = RequestError(f"the body is longer than {limit:,} bytes.", 413, code="body_too_large")
        if int(request.headers.get("content-length", 0)) > limit:
            raise too_long
        try:
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > limit:
                    raise too_long
        except ClientDisconnect as error:  # there is no one to answer
            raise RequestError("the client went away before the end of the body.", 499) from error
        return b"".join(parts)

    @asynccontextmanager
    async def submitted(self, http: Request, asked: Sequence[requests.Request]) -> AsyncIterator[asyncio.Event]:
        """Submit requests, and cancel them if the client goes away or the block ends first. The event is set when there
        is news, or when the client has gone."""
        self._loop, event = asyncio.get_running_loop(), asyncio.Event()
        self._waiters |= dict.fromkeys(asked, event)
        watch = asyncio.create_task(self._cancel_when_gone(http, asked))
        try:
            try:
                self.scheduler.submit(asked)
            except RequestError as error:
                if error.status != 400:  # more prompts than the queue ever takes: a wrong parameter
                    self.metrics.requests.labels(error.status).inc(len(asked))
                raise
            yield event
        finally:
            watch.cancel()
            for request in asked:
                del self._waiters[request]
                if not request.is_done:
                    self.scheduler.cancel(request)

    async def _cancel_when_gone(self, http: Request, asked: Sequence[requests.Request]) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        for request in asked:  # the scheduler then tells that they are done
            if not request.is_done:
                self.scheduler.cancel(request)


async def _news(event: asyncio.Event) -> None:
    """Wait for the next news, and take them."""
    await event.wait()
    event.clear()


def _raise_error_of(asked: Sequence[requests.Request]) -> None:
    for request in asked:
        if request.error is not None:
            raise request.error


async def complete(service: Service, http: Request) -> Response:
    """The answer to /v1/completions."""
    body = await service.body_of(http)

    def prepared() -> tuple[CompletionParameters, list[requests.Request], list[str]]:
        asked = parse_body(body)
        service.require_model(asked.model)
        return asked, service.prepared(asked), service.echoes(asked)

    parameters, asked, echoes = await run_in_threadpool(prepared)  # a long prompt takes a while
    answer = Answer(service.model_name, service.tokenizer, asked, echoes, parameters.include_usage)
    if parameters.stream:
        events = _streamed(service, http, asked, answer)
        first = await anext(events)  # an error before it has a status of HTTP
        return StreamingResponse(_after(first, events), media_type="text/event-stream")
    async with service.submitted(http, asked) as event:
        while not all(request.is_done for request in asked):
            await _news(event)
            _raise_error_of(asked)
    _raise_error_of(asked)  # they may have ended before the first look
    return JSONResponse(answer.whole())


async def _streamed(
    service: Service, http: Request, asked: Sequence[requests.Request], answer: Answer
) -> AsyncIterator[bytes]:
    """The events of a stream, as they become ready. An error before the first one is raised, a later one is sent."""
    has_begun, is_done = False, False
    async with service.submitted(http, asked) as event:
        while not is_done:
            await _news(event)
            is_done = all(request.is_done for request in asked)
            try:
                _raise_error_of(asked)
            except RequestError as error:
                if not has_begun:
                    raise
                yield event_of(error_of(error))
                return
            if part := answer.events(is_done):
                has_begun = True
                yield part
    yield DONE


async def _after(first: bytes, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for event in events:
            yield event
    finally:
        await events.aclose()


def application(service: Service) -> FastAPI:
    """The application of a service."""
    app = FastAPI(title="linrope", openapi_url=None)  # no page that needs no key

    @app.exception_handler(RequestError)
    async def _(request: Request, error: RequestError) -> JSONResponse:
        return JSONResponse(error_of(error), error.status)

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}. See GET /v1/models and POST /v1/completions."
        return JSONResponse(error_of(RequestError(message, code="unknown_url")), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def _(request: Request, error: Exception) -> JSONResponse:
        what = RequestError(f"the server failed: {type(error).__name__}.", type="server_error")
        return JSONResponse(error_of(what), 500)

    @app.get("/health")
    async def health() -> JSONResponse:
        is_alive = service.scheduler.is_alive
        return JSONResponse({"status": "ok" if is_alive else "stopped"}, 200 if is_alive else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        service.require_key(request)
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/v1/models")
    async def models(request: Request) -> JSONResponse:
        service.require_key(request)
        return JSONResponse({"object": "list", "data": [service.model]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> JSONResponse:
        service.require_key(request)
        service.require_model(name)
        return JSONResponse(service.model)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        service.require_key(request)
        return await complete(service, request)

    return app
