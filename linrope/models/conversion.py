"""From softmax attention to a hybrid: a language model whose chosen layers are linear, with the weights of another.

A linear layer takes all weights of the softmax layer that it replaces. It computes another function, so a converted
model is a start for training: `linrope.training.tasks.conversion` has the tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from linrope.errors import InputError
from linrope.feature_maps import get_feature_map
from linrope.layers.attention import Attention
from linrope.layers.linear_attention import LinearAttention
from linrope.models.base import differences, flat_options
from linrope.models.language_model import LanguageModel, LanguageModelConfig
from linrope.rotary import RotaryEmbedding

MAY_DIFFER = ("attention", "window", "feature_map", "temperature", "normalize", "forget_gate", "gate_normalizer")
MAY_DIFFER += ("short_conv", "conv_silu", "dropout", "rope.placement")
"""Options in which a converted model may differ from its teacher."""
HALF_LIFE = 1000
"""Tokens in which a forget gate's normalizer 1 forgets half at the start: softmax forgets nothing by itself."""


def hybrid_config(
    teacher: LanguageModelConfig, layers: str | Sequence[str], *, signed: bool = False, **options: Any
) -> LanguageModelConfig:
    """The configuration of a teacher's hybrid.

    Args:
        teacher: that of a model with softmax attention in every layer.
        layers: the type of attention of each layer, or of the first ones, which repeats: `attention` of
            `LanguageModelConfig`.
        signed: linear layers rotate half of each head's dimensions, which skip the feature map and the denominator
            (`rope.placement: signed`). False rotates the features in the numerator.
        options: others of `LanguageModelConfig` in which a hybrid may differ: those of `MAY_DIFFER`.

    Raises:
        InputError: options that a hybrid cannot have, or a model with positions that linear layers lack.
    """
    for name in options:
        if name not in MAY_DIFFER:
            raise InputError(f"{name} cannot differ from that of the teacher: a hybrid may differ in {_listed()}.")
    rope = teacher.rope
    if rope is not None:
        rope = replace(rope, placement="signed" if signed else "numerator")
    elif signed:
        raise InputError("signed=True needs rope, which the teacher does not have: leave it out.")
    attention = layers if isinstance(layers, str) else list(layers)
    if options.get("short_conv") and not teacher.short_conv:
        options.setdefault("conv_silu", "v")  # queries and keys then start as they were
    return replace(teacher, attention=attention, rope=rope, **options)


def convert(teacher: LanguageModel, config: LanguageModelConfig) -> LanguageModel:
    """A model of `config` with the weights and the tokenizer of `teacher`, in its dtype, in evaluation mode.

    Layers that stay softmax compute what they computed (within their window). Linear layers have the same weights. With
    `rope.placement: signed` the dimensions of their queries and keys are reordered, so that every second of RoPE's
    pairs is rotated as before, and the others are those of the feature map; and the rotated ones are scaled, so that
    weights are those of softmax to the first order. What the teacher lacks starts close to it:
    forget gates forget half in 1,000 tokens, feature maps are new ones, a short convolution passes its present token
    on (as nearly as its SiLU allows).

    Raises:
        InputError: a teacher with other layers than softmax; a configuration that differs from the teacher's in more
            than `MAY_DIFFER` (all differences are named).
    """
    if any(name != "softmax" for name in teacher.config.attention_types):
        raise InputError(f"the teacher has attention={teacher.config.attention}: only softmax layers are converted.")
    _require_convertible(teacher.config, config)
    dtype = next(teacher.parameters()).dtype
    model = LanguageModel(config).to(dtype)
    given = teacher.state_dict()
    with torch.no_grad():
        for layer, block in enumerate(model.blocks):
            before = teacher.blocks[layer].attention
            for name, weight in _weights_for(block.attention, before):
                given[f"blocks.{layer}.attention.{name}"] = weight
        model.load_state_dict({**model.state_dict(), **given})
        for block, before in zip(model.blocks, teacher.blocks, strict=True):
            _approach(block.attention, before.attention)
    model.tokenizer = teacher.tokenizer
    return model.eval()


def new_parameters(model: LanguageModel, teacher: LanguageModel) -> list[str]:
    """The names of the parameters that `model` has and `teacher` lacks."""
    known = {name for name, _ in teacher.named_parameters()}
    return [name for name, _ in model.named_parameters() if name not in known]


def layers_that_differ(model: LanguageModel, teacher: LanguageModel) -> list[int]:
    """The layers whose attention does not compute what the teacher's does: of another type, or with another window or a
    convolution that the teacher lacks."""

    def kind(attention: Attention) -> tuple[type, int | None, bool]:
        return type(attention), getattr(attention, "window", None), attention.conv is None

    pairs = zip(model.blocks, teacher.blocks, strict=True)
    return [layer for layer, (new, old) in enumerate(pairs) if kind(new.attention) != kind(old.attention)]


def _listed() -> str:
    return f"{', '.join(MAY_DIFFER[:-1])} and {MAY_DIFFER[-1]}"


def _require_convertible(teacher: LanguageModelConfig, config: LanguageModelConfig) -> None:
    allowed = {f"model.{name}" for name in MAY_DIFFER}
    differing = differences(flat_options(teacher), flat_options(config), ("in the teacher", "here"))
    if wrong := [text for name, text in differing.items() if name not in allowed]:
        raise InputError(
            f"the teacher's weights do not fit: a hybrid may differ from it in {_listed()}. Make these equal:\n  "
            + "\n  ".join(wrong)
        )
    rope = config.rope
    takes_half = rope is not None and rope.signed and rope.rotary_dim is None and "linear" in config.attention_types
    if takes_half and rope.scaling is not None and rope.scaling.rule == "ntk":
        raise InputError(
            "rope.scaling.rule='ntk' does not fit rope.placement='signed': signed layers rotate every second of the "
            "teacher's pairs, to which this rule gives other frequencies. Set rope.placement='numerator'."
        )
    if teacher.short_conv and teacher.short_conv != config.short_conv:
        raise InputError(
            f"short_conv={config.short_conv} does not fit the teacher's convolution over {teacher.short_conv} tokens: "
            f"set it to {teacher.short_conv}."
        )
    if teacher.short_conv and teacher.conv_silu != config.conv_silu:
        raise InputError(f"conv_silu={config.conv_silu!r} is {teacher.conv_silu!r} in the teacher: set it to that.")


def _weights_for(attention: Attention, teacher: Attention) -> Iterator[tuple[str, Tensor]]:
    """The weights of a layer that differ from those of the same name in its teacher."""
    order = _signed_order(attention, teacher)
    if teacher.rope is not None and teacher.rope.trainable:
        theta = teacher.rope.theta
        if order is not None:
            theta = theta[..., _rotated_pairs(attention.rope, teacher.rope)]
        yield "rope.theta", theta if theta.shape == attention.rope.theta.shape else attention.rope.theta
    if order is None:
        return
    rows = _reordered_rows(teacher, order)
    for name in ("qkv.weight", "qkv.bias", "conv.weight"):
        if (weight := _named(teacher, name)) is not None:
            yield name, weight[rows]
    for name in ("q_norm.weight", "k_norm.weight"):
        if (weight := _named(teacher, name)) is not None:
            yield name, weight[order]


def _named(module: nn.Module, name: str) -> Tensor | None:
    return dict(module.named_parameters()).get(name)


def _signed_order(attention: Attention, teacher: Attention) -> Tensor | None:
    """The teacher's dimension of a head for each of a signed linear layer's, (D,): first those that are rotated. None
    where the order stays."""
    rope = attention.rope
    if not isinstance(attention, LinearAttention) or rope is None or not rope.signed:
        return None
    if rope.rotary_dim == teacher.rope.rotary_dim:
        return None
    pairs = _rotated_pairs(rope, teacher.rope)
    n = teacher.rope.rotary_dim // 2
    first, second = (2 * pairs, 2 * pairs + 1) if rope.interleaved else (pairs, pairs + n)
    rotated = torch.stack((first, second), dim=1).flatten() if rope.interleaved else torch.cat((first, second))
    others = torch.ones(attention.head_dim, dtype=torch.bool).index_fill_(0, rotated, False)
    return torch.cat((rotated, others.nonzero().flatten()))


def _rotated_pairs(rope: RotaryEmbedding, teacher: RotaryEmbedding) -> Tensor:
    """The teacher's pair whose frequency each pair of a signed layer has, or is closest to: with half as many pairs
    every second."""
    n, n_teacher = rope.rotary_dim // 2, teacher.rotary_dim // 2
    return torch.arange(n) * n_teacher // n


def _reordered_rows(attention: Attention, order: Tensor) -> Tensor:
    """The rows of a matrix of queries, keys and values with each head's queries and keys in another order."""
    d, n_rotated = attention.head_dim, attention.n_heads + attention.n_kv_heads
    rows = torch.arange((n_rotated + attention.n_kv_heads) * d).view(-1, d)
    rows[:n_rotated] = rows[:n_rotated, order]
    return rows.flatten()


def _approach(attention: Attention, teacher: Attention) -> None:
    """Set the weights that the teacher lacks, so that the layer is close to it."""
    if isinstance(attention, LinearAttention):
        _approach_exponential(attention)
    forget = getattr(attention, "forget", None)
    if forget is not None:
        kept = -math.log(2) / HALF_LIFE  # the log decay of a token, at the normalizer 1
        forget.linear.bias.fill_(kept - math.log(-math.expm1(kept)))  # the inverse of logsigmoid
    if attention.conv is not None and teacher.conv is None:
        n_values = attention.n_kv_heads * attention.head_dim
        attention.conv.weight.zero_()[:, -1] = 1.0
        attention.conv.weight[-n_values:, -1] = 0.5  # 4 silu(v / 2) = v (1 + tanh(v / 4)), close to v for small ones
        if attention.norm is None:  # which takes the scale away
            attention.out.weight *= 4


def _approach_exponential(attention: LinearAttention) -> None:
    """Scale a signed layer so that its weights are those of softmax to the first order, ∝ 1 + qᵀk / √D.

    Rotated dimensions add their product to that of the other dimensions' features, which is that at 0 to this order.
    """
    signed = 0 if attention.rope is None else attention.rope.signed_dim
    if not signed or attention.options["normalize"] != "plain":
        return
    n, phi, root = attention.head_dim - signed, attention.feature_map, attention.head_dim**0.5
    at_zero = attention.qkv.weight.new_zeros(1, attention.n_heads, 1, n)
    constant = get_feature_map(phi).forward(at_zero).float().square().sum(-1).mean().item()
    if constant > 0:
        _scale_first(attention, signed, (constant / root) ** 0.5)


def _scale_first(attention: Attention, n: int, scale: float) -> None:
    """Multiply the first n dimensions of each head's queries and keys; through a convolution's SiLU not exactly."""
    if attention.q_norm is not None:
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight[:n] *= scale
        return
    rows = torch.arange(attention.qkv.out_features).view(-1, attention.head_dim)
    rows = rows[: attention.n_heads + attention.n_kv_heads, :n].flatten()
    for weight in (attention.qkv.weight, attention.qkv.bias):
        if weight is not None:
            weight[rows] *= scale
