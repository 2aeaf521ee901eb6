"""The radix tree of snapshots, against a dictionary of prefixes."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from linrope.layers.state import AttentionState, ModelState
from linrope.ops.state import State
from linrope.serving.prefix_cache import PrefixCache, Snapshot

N_BYTES = 4 * (4 + 2 + 1)  # of the state below


def snapshot(number: int, logits: bool = True) -> Snapshot:
    state = State(torch.full((1, 1, 2, 2), float(number)), torch.zeros(1, 1, 2), length=3)
    return Snapshot(ModelState([AttentionState(state)]), torch.zeros(5) if logits else None)


def number_of(found: Snapshot | None) -> int | None:
    return None if found is None else int(found.state[0].past.kv[0, 0, 0, 0])


class Evicted(dict):
    """A store: the number of each snapshot by its tokens, in the order in which they came."""

    def put(self, tokens: np.ndarray, snapshot: Snapshot, wait: bool) -> None:
        self[tuple(tokens.tolist())] = number_of(snapshot)

    def longest(self, tokens: np.ndarray, beyond: int) -> None:
        return None

    def close(self) -> None:
        self.is_closed = True


def tokens(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(10**6)


def test_the_longest_prefix_is_found(cache):
    assert cache.longest(tokens(1, 2)) == (0, None)
    cache.put(tokens(1, 2, 3, 4), snapshot(1))
    cache.put(tokens(1, 2), snapshot(2))  # splits the edge
    cache.put(tokens(1, 2, 3, 5, 6), snapshot(3))  # splits it again, at a node without a snapshot
    cases = {(1, 2, 3, 4): (4, 1), (1, 2, 3, 4, 9): (4, 1), (1, 2, 3): (2, 2), (1, 2, 3, 5, 6, 7): (5, 3)}
    cases |= {(1,): (0, None), (2, 1): (0, None), (): (0, None), (1, 2, 3, 5): (2, 2)}
    for prompt, (length, number) in cases.items():
        depth, found = cache.longest(tokens(*prompt))
        assert (depth, number_of(found)) == (length, number), prompt


def test_a_whole_prompt_needs_logits(cache):
    cache.put(tokens(1, 2), snapshot(1, logits=False))
    assert cache.longest(tokens(1, 2)) == (0, None)
    assert cache.longest(tokens(1, 2, 3))[0] == 2
    cache.put(tokens(1, 2), snapshot(2))
    assert number_of(cache.longest(tokens(1, 2))[1]) == 2
    cache.put(tokens(1, 2), snapshot(3, logits=False))  # is not worth more
    assert number_of(cache.longest(tokens(1, 2))[1]) == 2
    assert len(cache) == 1


def test_what_is_not_used_goes_first_and_its_bytes_with_it():
    evicted = Evicted()
    cache = PrefixCache(3 * (N_BYTES + 2 * 4 + 4), evicted)
    for first in (1, 2, 3):
        cache.put(tokens(first, 7), snapshot(first, logits=False))
    assert (len(cache), cache.n_bytes) == (3, 3 * (N_BYTES + 8))
    cache.longest(tokens(1, 7, 7))
    cache.put(tokens(4, 7), snapshot(4, logits=False))
    assert evicted == {(2, 7): 2}
    assert cache.n_bytes == 3 * (N_BYTES + 8)
    cache.put(tokens(*range(1000)), snapshot(5))  # larger than all of the cache
    assert len(cache) == 3
    cache.close()
    assert evicted.is_closed
    assert list(evicted.items()) == [((2, 7), 2), ((3, 7), 3), ((1, 7), 1), ((4, 7), 4)]
    assert (len(cache), cache.n_bytes, cache.root.children) == (0, 0, {})


def test_it_is_a_dictionary_of_prefixes():
    """Random prefixes of few tokens, with room for some of them only: what is found is the longest that is kept."""
    rng, kept = np.random.default_rng(0), {}
    store = Mock(put=lambda tokens, snapshot, wait: kept.pop(tuple(tokens.tolist())))
    cache = PrefixCache(12 * N_BYTES, store)
    for number in range(600):
        prompt = rng.integers(0, 2, rng.integers(1, 9)).astype(np.int32)
        if rng.random() < 0.5:
            kept[tuple(prompt.tolist())] = number
            cache.put(prompt, snapshot(number, logits=False))
        else:
            prefixes = [tuple(prompt[:n].tolist()) for n in range(1, len(prompt))]
            longest = max((prefix for prefix in prefixes if prefix in kept), key=len, default=())
            depth, found = cache.longest(prompt)
            assert (depth, number_of(found)) == (len(longest), kept.get(longest))
        edges = sum(node.edge.nbytes for node in walk(cache.root))
        assert cache.n_bytes == edges + N_BYTES * len(kept) <= 12 * N_BYTES
        assert all(node.snapshot is not None or len(node.children) > 1 for node in walk(cache.root))
    assert 4 < len(kept) == len(cache)


def walk(root):
    for node in root.children.values():
        yield node
        yield from walk(node)
