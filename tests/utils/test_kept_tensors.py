"""Constants are made once, and never where they would have no values."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from linrope import RotaryEmbedding, linear_attention
from linrope.utils import kept_tensors


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(kept_tensors, "_kept", {})


def counted(value: float, made: list) -> torch.Tensor:
    made.append(value)
    return torch.full((3,), value)


def test_made_once_for_each_key_and_found_again():
    made = []
    first, second, other = (kept_tensors.keep(key, "cpu", lambda key=key: counted(key, made)) for key in (1, 1, 2))
    assert made == [1, 2]
    assert first is second
    assert kept_tensors.key_of(first) == 1
    assert kept_tensors.key_of(other.view(3)) == 2
    assert kept_tensors.key_of(torch.full((3,), 1.0)) is None


def test_the_oldest_and_the_large_ones_are_let_go(monkeypatch):
    monkeypatch.setattr(kept_tensors, "MOST_TENSORS", 2)
    made = []
    for key in (1, 2, 1, 3, 1, 2):
        kept_tensors.keep(key, "cpu", lambda key=key: counted(key, made))
    assert made == [1, 2, 3, 2]
    monkeypatch.setattr(kept_tensors, "MOST_BYTES", 11)
    for _ in range(2):
        kept_tensors.keep("large", "cpu", lambda: counted(9, made))
    assert made[-2:] == [9, 9]


def test_neither_kept_nor_used_while_a_graph_is_traced():
    rope = RotaryEmbedding(4)
    with FakeTensorMode():
        assert type(rope.frequencies()) is not torch.Tensor
    assert not kept_tensors._kept
    real = rope.frequencies()
    assert rope.frequencies() is real
    with FakeTensorMode():
        assert type(rope.frequencies()) is not torch.Tensor


def test_made_in_inference_mode_and_used_with_gradients():
    rope = RotaryEmbedding(4)
    with torch.inference_mode():
        assert not rope.frequencies().is_inference()
    q = torch.randn(1, 1, 70, 4, requires_grad=True)
    linear_attention(q, q, q, rope, backend="chunked").sum().backward()
    assert q.grad.isfinite().all()


def test_frequencies_differ_by_all_that_they_depend_on():
    ropes = [RotaryEmbedding(8), RotaryEmbedding(8, 100.0), RotaryEmbedding(8, rotary_dim=4), RotaryEmbedding(6)]
    assert len({tuple(rope.frequencies().tolist()) for rope in ropes}) == len(ropes)
    assert RotaryEmbedding(8, (100.0, None)).frequencies().shape == (2, 4)
