"""Windows drawn at random, and contiguous batches."""

from pathlib import Path

import pytest
import torch

from linrope.data.batches.contiguous import ContiguousBatches
from linrope.data.batches.shuffling import permute
from linrope.data.batches.windows import EvaluationWindows, OverlappingWindows, TrainingWindows, segment_ids_of
from linrope.data.corpus.files import find_sources
from linrope.data.corpus.sequences import Corpus
from linrope.data.tokenizers.bytes import SEPARATOR
from linrope.errors import InputError
from linrope.losses import IGNORE


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    for name in range(4):
        (tmp_path / f"{name}.txt").write_bytes(bytes(1 + name * 50 + i for i in range(50)))
    return Corpus(find_sources(tmp_path).documents)  # 4 × 51 = 204 tokens


@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 1000])
def test_permute_is_a_permutation_that_its_key_names(n):
    order = [permute(i, n, 7) for i in range(n)]
    assert sorted(order) == list(range(n))
    assert order == [permute(i, n, 7) for i in range(n)]
    if n > 15:
        assert order != list(range(n))
        assert order != [permute(i, n, 8) for i in range(n)]
    # the same everywhere
    assert [permute(i, 10, 1, 2) for i in range(10)] == [4, 8, 0, 1, 6, 3, 7, 5, 2, 9]


def test_permute_spreads_neighbours():
    n = 4096
    order = torch.tensor([permute(i, n, 3) for i in range(n)], dtype=torch.float64)
    correlation = torch.corrcoef(torch.stack([order[:-1], order[1:]]))[0, 1]
    assert abs(correlation) < 0.05  # 3 standard deviations of independent draws
    with pytest.raises(IndexError, match="outside 0 … 4095"):
        permute(n, n, 3)


def test_an_epoch_of_training_never_repeats_and_the_next_starts_elsewhere(corpus):
    windows = TrainingWindows(corpus, context=10, seed=1)
    n = windows.n_windows
    assert n == 19  # 203 targets hold 20 windows of 10; one is given up for the offset
    epochs = [[windows.start_of(epoch * n + i) for i in range(n)] for epoch in range(8)]
    for starts in epochs:
        assert sorted(starts) == [min(starts) + 10 * i for i in range(n)]
        assert max(starts) + 11 <= len(corpus)
    assert len({min(starts) for starts in epochs}) > 3
    first_epochs = [[TrainingWindows(corpus, 10, seed).start_of(i) for i in range(n)] for seed in (1, 2)]
    assert first_epochs[0] == epochs[0] != first_epochs[1]
    assert epochs[0] != [start - min(epochs[1]) + min(epochs[0]) for start in epochs[1]]


def test_a_sample_is_tokens_and_their_next(corpus):
    windows = TrainingWindows(corpus, context=10)
    sample, start = windows[5], windows.start_of(5)
    assert torch.equal(sample["inputs"], corpus.tokens(start, start + 10))
    assert torch.equal(sample["targets"], corpus.tokens(start + 1, start + 11))


@pytest.mark.parametrize("context", [203, 150, 102, 101])
def test_a_corpus_of_little_more_than_a_window_still_serves(corpus, context):
    windows = TrainingWindows(corpus, context)
    assert {len(windows[i]["targets"]) for i in range(20)} == {context}


def test_evaluation_covers_the_split_once_in_a_shuffled_order(corpus):
    windows = EvaluationWindows(corpus, context=10)
    assert len(windows) == 20
    targets = [tuple(windows[i]["targets"].tolist()) for i in range(20)]
    everything = corpus.tokens(1, 201).view(20, 10)
    assert sorted(targets) == sorted(map(tuple, everything.tolist()))
    assert targets != list(map(tuple, everything.tolist()))


@pytest.mark.parametrize(("context", "stride"), [(10, 5), (10, 10), (10, 1), (7, 4), (60, 23), (203, 100)])
def test_overlapping_windows_predict_each_token_once_where_it_has_most_context(corpus, context, stride):
    windows = OverlappingWindows(corpus, context, stride=stride)
    text, seen = corpus.tokens(0, len(corpus)), []
    for i in range(len(windows)):
        start, targets = windows.start_of(i), windows[i]["targets"]
        (asked,) = torch.nonzero(targets != IGNORE, as_tuple=True)
        assert torch.equal(targets[asked], text[start + 1 + asked])
        assert torch.equal(windows[i]["inputs"], text[start : start + context])
        assert start == 0 or asked.min() >= context - stride
        seen += (start + 1 + asked).tolist()
    assert sorted(seen) == list(range(1, len(corpus)))
    assert len(windows) == 1 or seen != sorted(seen)


def test_a_split_that_is_too_short_is_named_with_the_mend(corpus):
    with pytest.raises(InputError, match=r"train split holds 204 tokens, .* data\.context=204 \+ 1: lower data\.con"):
        TrainingWindows(corpus, 204)
    with pytest.raises(InputError, match="the test split holds 0 tokens"):
        EvaluationWindows(Corpus([]), 10, "test")


def test_a_separator_belongs_to_the_document_that_it_ends():
    tokens = torch.tensor([[1, 2, SEPARATOR, 3, SEPARATOR, SEPARATOR, 4], [SEPARATOR, 1, 2, 3, 4, 5, SEPARATOR]])
    assert segment_ids_of(tokens).tolist() == [[0, 0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    assert segment_ids_of(tokens[0]).tolist() == [0, 0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize("kind", [TrainingWindows, EvaluationWindows])
def test_a_document_mask_numbers_documents_and_otherwise_the_same_samples(corpus, kind):
    plain, masked = kind(corpus, 100), kind(corpus, 100, document_mask=True)
    assert set(plain[0]) == {"inputs", "targets"}
    for name in plain[0]:
        assert torch.equal(plain[0][name], masked[0][name])
    ids, inputs = masked[0]["segment_ids"], masked[0]["inputs"]
    assert (ids.dtype, ids.shape) == (torch.int64, (100,))
    ends = (inputs == SEPARATOR).nonzero().flatten()
    assert len(ends) in (1, 2)  # documents have 51 tokens
    assert (ids[1:] != ids[:-1]).nonzero().flatten().tolist() == [end for end in ends.tolist() if end < 99]


# --- contiguous batches: each row goes on where it ended, ranks share the corpus, any batch can be the first ----------


def test_rows_go_on_where_they_ended(corpus):
    rows = ContiguousBatches(corpus, context=10, batch_size=3, seed=4)
    assert rows.batches_per_pass == (len(corpus) - 1) // 3 // 10 - 1  # so that passes can be shifted
    for number in range(2 * rows.batches_per_pass):
        batch = rows[number]
        assert batch["inputs"].shape == (3, 10)
        assert batch["inputs"].dtype == torch.int64
        assert torch.equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
        begins = number % rows.batches_per_pass == 0
        assert batch["fresh"].tolist() == [begins] * 3
        if not begins:
            assert torch.equal(batch["inputs"][:, 0], rows[number - 1]["targets"][:, -1])
        for row in range(3):
            start = rows.start_of(number, row)
            assert row * rows.row_tokens <= start
            assert start + 10 <= (row + 1) * rows.row_tokens  # and one target more
            assert torch.equal(batch["inputs"][row], corpus.tokens(start, start + 10))


def test_passes_are_shifted_by_the_seed(corpus):
    rows = {seed: ContiguousBatches(corpus, 7, 2, seed) for seed in (0, 1)}
    starts = {seed: [each.start_of(n * each.batches_per_pass, 0) for n in range(9)] for seed, each in rows.items()}
    assert len(set(starts[0])) > 1
    assert starts[0] != starts[1]


def test_ranks_have_rows_of_their_own(corpus):
    whole = ContiguousBatches(corpus, context=10, batch_size=4, seed=1)
    for rank in range(2):
        mine = ContiguousBatches(corpus, context=10, batch_size=2, seed=1, rank=rank, world_size=2)
        for number in (0, 3, 5, 11):
            assert torch.equal(mine[number]["inputs"], whole[number]["inputs"][2 * rank : 2 * rank + 2])


def test_with_a_document_mask_documents_begin_without_a_state(corpus):
    rows = ContiguousBatches(corpus, context=17, batch_size=2, seed=2, document_mask=True)
    found = set()
    for number in range(rows.batches_per_pass):
        batch = rows[number]
        for row in range(2):
            start = rows.start_of(number, row)
            before = SEPARATOR if number == 0 or start == 0 else corpus.tokens(start - 1, start).item()
            assert batch["fresh"][row].item() == (before == SEPARATOR)
            tokens = batch["inputs"][row].tolist()
            numbers = [tokens[:i].count(SEPARATOR) for i in range(17)]
            assert batch["segment_ids"][row].tolist() == numbers
            found.add((number > 0 and before == SEPARATOR, max(numbers) > 0))
    assert {fresh for fresh, _ in found} == {several for _, several in found} == {True, False}


def test_too_short_a_corpus_is_named(corpus):
    with pytest.raises(
        InputError, match=r"too few for data.batch_size=50 contiguous rows of data.context=10 on each of 2"
    ):
        ContiguousBatches(corpus, 10, 50, world_size=2)
    assert ContiguousBatches(corpus, 150, 1).batches_per_pass == 1  # a single one is not taken away
    two = ContiguousBatches(corpus, 100, 1)  # nor one of two: a state passes from the first to the second
    assert two.batches_per_pass == 2
    assert [two[n]["fresh"].item() for n in range(4)] == [True, False, True, False]
    assert all(two.start_of(2 * n, 0) + 200 < len(corpus) for n in range(20))
