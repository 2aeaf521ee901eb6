"""Questions about paragraphs, from the JSON of SQuAD 1.1 (arXiv 1606.05250)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linrope.data.finetune.encoding import Encoded
from linrope.data.finetune.jsonlines import read_json, require_text
from linrope.errors import InputError

FILES = {
    "train": ("train-v1.1.json", "train.json"),
    "val": ("dev-v1.1.json", "dev.json"),
    "test": ("test-v1.1.json", "test.json"),
}
"""Names of the files of each split."""


@dataclass(frozen=True)
class Question:
    """A question about a paragraph."""

    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    """Right answers, parts of the context; none in a file without answers."""
    start: int | None
    """Character of the context at which the first answer begins."""

    @property
    def target(self) -> int | None:
        return self.start


def read_questions(path: Path) -> list[Question]:
    """The questions of a file. They may be without answers.

    Raises:
        InputError: JSON of another form, or an answer that does not stand where it should; the message has the place.
    """
    found = list(_questions(read_json(path), path))
    if not found:
        raise InputError(f"{path} has no questions: give a file of SQuAD 1.1.")
    return found


def _questions(values: Any, path: Path) -> Iterator[Question]:
    for article, at in _items(values, "data", f"{path}"):
        for paragraph, at_paragraph in _items(article, "paragraphs", at):
            context = require_text(paragraph, "context", at_paragraph)
            for values_, at_question in _items(paragraph, "qas", at_paragraph):
                yield _question(values_, context, at_question)


def _question(values: dict[str, Any], context: str, at: str) -> Question:
    answers, starts = [], []
    for answer, at_answer in _items(values, "answers", at) if "answers" in values else ():
        text, start = require_text(answer, "text", at_answer), answer.get("answer_start")
        if type(start) is not int or not text or start < 0 or context[start : start + len(text)] != text:
            raise InputError(
                f"{at_answer}: the context has no {text!r:.60} at answer_start={start!r}: give the number of the "
                "answer's first character."
            )
        answers.append(text)
        starts.append(start)
    names = require_text(values, "id", at), require_text(values, "question", at)
    if any("\ud800" <= character <= "\udfff" for character in names[0]):  # predictions name it, in UTF-8
        raise InputError(f"{at}: 'id' is {names[0]!r:.60}, with half a surrogate pair: take that out.")
    return Question(*names, context, tuple(answers), starts[0] if starts else None)


def _items(values: Any, name: str, at: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The objects in the list under a key, and the place of each in words."""
    items = values.get(name) if isinstance(values, dict) else None
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise InputError(f"{at}: it has no list of objects {name!r}: give a file of SQuAD 1.1.")
    for number, item in enumerate(items):
        yield item, f"{at}, {name}[{number}]"


def token_spans(row: Encoded) -> np.ndarray:
    """The bytes of the context (the last text) of each token of a row, from … to, int64 (T, 2); (0, 0) for others."""
    spans = np.zeros((len(row.tokens), 2), dtype=np.int64)
    part = slice(row.start_of_last, row.start_of_last + len(row.ends))
    spans[part, 0], spans[part, 1] = np.concatenate([[0], row.ends])[:-1], row.ends
    return spans


def answer_tokens(question: Question, row: Encoded) -> tuple[int, int] | None:
    """The positions of the first and the last token of the first answer; None if it was cut off."""
    start = len(question.context[: question.start].encode())
    last = start + len(question.answers[0].encode()) - 1
    first_token, last_token = np.searchsorted(row.ends, [start, last], side="right")
    if last_token >= len(row.ends):
        return None
    return int(row.start_of_last + first_token), int(row.start_of_last + last_token)
