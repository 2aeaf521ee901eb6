"""Bad input: an error that names the argument, its value and the fix, before any work."""

import pytest
import torch

from linrope import InputError, RotaryEmbedding, State, linear_attention, summarize

B, H, T, D, E = 2, 3, 5, 4, 6
GOOD = {"q": torch.randn(B, H, T, D), "k": torch.randn(B, H, T, D), "v": torch.randn(B, H, T, E)}
STATE = State.zeros(B, H, D, E)
LONGER = {"k": torch.randn(B, H, 9, D), "v": torch.randn(B, H, 9, E)}
IDS = torch.zeros(B, T, dtype=torch.int64)


def decay(value: float, *shape: int) -> dict:
    return {"log_decay": torch.full(shape or (B, H, T), value)}


BAD = [
    ({"q": torch.randn(H, T, D)}, r"q has shape \(3, 5, 4\): pass 4 dimensions"),
    ({"k": [1.0]}, "k is a list"),
    ({"v": torch.ones(B, H, T, E, dtype=torch.int64)}, "v has dtype torch.int64"),
    ({"q": torch.ones(B, H, T, D, dtype=torch.complex64)}, "q has dtype torch.complex64"),
    ({"k": torch.randn(B, H, T, D).double()}, r"k is torch.float64.*q is torch.float32"),
    ({"k": torch.randn(B + 1, H, T, D)}, r"k \(3, 3, 5, 4\).*share B and H"),
    ({"v": torch.randn(B, H + 1, T, E)}, r"v \(2, 4, 5, 6\)"),
    ({"k": torch.randn(B, H, T, D + 1)}, "q and k share D"),
    ({"v": torch.randn(B, H, T + 1, E)}, "k and v share their length"),
    (LONGER, r"q has length 5 and k has length 9: causal=True.*causal=False"),
    ({"rope": RotaryEmbedding(8)}, "rope has dim=8.*have 4"),
    ({"rope": RotaryEmbedding(D, [10.0, None])}, r"rope\.base has 2 entries.*3 heads"),
    ({"rope": RotaryEmbedding(D, rotary_dim=D, signed=True)}, "leaves none of the 4 dimensions.*choose a smaller"),
    (
        {"rope": RotaryEmbedding(D, rotary_dim=2, signed=True), "normalize": "rotary"},
        "normalize='rotary' sums rotated features, rope.signed=True keeps them out",
    ),
    ({"rope": 10000.0}, "rope is a float"),
    ({"feature_map": "elu"}, "feature_map='elu' is unknown.*'elu1'"),
    ({"feature_map": torch.signbit}, "must return floats"),
    ({"feature_map": lambda x: x.sum(-1)}, r"maps q of shape \(2, 3, 5, 4\)"),
    ({"normalize": "plane"}, "normalize='plane' is unknown.*Did you mean 'plain'"),
    ({"backend": "chunk"}, "backend='chunk' is unknown.*Did you mean 'chunked'"),
    ({"eps": -1e-6}, "eps=-1e-06 must be a finite number, at least 0"),
    ({"causal": None}, "causal=None must be True or False"),
    ({"state": State(torch.zeros(B, H, D, E), None, 3)}, r"state\.k_sum is a NoneType"),
    (decay(0.1), r"log_decay lies in \[0\.1.*at most 0"),
    (decay(float("inf")), "log_decay lies in .*finite"),
    ({"log_decay": torch.tensor([0.1, torch.nan]).repeat(B, H, T)[..., :T]}, r"log_decay lies in \[0\.1"),
    (decay(-float("inf")), "use segment_ids to forget everything"),
    (decay(0.0, B, T, H), r"log_decay is \(2, 5, 3\)"),
    (decay(0.0) | {"causal": False}, "causal=False"),
    ({"key_mask": torch.ones(B, T)}, "key_mask is .*float32.*booleans"),
    ({"key_mask": torch.ones(B, H, T, dtype=torch.bool)}, r"shape \(B, S\) = \(2, 5\)"),
    ({"segment_ids": torch.zeros(T, dtype=torch.int64)}, r"\(B, T\) = \(2, 5\)"),
    ({"segment_ids": torch.zeros(B, T)}, "pass integers"),
    (LONGER | {"segment_ids": IDS, "causal": False}, "segment_ids was given with q of length 5 and k of length 9"),
    ({"state": torch.zeros(3)}, "state is a Tensor"),
    ({"state": State.zeros(1, H, D, E)}, r"state.kv has shape \(1, 3, 4, 6\).*\(2, 3, 4, 6\)"),
    ({"state": State(STATE.kv, torch.zeros(B, H, 9), 0)}, "state.k_sum has shape"),
    ({"state": STATE.to(torch.float64)}, "state.kv is torch.float64.*float32"),
    ({"state": STATE.to("meta")}, "state.kv is on meta, q on cpu"),
    ({"state": STATE, "normalize": "rotary"}, "state has no k_rotated_sum"),
    ({"state": State(STATE.kv, STATE.k_sum, -1)}, "state.length=-1"),
    ({"state": State(STATE.kv, STATE.k_sum, 2**53 - 3)}, "state.length=9007199254740989 with 5 tokens after it"),
]
BAD_FOR_SUMMARIZE = [
    ({"k": None}, "k is a NoneType"),
    ({"v": torch.zeros(B, H, 9, E)}, r"k \(2, 3, 5, 4\), v \(2, 3, 9, 6\) do not fit together"),
    ({"v": torch.zeros(B, H, T, E).double()}, "v is torch.float64 on cpu, k is torch.float32"),
    ({"rope": RotaryEmbedding(6)}, "rope has dim=6"),
    (decay(1.0), "at most 0"),
]


@pytest.mark.parametrize(
    ("operator", "names", "changes", "message"),
    [(linear_attention, "qkv", *bad) for bad in BAD] + [(summarize, "kv", *bad) for bad in BAD_FOR_SUMMARIZE],
)
def test_each_mistake_is_named(operator, names, changes, message):
    with pytest.raises(InputError, match=message):
        operator(**{name: GOOD[name] for name in names} | changes)


def test_an_input_error_is_a_value_error_and_the_good_call_passes():
    assert issubclass(InputError, ValueError)
    assert linear_attention(**GOOD).shape == (B, H, T, E)
