"""The JSON of SQuAD 1.1, and answers as tokens."""

import json

import pytest

from linrope.data.finetune.encoding import TextEncoder
from linrope.data.finetune.squad import answer_tokens, read_questions, token_spans
from linrope.data.tokenizers.bytes import ByteTokenizer
from linrope.data.tokenizers.subwords import SubwordTokenizer
from tests.conftest import assert_input_errors
from tests.data.tokenizers.subword_files import byte_level

CONTEXT = "A naïve 🐍 jumps over the lazy dog, twice."


def squad_file(*questions: dict) -> str:
    article = {"title": "t", "paragraphs": [{"context": CONTEXT, "qas": questions}]}
    return json.dumps({"version": "1.1", "data": [article]})


def question(*answers: str) -> dict:
    found = [{"text": answer, "answer_start": CONTEXT.index(answer)} for answer in answers]
    return {"id": "q", "question": "what?", "answers": found}


def test_questions_have_their_answers(tmp_path):
    path = tmp_path / "dev-v1.1.json"
    path.write_text(squad_file(question("lazy dog", "dog"), {"id": "r", "question": "who?"}))
    first, second = read_questions(path)
    assert (first.id, first.question, first.context) == ("q", "what?", CONTEXT)
    assert (first.answers, first.start) == (("lazy dog", "dog"), CONTEXT.index("lazy"))
    assert (second.answers, second.start) == ((), None)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), SubwordTokenizer(byte_level())], ids=["bytes", "subwords"])
def test_the_tokens_of_an_answer_cover_it(tokenizer, tmp_path):
    path, encode = tmp_path / "dev.json", TextEncoder(tokenizer, 512)
    answers = ["naïve", "🐍", "🐍 jumps", "twice", "A", CONTEXT]
    path.write_text(squad_file(*map(question, answers)))
    for asked in read_questions(path):
        row = encode(asked.question, asked.context)
        first, last = answer_tokens(asked, row)
        spans = token_spans(row)
        covered = CONTEXT.encode()[spans[first, 0] : spans[last, 1]].decode(errors="ignore")
        (answer,) = asked.answers
        assert answer in covered
        assert len(covered) <= len(answer) + 12  # the words that hold it
        if isinstance(tokenizer, ByteTokenizer):
            assert covered == answer
        assert first > row.n_first - 1
        short = TextEncoder(tokenizer, last - 1)(asked.question, asked.context) if last > 20 else None
        assert short is None or answer_tokens(asked, short) is None


def test_what_is_wrong_is_named_with_its_place(tmp_path):
    path = tmp_path / "train.json"

    def read(text: str):
        def call():
            path.write_text(text)
            read_questions(path)

        return call

    moved = question("dog")
    moved["answers"][0]["answer_start"] += 1
    assert_input_errors(
        (read("[]"), r"train\.json: it has no list of objects 'data'"),
        (read('{"data": [{"paragraphs": 3}]}'), r"train\.json, data\[0\]: it has no list of objects 'paragraphs'"),
        (read(squad_file({"question": "a"})), r"paragraphs\[0\], qas\[0\]: it has no 'id', but 'question'"),
        (read(squad_file(moved)), r"qas\[0\], answers\[0\]: the context has no 'dog' at answer_start=\d+"),
        (read(squad_file()), r"train\.json has no questions"),
        (read(squad_file({"id": "x\ud800", "question": "a"})), r"qas\[0\]: 'id' is 'x\\ud800', with half a surrogate"),
        (read("{"), r"train\.json, line 1: it is not valid JSON"),
    )
