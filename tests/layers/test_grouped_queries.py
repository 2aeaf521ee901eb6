"""Grouped queries: the layer and the model against those whose weights repeat the shared keys and values."""

import pytest
import torch
from einops import repeat

from linrope import CosineAttention, LanguageModel, LanguageModelConfig, LinearAttention, RotaryConfig, SoftmaxAttention
from linrope.errors import InputError
from linrope.ops.softmax import KeyValueCache, repeat_heads
from linrope.profiling.flops import step_flops
from tests.conftest import assert_input_errors
from tests.layers.cases import CLOSE

D_MODEL, HEADS, KV_HEADS, D, LENGTH = 20, 6, 2, 4, 37
KINDS = {
    "linear": (LinearAttention, {"forget_gate": True}),
    "hedgehog": (LinearAttention, {"feature_map": "hedgehog"}),
    "signed": (LinearAttention, {"rope": RotaryConfig(placement="signed")}),
    "bases": (LinearAttention, {"rope": RotaryConfig(base=[9.0, None, 1e4, 5.0, 100.0, None])}),
    "cosine": (CosineAttention, {}),
    "softmax": (SoftmaxAttention, {}),
    "window": (SoftmaxAttention, {"window": 5}),
}
COMMON = {"head_dim": D, "short_conv": 3, "conv_silu": "v", "qkv_bias": True, "qk_norm": 1e-6}


def repeated(rows):
    """Rows of the grouped projection, one for each channel, as those of a projection without groups."""
    q, k, v = rows.split([HEADS * D, KV_HEADS * D, KV_HEADS * D])
    k, v = (repeat(x, "(g d) ... -> (g n d) ...", g=KV_HEADS, n=HEADS // KV_HEADS) for x in (k, v))
    return torch.cat((q, k, v))


def both_layers(kind):
    make, options = KINDS[kind]
    torch.manual_seed(0)
    grouped = make(D_MODEL, HEADS, n_kv_heads=KV_HEADS, **COMMON, **options).double()
    for parameter in grouped.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    whole = make(D_MODEL, HEADS, **COMMON, **options).double()
    weights = grouped.state_dict()
    of_channels = ("qkv.weight", "qkv.bias", "conv.weight", "conv.bias")
    whole.load_state_dict({name: repeated(x) if name in of_channels else x for name, x in weights.items()})
    return grouped, whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_is_its_head_repeated_outputs_and_gradients(kind):
    grouped, whole = both_layers(kind)
    x = torch.randn(2, LENGTH, D_MODEL, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0] * 11 + [1] * 26, [0] * 37])
    for options in ({}, {"segment_ids": ids}, {"key_mask": torch.arange(LENGTH) > torch.tensor([[4], [0]])}):
        y, expected = grouped(x, **options), whole(x, **options)
        torch.testing.assert_close(y, expected, **CLOSE)
        downstream = torch.randn_like(y)
        (dx, dw), (dx_, dw_) = (
            torch.autograd.grad(out, (x, layer.qkv.weight), downstream)
            for out, layer in ((y, grouped), (expected, whole))
        )
        torch.testing.assert_close(dx, dx_, **CLOSE)
        q, k, v = dw_.split(HEADS * D)
        k, v = (part.view(KV_HEADS, -1, D, D_MODEL).sum(1).flatten(0, 1) for part in (k, v))
        torch.testing.assert_close(dw, torch.cat((q, k, v)), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_segments_and_steps(kind):
    grouped, whole = both_layers(kind)
    x = torch.randn(2, LENGTH, D_MODEL, dtype=torch.float64)
    expected, pieces, state = whole(x), [], None
    for piece in x.split([21, 1, 1, 13, 1], dim=1):
        y, state = grouped(piece, state, return_state=True)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, **CLOSE)
    if isinstance(state.past, KeyValueCache):  # which is why keys and values are shared
        assert state.past.k.shape == (2, KV_HEADS, LENGTH if grouped.window is None else 4, D)
        tensors = (state.past.k, state.past.v, state.conv_tail)
        assert grouped.state_bytes(LENGTH, torch.float64) == sum(x[0].numel() * x.itemsize for x in tensors)


def test_without_causality():
    torch.manual_seed(0)
    x = torch.randn(2, LENGTH, D_MODEL, dtype=torch.float64)
    mask = torch.arange(LENGTH) < torch.tensor([[37], [30]])
    for make in (LinearAttention, SoftmaxAttention):
        grouped = make(D_MODEL, HEADS, head_dim=D, n_kv_heads=KV_HEADS, causal=False).double()
        whole = make(D_MODEL, HEADS, head_dim=D, causal=False).double()
        whole.load_state_dict({**grouped.state_dict(), "qkv.weight": repeated(grouped.qkv.weight.data)})
        torch.testing.assert_close(grouped(x, key_mask=mask), whole(x, key_mask=mask), **CLOSE)


@pytest.mark.parametrize("eps", [False, True, 0, -1.0, float("nan"), "x"])
def test_the_norm_of_queries_and_keys_is_given_by_its_eps(eps):
    for make in (LinearAttention, SoftmaxAttention):
        with pytest.raises(InputError, match=r"qk_norm=.* must be ε of the norms of queries and keys"):
            make(D_MODEL, HEADS, head_dim=D, qk_norm=eps)


def test_heads_are_repeated_in_a_row():
    x = torch.arange(2.0).view(1, 2, 1, 1)
    assert repeat_heads(x, 6).flatten().tolist() == [0, 0, 0, 1, 1, 1]
    assert repeat_heads(x, 2) is x


def test_the_model_generates_and_counts_with_groups():
    torch.manual_seed(0)
    options = {"vocab_size": 31, "d_model": 24, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 10}
    config = LanguageModelConfig(**options, attention=["linear", "softmax"], qk_norm=True, qkv_bias=True)
    model = LanguageModel(config).double().eval()
    tokens = torch.randint(31, (2, 17))
    written = model.generate(tokens, 5, temperature=0)
    again = tokens
    for _ in range(5):
        again = torch.cat((again, model(again)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(written, again)
    assert LanguageModelConfig.from_dict(config.to_dict()) == config
    # two layers project to 2 · 20 channels less; a backward pass is two products
    all_heads = LanguageModel(LanguageModelConfig(**{**options, "n_kv_heads": None}))
    grouped = LanguageModel(LanguageModelConfig(**options))
    tokens, a_product = 2 * 17, 2 * 24 * (2 * 20)
    assert step_flops(all_heads, 2, 17) - step_flops(grouped, 2, 17) == tokens * a_product * 2 * 3


def test_bad_groups():
    assert_input_errors(
        (lambda: LinearAttention(24, 6, n_kv_heads=4), "n_kv_heads=4 must divide n_heads=6"),
        (lambda: SoftmaxAttention(24, 6, n_kv_heads=0), "n_kv_heads=0 must be a whole number, at least 1"),
        (lambda: LanguageModelConfig(n_kv_heads=0), "n_kv_heads=0 must be at least 1"),
        (lambda: LanguageModelConfig(n_kv_heads=3).build(), "n_kv_heads=3 must divide n_heads=4"),
        (
            lambda: SoftmaxAttention(24, 2, n_kv_heads=1, rope=RotaryConfig(base=[9.0, None])),
            "(?s)n_kv_heads=1.*rope.base.*one base",
        ),
    )
    x = torch.randn(1, 3, 24)
    grouped, whole = SoftmaxAttention(24, 6, n_kv_heads=2), SoftmaxAttention(24, 6)
    _, state = grouped(x, return_state=True)
    assert_input_errors((lambda: whole(x, state), r"state.past.k is \(1, 2, 3, 4\)"))
