"""Attention layers with every option, and what tests do with them."""

import pytest
import torch
import torch.nn.functional as F

from linrope import CosineAttention, LinearAttention, RotaryConfig, SoftmaxAttention
from linrope.rotary import RotaryScaling

D_MODEL, HEADS = 24, 3
LAYERS = {
    "linear": lambda **options: LinearAttention(D_MODEL, HEADS, **options).double(),
    "softmax": lambda **options: SoftmaxAttention(D_MODEL, HEADS, **options).double(),
    "cosine": lambda **options: CosineAttention(D_MODEL, HEADS, **options).double(),
}
OPTIONS = {
    "plain": {},
    "short_conv": {"short_conv": 4},
    "conv_silu": {"short_conv": 4, "conv_silu": "v"},
    "output_gate": {"output_gate": True},
    "no positions": {"rope": None},
    "partial rope": {"rope": RotaryConfig(rotary_dim=4, interleaved=False)},
    "wide heads": {"head_dim": 10},
    "output_norm": {"output_norm": True},
    "all": {"short_conv": 3, "output_norm": True, "output_gate": True, "bias": True},
    "grouped queries": {"n_kv_heads": 1},
    "grouped, all of Qwen": {"n_kv_heads": 1, "qk_norm": 1e-6, "qkv_bias": True, "short_conv": 3, "conv_silu": "v"},
}
LINEAR_OPTIONS = {
    "forget_gate": {"forget_gate": True},
    "gate_normalizer": {"forget_gate": True, "gate_normalizer": [1, 8, 64]},
    "all of linear": {"forget_gate": True, "short_conv": 4, "output_gate": True},
    "rotary denominator": {"rope": RotaryConfig(placement="both")},
    "before map": {"rope": RotaryConfig(placement="before_map")},
    "signed": {"rope": RotaryConfig(rotary_dim=4, placement="signed"), "forget_gate": True},
    "signed, learned features": {"rope": RotaryConfig(rotary_dim=2, placement="signed"), "feature_map": "hedgehog"},
    "signed, by head": {
        "rope": RotaryConfig(rotary_dim=4, placement="signed", base=[9.0, None, 1e4], trainable=True, interleaved=False)
    },
    "before map, partly": {"rope": RotaryConfig(placement="before_map", rotary_dim=4), "feature_map": "hedgehog"},
    "temperature": {"temperature": True},
    "favor": {"feature_map": "favor"},
    "hedgehog": {"feature_map": "hedgehog"},
    "grouped, learned features": {"n_kv_heads": 1, "feature_map": "hedgehog", "forget_gate": True},
    "taylor": {"feature_map": "taylor", "rope": RotaryConfig(placement="both")},
}
SOFTMAX_OPTIONS = {
    "window of 1": {"window": 1},
    "window of 7": {"window": 7, "short_conv": 3},
    "window of 40": {"window": 40},
    "grouped, window of 7": {"n_kv_heads": 1, "window": 7},
    "yarn": {"rope": RotaryConfig(scaling=RotaryScaling("yarn", 4.0, 16))},
}
COVERING = {
    "linear-all", "linear-all of linear", "linear-grouped, all of Qwen", "linear-no positions", "linear-wide heads",
    "linear-signed, by head", "linear-signed, learned features", "linear-before map, partly", "linear-gate_normalizer",
    "linear-temperature", "linear-favor", "linear-taylor", "softmax-all", "softmax-grouped, window of 7",
    "softmax-window of 40", "softmax-yarn", "softmax-no positions", "cosine-all", "cosine-partial rope",
}  # fmt: skip
EVERY = [pytest.param(kind, options, id=f"{kind}-{name}") for kind in LAYERS for name, options in OPTIONS.items()]
EVERY += [pytest.param("linear", options, id=f"linear-{name}") for name, options in LINEAR_OPTIONS.items()]
EVERY += [pytest.param("softmax", options, id=f"softmax-{name}") for name, options in SOFTMAX_OPTIONS.items()]
FEW = [
    pytest.param(*case.values, id=case.id, marks=[] if case.id in COVERING else pytest.mark.exhaustive)
    for case in EVERY
]
"""All of them too, but by default those alone that together have every option."""
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def layer_and_input(kind, options, length=90):
    torch.manual_seed(0)
    layer = LAYERS[kind](**options)
    for parameter in layer.parameters():  # a gate that starts at 0 would hide what its input does
        torch.nn.init.normal_(parameter, std=0.3)
    return layer, torch.randn(2, length, D_MODEL, dtype=torch.float64)


def projected(layer, x):
    """The layer's q, k and v (B, H, T, D)."""
    return F.linear(x, layer.qkv.weight).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)


def weighted(weights, v, denominator_weights=None):
    """Σ_j w_ij v_j / (Σ_j w_ij + ε) over j ≤ i."""
    sums = (weights if denominator_weights is None else denominator_weights).tril().sum(-1, keepdim=True)
    return weights.tril() @ v / (sums + 1e-6)


def assert_outputs(layer, x, o):
    """The layer computes these heads' outputs (B, H, T, D) before its last projection."""
    torch.testing.assert_close(layer(x), F.linear(o.transpose(1, 2).flatten(2), layer.out.weight), **CLOSE)
