"""Shuffled epochs: every row once in each, the same for any number of ranks, from any batch on."""

from itertools import chain, islice

from linrope.data.batches.epochs import ShuffledEpochs


def test_every_epoch_has_each_row_once_in_another_order():
    samples = list(chain.from_iterable(islice(ShuffledEpochs(11, 3, seed=5), 11)))  # three epochs
    epochs = [samples[start : start + 11] for start in (0, 11, 22)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert samples != list(chain.from_iterable(islice(ShuffledEpochs(11, 3, seed=6), 11)))


def test_ranks_deal_the_batches_and_a_run_resumes_at_any_of_them():
    whole = list(islice(ShuffledEpochs(7, 2, seed=1), 12))
    for rank in range(3):
        mine = ShuffledEpochs(7, 2, 1, batches_done=1, rank=rank, world_size=3)
        assert list(islice(mine, 3)) == whole[3 + rank :: 3]
