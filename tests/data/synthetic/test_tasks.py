"""Copying, induction and pass keys: what stands where in a row."""

import pytest
import torch

from linrope.data.corpus.files import find_sources
from linrope.data.corpus.sequences import Corpus
from linrope.data.synthetic.copying import copy_rows, induction_rows
from linrope.data.synthetic.passkey import SHORTEST, passkey_rows
from linrope.data.tokenizers.bytes import decode
from linrope.errors import InputError
from linrope.losses import IGNORE


@pytest.fixture
def text(tmp_path) -> Corpus:
    (tmp_path / "text.txt").write_text("".join(f"line {i} of it\n" for i in range(200)))
    return Corpus(find_sources(tmp_path / "text.txt").documents)


def test_what_is_copied_is_asked_after_the_mark_token_by_token():
    inputs, targets = copy_rows(30, 12, 5, seed=1)
    assert inputs.shape == targets.shape == (30, 12)
    assert (inputs[:, 6] == 0).all()
    assert (targets[:, :6] == IGNORE).all()
    assert torch.equal(targets[:, 6:], inputs[:, :6])
    assert torch.equal(inputs[:, 7:], inputs[:, :5])
    assert set(inputs[:, :6].flatten().tolist()) == {1, 2, 3, 4}


def test_the_symbol_after_the_mark_is_asked_at_the_end():
    inputs, targets = induction_rows(300, 10, 6, seed=2)
    assert ((inputs == 0).sum(1) == 2).all()
    assert (inputs[:, -1] == 0).all()
    assert (targets[:, :-1] == IGNORE).all()
    first = (inputs == 0).int().argmax(1)
    assert torch.equal(targets[:, -1], inputs[torch.arange(300), first + 1])
    assert set(first.tolist()) == set(range(8))  # up to where a symbol still follows it


@pytest.mark.parametrize(("depth", "place"), [(0, 0), (50, 4), (100, 7)])
def test_the_mark_stands_at_its_depth(depth, place):
    inputs, _ = induction_rows(3, 10, 6, seed=2, depth=depth)
    assert (inputs[:, place] == 0).all()


def test_a_pass_key_is_told_in_the_text_and_asked_at_its_end(text):
    for depth, before in ((0, 0), (50, 60), (100, 120)):
        inputs, targets = passkey_rows(4, SHORTEST + 120, text, 3, depth)
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
    inputs, targets = passkey_rows(50, SHORTEST + 100, text, 4)
    written = [decode(row) for row in inputs]
    assert len({row.index("\nThe pass key") for row in written}) > 25
    assert len({decode(row[-5:]) for row in targets}) > 45
    assert len({row[:8] for row in written}) > 10


@pytest.mark.parametrize(
    "make", [lambda n, seed: copy_rows(n, 8, 9, seed), lambda n, seed: induction_rows(n, 8, 9, seed)]
)
def test_rows_follow_from_the_seed(make):
    inputs, targets = make(6, 5)
    assert torch.equal(make(6, 5)[0], inputs)
    assert torch.equal(make(6, 5)[1], targets)
    assert not torch.equal(make(6, (5, 1))[0], inputs)
    assert make(0, 5)[0].shape == (0, 8)


def test_pass_keys_follow_from_the_seed_and_their_number(text):
    few, many = (passkey_rows(n, 200, text, (1, 7))[0] for n in (2, 5))
    assert torch.equal(few, many[:2])
    assert passkey_rows(0, 200, text, 1)[0].shape == (0, 200)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda text: copy_rows(1, 7, 9, 0), "length=7 must be even"),
        (lambda text: copy_rows(1, 8, 2, 0), "vocab_size=2 must be 3 or more"),
        (lambda text: copy_rows(-1, 8, 9, 0), "n_rows=-1 and seed=0 must be 0 or more"),
        (lambda text: induction_rows(1, 2, 9, 0), "length=2 must be 3 or more"),
        (lambda text: induction_rows(1, 8, 9, 0, depth=101), "depth=101 must be a whole number of percent"),
        (lambda text: induction_rows(1, 8, 9, 0, depth=0.5), r"depth=0\.5 must be a whole number of percent"),
        (lambda text: passkey_rows(1, SHORTEST - 1, text, 0), f"raise it to {SHORTEST} or more"),
        (lambda text: passkey_rows(1, 10_000, text, 0), r"length=10000 needs .* tokens of text around the key"),
        (lambda text: passkey_rows(1, 200, text, -1), "seed=-1 must be 0 or more"),
    ],
)
def test_what_does_not_fit_is_named(make, message, text):
    with pytest.raises(InputError, match=message):
        make(text)
