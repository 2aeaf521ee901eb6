"""The body of a request to /v1/completions: its parameters, checked, and the tokens of its prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from linrope.data.tokenizers.base import Tokenizer
from linrope.errors import InputError, suggest
from linrope.generation.sampling import Sampling
from linrope.serving.prefix_cache import TOKEN
from linrope.serving.requests import Options, RequestError

MOST_STOPS, MOST_LOGPROBS = 16, 20
NEUTRAL = {"best_of": 1, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "suffix": ""}
"""Parameters of OpenAI's that do nothing here, with the values that ask for nothing; null is one for all."""


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_prompt(value: Any) -> bool:
    return isinstance(value, (str, list))


def _is_stop(value: Any) -> bool:
    stops = [value] if isinstance(value, str) else value
    return (
        isinstance(stops, list)
        and len(stops) <= MOST_STOPS
        and all(isinstance(stop, str) and stop != "" for stop in stops)
    )


def _is_stream_options(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) <= {"include_usage", "include_obfuscation"}
        and all(isinstance(x, bool) for x in value.values())
        and not value.get("include_obfuscation", False)  # this server has none
    )


PARAMETERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (lambda x: isinstance(x, str), "a name of /v1/models"),
    "prompt": (_is_prompt, "a string, a list of strings, a list of tokens, or a list of lists of tokens"),
    "max_tokens": (lambda x: _is_int(x) and x >= 0, "a whole number, at least 0"),
    "temperature": (_is_number, "a number, at least 0"),
    "top_p": (_is_number, "a number above 0, at most 1"),
    "top_k": (_is_int, "a whole number, at least 1"),
    "n": (lambda x: _is_int(x) and x >= 1, "a whole number, at least 1"),
    "stream": (lambda x: isinstance(x, bool), "true or false"),
    "stream_options": (_is_stream_options, '{"include_usage": true} or false'),
    "stop": (_is_stop, f"a string that is not empty, or a list of at most {MOST_STOPS} of them"),
    "seed": (_is_int, "a whole number of at most 63 bits"),
    "logprobs": (lambda x: _is_int(x) and 0 <= x <= MOST_LOGPROBS, f"a whole number from 0 to {MOST_LOGPROBS}"),
    "echo": (lambda x: isinstance(x, bool), "true or false"),
    "user": (lambda x: isinstance(x, str), "a string"),
}
"""What each parameter must be, as a check and in words; null stands for its default."""


@dataclass(frozen=True, kw_only=True)
class CompletionParameters:
    """A request to /v1/completions."""

    model: str | None
    prompts: list[str] | list[list[int]]
    options: Options
    stream: bool
    include_usage: bool
    echo: bool


def parse_body(body: bytes) -> CompletionParameters:
    """The parameters in a body of JSON. RequestError, which names it, for one that is unknown or has a wrong value."""
    values = _json_object(body)
    for name, value in values.items():
        if name in NEUTRAL:
            if value is not None and value != NEUTRAL[name]:
                raise refused(name, value, f"must be {json.dumps(NEUTRAL[name])}: this server has no such option")
        elif name not in PARAMETERS:
            name = name.encode(errors="replace").decode()  # half a surrogate pair cannot be answered
            near = suggest(name[:60], [*PARAMETERS, *NEUTRAL])
            message = f"unknown parameter {name[:60]!r}.{near} Known are {', '.join(PARAMETERS)}."
            raise RequestError(message, param=name[:60], code="unknown_parameter")
        elif value is not None and not PARAMETERS[name][0](value):
            raise refused(name, value, f"must be {PARAMETERS[name][1]}")
    values = {name: value for name, value in values.items() if value is not None and name not in NEUTRAL}
    stream, echo = values.get("stream", False), values.get("echo", False)
    if "stream_options" in values and not stream:
        raise refused("stream_options", values["stream_options"], "needs stream=true")
    if echo and "logprobs" in values:
        raise refused("echo", echo, "does not go with logprobs, which are those of new tokens only: leave one out")
    stop = values.get("stop", [])
    return CompletionParameters(
        model=values.get("model"),
        prompts=_prompts(values.get("prompt", "")),
        options=Options(
            max_tokens=values.get("max_tokens", 16),
            sampling=_sampling(values),
            n=values.get("n", 1),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            logprobs=values.get("logprobs"),
        ),
        stream=stream,
        include_usage=values.get("stream_options", {}).get("include_usage", False),
        echo=echo,
    )


def refused(name: str, value: Any, why: str) -> RequestError:
    """The error of a parameter's value."""
    shown = json.dumps(value)
    shown = shown if len(shown) < 80 else f"{shown[:60]} …"
    return RequestError(f"{name}={shown} {why}.", param=name, code="invalid_value")


def _json_object(body: bytes) -> dict[str, Any]:
    def no_number(name: str) -> None:
        raise ValueError(f"{name} is no number of JSON")

    try:
        values = json.loads(body.decode("utf-8"), parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(values, dict):
        raise RequestError('the body must be an object of JSON, {"prompt": "…"} for example.', code="invalid_json")
    return values


def _prompts(value: str | list) -> list[str] | list[list[int]]:
    """A list of texts, or of tokens."""
    if isinstance(value, str):
        return [value]
    if value and all(isinstance(one, str) for one in value):
        return value
    if value and all(isinstance(one, list) for one in value):
        return value
    if value and not any(isinstance(one, (str, list)) for one in value):
        return [value]
    raise refused("prompt", value, f"must be {PARAMETERS['prompt'][1]}, and not empty")


def _sampling(values: dict[str, Any]) -> Sampling:
    given = {name: values[name] for name in ("temperature", "top_p", "top_k", "seed") if name in values}
    if given.get("top_p") == 1:
        del given["top_p"]
    try:
        return Sampling(**given)
    except InputError as error:
        name = str(error).partition("=")[0]
        raise RequestError(str(error), param=name if name in given else None, code="invalid_value") from error


def tokens_of(prompt: str | list[int], tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """The tokens of a prompt, (T,) int32; a text is the beginning of a document. RequestError for what is none."""
    if isinstance(prompt, str):
        try:
            prompt.encode("utf-8")
            return tokenizer.encode_prompt(prompt).numpy().astype(TOKEN)
        except (UnicodeEncodeError, InputError) as error:
            raise RequestError(f"prompt cannot be read: {error}.", param="prompt", code="invalid_value") from error
    try:
        tokens = np.empty(0) if any(isinstance(token, bool) for token in prompt) else np.array(prompt)
    except (ValueError, OverflowError):
        tokens = np.empty(0)
    if tokens.ndim != 1 or tokens.dtype != np.int64 or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise refused("prompt", prompt, f"must have at least one token, whole numbers from 0 to {vocab_size - 1}")
    return tokens.astype(TOKEN)
