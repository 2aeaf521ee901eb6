"""A converted model against its teacher."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from linrope import InputError, LanguageModel, LanguageModelConfig, RotaryConfig, RotaryScaling
from linrope.models.conversion import convert, hybrid_config, layers_that_differ, new_parameters

SIZES = {"vocab_size": 50, "d_model": 32, "n_layers": 3, "n_heads": 4, "attention": "softmax"}
TOKENS = torch.arange(2 * 21).view(2, 21) * 7 % 50


def teacher(**options) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LanguageModelConfig(**{**SIZES, **options})).eval()


TEACHERS = {
    "plain": {},
    "convolution": {"short_conv": 3},
    "Qwen": {"n_kv_heads": 2, "qkv_bias": True, "qk_norm": True, "rope": RotaryConfig(interleaved=False)},
}


@pytest.mark.parametrize("options", TEACHERS.values(), ids=TEACHERS)
def test_layers_that_stay_softmax_compute_what_they_did(options):
    model = teacher(**options)
    for config in (hybrid_config(model.config, "softmax"), hybrid_config(model.config, "softmax", window=21)):
        assert torch.equal(convert(model, config)(TOKENS), model(TOKENS))
    narrow = convert(model, hybrid_config(model.config, "softmax", window=5))
    torch.testing.assert_close(narrow(TOKENS)[:, :5], model(TOKENS)[:, :5], rtol=1e-4, atol=1e-5)  # another kernel
    assert layers_that_differ(narrow, model) == [0, 1, 2]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("options", TEACHERS.values(), ids=TEACHERS)
def test_a_signed_layer_rotates_every_second_pair_as_the_teacher_does(options, interleaved):
    """Without the division and with all of the rest as it is, its weights are the teacher's rotated products."""
    model = teacher(**{**options, "rope": RotaryConfig(interleaved=interleaved)})
    config = hybrid_config(model.config, "linear", signed=True, feature_map="identity", normalize="none")
    linear, softmax = convert(model, config).blocks[0].attention, model.blocks[0].attention
    x = torch.randn(1, 21, 32, generator=torch.manual_seed(1))
    seen = {}
    linear.watch = lambda q, k, v, options, o, final: seen.update(q=q, k=k, o=o, v=v)
    linear(x)
    rope, d = softmax.rope, softmax.head_dim
    order = [0, 1, 4, 5, 2, 3, 6, 7] if interleaved else [0, 2, 4, 6, 1, 3, 5, 7]
    q, k = (torch.empty_like(seen[name]) for name in "qk")
    q[..., order], k[..., order] = seen["q"], seen["k"]
    rotated, plain = torch.tensor(order[: d // 2]), torch.tensor(order[d // 2 :])
    of_teacher = (rope.rotate(q)[..., rotated] @ rope.rotate(k)[..., rotated].mT) + q[..., plain] @ k[..., plain].mT
    expected = of_teacher.tril() @ seen["v"]
    torch.testing.assert_close(seen["o"], expected, rtol=1e-4, atol=1e-5)  # float32 sums in another order


@pytest.mark.parametrize("feature_map", ["elu1", "hedgehog", "taylor", "softmax"])
@pytest.mark.parametrize("options", [{}, TEACHERS["Qwen"]], ids=["plain", "Qwen"])
def test_a_signed_layer_starts_with_the_weights_of_softmax_to_the_first_order(options, feature_map):
    """Where only rotated dimensions are not 0, and what the denominator leaves out is small: Σ_j qᵀk_j of many keys."""
    model = teacher(**options)
    softmax = model.blocks[0].attention
    plain = [2, 3, 6, 7] if softmax.rope.interleaved else [1, 3, 5, 7]
    with torch.no_grad():
        n_rotated = softmax.n_heads + softmax.n_kv_heads
        if softmax.q_norm is None:
            rows = torch.arange(n_rotated * 8).view(-1, 8)
            softmax.qkv.weight[rows[:, plain].flatten()] = 0
            softmax.qkv.weight[rows.flatten()] *= 0.3
        else:
            for norm in (softmax.q_norm, softmax.k_norm):
                norm.weight.fill_(0.3)[plain] = 0
            softmax.qkv.bias.zero_()
    linear = convert(model, hybrid_config(model.config, "linear", signed=True, feature_map=feature_map))
    linear = linear.blocks[0].attention
    x = torch.randn(2, 2000, 32, generator=torch.manual_seed(1))
    found, expected = (attention(x)[:, 1000:] for attention in (linear, softmax))
    with torch.no_grad():
        softmax.qkv.weight[: softmax.n_heads * 8] = 0
    uniform = softmax(x)[:, 1000:]  # weights without their first order
    assert (found - expected).norm() < 0.1 * (uniform - expected).norm()


def test_what_the_teacher_lacks_starts_close_to_it():
    model = teacher()
    config = hybrid_config(model.config, ["linear", "softmax", "softmax"], feature_map="hedgehog", forget_gate=True)
    hybrid = convert(model, config)
    assert {name.removeprefix("blocks.0.attention.") for name in new_parameters(hybrid, model)} == {
        "feature_map.weight",
        "forget.linear.weight",
        "forget.linear.bias",
    }
    assert layers_that_differ(hybrid, model) == [0]
    x = torch.randn(1, 9, 32)
    log_decay = hybrid.blocks[0].attention.forget(x)
    torch.testing.assert_close((1000 * log_decay).exp(), torch.full((1, 4, 9), 0.5), rtol=1e-3, atol=0)

    model.blocks[0].attention.qkv.weight.data.mul_(0.1)  # small values, which a SiLU scales alike
    convolved = convert(model, hybrid_config(model.config, "softmax", short_conv=3))
    assert layers_that_differ(convolved, model) == [0, 1, 2]
    found, expected = (one.blocks[0].attention(x) for one in (convolved, model))
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_a_convolution_before_a_norm_keeps_the_scale():
    model = teacher(output_norm=True)
    x = torch.randn(1, 9, 32)
    model.blocks[0].attention.qkv.weight.data.mul_(0.1)
    convolved = convert(model, hybrid_config(model.config, "softmax", short_conv=3))
    found, expected = (one.blocks[0].attention(x) for one in (convolved, model))
    assert (found - expected).norm() < 0.2 * expected.norm()  # ε of the norm counts at a quarter of the values


def test_trained_frequencies_go_along():
    model = teacher(rope=RotaryConfig(trainable=True))
    for block in model.blocks:
        block.attention.rope.theta.data.copy_(torch.tensor([4.0, 3.0, 2.0, 1.0]))
    signed = convert(model, hybrid_config(model.config, ["linear", "softmax", "softmax"], signed=True))
    assert signed.blocks[0].attention.rope.theta.tolist() == [4.0, 2.0]
    assert signed.blocks[1].attention.rope.theta.tolist() == [4.0, 3.0, 2.0, 1.0]


def test_dtype_and_tokenizer_are_the_teachers():
    model = teacher().bfloat16()
    model.tokenizer = {"kind": "bytes"}
    hybrid = convert(model, hybrid_config(model.config, "linear", forget_gate=True))
    assert {parameter.dtype for parameter in hybrid.parameters()} == {torch.bfloat16}
    assert hybrid.tokenizer == {"kind": "bytes"}


def test_what_does_not_fit_is_named():
    model = teacher(short_conv=3)
    config, ntk = model.config, teacher(rope=RotaryConfig(scaling=RotaryScaling("ntk", 4.0)))
    cases = [
        (lambda: hybrid_config(config, "linear", d_model=64), "d_model cannot differ from that of the teacher"),
        (lambda: hybrid_config(config, "linear", output_gate=True), "output_gate cannot differ"),
        (lambda: convert(model, replace(config, d_model=64, n_layers=2)), r"(?s)d_model: 32 in.*n_layers: 3 in the"),
        (lambda: convert(model, replace(config, rope=RotaryConfig(base=5.0))), "rope.base: 10000.0 in the teacher"),
        (lambda: convert(model, replace(config, short_conv=4)), "short_conv=4 does not fit .* over 3 tokens"),
        (lambda: convert(model, replace(config, conv_silu="v")), "conv_silu='v' is 'qkv' in the teacher"),
        (lambda: convert(teacher(attention="linear"), config), "attention=linear: only softmax layers are converted"),
        (lambda: hybrid_config(teacher(rope=None).config, "linear", signed=True), "signed=True needs rope"),
        (lambda: hybrid_config(config, "linaer"), "Did you mean 'linear'"),
        (lambda: convert(ntk, hybrid_config(ntk.config, "linear", signed=True)), "rule='ntk' does not fit"),
    ]
    for call, message in cases:
        with pytest.raises(InputError, match=message):
            call()
