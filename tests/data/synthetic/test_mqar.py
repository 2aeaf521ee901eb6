import math

import pytest
import torch

from linrope.data.synthetic.mqar import MQAR, POWER
from linrope.errors import InputError
from linrope.losses import IGNORE


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


def test_the_first_question_falls_into_a_slot_by_the_power_law():
    n_rows, n_slots = 20_000, 15
    _, targets = MQAR(64).rows(n_rows, (32, 1), seed=1)
    slots = (targets != IGNORE).nonzero()[:, 1] // 2 - 1
    gaps = torch.arange(1, n_slots + 1, dtype=torch.float64)
    expected = gaps ** (POWER - 1) / (gaps ** (POWER - 1)).sum()
    deviation = (expected * (1 - expected) / n_rows).sqrt()
    shares = torch.bincount(slots, minlength=n_slots) / n_rows
    assert ((shares - expected).abs() < 4 * deviation).all()


def test_later_questions_are_drawn_by_the_same_law_from_the_slots_left():
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


def test_a_row_follows_from_the_seed_and_its_number():
    inputs, targets = MQAR(100).rows(20, (64, 4), seed=7)
    for n_rows in (1, 5, 20):
        fewer = MQAR(100).rows(n_rows, (64, 4), seed=7)
        assert torch.equal(fewer[0], inputs[:n_rows])
        assert torch.equal(fewer[1], targets[:n_rows])
    assert len({tuple(row) for row in inputs.tolist()}) == 20
    for seed in (8, (7, 1), (7, 2)):
        assert not torch.equal(MQAR(100).rows(20, (64, 4), seed)[0], inputs)
    assert MQAR(100).rows(0, (64, 4), seed=7)[0].shape == (0, 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_rows": -1}, "n_rows=-1 and seed=0 must be 0 or more"),
        ({"seed": (0, -1)}, r"seed=\(0, -1\) must be 0 or more"),
        ({"case": (64, 0)}, "n_pairs=0 must be 1 or more"),
        ({"case": (65, 4)}, "length=65 must be even"),
        ({"case": (64, 17)}, "length=64 is too short for n_pairs=17, .* raise length to 68 or more"),
        ({"vocab_size": 9}, r"vocab_size=9 has too few keys .* n_pairs=4 .* raise vocab_size to 10 or more"),
    ],
)
def test_what_does_not_fit_is_named_with_the_mend(options, message):
    arguments = {"n_rows": 2, "case": (64, 4), "seed": 0, **options}
    with pytest.raises(InputError, match=message):
        MQAR(arguments.pop("vocab_size", 100)).rows(**arguments)
