"""The HTTP interface of a live server, asked by the package `openai` and by plain requests."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
from starlette.requests import Request as HTTPRequest

from linrope.data.tokenizers.bytes import ByteTokenizer, encode_prompt
from linrope.serving.http import BYTES_OF_TOKEN, REST_OF_BODY, Service, application
from linrope.serving.metrics import Metrics
from linrope.serving.parameters import PARAMETERS
from linrope.serving.prefix_cache import PrefixCache
from linrope.serving.requests import RequestError
from linrope.serving.scheduler import Limits, Scheduler
from linrope.serving.server import Server, listening_socket
from tests.serving.conftest import SIZES, request_for, writing
from tests.serving.test_scheduler import alone, wait_for

KEY = "a secret"
PLAIN = {"include_usage": False, "include_obfuscation": False}
DRAWN = {"temperature": 3.0, "seed": 3, "extra_body": {"top_k": 8}}


class Live:
    """A server in a thread."""

    def __init__(self, model, max_length: int = 4000, **limits) -> None:
        self.metrics, cache = Metrics(), PrefixCache(10**8)
        self.scheduler = Scheduler(model, cache, Limits(**limits), events=self.metrics)
        self.metrics.watch(self.scheduler, cache)
        self.service = Service(self.scheduler, ByteTokenizer(), self.metrics, "tiny", max_length, KEY)
        self.socket = listening_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.ready = threading.Event()
        self.server = Server(application(self.service), self.ready.set, self.service.cut)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))
        self.scheduler.start()
        self.thread.start()
        assert self.ready.wait(30)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def post(self, content: bytes | dict, **headers: str) -> httpx.Response:
        content = json.dumps(content).encode() if isinstance(content, dict) else content
        headers = {"authorization": f"Bearer {KEY}", **headers}
        return httpx.post(f"{self.url}/v1/completions", content=content, headers=headers, timeout=30)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.scheduler.close(answer=False)
        self.socket.close()


@pytest.fixture(scope="module")
def live(model):
    server = Live(model)
    yield server
    server.close()


def expected(model, prompt: str, **options) -> str:
    return alone(model, request_for(prompt, **options))[0]


def test_a_completion_is_what_the_model_writes(live, model):
    done = live.client.completions.create(model="tiny", prompt="hello wörld", max_tokens=20, temperature=0)
    assert done.choices[0].text == expected(model, "hello wörld", max_tokens=20)
    assert (done.object, done.model, done.choices[0].finish_reason) == ("text_completion", "tiny", "length")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (13, 20, 33)
    again = live.client.completions.create(model="tiny", prompt="hello wörld", max_tokens=20, temperature=0)
    assert again.usage.prompt_tokens_details.cached_tokens == 13
    assert again.choices[0].text == done.choices[0].text
    by_default = live.client.completions.create(model="tiny", prompt="a")
    assert by_default.usage.completion_tokens == 16


def test_a_stream_has_the_same_text(live, model):
    options = {"max_tokens": 30, "temperature": 3.0, "top_k": 8, "seed": 3}
    stream = live.client.completions.create(
        model="tiny", prompt="hello", max_tokens=30, stream=True, stream_options={"include_usage": True}, **DRAWN
    )
    parts = list(stream)
    assert len(parts) > 3
    assert "".join(part.choices[0].text for part in parts[:-1]) == expected(model, "hello", **options)
    assert [part.choices[0].finish_reason for part in parts[:-1]] == [None] * (len(parts) - 2) + ["length"]
    assert (parts[-1].choices, parts[-1].usage.completion_tokens) == ([], 30)
    assert all(part.usage is None for part in parts[:-1])
    assert len({part.id for part in parts}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_of_each_form_and_continuations(live, model, stream):
    tokens = {text: encode_prompt(text).tolist() for text in ("one", "three")}
    for prompt in (["one", "three"], [tokens["one"], tokens["three"]], tokens["one"]):
        texts = ["one"] if prompt == tokens["one"] else ["one", "three"]
        done = live.client.completions.create(
            model="tiny", prompt=prompt, n=2, max_tokens=9, echo=True, stream=stream, **DRAWN
        )
        found = [""] * 2 * len(texts)
        for part in done if stream else [done]:
            for choice in part.choices:
                found[choice.index] += choice.text
        drawn = {"max_tokens": 9, "temperature": 3.0, "top_k": 8}
        assert found == [text + expected(model, text, seed=3 + i, **drawn) for text in texts for i in range(2)]


def test_stop_strings_and_logprobs(live, model):
    text = expected(model, "hello", max_tokens=30, temperature=3.0, top_k=8, seed=3)
    done = live.client.completions.create(
        model="tiny", prompt="hello", max_tokens=30, stop=[text[7:10], "~"], logprobs=2, **DRAWN
    )
    (choice,) = done.choices
    assert (choice.text, choice.finish_reason) == (text[: text.index(text[7:10])], "stop")
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == list(range(len(choice.text)))
    assert all(len(likeliest) == 2 for likeliest in choice.logprobs.top_logprobs)
    assert max(choice.logprobs.token_logprobs) < 0


def test_no_tokens_are_wanted(live):
    done = live.client.completions.create(model="tiny", prompt="a new one", max_tokens=0, echo=True)
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("a new one", "length")
    (part,) = live.client.completions.create(model="tiny", prompt="another", max_tokens=0, stream=True)
    assert (part.choices[0].text, part.choices[0].finish_reason) == ("", "length")
    done = live.client.completions.create(model="tiny", prompt="a new one", max_tokens=1)
    assert done.usage.prompt_tokens_details.cached_tokens == 10


def test_models_health_and_the_key(live):
    assert [model.id for model in live.client.models.list()] == ["tiny"]
    assert live.client.models.retrieve("tiny").owned_by == "linrope"
    assert httpx.get(f"{live.url}/health").json() == {"status": "ok"}
    for path in ("/v1/models", "/metrics", "/v1/models/tiny"):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}):
            answer = httpx.get(live.url + path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    odd = {"authorization": "Bearer ключ".encode()}
    assert httpx.get(f"{live.url}/v1/models", headers=odd).status_code == 401
    wrong = openai.OpenAI(base_url=f"{live.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
        wrong.models.list()


def test_a_key_may_have_any_letters(model, monkeypatch, live):
    monkeypatch.setattr(live.service, "api_key", "ключ")
    headers = {"authorization": "Bearer ключ".encode()}
    assert httpx.get(f"{live.url}/v1/models", headers=headers).status_code == 200


BAD = {
    "max_tokens": ([-1, 1.5, "5", True], "max_tokens=-1 must be a whole number, at least 0"),
    "temperature": ([-1, "warm", 10**400], "temperature=-1 must be a finite number"),
    "top_p": ([0, 1.5, []], "top_p=0 must be above 0 and at most 1"),
    "top_k": ([0, 1.5], "top_k=0 must be at least 1"),
    "n": ([0, 33, 1.0], "n=0 must be a whole number"),
    "stop": (["", ["a", ""], [1], ["a"] * 17], 'stop="" must be a string that is not empty'),
    "seed": ([2**63, 0.5], f"seed={2**63} must be"),
    "logprobs": ([-1, 21, True], "logprobs=-1 must be a whole number from 0 to 20"),
    "stream": ([1], "stream=1 must be true or false"),
    "stream_options": ([{"include_usage": True}, {"x": 1}, {"include_obfuscation": True}], "needs stream=true"),
    "prompt": ([[], [[]], [1.5], [True], ["a", 1], [257], [-1], [2**70], 5, "\ud800", [[1], []]], "and not empty"),
    "best_of": ([2], "best_of=2 must be 1: this server has no such option"),
    "logit_bias": ([{"5": 1}], "logit_bias"),
    "model": (["gpt-4"], "model 'gpt-4' is not here: this server has 'tiny'"),
    "\ud800": ([1], "unknown parameter"),
    "temprature": ([1], "unknown parameter 'temprature'. Did you mean 'temperature'?"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_parameters_are_named(live, name):
    values, message = BAD[name]
    for i, value in enumerate(values):
        answer = live.post({"prompt": "a", name: value})
        error = answer.json()["error"]
        assert answer.status_code == (404 if name == "model" else 400), value
        assert (error["type"], error["param"]) == ("invalid_request_error", "?" if name == "\ud800" else name)
        assert i > 0 or message in error["message"]


def test_continuations_that_do_not_fit_into_memory_together_are_refused():
    model = writing(SIZES["growing"])
    live = Live(model)
    try:
        live.scheduler.memory = 2 * 3 * model.state_bytes(20)
        answers = {n: live.post({"prompt": "hello", "max_tokens": 14, "n": n}) for n in (3, 4)}
        assert {n: answer.status_code for n, answer in answers.items()} == {3: 200, 4: 400}
        assert "max_tokens=14: n=4 such texts do not fit into memory" in answers[4].json()["error"]["message"]
    finally:
        live.close()


def test_a_request_that_fails_before_it_is_looked_at_has_an_error(live, monkeypatch):
    submit = live.scheduler.submit

    def slow(requests):
        submit(requests)
        wait_for(lambda: all(request.is_done for request in requests))

    def fail():
        raise ValueError("a defect")

    monkeypatch.setattr(live.scheduler, "submit", slow)
    monkeypatch.setattr(live.scheduler, "_read", fail)
    answer = live.post({"prompt": "a", "max_tokens": 2})
    assert answer.status_code == 500
    assert "the server failed: ValueError" in answer.json()["error"]["message"]


def test_other_bad_requests(live):
    assert "not valid JSON" in live.post(b'{"prompt": ').json()["error"]["message"]
    for body in (b"", b"\xff", b"[" * 100_000, b'{"temperature": NaN}', b"[1]"):
        answer = live.post(body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json"), body[:10]
    with pytest.raises(openai.BadRequestError, match="echo=true does not go with logprobs") as caught:
        live.client.completions.create(model="tiny", prompt="a", echo=True, logprobs=1)
    assert (caught.value.param, caught.value.code) == ("echo", "invalid_value")
    with pytest.raises(openai.BadRequestError, match="prompt has 3,991 tokens and max_tokens=16: together they"):
        live.client.completions.create(model="tiny", prompt="a" * 3990)
    assert live.post(b" " * (BYTES_OF_TOKEN * 4000 + REST_OF_BODY + 1)).status_code == 413
    for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/v1/chat/completions", 404)):
        answer = httpx.request(method, live.url + path)
        assert answer.status_code == status
        assert "See GET /v1/models" in answer.json()["error"]["message"]
    nulls = dict.fromkeys(("max_tokens", "stop", "seed", "logprobs", "n", "best_of", "suffix", "model"))
    answer = live.post({"prompt": "a", **nulls, "user": "me", "frequency_penalty": 0.0})
    assert answer.status_code == 200
    answer = live.post({"prompt": "a", "temperature": 10**20, "stream": True, "stream_options": PLAIN})
    assert (answer.status_code, answer.text.count("[DONE]")) == (200, 1)
    with sending(live, 99_999_999_999_999) as connection:
        assert_answered(connection, 413, "body_too_large")


def test_a_client_that_goes_away_while_it_sends_is_no_failure_of_the_server(live):
    parts = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> dict:
        return next(parts)

    with pytest.raises(RequestError, match="the client went away") as found:
        asyncio.run(live.service.body_of(HTTPRequest({"type": "http", "method": "POST", "headers": []}, receive)))
    assert found.value.status == 499


def test_metrics(live):
    before = metrics_of(live)
    live.client.completions.create(model="tiny", prompt="counted", max_tokens=3, temperature=0)
    live.client.completions.create(model="tiny", prompt="counted", max_tokens=3, temperature=0)
    after = metrics_of(live)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown['linrope_requests_total{status="200"}'] == 2
    assert grown["linrope_prompt_tokens_total"] == 16
    assert grown["linrope_cached_tokens_total"] == 8
    assert grown["linrope_generated_tokens_total"] == 6
    assert grown["linrope_seconds_to_first_token_count"] == grown["linrope_request_seconds_count"] == 2
    assert after["linrope_cache_snapshots"] == len(live.scheduler.cache) > 0
    assert after["linrope_cache_bytes"] == live.scheduler.cache.n_bytes
    assert after["linrope_waiting_requests"] == after["linrope_running_rows"] == 0


def metrics_of(live) -> dict[str, float]:
    text = httpx.get(f"{live.url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


@pytest.fixture
def slow(model):
    """A server of one row, which decodes slowly."""
    hook = model.register_forward_hook(lambda *args: time.sleep(0.01))
    server = Live(model, rows=1, queue=1, seconds=0.6)
    yield server
    server.close()
    hook.remove()


@contextmanager
def two_requests(server: Live, says: str) -> Iterator[None]:
    """A long stream is under way and a long request waits; both end with an error that `says` something."""
    errors, requests = [], []

    def ask(stream: bool) -> None:
        try:
            done = server.client.completions.create(model="tiny", prompt="a", max_tokens=3000, stream=stream)
            list(done)
        except openai.APIError as error:
            errors.append(error)

    for stream in (True, False):
        requests.append(threading.Thread(target=ask, args=(stream,)))
        requests[-1].start()
        wait_for(lambda: server.scheduler.n_running + server.scheduler.n_waiting == len(requests))
    wait_for(lambda: server.scheduler.n_running == 1)
    yield
    for request in requests:
        request.join()
    assert {type(error) for error in errors} == {openai.APIError, openai.InternalServerError}  # one within the stream
    assert all(says in str(error) for error in errors)


def test_a_full_queue_and_a_late_answer_are_errors(slow):
    with two_requests(slow, "took longer than 0.6 seconds"):
        with pytest.raises(openai.RateLimitError, match="1 requests are waiting, at most 1 may"):
            slow.client.completions.create(model="tiny", prompt="a")
        assert 'linrope_requests_total{status="429"} 1.0' in slow.metrics.text().decode()
    assert slow.client.completions.create(model="tiny", prompt="a", max_tokens=2).usage.completion_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_place(slow, stream):
    body = json.dumps({"prompt": "a", "max_tokens": 3000, "stream": stream}).encode()
    with sending(slow, len(body)) as connection:
        connection.sendall(body)
        wait_for(lambda: slow.scheduler.n_running == 1)
    wait_for(lambda: slow.scheduler.n_running == 0, 0.5)
    assert 'linrope_requests_total{status="499"} 1.0' in slow.metrics.text().decode()


@contextmanager
def sending(server: Live, length: int) -> Iterator[socket.socket]:
    """A connection on which a body of this length is announced."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    with socket.create_connection(server.socket.getsockname(), timeout=30) as connection:
        connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())
        yield connection


def assert_answered(connection: socket.socket, status: int, says: str) -> None:
    answer = ""
    while says not in answer:
        more = connection.recv(65536).decode()
        assert more, answer
        answer += more
    assert answer.startswith(f"HTTP/1.1 {status} ")


def test_a_body_that_does_not_come_holds_up_no_end(slow, capfd):
    with sending(slow, 100) as connection:
        connection.sendall(b"{")
        assert_answered(connection, 408, "the body has not come within 0.6 seconds")
    slow.scheduler.limits = replace(slow.scheduler.limits, seconds=60.0)
    with sending(slow, 100) as connection:
        wait_for(lambda: slow.service._bodies)
        slow.server.handle_exit(signal.SIGTERM, None)
        time.sleep(0.2)
        assert slow.thread.is_alive()  # the body may still come
        slow.server.handle_exit(signal.SIGTERM, None)
        assert_answered(connection, 503, "shutting down")
    slow.thread.join(10)
    assert not slow.thread.is_alive()
    assert capfd.readouterr() == ("", "")


def test_a_second_signal_cuts_requests_off_with_an_error(slow, capfd):
    with two_requests(slow, "shutting down"):
        slow.server.handle_exit(signal.SIGTERM, None)
        time.sleep(0.2)
        assert slow.scheduler.n_running == 1  # it would be finished
        slow.server.handle_exit(signal.SIGTERM, None)
    slow.thread.join(10)
    assert not slow.thread.is_alive()
    assert not slow.server.force_exit
    assert capfd.readouterr() == ("", "")
    assert 'linrope_requests_total{status="503"} 2.0' in slow.metrics.text().decode()
    slow.server.handle_exit(signal.SIGTERM, None)
    logging.disable(logging.NOTSET)
    assert slow.server.force_exit


def test_the_page_is_right(live, capsys):
    """The Python of docs/serving.md, at this server."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (code,) = re.findall(r"^```py\n(.*?)^```$", page, re.M | re.S)
    code = code.replace("http://127.0.0.1:8000", live.url).replace('"none"', repr(KEY))
    exec(compile(code, "serving.md", "exec"), {})
    assert len(capsys.readouterr().out) > 5
    named = set(re.findall(r"linrope_\w+", page)) - {"linrope_cache_folder_bytes"}
    assert named == named & {re.sub(r"_count$|[{].*", "", name) for name in metrics_of(live)}
    table = set(re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page, re.M))
    assert {name for names in table for name in re.findall(r"\w+", names)} == set(PARAMETERS) - {"model", "user"}
