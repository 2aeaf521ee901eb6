"""Bad input: an error that names the argument, its value and the mend, before any work."""

import pytest
import torch

from linrope import InputError, RotaryEmbedding, State, linear_attention

B, H, T, D, E = 2, 3, 5, 4, 6


def good() -> dict:
    return {"q": torch.randn(B, H, T, D), "k": torch.randn(B, H, T, D), "v": torch.randn(B, H, T, E)}


STATE = State.zeros(B, H, D, E)
BAD = {
    "rank": ({"q": torch.randn(H, T, D)}, r"q has shape \(3, 5, 4\): pass 4 dimensions"),
    "not a tensor": ({"k": [1.0]}, "k is a list"),
    "integers": ({"v": torch.ones(B, H, T, E, dtype=torch.int64)}, "v has dtype torch.int64"),
    "complex": ({"q": torch.ones(B, H, T, D, dtype=torch.complex64)}, "q has dtype torch.complex64"),
    "two dtypes": ({"k": torch.randn(B, H, T, D).double()}, r"k is torch.float64.*q is torch.float32"),
    "batch": ({"k": torch.randn(B + 1, H, T, D)}, r"k \(3, 3, 5, 4\).*share B and H"),
    "heads": ({"v": torch.randn(B, H + 1, T, E)}, r"v \(2, 4, 5, 6\)"),
    "head size": ({"k": torch.randn(B, H, T, D + 1)}, "q and k share D"),
    "length of v": ({"v": torch.randn(B, H, T + 1, E)}, "k and v share their length"),
    "length of k": (
        {"k": torch.randn(B, H, T + 1, D), "v": torch.randn(B, H, T + 1, E)},
        r"q has length 5 and k has length 6: causal=True.*causal=False",
    ),
    "rope of another size": ({"rope": RotaryEmbedding(8)}, "rope has dim=8.*have 4"),
    "rope of other heads": ({"rope": RotaryEmbedding(D, [10.0, None])}, r"rope\.base has 2 entries.*3 heads"),
    "signed in all dimensions": (
        {"rope": RotaryEmbedding(D, rotary_dim=D, signed=True)},
        "leaves none of the 4 dimensions.*choose a smaller",
    ),
    "signed in both sums": (
        {"rope": RotaryEmbedding(D, rotary_dim=2, signed=True), "normalize": "rotary"},
        "normalize='rotary' sums rotated features, rope.signed=True keeps them out",
    ),
    "rope of another kind": ({"rope": 10000.0}, "rope is a float"),
    "feature map": ({"feature_map": "elu"}, "feature_map='elu' is unknown.*'elu1'"),
    "feature map of integers": ({"feature_map": torch.signbit}, "must return floats"),
    "feature map that reduces": ({"feature_map": lambda x: x.sum(-1)}, r"maps q of shape \(2, 3, 5, 4\)"),
    "normalize": ({"normalize": "plane"}, "normalize='plane' is unknown.*Did you mean 'plain'"),
    "backend": ({"backend": "chunk"}, "backend='chunk' is unknown.*Did you mean 'chunked'"),
    "eps": ({"eps": -1e-6}, "eps=-1e-06 must be a finite number, at least 0"),
    "causal": ({"causal": None}, "causal=None must be True or False"),
    "state without sums": ({"state": State(torch.zeros(B, H, D, E), None, 3)}, r"state\.k_sum is a NoneType"),
    "positive decay": ({"log_decay": torch.full((B, H, T), 0.1)}, r"log_decay lies in \[0\.1.*at most 0"),
    "NaN decay": ({"log_decay": torch.full((B, H, T), float("nan"))}, "log_decay lies in .*finite"),
    "infinite decay": ({"log_decay": torch.full((B, H, T), -float("inf"))}, "use segment_ids to forget everything"),
    "decay of another shape": ({"log_decay": torch.zeros(B, T, H)}, r"log_decay is \(2, 5, 3\)"),
    "decay without order": ({"log_decay": torch.zeros(B, H, T), "causal": False}, "causal=False"),
    "mask of numbers": ({"key_mask": torch.ones(B, T)}, "key_mask is .*float32.*booleans"),
    "mask of another shape": ({"key_mask": torch.ones(B, H, T, dtype=torch.bool)}, r"shape \(B, S\) = \(2, 5\)"),
    "segments of another shape": ({"segment_ids": torch.zeros(T, dtype=torch.int64)}, r"\(B, T\) = \(2, 5\)"),
    "segments that are floats": ({"segment_ids": torch.zeros(B, T)}, "pass integers"),
    "segments of two sequences": (
        {
            "segment_ids": torch.zeros(B, T, dtype=torch.int64),
            "k": torch.randn(B, H, 9, D),
            "v": torch.randn(B, H, 9, E),
            "causal": False,
        },
        "segment_ids was given with q of length 5 and k of length 9",
    ),
    "state of another kind": ({"state": torch.zeros(3)}, "state is a Tensor"),
    "state of another batch": (
        {"state": State.zeros(1, H, D, E)},
        r"state.kv has shape \(1, 3, 4, 6\).*\(2, 3, 4, 6\)",
    ),
    "state of another size": ({"state": State(STATE.kv, torch.zeros(B, H, 9), 0)}, "state.k_sum has shape"),
    "state of another dtype": ({"state": STATE.to(torch.float64)}, "state.kv is torch.float64.*float32"),
    "state on another device": ({"state": STATE.to("meta")}, "state.kv is on meta, q on cpu"),
    "state of another normalize": ({"state": STATE, "normalize": "rotary"}, "state has no k_rotated_sum"),
    "state of no length": ({"state": State(STATE.kv, STATE.k_sum, -1)}, "state.length=-1"),
    "positions overflow": (
        {"state": State(STATE.kv, STATE.k_sum, 2**53 - 3)},
        "state.length=9007199254740989 with 5 tokens after it",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_each_mistake_is_named(name):
    changes, message = BAD[name]
    with pytest.raises(InputError, match=message):
        linear_attention(**{**good(), **changes})


def test_an_input_error_is_a_value_error_and_the_good_call_passes():
    assert issubclass(InputError, ValueError)
    assert linear_attention(**good()).shape == (B, H, T, E)
