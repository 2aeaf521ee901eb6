"""Copying, induction and pass keys: what stands where in a row."""

import pytest
import torch

from linrope.data.corpus.files import find_sources
from linrope.data.corpus.sequences import Corpus
from linrope.data.synthetic.copying import Copy, Induction
from linrope.data.synthetic.passkey import SHORTEST, Passkey
from linrope.data.tokenizers.bytes import decode
from linrope.errors import InputError
from linrope.losses import IGNORE


@pytest.fixture
def text(tmp_path) -> Corpus:
    (tmp_path / "text.txt").write_text("".join(f"line {i} of it\n" for i in range(200)))
    return Corpus(find_sources(tmp_path / "text.txt").documents)


def test_what_is_copied_is_asked_after_the_mark_token_by_token():
    inputs, targets = Copy(5).rows(30, (12,), seed=1)
    assert inputs.shape == targets.shape == (30, 12)
    assert (inputs[:, 6] == 0).all()
    assert (targets[:, :6] == IGNORE).all()
    assert torch.equal(targets[:, 6:], inputs[:, :6])
    assert torch.equal(inputs[:, 7:], inputs[:, :5])
    assert set(inputs[:, :6].flatten().tolist()) == {1, 2, 3, 4}


def test_the_symbol_after_the_mark_is_asked_at_the_end():
    inputs, targets = Induction(6).rows(300, (10,), seed=2)
    assert ((inputs == 0).sum(1) == 2).all()
    assert (inputs[:, -1] == 0).all()
    assert (targets[:, :-1] == IGNORE).all()
    first = (inputs == 0).int().argmax(1)
    assert torch.equal(targets[:, -1], inputs[torch.arange(300), first + 1])
    assert set(first.tolist()) == set(range(8))  # up to where a symbol still follows it


@pytest.mark.parametrize(("depth", "place"), [(0, 0), (50, 4), (100, 7)])
def test_the_mark_stands_at_its_depth(depth, place):
    inputs, _ = Induction(6).rows(3, (10, depth), seed=2)
    assert (inputs[:, place] == 0).all()


def test_a_pass_key_is_told_in_the_text_and_asked_at_its_end(text):
    for depth, before in ((0, 0), (50, 60), (100, 120)):
        inputs, targets = Passkey(text).rows(4, (SHORTEST + 120, depth), 3)
        assert inputs.shape == targets.shape == (4, SHORTEST + 120)
        for row, row_targets in zip(inputs, targets):
            key = decode(row_targets[-5:])
            assert (row_targets[:-5] == IGNORE).all()
            assert key.isdecimal()
            written = decode(row)
            assert written.endswith(f"\nWhat is the pass key? The pass key is {key[:4]}")
            told = f"\nThe pass key is {key}. Remember it.\n"
            assert written.index(told) == before
            around = written.replace(told, "").removesuffix(f"\nWhat is the pass key? The pass key is {key[:4]}")
            assert around in decode(text.tokens(0, len(text)))
            assert len(around) == 120


def test_keys_depths_and_places_of_the_text_differ_from_row_to_row(text):
    inputs, targets = Passkey(text).rows(50, (SHORTEST + 100,), 4)
    written = [decode(row) for row in inputs]
    assert len({row.index("\nThe pass key") for row in written}) > 25
    assert len({decode(row[-5:]) for row in targets}) > 45
    assert len({row[:8] for row in written}) > 10


@pytest.mark.parametrize("task", [Copy(9), Induction(9)])
def test_rows_follow_from_the_seed(task):
    inputs, targets = task.rows(6, (8,), 5)
    assert all(map(torch.equal, task.rows(6, (8,), 5), (inputs, targets)))
    assert not torch.equal(task.rows(6, (8,), (5, 1))[0], inputs)
    assert task.rows(0, (8,), 5)[0].shape == (0, 8)


def test_pass_keys_follow_from_the_seed_and_their_number(text):
    few, many = (Passkey(text).rows(n, (200,), (1, 7))[0] for n in (2, 5))
    assert torch.equal(few, many[:2])
    assert Passkey(text).rows(0, (200,), 1)[0].shape == (0, 200)


@pytest.mark.parametrize(
    ("task", "n_rows", "case", "message"),
    [
        (Copy(9), 1, (7,), "length=7 must be even"),
        (Copy(2), 1, (8,), "vocab_size=2 must be 3 or more"),
        (Copy(9), -1, (8,), "n_rows=-1 and seed=0 must be 0 or more"),
        (Induction(9), 1, (2,), "length=2 must be 3 or more"),
        (Induction(9), 1, (8, 101), "depth=101 must be a whole number of percent"),
        (Induction(9), 1, (8, 0.5), r"depth=0\.5 must be a whole number of percent"),
        (Passkey, 1, (SHORTEST - 1,), f"raise it to {SHORTEST} or more"),
        (Passkey, 1, (10_000,), r"length=10000 needs .* tokens of text around the key"),
    ],
)
def test_what_does_not_fit_is_named(task, n_rows, case, message, text):
    with pytest.raises(InputError, match=message):
        (Passkey(text) if task is Passkey else task).rows(n_rows, case, 0)
