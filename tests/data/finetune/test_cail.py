"""The JSON lines of CAIL2019-SCM."""

import json

from linrope.data.finetune.cail import Choice, read_triplets
from linrope.data.finetune.jsonlines import read_json
from tests.conftest import assert_input_errors


def test_a_triplet_has_two_choices(tmp_path):
    path = tmp_path / "train.json"
    rows = [{"A": "甲", "B": "乙", "C": "丙\u2028", "label": "C"}, {"C": "z", "B": "y", "A": "x", "label": "B"}]
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")
    assert read_triplets(path) == [
        Choice("0", (("甲", "乙"), ("甲", "丙\u2028")), 1),
        Choice("1", (("x", "y"), ("x", "z")), 0),
    ]
    path.write_text('{"A": "x", "B": "y", "C": "z"}')
    assert read_triplets(path) == [Choice("0", (("x", "y"), ("x", "z")), None)]


def test_what_is_wrong_is_named_with_file_and_line(tmp_path):
    path = tmp_path / "train.json"

    def read(second: str, reader=read_triplets):
        def call():
            path.write_text(f'{{"A": "x", "B": "y", "C": "z", "label": "B"}}\n{second}')
            reader(path)

        return call

    assert_input_errors(
        (read('{"A": "x", "B": "y"}'), r"train\.json, line 2: it has no 'C', but 'A', 'B'"),
        (read('{"A": "x", "B": "y", "C": "z", "label": "A"}'), r"line 2: the label 'A' is unknown: .* 'B', 'C'"),
        (read('{"A": "x", "B": "y", "C": "z", "label": 1}'), r"line 2: 'label' is 1, and must be a text"),
        (read('{"A": "x", "B": 3, "C": "z"}'), r"line 2: 'B' is 3, and must be a text"),
        (read("[]"), r"line 2: it is no JSON object"),
        (read("{"), r"line 2: it is not valid JSON"),
        (read("[" * 100_000), r"line 2: it is not valid JSON \(maximum recursion depth"),
        (read("", reader=lambda path: (path.write_text(""), read_triplets(path))), r"train\.json is empty"),
        (
            read("", reader=lambda path: (path.write_text("\t\n"), read_triplets(path))),
            r"train\.json has no JSON objects",
        ),
        (read('{"a": }', reader=read_json), r"train\.json, line 2: it is not valid JSON"),
        (
            read("", reader=lambda path: (path.write_text("[" * 100_000), read_json(path))),
            r"train\.json, line 1: it is not valid JSON \(maximum recursion depth",
        ),
    )
