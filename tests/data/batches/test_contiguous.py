"""ContiguousBatches: each row goes on where it ended, ranks share the corpus, and any batch can be the first."""

import pytest
import torch

from linrope.data.batches.contiguous import ContiguousBatches
from linrope.data.corpus.files import find_sources
from linrope.data.corpus.sequences import Corpus
from linrope.data.tokenizers.bytes import SEPARATOR
from linrope.errors import InputError


@pytest.fixture
def corpus(tmp_path):
    for number in range(7):
        (tmp_path / f"{number}.txt").write_bytes(bytes(range(65, 65 + 13 + number)) * 3)
    return Corpus(find_sources(tmp_path).documents)


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
    rows = ContiguousBatches(corpus, context=8, batch_size=2, document_mask=True)
    found = set()
    for number in range(rows.batches_per_pass):
        batch = rows[number]
        for row in range(2):
            start = rows.start_of(number, row)
            before = SEPARATOR if number == 0 or start == 0 else corpus.tokens(start - 1, start).item()
            assert batch["fresh"][row].item() == (before == SEPARATOR)
            tokens = batch["inputs"][row].tolist()
            numbers = [tokens[:i].count(SEPARATOR) for i in range(8)]
            assert batch["segment_ids"][row].tolist() == numbers
            found |= {before == SEPARATOR, max(numbers) > 0}
    assert found == {True, False}


def test_too_short_a_corpus_is_named(corpus):
    with pytest.raises(
        InputError, match=r"too few for data.batch_size=50 contiguous rows of data.context=10 on each of 2"
    ):
        ContiguousBatches(corpus, 10, 50, world_size=2)
    assert ContiguousBatches(corpus, 300, 1).batches_per_pass == 1  # a single one is not taken away
