"""Attention with the similarity 1 + cos: against its equation, and what its weights are."""

import pytest
import torch

from linrope import CosineAttention, LanguageModel, LanguageModelConfig, RotaryConfig
from tests.conftest import assert_input_errors
from tests.layers.cases import CLOSE, HEADS, assert_outputs, layer_and_input, projected


def similarities(layer, x):
    """1 + cos of the angle between each rotated query and key, by their definition, (B, H, T, T)."""
    q, k, _ = projected(layer, x)
    if layer.rope is not None:
        q, k = (layer.rope.rotate(torch.nn.functional.pad(y, (0, 1)))[..., :-1] for y in (q, k))
    rows = [
        [torch.cosine_similarity(q[:, :, i], k[:, :, j], dim=-1) for j in range(x.shape[1])] for i in range(x.shape[1])
    ]
    return 1 + torch.stack([torch.stack(row, -1) for row in rows], -2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", [{}, {"rope": None}, {"head_dim": 7}, {"rope": RotaryConfig(rotary_dim=4)}])
def test_it_is_the_mean_of_values_weighted_by_one_plus_cosine(options, causal):
    layer, x = layer_and_input("cosine", {**options, "causal": causal}, length=13)
    weights = similarities(layer, x)
    assert weights.min() >= 0
    weights = weights.tril() if causal else weights
    assert_outputs(layer, x, weights @ projected(layer, x)[2] / (weights.sum(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_are_those_of_the_equation(causal):
    layer, x = layer_and_input("cosine", {"causal": causal}, length=9)
    x.requires_grad_()
    g = torch.randn_like(x)
    (found,) = torch.autograd.grad(layer(x), x, g)
    weights = similarities(layer, x)
    weights = weights.tril() if causal else weights
    o = weights @ projected(layer, x)[2] / (weights.sum(-1, keepdim=True) + 1e-6)
    (expected,) = torch.autograd.grad(torch.nn.functional.linear(o.transpose(1, 2).flatten(2), layer.out.weight), x, g)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_weights_sum_to_one_and_do_not_change_with_the_position():
    layer, x = layer_and_input("cosine", {}, length=20)
    with torch.no_grad():  # every value is a constant vector: a mean of it is it
        width = layer.qkv.weight.shape[0] // 3
        layer.qkv = torch.nn.Linear(24, 3 * width).double()
        layer.qkv.weight[2 * width :] = 0
        layer.out.weight.copy_(torch.eye(24, dtype=torch.float64))
        expected = layer.qkv.bias[2 * width :].expand_as(x)
    torch.testing.assert_close(layer(x), expected, rtol=2e-6, atol=1e-6)  # up to ε / denominator
    shifted = torch.cat((torch.randn_like(x[:, :5]), x), dim=1)
    alone = layer(x)
    documents = torch.tensor([[0] * 5 + [1] * 20] * 2)
    torch.testing.assert_close(layer(shifted, segment_ids=documents)[:, 5:], alone, **CLOSE)


def test_zeros_and_padding_give_finite_outputs_and_gradients():
    layer, x = layer_and_input("cosine", {"causal": False}, length=6)
    zeros = torch.zeros_like(x).requires_grad_()
    y = layer(zeros)
    y.sum().backward()
    assert torch.equal(y, torch.zeros_like(y))
    assert zeros.grad.isfinite().all()
    nothing = layer(x, key_mask=torch.zeros(2, 6, dtype=torch.bool))
    assert torch.equal(nothing, torch.zeros_like(nothing))


def test_rope_and_causal_are_those_that_the_layer_has_now():
    layer, x = layer_and_input("cosine", {"rope": RotaryConfig(base=50.0)}, length=9)
    other, _ = layer_and_input("cosine", {"rope": None, "causal": False}, length=9)
    other.load_state_dict(layer.state_dict())
    layer.rope, layer.causal = None, False
    assert torch.equal(layer(x), other(x))


def test_a_language_model_learns_with_it():
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(vocab_size=11, d_model=24, n_layers=2, n_heads=HEADS, attention="cosine"))
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    tokens = torch.arange(64).remainder(11).expand(2, -1)
    for _ in range(30):
        loss = model(tokens[:, :-1], targets=tokens[:, 1:]) / 126
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 < losses[0]


def test_ropes_that_do_not_fit_are_refused():
    assert_input_errors(
        (lambda: CosineAttention(21, 3, rope=RotaryConfig(rotary_dim=8)), "rope.rotary_dim=8 must be at most 7"),
        (lambda: CosineAttention(24, 3, rope=RotaryConfig(rotary_dim=10)), "rope.rotary_dim=10 must be at most 8"),
        (lambda: CosineAttention(24, 3, rope=RotaryConfig(placement="signed")), "rope.placement='signed' is unknown"),
        (lambda: CosineAttention(24, 3, backend="cuda"), "backend='cuda' is unknown"),
        (lambda: CosineAttention(24, 3, eps="1e-6"), "eps='1e-6' must be a finite number"),
    )
