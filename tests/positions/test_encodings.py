"""Every position encoding against its equation, written out for each pair; in layers; and in models."""

import math

import pytest
import torch

from linrope import CosineAttention, LanguageModel, LanguageModelConfig, LinearAttention, RotaryConfig, SoftmaxAttention
from linrope.losses import IGNORE
from linrope.models.encoder import EncoderConfig
from linrope.positions.alibi import slopes
from linrope.positions.base import PositionsConfig, Sizes
from linrope.positions.sinusoidal import sinusoids
from linrope.positions.t5 import buckets
from linrope.positions.table import ENCODINGS, IN_EMBEDDING, IN_WEIGHTS, encoding_of
from tests.conftest import assert_input_errors

RELATIVE = [name for name in IN_WEIGHTS if name != "tupe"] + ["rope", "none"]
CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # float64
D_MODEL, HEADS = 15, 3
EXACT = {"length": 40, "max_distance": 4, "n_buckets": 6}


def options_of(name):
    return PositionsConfig(name, **EXACT)


def awake(module):
    """The module in float64, with weights that all have an effect."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    return module.double()


# The equations. Each gives the logit of head h for query i and key j, which stand at these positions.


def shaw(e, h, q, k, i, j):
    return q @ (k + e.keys[max(-4, min(4, j - i)) + 4]) / q.numel() ** 0.5


def transformer_xl(e, h, q, k, i, j):
    r = e.w_k[h * 5 : h * 5 + 5] @ sinusoids(torch.tensor([i - j]), 16)[0]  # 15, rounded up to whole pairs
    return (q @ k + q @ r + e.u[h] @ k + e.v[h] @ r) / q.numel() ** 0.5


def bucket_of(i, j, causal):
    """T5's, with 6 buckets up to distance 4: 0, 1, 2, then by the logarithm; without causality 3 a direction."""
    if causal:
        return max(0, i - j) if i - j < 3 else min(5, 3 + int(math.log((i - j) / 3) / math.log(4 / 3) * 3))
    n = abs(i - j)
    return (3 if j > i else 0) + (n if n < 1 else min(2, 1 + int(math.log(n) / math.log(4) * 2)))


def t5(e, h, q, k, i, j):
    return q @ k / q.numel() ** 0.5 + e.table[h, bucket_of(i, j, e.sizes.causal)]


def tupe(e, h, q, k, i, j):
    u_q, u_k = e.u_q[h * 5 : h * 5 + 5], e.u_k[h * 5 : h * 5 + 5]
    correlation = (u_q @ e.table[i]) @ (u_k @ e.table[j]) / (2 * q.numel()) ** 0.5
    if not e.sizes.causal and i == 0:
        correlation = e.theta[0, h]
    elif not e.sizes.causal and j == 0:
        correlation = e.theta[1, h]
    bias = e.by_bucket[h, bucket_of(i, j, e.sizes.causal)]
    return q @ k / (2 * q.numel()) ** 0.5 + correlation + bias


def deberta(e, h, q, k, i, j):
    def row(i, j):
        return 0 if i - j <= -4 else 7 if i - j >= 4 else i - j + 4

    k_r, q_r = e.w_kr[h * 5 : h * 5 + 5] @ e.table[row(i, j)], e.w_qr[h * 5 : h * 5 + 5] @ e.table[row(j, i)]
    return (q @ k + q @ k_r + k @ q_r) / (3 * q.numel()) ** 0.5


def alibi(e, h, q, k, i, j):
    return q @ k / q.numel() ** 0.5 - [2**-4, 2**-8, 2**-2][h] * abs(i - j)  # two heads, and a third of those of four


EQUATIONS = {
    "shaw": shaw,
    "transformer_xl": transformer_xl,
    "t5": t5,
    "tupe": tupe,
    "deberta": deberta,
    "alibi": alibi,
}


def written_out(e, q, k, v, mask):
    rows, n_past = [], k.shape[2] - q.shape[2]
    for b, h, t in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        seen = [j for j in range(k.shape[2]) if mask[b % len(mask), t, j]]
        logits = [EQUATIONS[e.config.name](e, h, q[b, h, t], k[b, h, j], n_past + t, j) for j in seen]
        weights = torch.stack(logits).softmax(0) if seen else ()
        o = torch.zeros(q.shape[3], dtype=q.dtype)
        for weight, j in zip(weights, seen, strict=True):
            value = v[b, h, j]
            if e.config.name == "shaw":
                value = value + e.of_values[max(-4, min(4, j - n_past - t)) + 4]
            o = o + weight * value
        rows.append(o)
    return torch.stack(rows).view(*q.shape)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", IN_WEIGHTS)
def test_it_is_its_equation(name, causal):
    torch.manual_seed(0)
    e = awake(encoding_of(options_of(name), Sizes(D_MODEL, HEADS, 5, causal)))
    n_past = 2 if causal else 0
    q = torch.randn(2, HEADS, 9, 5, dtype=torch.double, requires_grad=True)
    k, v = torch.randn(2, 2, HEADS, 9 + n_past, 5, dtype=torch.double, requires_grad=True)
    mask = torch.rand(2, 9, 9 + n_past) < 0.8
    mask = mask.tril(n_past) if causal else mask
    mask[1, 3] = False  # sees nothing: zeros
    expected, found = written_out(e, q, k, v, mask), e.attend(q, k, v, mask)
    torch.testing.assert_close(found, expected, **CLOSE)
    weight, wanted = torch.randn_like(found), [q, k, v, *e.parameters()]
    gradients = [
        torch.autograd.grad((o * weight).sum(), wanted, allow_unused=True, materialize_grads=True)
        for o in (found, expected)
    ]
    torch.testing.assert_close(*gradients, **CLOSE)


def test_the_buckets_of_t5_as_published():
    """32 buckets up to 128: single distances up to 15 (7 a direction), the last from 113 (91) on."""
    causal = buckets(torch.arange(-2, 200), 32, 128, causal=True)
    assert causal[:19].tolist() == [0, 0, *range(17)]
    assert (causal == 31).nonzero()[0] - 2 == 113
    assert causal[-1] == 31
    both = buckets(torch.arange(-200, 201), 32, 128, causal=False)
    assert both[192:209].tolist() == [*range(24, 16, -1), *range(9)]
    assert [(both == last).nonzero()[-1] - 200 for last in (31, 14)] == [-91, 90]


@pytest.mark.parametrize(("heads", "expected"), [(1, [8]), (4, [2, 4, 6, 8]), (6, [2, 4, 6, 8, 1, 3])])
def test_the_slopes_of_alibi_as_published(heads, expected):
    assert slopes(heads) == [2.0**-power for power in expected]


def test_sinusoids_are_their_formula_and_exact_far_out():
    angles = torch.arange(50)[:, None] * 10000 ** (-torch.arange(0, 6, 2).double() / 6)
    expected = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)
    torch.testing.assert_close(sinusoids(torch.arange(50), 6), expected, rtol=0, atol=1e-14)
    far = sinusoids(torch.tensor([10**9]), 6)[0, :2]
    assert far.tolist() == pytest.approx([math.sin(10**9), math.cos(10**9)], abs=1e-12)


# In layers.


def layer_of(name, **options):
    torch.manual_seed(0)
    options |= {"rope": RotaryConfig(rotary_dim=4)} if name == "rope" else {}
    return awake(SoftmaxAttention(D_MODEL, HEADS, positions=options_of(name), **options))


@pytest.mark.parametrize("name", IN_WEIGHTS)
def test_a_layer_has_no_rope_beside_it_and_is_drawn_again_as_it_was(name):
    torch.manual_seed(0)
    layer = SoftmaxAttention(D_MODEL, HEADS, positions=options_of(name))
    assert layer.rope is None
    expected = {key: value.clone() for key, value in layer.state_dict().items()}
    for tensor in layer.state_dict().values():
        tensor.fill_(torch.nan)
    torch.manual_seed(0)
    layer.reset_parameters()
    assert all(expected[key].equal(value) for key, value in layer.state_dict().items())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", RELATIVE)
def test_relative_encodings_do_not_see_where_a_row_begins(name, causal):
    layer, x = layer_of(name, causal=causal), torch.randn(2, 23, D_MODEL, dtype=torch.double)
    before = torch.cat((torch.randn(2, 9, D_MODEL, dtype=torch.double), x), dim=1)
    mask = (torch.arange(32) >= 9).expand(2, -1)
    torch.testing.assert_close(layer(before, key_mask=mask)[:, 9:], layer(x), **CLOSE)


@pytest.mark.parametrize("name", IN_WEIGHTS)
def test_a_cache_continues_the_row_and_packed_documents_are_read_apart(name):
    layer, x = layer_of(name, short_conv=3), torch.randn(2, 31, D_MODEL, dtype=torch.double)
    pieces, state = [], None
    for piece in x.split([12, 1, 1, 17], dim=1):
        y, state = layer(piece, state, return_state=True)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, dim=1), layer(x), **CLOSE)
    ids = torch.tensor([[0] * 5 + [1] * 20 + [2] * 6, [0] * 31])
    packed = layer(x, segment_ids=ids)
    for row, first, last in [(0, 0, 5), (0, 5, 25), (0, 25, 31), (1, 0, 31)]:
        alone = layer(x[row : row + 1, first:last])
        torch.testing.assert_close(packed[row : row + 1, first:last], alone, **CLOSE)
    _, state = layer(x[:, :13], segment_ids=ids[:, :13], return_state=True)  # ends within a document
    rest = layer(x[:, 13:], state, ids[:, 13:])
    torch.testing.assert_close(rest, packed[:, 13:], **CLOSE)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", IN_WEIGHTS)
def test_padding_is_not_seen_and_a_row_of_it_is_finite(name, causal):
    layer, x = layer_of(name, causal=causal), torch.randn(2, 9, D_MODEL, dtype=torch.double)
    mask = torch.tensor([[True] * 6 + [False] * 3, [False] * 9])
    found = layer(x, key_mask=mask)
    torch.testing.assert_close(found[:1, :6], layer(x[:1, :6]), **CLOSE)
    assert found.isfinite().all()
    assert causal or not found[1].any()


@pytest.mark.parametrize("name", IN_WEIGHTS)
def test_half_precision_computes_the_weights_in_float32(name):
    torch.manual_seed(0)
    e, mask = encoding_of(options_of(name), Sizes(D_MODEL, HEADS, 5)), torch.ones(1, 30, 30).tril().bool()
    q, k, v = torch.randn(3, 1, HEADS, 30, 5).bfloat16()
    expected = e.attend(q.float(), k.float(), v.float(), mask).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert e.attend(q, k, v, mask).equal(expected)
    e.bfloat16().float()  # rounded
    expected = e.attend(q.float(), k.float(), v.float(), mask).bfloat16()
    assert e.bfloat16().attend(q, k, v, mask).equal(expected)


# In models.

SMALL = {"vocab_size": 11, "d_model": 12, "n_layers": 2, "n_heads": 2}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ENCODINGS)
def test_every_encoding_trains(name):
    """The task: which token stood two places before. Those that can single out a distance solve it in 100 steps."""
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(**SMALL, attention="softmax", positions=PositionsConfig(name)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for _ in range(100):
        tokens = torch.randint(11, (16, 20))
        targets = tokens[:, :-2].masked_fill(torch.arange(18) < 2, IGNORE)  # which the model does not see
        loss = model(tokens[:, 2:], targets=targets) / (16 * 16)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(parameter.grad is not None for parameter in model.parameters())
    slow = name in ("none", "sinusoidal", "alibi")  # counting, which is harder; ln 11 = 2.40 for guesses
    assert loss < (2.2 if slow else 0.2)


@pytest.mark.parametrize("attention", ["softmax", "linear", "cosine"])
@pytest.mark.parametrize("name", IN_EMBEDDING)
def test_embeddings_follow_the_position_in_the_document(name, attention):
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(**SMALL, attention=attention, positions=options_of(name))).double()
    tokens = torch.randint(11, (2, 30))
    whole = model(tokens)
    first, state = model(tokens[:, :13], return_state=True)
    torch.testing.assert_close(torch.cat((first, model(tokens[:, 13:], state)), 1), whole, **CLOSE)
    ids = (torch.arange(30) >= 17).long().expand(2, -1)
    torch.testing.assert_close(model(tokens, segment_ids=ids)[:, 17:], model(tokens[:, 17:]), **CLOSE)
    added = model.positions.embed(torch.arange(30))
    assert added.square().mean().sqrt().item() == pytest.approx(0.02, rel=0.1)  # that of the token embeddings


def test_errors():
    def config(name, **options):
        return LanguageModelConfig(**{"attention": "softmax", **options}, positions=options_of(name))

    x, long = torch.randn(1, 41, 16), torch.zeros(1, 41, dtype=torch.long)
    learned = LanguageModel(config("learned", **{**SMALL, "attention": "linear"}))
    _, state = learned(long[:, :40], return_state=True)
    assert_input_errors(
        (lambda: PositionsConfig("alibbi"), "positions.name='alibbi' is unknown.*Did you mean 'alibi'"),
        (lambda: PositionsConfig(length=0), "positions.length=0 must be at least 1"),
        (lambda: PositionsConfig(n_buckets=256), "n_buckets=256 must be below twice positions.max_distance=128"),
        (lambda: LinearAttention(16, 2, positions=options_of("t5")), "'t5' changes the attention weight .* and linear"),
        (lambda: CosineAttention(16, 2, positions=options_of("shaw")), "'shaw' changes .* and cosine attention never"),
        (lambda: config("alibi", attention=["softmax", "linear"]), "'alibi' changes .* RoPE does not need them"),
        (lambda: EncoderConfig(positions=options_of("tupe")), "'tupe' changes .* and linear attention never"),
        (lambda: config("t5", window=5).build(), "window=5 does not go with positions.name='t5'"),
        (lambda: config("none", rope=RotaryConfig(base=5.0)), "positions.name='none' takes the place of RoPE"),
        (lambda: config("learned", rope_layers=[0]), r"rope_layers=\[0\] has no RoPE to place beside"),
        (lambda: config("sinusoidal", d_model=9, n_heads=1).build(), "an even width, not 9"),
        (lambda: learned(long), "positions.length=40 is too short for the learned positions of 41 tokens"),
        (lambda: learned(long[:, :1], state), "positions.length=40 is too short for the learned positions of 41"),
        (lambda: SoftmaxAttention(16, 2, positions=options_of("tupe"))(x), "length=40 is too short for the tupe"),
    )
