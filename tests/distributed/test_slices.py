"""What ranks send each other, and what every one of them refuses with one message."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from linrope import (
    EncoderConfig,
    LanguageModel,
    LanguageModelConfig,
    LinearAttention,
    SoftmaxAttention,
    State,
)
from linrope.distributed.group import SequenceGroup
from linrope.distributed.segments import sequence_parallel_segmented_loss, tokens_of_rank
from linrope.distributed.sequence import (
    sequence_parallel_attention,
    sequence_parallel_loss,
    sequence_parallel_masked_loss,
)
from linrope.distributed.slices import SequenceSlice
from linrope.positions.base import PositionsConfig
from tests.conftest import assert_input_errors
from tests.distributed.ranks import run_on_ranks

COLLECTIVES = {"all_gather": 1, "reduce_scatter": 0, "all_to_all_single": 1, "broadcast": 0, "reduce": 0}
"""Each collective of the group, with the place of what this rank sends (of what it receives in a reduce-scatter)."""


@contextlib.contextmanager
def counted(sent: Counter):
    """Inside, `sent` counts calls and bytes of each collective."""

    def counting(name, real):
        def call(*args, **options):
            sent[name, "calls"] += 1
            sent[name, "bytes"] += args[COLLECTIVES[name]].nbytes
            return real(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(dist, name, counting(name, getattr(dist, name)))
        yield


def traffic(length: int, **options) -> tuple[Counter, Counter]:
    """What this rank sends in the forward and in the backward of a model that reads `length` tokens of it."""
    torch.manual_seed(0)
    lm = LanguageModel(LanguageModelConfig(vocab_size=5, d_model=8, n_heads=2, n_layers=3, **options))
    tokens = torch.randint(5, (1, length))
    forward, backward = Counter(), Counter()
    with counted(forward):
        loss, _ = sequence_parallel_loss(lm, tokens, tokens, group=SequenceGroup())
    with counted(backward):
        loss.backward()
    return forward, backward


HYBRID = {"attention": ["linear", "softmax", "linear"], "window": 5, "short_conv": 3, "forget_gate": True}
TRAFFIC = {"linear": {"forget_gate": True}, "hybrid": HYBRID}


def attend(change: str) -> None:
    """Calls the operator with what does not fit, or not on the second rank."""
    group = SequenceGroup()
    is_second = group.rank == 1
    shape, options = (2, 1, 4, 2), {}
    if change == "no tokens" and is_second:
        shape = (2, 1, 0, 2)
    elif change == "rows" and is_second:
        shape = (3, 1, 4, 2)
    elif change == "some packed" and not is_second:
        options = {"segment_ids": torch.zeros(2, 4, dtype=torch.int64)}
    elif change == "bad ids":
        options = {"segment_ids": torch.zeros(2, 3 if is_second else 4, dtype=torch.int64)}
    elif change == "state":
        options = {"state": dataclasses.replace(State.zeros(2, 1, 2), length=3 + group.rank)}
    q = torch.ones(shape)
    sequence_parallel_attention(q, q, q, group=group, **options)


@contextlib.contextmanager
def nothing_sent():
    """Inside, what is refused is refused before the first collective: no other rank waits for this one."""
    sent = Counter()
    with counted(sent):
        try:
            yield
        finally:
            assert not sent


def softmax_layer() -> object:
    x = torch.ones(1, 3, 4)
    where = SequenceSlice.of(SequenceGroup(), (1, 3), x.device)
    with nothing_sent():
        return SoftmaxAttention(4, 1, short_conv=3)(x, where.state_before())


def softmax_model() -> object:
    lm = LanguageModel(
        LanguageModelConfig(vocab_size=5, d_model=8, n_heads=2, n_layers=2, attention=["linear", "softmax"])
    )
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with nothing_sent():
        return sequence_parallel_loss(lm, tokens, tokens, group=SequenceGroup())


def softmax_encoder() -> object:
    mlm = EncoderConfig(vocab_size=5, d_model=8, n_heads=2, n_layers=1, attention="softmax", head="masked_lm").build()
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with nothing_sent():
        return sequence_parallel_masked_loss(mlm, tokens, tokens, group=SequenceGroup())


LEARNED = {"positions": PositionsConfig("learned", length=5)}


def too_long() -> object:
    """The first rank's tokens have positions."""
    lm = LanguageModel(LanguageModelConfig(vocab_size=5, d_model=8, n_heads=2, n_layers=1, **LEARNED))
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    return sequence_parallel_loss(lm, tokens, tokens, group=SequenceGroup())


def too_long_a_document() -> object:
    """The first rank has one of 2 tokens, and the first of one of 6."""
    lm = LanguageModel(LanguageModelConfig(vocab_size=5, d_model=8, n_heads=2, n_layers=1, **LEARNED))
    n = (3, 5)[dist.get_rank()]
    tokens, ids = torch.zeros(1, n, dtype=torch.int64), torch.tensor([([0, 0, 1], [1] * 5)[dist.get_rank()]])
    return sequence_parallel_loss(lm, tokens, tokens, group=SequenceGroup(), segment_ids=ids)


def too_long_for_an_encoder() -> object:
    mlm = EncoderConfig(vocab_size=5, d_model=8, n_heads=2, n_layers=1, head="masked_lm", **LEARNED).build()
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    return sequence_parallel_masked_loss(mlm, tokens, tokens, group=SequenceGroup())


def bad_tokens() -> object:
    """The second rank has a token too large."""
    lm = LanguageModel(LanguageModelConfig(vocab_size=5, d_model=8, n_heads=2, n_layers=1))
    targets = torch.zeros(1, 3, dtype=torch.int64)
    return sequence_parallel_loss(lm, targets + 5 * dist.get_rank(), targets, group=SequenceGroup())


def bad_targets() -> object:
    """The second rank has a target too large."""
    lm = LanguageModel(LanguageModelConfig(vocab_size=5, d_model=8, n_heads=2, n_layers=1))
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    return sequence_parallel_loss(lm, tokens, tokens + 5 * dist.get_rank(), group=SequenceGroup())


def bad_tokens_of_segments() -> object:
    lm = LanguageModel(LanguageModelConfig(vocab_size=5, d_model=8, n_heads=2, n_layers=1))
    targets = torch.zeros(1, 3, dtype=torch.int64)
    return sequence_parallel_segmented_loss(lm, targets + 5 * dist.get_rank(), targets, 2, group=SequenceGroup())


def other_segments() -> object:
    """Four tokens on the first rank, three on the second, in segments of three."""
    lm = LanguageModel(LanguageModelConfig(vocab_size=5, d_model=8, n_heads=2, n_layers=1))
    tokens = torch.zeros(1, 4 - dist.get_rank(), dtype=torch.int64)
    return sequence_parallel_segmented_loss(lm, tokens, tokens, 3, group=SequenceGroup())


def later_state() -> object:
    """A layer's own state is checked as in a call without ranks."""
    x = torch.ones(1, 3, 4)
    where = SequenceSlice.of(SequenceGroup(), (1, 3), x.device)
    other = LinearAttention(4, 1, short_conv=3).advance(x)
    return LinearAttention(4, 1)(x, where.state_before(other))


def meshes() -> object:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "sequence"))
    group = SequenceGroup(mesh["sequence"])
    assert (group.rank, group.size) == (dist.get_rank(), 2)
    return SequenceGroup(mesh)


def raw_group() -> object:
    """A process group itself, where a SequenceGroup is expected."""
    x = torch.ones(1, 1, 3, 4)
    assert_input_errors((lambda: tokens_of_rank(4, None, dist.group.WORLD), r"pass SequenceGroup\(group\)"))
    return sequence_parallel_attention(x, x, x, group=dist.group.WORLD)


def wrapped() -> object:
    """A model within DistributedDataParallel."""
    lm = LanguageModel(LanguageModelConfig(vocab_size=5, d_model=8, n_heads=2, n_layers=1))
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    return sequence_parallel_loss(DistributedDataParallel(lm), tokens, tokens, group=SequenceGroup())


def outside() -> object:
    first = dist.new_group([0])
    return None if dist.get_rank() == 0 else SequenceGroup(first)


REFUSED = {
    "no tokens": (partial(attend, "no tokens"), r"slices have \[4, 0\] tokens: each needs one at least"),
    "rows": (partial(attend, "rows"), r"differ in rows, \[2, 3\]"),
    "some packed": (partial(attend, "some packed"), r"differ in segment_ids \(1\) or none \(0\), \[1, 0\]"),
    "state": (partial(attend, "state"), r"differ in a length before the first token, \[3, 4\]"),
    "softmax layer": (softmax_layer, "softmax attention without a window"),
    "softmax model": (softmax_model, "sequence parallelism needs a state of fixed size, but layer 1 is softmax"),
    "softmax encoder": (softmax_encoder, "model.attention is 'softmax', which sees all keys"),
    "too long": (too_long, "positions.length=5 is too short for the learned positions of 6 tokens"),
    "too long a document": (too_long_a_document, "positions of 6 tokens"),
    "too long for an encoder": (too_long_for_an_encoder, "positions.length=5 is too short"),
    "other state": (later_state, "state.conv_tail is"),
    "other segments": (other_segments, r"the ranks hold \[4, 3\] tokens, which are not as many segments of 3"),
    "no segment": (lambda: tokens_of_rank(9, 0, SequenceGroup()), "segment_length=0 must be a whole number"),
    "short": (lambda: tokens_of_rank(17, 4, SequenceGroup()), "leaves 1 tokens for the last"),
    "group": (raw_group, r"group is a ProcessGroup: pass SequenceGroup\(group\)"),
    "wrapped": (wrapped, "model is a DistributedDataParallel: pass a LanguageModel"),
    "mesh": (meshes, r"mesh of 2 dimensions \('data', 'sequence'\)"),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    functions = {name: function for name, (function, _) in REFUSED.items()}
    functions |= {"bad ids": partial(attend, "bad ids"), "bad tokens": bad_tokens, "outside": outside}
    functions |= {"bad tokens of segments": bad_tokens_of_segments, "bad targets": bad_targets}
    for name, options in TRAFFIC.items():
        functions |= {f"{name}, {n}": partial(traffic, n, **options) for n in (16, 256)}
    return run_on_ranks(2, tmp_path_factory.mktemp("ranks"), functions)


@pytest.mark.parametrize("name", REFUSED)
def test_every_rank_refuses_with_one_message(ranks, name):
    errors = [one[name] for one in ranks]
    assert_input_errors(*((partial(_raise, error), REFUSED[name][1]) for error in errors))
    assert str(errors[0]) == str(errors[1])


def test_an_error_of_one_rank_ends_the_others(ranks):
    other, own = (one["bad ids"] for one in ranks)
    assert_input_errors((partial(_raise, other), "rank 1 refuses its slice"), (partial(_raise, own), r"\(2, 3\)"))
    bad = dict.fromkeys(("bad tokens", "bad tokens of segments"), r"tokens lie in \[5, 5\]")
    for name, message in {**bad, "bad targets": "targets has 5, vocab_size is 5"}.items():
        other, own = (one[name] for one in ranks)
        assert_input_errors((partial(_raise, other), "rank 1 refuses"))
        assert_input_errors((partial(_raise, own), message))
    assert_input_errors((partial(_raise, ranks[1]["outside"]), "no member of the group"))


def test_without_torch_distributed():
    assert_input_errors((SequenceGroup, "call init_process_group"))


@pytest.mark.parametrize("name", TRAFFIC)
def test_what_ranks_send_does_not_grow_with_the_length(ranks, name):
    for one in ranks:
        assert one[f"{name}, 16"] == one[f"{name}, 256"]


def test_one_gather_of_states_a_layer_and_direction(ranks):
    """Each of (H = 2, D = E = 4) float32: kv, k_sum and the decay; before them the slices' five numbers."""
    state = 2 * (4 * 4 + 4 + 1) * 4
    for one in ranks:
        forward, backward = one["linear, 16"]
        assert forward == {("all_gather", "calls"): 1 + 3, ("all_gather", "bytes"): 5 * 8 + 3 * state}
        assert backward == {("reduce_scatter", "calls"): 3, ("reduce_scatter", "bytes"): 3 * state}


def _raise(error: object) -> None:
    if isinstance(error, Exception):
        raise error
