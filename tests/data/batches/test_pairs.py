"""Batches of pairs: what is in them, their sizes, and their order."""

import numpy as np
import pytest
import torch

from linrope.data.batches.pairs import EvaluationPairs, TokenPairs, TrainingPairs, TranslationTokens, by_length, cut
from linrope.data.parallel_text import ParallelText
from linrope.data.tokenizers.bytes import ByteTokenizer
from linrope.data.tokenizers.subwords import SubwordTokenizer
from linrope.data.tokenizers.training import train_bpe
from linrope.errors import InputError
from tests.data.tokenizers.subword_files import byte_level, wordpiece

TOKENIZER = ByteTokenizer()


def text_of(n, seed=0, longest=12):
    drawn = np.random.default_rng(seed)
    sides = [["abcdefghijkl"[: drawn.integers(1, longest + 1)] + str(i) for i in range(n)] for _ in range(2)]
    return ParallelText(*sides)


def test_a_batch_has_ends_beginnings_and_padding():
    tokenizer = train_bpe(["ab cd"], 259, "data.vocab_size")  # bytes and three special tokens
    a, b, c = (tokenizer.encode_batch([letter])[0][0] for letter in "abc")
    pairs = TokenPairs(ParallelText(["ab", "c"], ["c", "abc"]), tokenizer, keep_text=True)
    batch = pairs.batch([0, 1])
    assert batch["inputs"].tolist() == [[a, b, 2], [c, 2, 0]]
    assert batch["source_mask"].tolist() == [[True, True, True], [True, True, False]]
    assert batch["decoder_inputs"].tolist() == [[1, c, 0, 0], [1, a, b, c]]
    assert batch["targets"].tolist() == [[c, 2, -100, -100], [a, b, c, 2]]
    assert (batch["sources"], batch["references"]) == (["ab", "c"], ["c", "abc"])
    assert {batch[name].dtype for name in ("inputs", "decoder_inputs", "targets")} == {torch.int64}


def test_special_tokens_are_the_tokenizers_or_its_separator():
    assert TranslationTokens.of(TOKENIZER) == TranslationTokens(256, 256, 256)
    bert = SubwordTokenizer(byte_level(("[PAD]", "[CLS]", "[SEP]")))
    assert TranslationTokens.of(bert) == TranslationTokens(begin=1, end=2, pad=0)
    assert TranslationTokens.of(SubwordTokenizer(wordpiece())) == TranslationTokens(begin=1, end=1, pad=1)


def test_each_epoch_has_all_short_pairs_once_in_batches_of_similar_lengths_that_fit():
    pairs = TokenPairs(text_of(331), TOKENIZER, max_length=14)
    lengths = np.array([[len(line) + 1 for line in side] for side in (text_of(331).source, text_of(331).target)])
    short = int((lengths.max(0) <= 14).sum())
    assert len(pairs) == short
    assert pairs.n_long == 331 - short > 20
    training = TrainingPairs(pairs, 90, seed=3)
    seen, paddings = [], 0
    for epoch in range(3):
        batches = [training.numbers_of(epoch * training.n_batches + i) for i in range(training.n_batches)]
        assert sorted(np.concatenate(batches)) == list(range(short))
        seen.append([tuple(batch) for batch in batches])
        for i in range(training.n_batches):
            batch = training[epoch * training.n_batches + i]
            assert batch["n_positions"] == 90
            rows = len(batch["inputs"])
            assert rows * max(batch["inputs"].shape[1], batch["targets"].shape[1]) <= 90
            paddings += (batch["targets"] == -100).sum().item()
    assert paddings < 0.02 * 3 * lengths[1].sum()
    assert seen[0] != seen[1] != seen[2]
    assert set(seen[0]) != set(seen[1])  # pairs of equal lengths are exchanged
    again = TrainingPairs(pairs, 90, seed=3)
    later = training.n_batches + 5
    assert again.numbers_of(later).tolist() == list(seen[1][5])  # without the batches before
    assert TrainingPairs(pairs, 90, seed=4).numbers_of(later).tolist() != list(seen[1][5])


def test_the_lengths_of_an_order_do_not_depend_on_its_key():
    lengths = np.random.default_rng(1).integers(2, 9, (2, 200))
    orders = [by_length(lengths, 5, epoch) for epoch in range(4)]
    for order in orders:
        assert sorted(order) == list(range(200))
        assert (lengths[:, order] == lengths[:, orders[0]]).all()
    assert len({tuple(order) for order in orders}) == 4
    assert (np.diff(lengths[1, orders[0]]) >= 0).all()
    assert by_length(lengths, 5, 2).tolist() == orders[2].tolist()


def test_cuts_are_greedy_and_a_long_pair_stands_alone():
    lengths = np.array([[1, 2, 2, 3, 30, 4], [2, 2, 3, 1, 1, 4]])
    assert cut(lengths, 9).tolist() == [0, 3, 4, 5, 6]


@pytest.mark.parametrize("in_order", [False, True])
def test_evaluation_reads_each_pair_once_over_all_ranks(in_order):
    text = text_of(47)
    pairs, found = TokenPairs(text, TOKENIZER, keep_text=True), []
    for rank in range(3):
        data = EvaluationPairs(pairs, 60, rank, 3, in_order)
        found.append([source for i in range(len(data)) for source in data[i]["sources"]])
        if in_order:
            assert found[-1] == text.source[rank::3]
    assert sorted(source for of_rank in found for source in of_rank) == sorted(text.source)
    assert "n_positions" not in data[0]


def test_no_pair_to_train_on_is_an_error():
    with pytest.raises(InputError, match=r"no pair that is neither empty nor longer than data\.max_length"):
        TrainingPairs(TokenPairs(text_of(5), TOKENIZER, max_length=2), 90, 0)
