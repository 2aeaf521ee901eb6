"""Bodies of requests: what is accepted can be answered, and all else is an error that says what is wrong."""

import json
import random

import numpy as np
import pytest

from linrope.data.tokenizers.bytes import ByteTokenizer
from linrope.data.tokenizers.subwords import SubwordTokenizer
from linrope.serving.answers import name_of
from linrope.serving.parameters import NEUTRAL, PARAMETERS, parse_body, tokens_of
from linrope.serving.requests import Options, Piece, Request, RequestError
from tests.conftest import covering
from tests.data.tokenizers.subword_files import KINDS

VALUES = [None, True, False, -1, 0, 1, 3, 0.5, -1.5, 1e30, 10**9, 10**30, "", "abc", "\ud800", "\u202e\0", [], [1, 2]]
VALUES += [
    [None],
    [True],
    [1.5],
    [[1], [2]],
    [[1], "a"],
    ["a", "b"],
    ["a", ""],
    [[]],
    [[[1]]],
    {},
    {"a": 1},
    [{}],
    "é🐍",
]
VALUES += [{"include_usage": True}, {"include_usage": 1}, [10**30], [-1], [256], [257], 2**63, "1"]


@pytest.mark.parametrize("seed", covering(range(4), [0]))
def test_random_bodies(seed):
    draw, accepted = random.Random(seed), 0
    for _ in range(3000):
        names = draw.sample([*PARAMETERS, *NEUTRAL, "other"], draw.choice([1, 1, 2, 3]))
        body = json.dumps({"prompt": "a", **{name: draw.choice(VALUES) for name in names}}).encode()
        if draw.random() < 0.2:
            at = draw.randrange(len(body))
            body = body[:at] + bytes([draw.randrange(256)]) + body[at + draw.randrange(2) :]
        result = taken(body)
        if isinstance(result, RequestError):
            assert result.status == 400
            assert result.code in ("invalid_value", "invalid_json", "unknown_parameter"), body
            assert result.param is not None or result.code == "invalid_json", body
            assert len(result.message) < 600
        else:
            accepted += 1
            assert all(len(prompt) >= 1 and 0 <= prompt.min() <= prompt.max() <= 256 for prompt in result)
    assert 100 < accepted < 2900


def taken(body: bytes) -> list[np.ndarray] | RequestError:
    """The tokens of the prompts of a body, at least one, or what is wrong."""
    try:
        return [tokens_of(prompt, ByteTokenizer(), 257) for prompt in parse_body(body).prompts]
    except RequestError as error:
        return error


def test_names_are_not_repeated_at_length():
    error = taken(json.dumps({"x" * 10**6: 1}).encode())
    assert error.code == "unknown_parameter"
    assert len(error.message) < 600
    assert len(taken(json.dumps({"stop": ["x" * 10**6] * 20}).encode()).message) < 600


def test_tokens_have_names_of_their_own():
    bytes_ = ByteTokenizer()
    names = [name_of(bytes_, token) for token in range(257)]
    assert (names[97], names[195], names[256]) == ("a", "bytes:\\xc3", "<|endoftext|>")
    assert len(set(names)) == 257
    assert name_of(bytes_, 281) == "token_id:281"  # of a model that knows more tokens than bytes


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_subwords(kind):
    tokenizer = SubwordTokenizer(KINDS[kind]())
    tokens = tokenizer.encode_prompt("the quick fox")[1:].tolist()
    names = [name_of(tokenizer, token) for token in tokens]
    assert "".join(names).strip() == "the quick fox"
    assert name_of(tokenizer, tokenizer.separator) == "<|endoftext|>"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [(), ("e", "zz")])
def test_pieces_of_subwords_are_the_text(kind, stop):
    """Random tokens, which cut characters apart: what is sent piece by piece is the text of all of them, after that of
    the prompt."""
    tokenizer, draw = SubwordTokenizer(KINDS[kind]()), random.Random(0)
    for _ in range(30):
        options = Options(max_tokens=40, stop=stop, logprobs=0)
        choice = Request(np.array([1], np.int32), options, tokenizer, streams=True).choices[0]
        pieces = []
        while choice.finish_reason is None:
            choice.add(draw.randrange(tokenizer.vocab_size), -1.0)
            if draw.random() < 0.5 or choice.finish_reason is not None:
                pieces.append(choice.take() or Piece(""))
        decoder = tokenizer.decoder([1])
        text = decoder.feed(choice.tokens) + decoder.finish()
        ends = [text.find(one) for one in stop if one in text]
        assert "".join(piece.text for piece in pieces) == (text[: min(ends)] if ends else text)
        logprobs = [one for piece in pieces for one in piece.logprobs]
        assert [one.token for one in logprobs] == choice.tokens[: len(logprobs)]
        assert ends or len(logprobs) == len(choice.tokens) - (choice.tokens[-1] == tokenizer.separator)
