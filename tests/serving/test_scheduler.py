"""The scheduler, turn by turn: the same tokens as alone and as without the cache, stops, limits."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from linrope.data.tokenizers.bytes import SEPARATOR, TextDecoder
from linrope.serving.requests import RequestError
from tests.conftest import covering
from tests.serving.conftest import SIZES, finish, prompt_of, request_for, text_of, writing

LONG = "once upon a time there was a number, and it was {}; ".format
PROMPTS = ["a", LONG(1) * 3, "hello", LONG(2), LONG(1) * 3 + "x", LONG(1) * 5]
DRAWN = {"temperature": 1.0, "top_p": 0.9}


def alone(model, request) -> list[str]:
    """What `model.generate` writes of the same prompt, for each continuation."""
    options, prompt = request.options, torch.from_numpy(request.prompt.astype(np.int64))[None]
    sampling = {name: getattr(options.sampling, name) for name in ("temperature", "top_p", "top_k")}
    texts = []
    for index in range(options.n):
        seed = None if options.sampling.seed is None else options.sampling.seed + index
        new = model.generate(prompt, options.max_tokens, **sampling, seed=seed)[0, len(request.prompt) :].tolist()
        new = new[: new.index(SEPARATOR)] if SEPARATOR in new else new
        decoder = TextDecoder()
        texts.append(decoder.feed(new) + decoder.finish())
    return texts


@pytest.mark.parametrize(
    ("kind", "sampling"),
    covering(
        [(kind, sampling) for kind in SIZES for sampling in ({}, DRAWN)],
        [("hybrid", DRAWN)],
    ),
)
def test_together_and_with_the_cache_each_is_continued_as_alone(kind, sampling, make):
    """Of any length, with one prefix or different ones, and again when the cache has all of them."""
    model = writing(SIZES[kind])
    scheduler, expected = make(of=model, rows=5), None
    for _ in range(2):
        requests = [
            request_for(text, max_tokens=8 + 5 * i, n=1 + i % 2, seed=i, **sampling) for i, text in enumerate(PROMPTS)
        ]
        texts = finish(scheduler, *requests)
        expected = expected or [text for request in requests for text in alone(model, request)]
        assert texts == expected
        assert [request.n_generated for request in requests] == [(8 + 5 * i) * (1 + i % 2) for i in range(len(PROMPTS))]
    assert len(set(texts)) > 5
    assert all(request.cached_tokens == len(request.prompt) for request in requests)


@pytest.mark.parametrize("kind", covering(SIZES, ["recipe", "growing"]))
def test_a_second_turn_reads_only_what_is_new(kind, make):
    model = writing(SIZES[kind])
    scheduler, prompt, seen = make(of=model), LONG(1) * 4, []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    (answer,) = finish(scheduler, request_for(prompt, max_tokens=20))
    seen.clear()
    second = request_for(f"{prompt}{answer} and then", max_tokens=20)
    texts = finish(scheduler, second)
    assert second.cached_tokens == len(prompt_of(prompt)) + 19
    assert max(seen) == len(" and then") + 1  # with the last token of the answer
    assert texts == finish(make(0, of=model), request_for(f"{prompt}{answer} and then", max_tokens=20))


def test_snapshots_stand_at_boundaries_and_ends(make, model):
    scheduler = make(snapshot_every=32)
    prompt = prompt_of(LONG(1) * 3)
    finish(scheduler, request_for(prompt, max_tokens=3))
    lengths = [
        n for n in range(1, len(prompt) + 3) if scheduler.cache.longest(np.append(prompt, [97] * 9)[: n + 1])[0] == n
    ]
    assert lengths == [*range(32, len(prompt), 32), len(prompt)]
    growing = make(of=writing(SIZES["growing"]), snapshot_every=8)
    ends = [growing._next_snapshot(position) for position in (0, 7, 8, 15, 16, 31, 32, 100)]
    assert ends == [8, 8, 16, 16, 32, 32, 64, 128]


def test_a_long_prompt_does_not_hold_up_others(make):
    """Between two of its segments others get tokens, and a short prompt that comes later is answered first."""
    scheduler = make(segment_length=16)
    first, late = request_for("a", max_tokens=30, streams=True), request_for("b", max_tokens=2)
    long = request_for(LONG(1) * 10, max_tokens=2)
    scheduler.submit([first])
    scheduler.turn()
    scheduler.submit([long])
    for _ in range(5):
        before = len(first.choices[0].tokens)
        scheduler.turn()
        assert len(first.choices[0].tokens) == before + 1
    scheduler.submit([late])
    while not late.is_done:
        scheduler.turn()
    assert not long.is_read
    while scheduler.turn():
        pass
    assert long.is_done
    assert first.is_done


def test_prompts_under_way_share_what_one_of_them_has_read(make):
    scheduler = make(segment_length=16)
    same = [request_for(LONG(1) * 4, max_tokens=1) for _ in range(3)]
    finish(scheduler, *same)
    n = len(same[0].prompt)
    assert sum(request.cached_tokens for request in same) > 2 * n - 3 * 16


def test_stop_strings_and_the_end_of_a_document(make, model):
    drawn = {"max_tokens": 30, "temperature": 3.0, "top_k": 8, "seed": 3}
    text = alone(model, request_for("hello", **drawn))[0]
    stop = text[7:10]
    request = request_for("hello", stop=("not there", stop), **drawn)
    assert finish(make(), request) == [text[: text.index(stop)]]
    assert request.choices[0].finish_reason == "stop"
    full = request_for("hello", **drawn)
    assert finish(make(), full) == [text]
    assert full.choices[0].finish_reason == "length"
    ends = writing(SIZES["recipe"])
    torch.nn.init.zeros_(ends.output.weight)
    hook = ends.output.register_forward_hook(lambda *args: args[2].index_fill(-1, torch.tensor(SEPARATOR), 9.0))
    request = request_for("hello", max_tokens=30)
    assert finish(make(of=ends), request) == [""]
    assert (request.choices[0].finish_reason, request.n_generated) == ("stop", 1)
    hook.remove()


def test_logprobs_are_those_of_the_model(make, model):
    request = request_for("hello", max_tokens=6, logprobs=3, temperature=1.0, seed=1, streams=True)
    scheduler = make()
    scheduler.submit([request])
    pieces = []
    is_more = True
    while is_more:
        is_more = scheduler.turn()
        pieces.append(request.choices[0].take())
    assert len(pieces) == 5  # the prompt's turn makes a step too
    found = [one for piece in pieces if piece is not None for one in piece.logprobs]
    tokens = [*request.prompt.tolist(), *(one.token for one in found)]
    expected = model(torch.tensor(tokens)[None])[0].log_softmax(-1)[len(request.prompt) - 1 : -1]
    assert len(found) == 6
    for one, logprobs in zip(found, expected):
        assert one.logprob == pytest.approx(logprobs[one.token].item(), abs=1e-4)
        assert [token for token, _ in one.likeliest] == logprobs.topk(3).indices.tolist()
    assert [one.offset for one in found] == list(range(6))


def test_logprobs_end_with_the_text(make, model):
    drawn = {"max_tokens": 30, "temperature": 3.0, "top_k": 8, "seed": 3}
    text = alone(model, request_for("hello", **drawn))[0]
    request = request_for("hello", stop=(text[7:10],), logprobs=0, **drawn)
    finish_with = make()
    finish_with.submit([request])
    while finish_with.turn():
        pass
    piece = request.choices[0].take()
    assert len(piece.logprobs) == len(piece.text) == text.index(text[7:10]) > 3


def test_without_tokens_to_write_the_prompt_is_cached(make):
    scheduler = make()
    warm = request_for(LONG(1), max_tokens=0)
    assert finish(scheduler, warm) == [""]
    assert warm.is_done
    assert warm.error is None
    request = request_for(LONG(1), max_tokens=4)
    finish(scheduler, request)
    assert request.cached_tokens == len(request.prompt)


def test_the_queue_is_limited_and_the_rows_are(make):
    scheduler = make(queue=3, rows=2)
    scheduler.submit([request_for("a", max_tokens=9), request_for("b", max_tokens=9)])
    with pytest.raises(RequestError, match="2 requests are waiting, at most 3") as caught:
        scheduler.submit([request_for("c"), request_for("d")])
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    with pytest.raises(RequestError, match="prompt has 4 prompts, at most 3 may wait") as caught:
        scheduler.submit([request_for("c") for _ in range(4)])
    assert (caught.value.status, caught.value.param) == (400, "prompt")
    scheduler.turn()
    last = request_for("c", max_tokens=1, n=2)
    scheduler.submit([last])
    for _ in range(3):
        scheduler.turn()
        assert (scheduler.n_waiting, scheduler.n_running) == (1, 2)
    while scheduler.turn():
        assert scheduler.n_running <= 2
    assert last.is_done
    assert scheduler.n_running == scheduler.n_waiting == 0


@pytest.mark.parametrize("kind", list(SIZES))
def test_models_of_half_precision_are_served(kind, make):
    """bfloat16 rounds differently in batches: the same prompts alone give the same, together they all end."""
    model = writing(SIZES[kind]).bfloat16()
    scheduler = make(of=model)
    request = request_for("hello", max_tokens=9)
    assert finish(scheduler, request) == alone(model, request)
    texts = finish(scheduler, *(request_for(text, max_tokens=9, **DRAWN) for text in PROMPTS))
    assert [len(text.encode()) >= 9 for text in texts] == [True] * len(PROMPTS)


def test_caches_that_grow_are_admitted_as_far_as_memory_goes(make):
    model = writing(SIZES["growing"])
    scheduler = make(of=model)
    requests = [request_for("a", max_tokens=98), request_for("b", max_tokens=48), request_for("c", max_tokens=18)]
    scheduler.memory = 2 * 2 * model.state_bytes(100)  # two, as long as the longest
    scheduler.submit(requests)
    scheduler.turn()
    assert (scheduler.n_running, scheduler.n_waiting) == (2, 1)
    while scheduler.turn():
        assert scheduler.n_running <= 2
    assert [text_of(one.choices[0]) for one in requests] == [alone(model, one)[0] for one in requests]
    scheduler.memory = 1
    assert finish(scheduler, request_for("a", max_tokens=2)) == alone(model, request_for("a", max_tokens=2))


@pytest.mark.parametrize("stage", ["waiting", "reading", "decoding"])
def test_a_client_that_goes_away_or_waits_too_long_frees_its_place(stage, make):
    for cause in ("cancelled", "late"):
        scheduler = make(rows=1, segment_length=16, seconds=50.0)
        request = request_for("a" if stage == "decoding" else LONG(1) * 4, max_tokens=100)
        scheduler.submit([request_for("b", max_tokens=100), request][0 if stage == "waiting" else 1 :])
        scheduler.turn()
        assert scheduler.n_waiting == (1 if stage == "waiting" else 0)
        if cause == "cancelled":
            scheduler.cancel(request)
        else:
            request.submitted_at = time.monotonic() - 51
        scheduler.turn()
        assert request.is_done
        assert request.error.status == (499 if cause == "cancelled" else 504)
        assert scheduler.n_waiting == 0
        assert scheduler.n_running == (1 if stage == "waiting" else 0)


def test_logits_that_are_not_finite_fail_their_request_only(make):
    model = writing(replace(SIZES["recipe"], forget_gate=False))
    with torch.no_grad():
        model.embedding.weight[200] = torch.nan
    scheduler = make(of=model)
    broken, sound = request_for(np.array([256, 200, 97], np.int32)), request_for("a", max_tokens=5)
    assert finish(scheduler, broken, sound)[1] == alone(model, sound)[0]
    assert (broken.error.status, sound.error) == (500, None)


def test_the_thread_survives_an_error_and_ends_when_all_is_answered(make, model, capsys):
    scheduler, told = make(), []
    scheduler.listener = told.extend
    scheduler.start()
    broken = request_for(np.array([9999], np.int32))
    scheduler.submit([broken])
    wait_for(lambda: broken.is_done)
    assert broken.error.status == 500
    requests = [request_for(LONG(i), max_tokens=30) for i in range(5)]
    scheduler.submit(requests)
    scheduler.close()
    assert not scheduler.is_alive
    assert [text_of(request.choices[0]) for request in requests] == [alone(model, one)[0] for one in requests]
    assert told.count(broken) == 1
    assert all(told.count(one) == 1 for one in requests)
    assert "InputError" in capsys.readouterr().err
    with pytest.raises(RequestError, match="shutting down"):
        scheduler.submit([request_for("a")])


def test_a_closed_log_ends_nothing(make, model, monkeypatch):
    def closed(*args) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("traceback.print_exc", closed)
    scheduler = make()
    scheduler.start()
    broken, sound = request_for(np.array([9999], np.int32)), request_for("a", max_tokens=3)
    for request in (broken, sound):
        scheduler.submit([request])
        wait_for(lambda request=request: request.is_done)
    assert (broken.error.status, sound.error) == (500, None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a thread that ends is shown so
def test_however_the_thread_ends_all_are_answered(make, monkeypatch):
    scheduler, told = make(), []
    scheduler.listener = told.extend

    def end() -> None:
        raise SystemError

    monkeypatch.setattr(scheduler, "turn", end)
    monkeypatch.setattr(scheduler, "_fail_all", lambda error: end())
    waiting = request_for("a")
    scheduler.submit([waiting])
    scheduler.start()
    wait_for(lambda: not scheduler.is_alive)
    assert (waiting.error.status, told) == (503, [waiting])
    with pytest.raises(RequestError, match="shutting down"):
        scheduler.submit([request_for("a")])


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
