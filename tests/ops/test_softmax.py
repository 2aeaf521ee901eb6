"""Softmax attention with a window and a cache, against the softmax over all pairs with a mask."""

from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from linrope import KeyValueCache
from linrope.ops.softmax import masked_attention, softmax_attention
from tests.conftest import covering

HEADS, DIM = 2, 4


def defined(q, k, v, window, ids, scale=DIM**-0.5):
    """Every pair, and a mask of those that are too far apart or in two documents."""
    position = torch.arange(q.shape[2])
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance < window)
    if ids is not None:
        document = torch.nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0)).cumsum(1)
        seen = (seen & (document[:, :, None] == document[:, None, :]))[:, None]
    return (q @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1) @ v


def in_pieces(q, k, v, window, ids, sizes, scale=None):
    outputs, cache, start = [], None, 0
    for size in sizes:
        piece = slice(start, start + size)
        o, cache = softmax_attention(
            *(x[:, :, piece] for x in (q, k, v)),
            window=window,
            segment_ids=None if ids is None else ids[:, piece],
            cache=cache,
            scale=scale,
        )
        start += size
        outputs.append(o)
        assert cache.length == start
        assert cache.k.shape[2] == cache.v.shape[2] == min(start, window - 1)
    return torch.cat(outputs, dim=2)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [1, 2, 7, 16, 63, 64, 200])
@pytest.mark.parametrize("sizes", [[1], [63], [65], [130], [64, 64], [5, 1, 1, 0, 90, 33], [40, 1, 65], [1, 1, 1, 80]])
def test_a_window_is_its_mask(sizes, window, packed):
    """Whole and in pieces, outputs and gradients, packed or not."""
    torch.manual_seed(0)
    length = sum(sizes)
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, HEADS, length, DIM, dtype=torch.float64))
    # runs of documents of either row end elsewhere, one within a piece and one over several
    ids = torch.stack((torch.arange(length) // 17, torch.arange(length) // 71 % 2)) if packed else None
    o = in_pieces(q, k, v, window, ids, sizes)
    expected = defined(q, k, v, window, ids)
    torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn_like(o)
    for actual, right in zip(*(torch.autograd.grad((y * weight).sum(), (q, k, v)) for y in (o, expected))):
        torch.testing.assert_close(actual, right, rtol=1e-9, atol=1e-11)


def test_the_scale_reaches_every_path():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, 50, DIM, dtype=torch.float64)
    for sizes in ([50], [20, 1, 29]):
        expected = defined(q, k, v, 6, None, scale=1.3)
        torch.testing.assert_close(in_pieces(q, k, v, 6, None, sizes, scale=1.3), expected)
    torch.testing.assert_close(softmax_attention(q, k, v, scale=1.3)[0], defined(q, k, v, 50, None, scale=1.3))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("packed", [False, True])
def test_a_window_takes_memory_linear_in_the_length(packed):
    length, window = 20000, 64
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 1, length, 8))
    ids = (torch.arange(length) // 999)[None] if packed else None
    with Largest() as largest:
        o, cache = softmax_attention(q, k, v, window=window, segment_ids=ids)
        o.sum().backward()
    assert largest.elements <= 2.1 * window * length  # the pairs within two blocks, where they are packed
    assert cache.k.shape[2] == window - 1
    assert q.grad.isfinite().all()


GRAPHS = [*product((12, 13), (False, True))]


@pytest.mark.parametrize(("example", "packed"), covering(GRAPHS, []))
def test_a_graph_is_for_whole_and_broken_windows(example, packed):
    class Attention(torch.nn.Module):
        def forward(self, q, ids):
            return softmax_attention(q, q, q, window=4, segment_ids=ids if packed else None)[0]

    def inputs(length, rows=2):
        return torch.randn(rows, HEADS, length, DIM), (torch.arange(length) // 5)[None].repeat(rows, 1)

    any_size = torch.export.Dim.DYNAMIC
    sizes = {"q": {0: any_size, 2: any_size}, "ids": {0: any_size, 1: any_size}}
    graph = torch.export.export(Attention(), inputs(example), dynamic_shapes=sizes).module()
    for length, rows in ((8, 1), (9, 2), (16, 3), (31, 1)):
        given = inputs(length, rows)
        torch.testing.assert_close(graph(*given), Attention()(*given))


def test_padding_without_causality_is_one_row_of_the_mask():
    q, visible, shapes = torch.randn(2, HEADS, 9, DIM), torch.arange(9) < torch.tensor([[9], [4]]), []

    def attend(q, k, v, mask):
        shapes.append(mask.shape)
        return masked_attention(q, k, v, mask, None)

    o, _ = softmax_attention(q, q, q, causal=False, key_mask=visible, attend=attend)
    assert shapes == [(2, 1, 9)]
    weights = (q @ q.mT * DIM**-0.5).masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
    torch.testing.assert_close(o, weights @ q)


def test_a_cache_keeps_no_more_alive_than_it_shows():
    whole = torch.randn(1, 3, 100, DIM)
    _, cache = softmax_attention(whole[:, :1], whole[:, 1:2], whole[:, 2:], window=9)
    assert [x.untyped_storage().nbytes() for x in (cache.k, cache.v)] == [8 * DIM * 4] * 2
    assert (cache.length, KeyValueCache(cache.k, cache.v).length) == (100, 8)
