"""The state is a monoid: merge is associative, State.zeros is neutral, and a call's state is its tokens' merged."""

import itertools
from dataclasses import replace

import pytest
import torch

from linrope import InputError, RotaryEmbedding, State, linear_attention, merge, summarize


def random_state(length, normalize="plain", seed=0):
    draw = torch.Generator().manual_seed(seed + length)
    shapes = [(2, 3, 6, 5), (2, 3, 6), (2, 3), (2, 3, 6)]
    kv, k_sum, log_decay, rotated = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return State(kv, k_sum.abs(), length, -log_decay.abs(), rotated if normalize == "rotary" else None)


def assert_same(a: State, b: State, tolerance: float = 1e-12):
    assert a.length == b.length
    torch.testing.assert_close(a.tensors, b.tensors, rtol=tolerance, atol=tolerance)


ROPES = {
    "interleaved": RotaryEmbedding(6, 100.0),
    "half-split": RotaryEmbedding(6, 100.0, interleaved=False),
    "partial": RotaryEmbedding(6, 100.0, rotary_dim=4),
    "a base for each head": RotaryEmbedding(6, (100.0, None, 7.0)),
    "signed": RotaryEmbedding(6, 100.0, signed=True),
    "none": None,
}


@pytest.mark.parametrize("normalize", ["plain", "rotary"])
@pytest.mark.parametrize("rope", ROPES)
def test_merge_is_associative_with_an_identity(rope, normalize):
    rope = ROPES[rope]
    a, b, c = (random_state(length, normalize) for length in (7, 10**9, 1000))
    assert_same(merge(merge(a, b, rope), c, rope), merge(a, merge(b, c, rope), rope))
    nothing = State.zeros(2, 3, 6, 5, normalize=normalize, dtype=torch.float64)
    assert nothing.length == 0
    assert_same(merge(nothing, a, rope), a, 0)
    assert_same(merge(a, nothing, rope), a, 0)


def test_merge_of_a_run_that_forgot_everything_keeps_the_right_one():
    left, right = random_state(7), random_state(9)
    cut = State(right.kv, right.k_sum, right.length, torch.full((2, 3), -torch.inf))
    merged = merge(left, cut.to(torch.float64))
    assert torch.equal(merged.kv, right.kv)
    assert torch.equal(merged.k_sum, right.k_sum)
    assert (merged.log_decay == -torch.inf).all()


def test_a_state_in_half_precision_keeps_its_sums_in_float32():
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    _, state = linear_attention(q, k, v, return_state=True)
    assert {x.dtype for x in state.to(torch.bfloat16).tensors.values()} == {torch.float32}
    assert {x.dtype for x in state.to("cpu", torch.float64).tensors.values()} == {torch.float64}
    assert state.to("cpu", copy=True).kv.data_ptr() != state.kv.data_ptr() == state.to("cpu").kv.data_ptr()
    halves = q.bfloat16(), k.bfloat16(), v.bfloat16()
    assert torch.equal(
        linear_attention(*halves, state=state.to(torch.bfloat16)), linear_attention(*halves, state=state)
    )


def attended(k, v, rope, **options):
    return linear_attention(k, k, v, rope, return_state=True, **options)[1]


@pytest.mark.parametrize("state_of", [attended, summarize])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("rope", "normalize"),
    [
        *itertools.product(("interleaved", "a base for each head"), ("plain", "rotary", "none")),
        *itertools.product(["signed"], ("plain", "none")),
    ],
)
def test_states_of_pieces_merge_into_the_state_of_the_whole(rope, normalize, packed, state_of):
    """Each piece run from nothing: the prefix sum that sequence parallelism computes, boundaries included."""
    torch.manual_seed(0)
    k, v = (torch.randn(2, 3, 200, size, dtype=torch.float64) for size in (6, 5))
    decay = -torch.rand(2, 3, 200, dtype=torch.float64) / 10
    ids = (torch.arange(200) >= 130).long().expand(2, -1) if packed else None
    rope, merged = ROPES[rope], State.zeros(2, 3, 6, 5, normalize=normalize, dtype=torch.float64)

    def state(tokens):
        options = {"log_decay": decay[:, :, tokens], "segment_ids": None if ids is None else ids[:, tokens]}
        return state_of(k[:, :, tokens], v[:, :, tokens], rope, normalize=normalize, **options)

    for start, stop in itertools.pairwise((0, 1, 64, 129, 150, 200)):
        merged = merge(merged, state(slice(start, stop)), rope)
    assert_same(merged, state(slice(0, 200)), 1e-11)


def test_merge_differentiates_through_both_states_and_theta():
    rope = RotaryEmbedding(6, 100.0, trainable=True).double()
    tensors = [tensor.requires_grad_() for length in (3, 5) for tensor in random_state(length).tensors.values()]

    def merged(*tensors):
        left, right = State(*tensors[:2], 3, tensors[2]), State(*tensors[3:5], 5, tensors[5])
        state = merge(left, right, rope)
        return state.kv, state.k_sum, state.log_decay

    assert torch.autograd.gradcheck(merged, tuple(tensors))
    (gradient,) = torch.autograd.grad(merged(*tensors)[0].square().sum() / 2, rope.theta)
    assert gradient.abs().min() > 0


def test_zeros_sizes_bytes_and_moves():
    state = State.zeros(2, 3, 6)
    assert (state.kv.shape, state.k_sum.shape, state.log_decay.shape) == ((2, 3, 6, 6), (2, 3, 6), (2, 3))
    assert state.kv.dtype == torch.float32
    assert state.nbytes == 4 * 2 * 3 * (36 + 6 + 1)
    assert State.zeros(2, 3, 6, normalize="rotary").nbytes == 4 * 2 * 3 * (36 + 6 + 6 + 1)
    assert state.to(torch.float64).log_decay.dtype == torch.float64
    graph = State(state.kv.requires_grad_() * 2, state.k_sum, 0)
    assert graph.kv.requires_grad
    assert not graph.detach().kv.requires_grad


ZEROS = State.zeros(2, 3, 6)


@pytest.mark.parametrize(
    ("left", "right", "rope", "message"),
    [
        (ZEROS, State.zeros(2, 3, 6, 5), None, r"left\.kv is \(2, 3, 6, 6\).*right\.kv \(2, 3, 6, 5\)"),
        (ZEROS, ZEROS.to(torch.float64), None, "float64"),
        (ZEROS, State.zeros(2, 3, 6, normalize="rotary"), None, "normalize"),
        (ZEROS, ZEROS, RotaryEmbedding(4), r"rope has dim=4.*have 6"),
        (ZEROS, ZEROS, RotaryEmbedding(6, [10.0, 100.0]), r"rope\.base has 2 entries.*3 heads"),
        (replace(ZEROS, length=2**53), replace(ZEROS, length=1), None, r"2\^53"),
        (replace(ZEROS, length=1e9), ZEROS, None, r"left\.length=1000000000\.0 must be an int"),
        (ZEROS, replace(ZEROS, length=1e9), None, r"right\.length=1000000000\.0 must be an int"),
        (ZEROS, None, None, "right is a NoneType: pass"),
    ],
)
def test_merge_refuses_states_that_do_not_fit(left, right, rope, message):
    with pytest.raises(InputError, match=message):
        merge(left, right, rope)
