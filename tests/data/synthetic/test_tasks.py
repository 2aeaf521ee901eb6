"""Recall tasks: what stands where in a row, and how often."""

import math

import pytest
import torch

from linrope.data.corpus.files import find_sources
from linrope.data.corpus.sequences import Corpus
from linrope.data.synthetic.copying import Copy, Induction
from linrope.data.synthetic.mqar import MQAR
from linrope.data.synthetic.passkey import SHORTEST, Passkey
from linrope.data.tokenizers.bytes import TextDecoder
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
            key = TextDecoder().feed(row_targets[-5:])
            assert (row_targets[:-5] == IGNORE).all()
            assert key.isdecimal()
            written = TextDecoder().feed(row)
            assert written.endswith(f"\nWhat is the pass key? The pass key is {key[:4]}")
            told = f"\nThe pass key is {key}. Remember it.\n"
            assert written.index(told) == before
            around = written.replace(told, "").removesuffix(f"\nWhat is the pass key? The pass key is {key[:4]}")
            assert around in TextDecoder().feed(text.tokens(0, len(text)))
            assert len(around) == 120


def test_keys_depths_and_places_of_the_text_differ_from_row_to_row(text):
    inputs, targets = Passkey(text).rows(50, (SHORTEST + 100,), 4)
    written = [TextDecoder().feed(row) for row in inputs]
    assert len({row.index("\nThe pass key") for row in written}) > 25
    assert len({TextDecoder().feed(row[-5:]) for row in targets}) > 45
    assert len({row[:8] for row in written}) > 10


@pytest.mark.parametrize(
    ("task", "case"), [(Copy(9), (8,)), (Induction(9), (8,)), (MQAR(100), (64, 4)), (Passkey, (200,))]
)
def test_rows_follow_from_the_seed(task, case, text):
    task = Passkey(text) if task is Passkey else task
    inputs, targets = task.rows(20, case, 7)
    assert all(map(torch.equal, task.rows(20, case, 7), (inputs, targets)))
    assert len({tuple(row) for row in inputs.tolist()}) == 20
    for seed in (8, (7, 1), (7, 2)):
        assert not torch.equal(task.rows(20, case, seed)[0], inputs)
    assert task.rows(0, case, 7)[0].shape == (0, case[0])
    if not isinstance(task, Copy | Induction):  # then a row follows from its number too
        for n_rows in (1, 5):
            assert all(map(torch.equal, task.rows(n_rows, case, 7), (inputs[:n_rows], targets[:n_rows])))


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
        (MQAR(100), 1, (64, 0), "n_pairs=0 must be 1 or more"),
        (MQAR(100), 1, (65, 4), "length=65 must be even"),
        (MQAR(100), 1, (64, 17), "length=64 is too short for n_pairs=17, .* raise length to 68 or more"),
        (MQAR(9), 1, (64, 4), r"vocab_size=9 has too few keys .* n_pairs=4 .* raise vocab_size to 10 or more"),
    ],
)
def test_what_does_not_fit_is_named(task, n_rows, case, message, text):
    with pytest.raises(InputError, match=message):
        (Passkey(text) if task is Passkey else task).rows(n_rows, case, 0)
    with pytest.raises(InputError, match=r"n_rows=1 and seed=\(0, -1\) must be 0 or more"):
        Copy(9).rows(1, (8,), (0, -1))


@pytest.mark.parametrize(
    ("length", "n_pairs", "vocab_size"),
    [(64, 4, 8192), (62, 5, 101), (16, 4, 10), (4, 1, 4)],  # the last two: as many pairs as fit, as few tokens as serve
)
def test_every_key_is_asked_for_once_and_its_target_is_its_value(length, n_pairs, vocab_size):
    inputs, targets = MQAR(vocab_size).rows(50, (length, n_pairs), seed=3)
    assert inputs.shape == targets.shape == (50, length)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.min() >= 0
    assert inputs.max() < vocab_size
    for row, row_targets in zip(inputs.tolist(), targets.tolist()):
        keys, values = row[0 : 2 * n_pairs : 2], row[1 : 2 * n_pairs : 2]
        assert len(set(keys)) == len(set(values)) == n_pairs
        assert all(1 <= key < vocab_size // 2 for key in keys)
        assert all(vocab_size // 2 <= value < vocab_size for value in values)
        asked = [t for t in range(length) if row_targets[t] != IGNORE]
        assert all(t >= 2 * n_pairs and t % 2 == 0 for t in asked)
        answers = [(row[t], row_targets[t]) for t in asked]  # the value is said right after the key is read
        assert sorted(answers) == sorted(zip(keys, values))


def test_all_keys_values_and_other_tokens_occur_equally_often():
    inputs, targets = MQAR(12).rows(4000, (16, 2), seed=0)
    spare = inputs[:, 4:][targets[:, 4:] == IGNORE]
    for tokens, low, high in ((inputs[:, :4:2], 1, 6), (inputs[:, 1:4:2], 6, 12), (spare, 0, 12)):
        shares = torch.bincount(tokens.flatten(), minlength=12).double() / tokens.numel()
        expected = torch.zeros(12, dtype=torch.float64)
        expected[low:high] = 1 / (high - low)
        four_deviations = 4 * 0.5 / math.sqrt(tokens.numel())  # 0.5: the most that one draw can have
        torch.testing.assert_close(shares, expected, rtol=0, atol=four_deviations)


def test_questions_are_drawn_by_the_power_law_from_the_slots_left():
    n_rows, gaps = 20_000, (1, 2, 3, 4)
    inputs, targets = MQAR(64).rows(n_rows, (12, 2), seed=1)  # 4 slots for 2 questions
    weights = [gap**-0.99 for gap in gaps]
    slots = [((inputs == inputs[:, key : key + 1]) & (targets != IGNORE)).int().argmax(1) // 2 - 2 for key in (0, 2)]
    for first in range(4):
        for second in range(4):
            share = ((slots[0] == first) & (slots[1] == second)).double().mean().item()
            expected = weights[first] / sum(weights) * weights[second] / (sum(weights) - weights[first])
            expected *= first != second
            assert abs(share - expected) <= 4 * math.sqrt(expected * (1 - expected) / n_rows)
