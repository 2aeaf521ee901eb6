from pathlib import Path

import pytest
import torch

from linrope.data import Corpus, EvaluationWindows, TrainingBatches, TrainingWindows, find_sources, permute
from linrope.errors import InputError


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


def test_permute_is_the_same_everywhere():
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


def test_the_order_depends_on_the_seed_alone(corpus):
    starts = [[TrainingWindows(corpus, 10, seed).start_of(i) for i in range(19)] for seed in (0, 0, 1)]
    assert starts[0] == starts[1] != starts[2]


def test_evaluation_covers_the_split_once_in_a_shuffled_order(corpus):
    windows = EvaluationWindows(corpus, context=10)
    assert len(windows) == 20
    targets = [tuple(windows[i]["targets"].tolist()) for i in range(20)]
    everything = corpus.tokens(1, 201).view(20, 10)
    assert sorted(targets) == sorted(map(tuple, everything.tolist()))
    assert targets != list(map(tuple, everything.tolist()))


def test_a_split_that_is_too_short_is_named_with_the_mend(corpus):
    with pytest.raises(
        InputError, match=r"train split holds 204 tokens, .* data\.context=204 \+ 1: lower data\.context"
    ):
        TrainingWindows(corpus, 204)
    with pytest.raises(InputError, match="the test split holds 0 tokens"):
        EvaluationWindows(Corpus([]), 10, "test")


def test_ranks_share_the_samples_and_a_later_start_continues():
    def first(n, **options):
        batches = iter(TrainingBatches(2, **options))
        return [next(batches) for _ in range(n)]

    assert first(4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert first(2, rank=0, world_size=2) == [[0, 1], [4, 5]]
    assert first(2, rank=1, world_size=2) == [[2, 3], [6, 7]]
    assert first(2, first=4) == first(4)[2:]
