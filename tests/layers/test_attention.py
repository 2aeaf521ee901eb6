"""The attention layers: what they compute, their options, and continuing from a state."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from linrope import (
    AttentionState,
    InputError,
    LinearAttention,
    RotaryConfig,
    RotaryEmbedding,
    SoftmaxAttention,
    linear_attention,
)
from linrope.feature_maps import MAP_MODULES, elu1
from linrope.layers.forget_gate import ForgetGate
from linrope.layers.short_convolution import ShortConvolution
from linrope.layers.state import reset_rows
from linrope.rotary import RotaryScaling

D_MODEL, HEADS = 24, 3
SELECTIVE = RotaryConfig(rotary_dim=4, placement="selective")
LAYERS = {
    "linear": lambda **options: LinearAttention(D_MODEL, HEADS, **options).double(),
    "softmax": lambda **options: SoftmaxAttention(D_MODEL, HEADS, **options).double(),
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
}
LINEAR_OPTIONS = {
    "forget_gate": {"forget_gate": True},
    "gate_normalizer": {"forget_gate": True, "gate_normalizer": [1, 8, 64]},
    "all of linear": {"forget_gate": True, "short_conv": 4, "output_gate": True},
    "rotary denominator": {"rope": RotaryConfig(placement="both")},
    "before map": {"rope": RotaryConfig(placement="before_map")},
    "signed": {"rope": RotaryConfig(rotary_dim=4, placement="signed"), "forget_gate": True},
    "signed, learned features": {"rope": RotaryConfig(rotary_dim=2, placement="signed"), "feature_map": "hedgehog"},
    "selective": {"rope": SELECTIVE, "forget_gate": True, "short_conv": 4},
    "selective, by head": {"rope": replace(SELECTIVE, base=[9.0, None, 1e4], trainable=True, interleaved=False)},
    "before map, partly": {"rope": RotaryConfig(placement="before_map", rotary_dim=4), "feature_map": "hedgehog"},
    "temperature": {"temperature": True},
    "favor": {"feature_map": "favor"},
    "hedgehog": {"feature_map": "hedgehog"},
    "taylor": {"feature_map": "taylor", "rope": RotaryConfig(placement="both")},
}
SOFTMAX_OPTIONS = {
    "window of 1": {"window": 1},
    "window of 7": {"window": 7, "short_conv": 3},
    "window of 40": {"window": 40},
    "yarn": {"rope": RotaryConfig(scaling=RotaryScaling("yarn", 4.0, 16))},
}
EVERY = [pytest.param(kind, options, id=f"{kind}-{name}") for kind in LAYERS for name, options in OPTIONS.items()]
EVERY += [pytest.param("linear", options, id=f"linear-{name}") for name, options in LINEAR_OPTIONS.items()]
EVERY += [pytest.param("softmax", options, id=f"softmax-{name}") for name, options in SOFTMAX_OPTIONS.items()]
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def layer_and_input(kind, options, length=90):
    torch.manual_seed(0)
    layer = LAYERS[kind](**options)
    for parameter in layer.parameters():  # a gate that starts at 0 would hide what its input does
        torch.nn.init.normal_(parameter, std=0.3)
    return layer, torch.randn(2, length, D_MODEL, dtype=torch.float64)


def heads(x, weight):
    return F.linear(x, weight).unflatten(-1, (HEADS, -1)).transpose(1, 2)


def test_the_default_is_the_plain_form():
    layer, x = layer_and_input("linear", {})
    q, k, v = (heads(x, weight) for weight in layer.qkv.weight.chunk(3))
    o = linear_attention(q, k, v, RotaryEmbedding(D_MODEL // HEADS), backend="reference")
    torch.testing.assert_close(layer(x), F.linear(o.transpose(1, 2).flatten(2), layer.out.weight), **CLOSE)
    assert {name for name, _ in layer.named_parameters()} == {"qkv.weight", "out.weight"}


def test_the_baseline_is_rope_then_softmax():
    layer, x = layer_and_input("softmax", {})
    q, k, v = (heads(x, weight) for weight in layer.qkv.weight.chunk(3))
    rope = RotaryEmbedding(D_MODEL // HEADS)
    scores = rope.rotate(q) @ rope.rotate(k).mT / (D_MODEL // HEADS) ** 0.5
    scores = scores.masked_fill(torch.ones(90, 90).triu(1).bool(), -torch.inf)
    o = scores.softmax(-1) @ v
    torch.testing.assert_close(layer(x), F.linear(o.transpose(1, 2).flatten(2), layer.out.weight), **CLOSE)


def projected(layer, x):
    return (heads(x, weight) for weight in layer.qkv.weight.chunk(3))


def merged(layer, o):
    return F.linear(o.transpose(1, 2).flatten(2), layer.out.weight)


def test_positions_before_the_map_stand_in_both_sums():
    layer, x = layer_and_input("linear", {"rope": RotaryConfig(placement="before_map")})
    q, k, v = projected(layer, x)
    rope = RotaryEmbedding(D_MODEL // HEADS)
    weights = (elu1(rope.rotate(q)) @ elu1(rope.rotate(k)).mT).tril()
    o = weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(layer(x), merged(layer, o), **CLOSE)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("base", [10000.0, [9.0, None, 100.0]], ids=str)
def test_a_selective_rotation_by_its_definition(interleaved, base):
    """Tokens i and j meet, in each pair of the dimensions that turn, at the angle that those from j + 1 to i add up to:
    θ (1 + tanh(W x)) each."""
    config = replace(SELECTIVE, base=base, interleaved=interleaved)
    layer, x = layer_and_input("linear", {"rope": config})
    q, k, v = projected(layer, x)
    angle = torch.zeros(2, HEADS, 2, dtype=torch.float64)
    angles = []
    for token in x.unbind(1):
        pace = 1 + (layer.selective.weight @ token.mT).mT.tanh().view(2, HEADS, 2)
        angle = angle + pace * RotaryEmbedding(4, base).frequencies()
        angles.append(angle)
    between = torch.stack(angles, 2)[:, :, :, None] - torch.stack(angles, 2)[:, :, None]  # (B, H, i, j, pair)
    assert between.diff(dim=2).std() > 0.05  # tokens do not turn alike
    first, second = ([0, 2], [1, 3]) if interleaved else ([0, 1], [2, 3])
    (q1, q2), (k1, k2) = ((y[..., first], y[..., second]) for y in (q, k))
    q1, q2, k1, k2 = q1[..., None, :], q2[..., None, :], k1[:, :, None], k2[:, :, None]
    turned = ((q1 * k1 + q2 * k2) * between.cos() + (q1 * k2 - q2 * k1) * between.sin()).sum(-1)
    plain = (elu1(q[..., 4:]) @ elu1(k[..., 4:]).mT).tril()
    o = (turned.tril() + plain) @ v / (plain.sum(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(layer(x), merged(layer, o), **CLOSE)


def test_a_selective_rotation_starts_as_rope():
    torch.manual_seed(0)
    layer = LinearAttention(D_MODEL, HEADS, rope=SELECTIVE).double()
    plain = LinearAttention(D_MODEL, HEADS, rope=replace(SELECTIVE, placement="signed")).double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(2, 90, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(layer(x), plain(x), **CLOSE)


def test_selective_angles_are_sums_in_float64():
    """Of paces in float32, as autocast leaves them too; and the angle of a far token is as good as that of a near one:
    a million turns further on, a layer computes the same."""
    torch.manual_seed(0)
    layer, x = LinearAttention(D_MODEL, HEADS, rope=SELECTIVE), torch.randn(2, 20_000, D_MODEL)
    torch.nn.init.normal_(layer.selective.weight)
    theta = layer.rope.frequencies()
    pace = 1 + F.linear(x, layer.selective.weight).tanh()
    expected = (pace.double().view(2, -1, HEADS, 2).transpose(1, 2) * theta).cumsum(2)
    assert expected.max() > 10_000  # where float32 has 3 digits after the point
    torch.testing.assert_close(layer.selective.angles(x, theta), expected, rtol=1e-12, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(layer.selective.angles(x, theta), expected, rtol=1e-12, atol=0)
    _, state = layer(x[:, :70], return_state=True)
    far = replace(state, angle=state.angle + 2 * torch.pi * 10**6)
    # float64 has 1e-9 of an angle of 6e6; float32 would have 0.5
    torch.testing.assert_close(layer(x[:, :70], far), layer(x[:, :70], state), rtol=1e-5, atol=1e-6)


def test_gradients_of_selective_angles_keep_their_digits_in_bfloat16():
    """A token's angle turns all that comes after it, in later documents of the row too, whose gradients cancel unless
    they were rounded."""
    torch.manual_seed(0)
    layer = LinearAttention(D_MODEL, HEADS, rope=SELECTIVE, forget_gate=True)
    torch.nn.init.normal_(layer.selective.weight, std=0.3)
    x, weight = torch.randn(1, 8192, D_MODEL), torch.randn(1, 8192, D_MODEL)
    documents = torch.arange(8192)[None] // 500

    def gradient(layer, x, weight):
        return torch.autograd.grad((layer(x, segment_ids=documents) * weight).sum(), layer.selective.weight)[0]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradient(layer, x, weight)
    exact = gradient(layer.double(), x.double(), weight.double())
    # q, k, v and the outputs were bfloat16, of a relative error of 0.004 each
    assert (found - exact).norm() <= 0.01 * exact.norm()


def test_a_row_that_forgot_has_the_angle_of_a_new_one():
    layer, x = layer_and_input("linear", {"rope": SELECTIVE})
    x[0, 5] = torch.nan
    _, state = layer(x, return_state=True)
    (forgot,) = reset_rows((state,), torch.tensor([True, False]))
    y = torch.randn_like(x)
    torch.testing.assert_close(layer(y, forgot)[0], layer(y)[0], **CLOSE)
    torch.testing.assert_close(layer(y, forgot)[1], layer(y, state)[1], **CLOSE)


def test_a_seed_makes_the_other_weights_that_it_makes_without_a_selective_rotation():
    made = []
    for rope in (SELECTIVE, replace(SELECTIVE, placement="signed")):
        torch.manual_seed(0)
        made.append((LinearAttention(D_MODEL, HEADS, rope=rope), torch.rand(1)))
    (layer, drawn), (plain, same) = made
    assert torch.equal(drawn, same)
    assert not layer.selective.weight.any()
    assert all(torch.equal(layer.state_dict()[name], weight) for name, weight in plain.state_dict().items())


def test_the_temperature_scales_inside_the_map():
    layer, x = layer_and_input("linear", {"temperature": True, "rope": None})
    q, k, v = projected(layer, x)
    scale = layer.log_scale.exp().view(HEADS, 1, 1)
    weights = (elu1(scale * q) @ elu1(scale * k).mT).tril()
    o = weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(layer(x), merged(layer, o), **CLOSE)
    torch.manual_seed(0)
    plain = LinearAttention(D_MODEL, HEADS)
    torch.manual_seed(0)
    assert torch.equal(LinearAttention(D_MODEL, HEADS, temperature=True)(x.float()), plain(x.float()))  # τ = 0


@pytest.mark.parametrize("kind", LAYERS)
def test_the_output_norm_comes_before_the_gate(kind):
    layer, x = layer_and_input(kind, {"output_norm": True, "output_gate": True})
    plain, _ = layer_and_input(kind, {"output_gate": True})
    plain.load_state_dict(layer.state_dict(), strict=False)
    torch.nn.init.eye_(plain.out.weight)
    gate = F.silu(plain.gate(x))
    o = (plain(x) / gate).unflatten(-1, (HEADS, -1))
    o = o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * layer.norm.weight
    torch.testing.assert_close(layer(x), F.linear(o.flatten(2) * gate, layer.out.weight), **CLOSE)


@pytest.mark.parametrize("name", MAP_MODULES)
def test_rope_turns_the_features_of_a_learned_map(name):
    layer, x = layer_and_input("linear", {"feature_map": name})
    q, k, v = projected(layer, x)
    q, k = layer.feature_map(q), layer.feature_map(k)
    n_features = q.shape[-1]
    rope = RotaryEmbedding(n_features, rotary_dim=n_features - n_features % 2)
    num = (rope.rotate(q) @ rope.rotate(k).mT).tril() @ v
    den = (q @ k.mT).tril().sum(-1, keepdim=True)
    torch.testing.assert_close(layer(x), merged(layer, num / (den + 1e-6)), **CLOSE)


def test_yarn_sharpens_the_softmax():
    scaling = RotaryScaling("yarn", 4.0, 16)
    layer, x = layer_and_input("softmax", {"rope": RotaryConfig(scaling=scaling)})
    q, k, v = projected(layer, x)
    rope = RotaryEmbedding(D_MODEL // HEADS, scaling=scaling)
    scores = rope.rotate(q) @ rope.rotate(k).mT * rope.logit_scale**2 / (D_MODEL // HEADS) ** 0.5
    scores = scores.masked_fill(torch.ones(90, 90).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(layer(x), merged(layer, scores.softmax(-1) @ v), **CLOSE)
    assert rope.logit_scale > 1


def test_one_option_swaps_the_attention_and_nothing_else_changes():
    """The same weights fit both: the comparison is of attentions, not of parameter counts."""
    options = {"short_conv": 4, "output_gate": True}
    linear, softmax = LinearAttention(D_MODEL, HEADS, **options), SoftmaxAttention(D_MODEL, HEADS, **options)
    softmax.load_state_dict(linear.state_dict())


@pytest.mark.parametrize(("kind", "options"), EVERY)
def test_a_state_continues_the_sequence(kind, options):
    """Prefill and token by token give what one call gives, gradients through the state included."""
    layer, x = layer_and_input(kind, options)
    x.requires_grad_()
    whole, end = layer(x, return_state=True)
    pieces, state = [], None
    for piece in x.split([50, 1, 1, 37, 1], dim=1):
        y, state = layer(piece, state, return_state=True)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, **CLOSE)
    assert state.past.length == end.past.length == 90
    weight = torch.randn_like(whole)
    expected = torch.autograd.grad((whole * weight).sum(), [x, *layer.parameters()])
    actual = torch.autograd.grad((torch.cat(pieces, dim=1) * weight).sum(), [x, *layer.parameters()])
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e, **CLOSE)


@pytest.mark.parametrize(("kind", "options"), EVERY)
def test_packed_documents_are_read_apart(kind, options):
    """One row of three documents equals three rows, whatever the numbers, also when the row is cut anywhere."""
    layer, x = layer_and_input(kind, options)
    ids = torch.tensor([5] * 31 + [2] * 33 + [5] * 26).expand(2, -1)  # the third has the first one's number
    packed = layer(x, segment_ids=ids)
    apart = torch.cat([layer(piece) for piece in x.split([31, 33, 26], dim=1)], dim=1)
    torch.testing.assert_close(packed, apart, **CLOSE)
    for cut in (30, 32, 40, 65):
        first, state = layer(x[:, :cut], segment_ids=ids[:, :cut], return_state=True)
        rest = layer(x[:, cut:], state, ids[:, cut:])
        torch.testing.assert_close(torch.cat((first, rest), dim=1), packed, **CLOSE)


@pytest.mark.parametrize(("kind", "options"), EVERY)
def test_later_inputs_change_nothing_earlier(kind, options):
    layer, x = layer_and_input(kind, options)
    changed = x.clone()
    changed[:, 40:] += 1
    # a tolerance, for matrix products of another shape may round otherwise
    torch.testing.assert_close(layer(changed)[:, :40], layer(x)[:, :40], rtol=1e-13, atol=1e-14)
    assert not torch.allclose(layer(changed)[:, 40:], layer(x)[:, 40:])


@pytest.mark.parametrize("kind", LAYERS)
def test_noncausal_layers_see_everything(kind):
    layer, x = layer_and_input(kind, {"causal": False})
    changed = x.clone()
    changed[:, 80] += 1
    assert not torch.allclose(layer(changed)[:, 0], layer(x)[:, 0])


@pytest.mark.parametrize("kind", LAYERS)
def test_an_empty_input_gives_an_empty_output(kind):
    layer, x = layer_and_input(kind, {"short_conv": 4})
    y, state = layer(x[:, :0], return_state=True)
    assert y.shape == (2, 0, D_MODEL)
    _, state = layer(x[:, :9], return_state=True)
    y, same = layer(x[:, :0], state, torch.zeros(2, 0, dtype=torch.int64), return_state=True)
    assert y.shape == (2, 0, D_MODEL)
    torch.testing.assert_close(layer(x[:, 9:12], same), layer(x[:, 9:12], state), rtol=0, atol=0)


def test_the_forget_gate_starts_slow_and_forgets():
    layer = LinearAttention(D_MODEL, HEADS, forget_gate=True)
    decay = layer.forget(torch.randn(2, 7, D_MODEL))
    torch.testing.assert_close(decay, torch.full((2, HEADS, 7), torch.tensor(4.0).sigmoid().log().item()))
    half_life = torch.log(torch.tensor(0.5)) / decay[0, 0, 0]
    assert 37 < half_life < 39  # as the docstring says
    torch.nn.init.constant_(layer.forget.bias, -100.0)  # forget all but the token itself: it attends to its own value
    x = torch.randn(2, 7, D_MODEL)
    v = F.linear(x, layer.qkv.weight.chunk(3)[2])
    torch.testing.assert_close(layer(x), F.linear(v, layer.out.weight), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalizer", [16.0, [1.0, 8.0, 64.0]], ids=str)
def test_the_gate_normalizer_divides_the_log_decay(normalizer):
    """By its definition, with any weights; and every head starts with √r times the memory it has without one."""
    torch.manual_seed(0)
    gate, plain = ForgetGate(D_MODEL, HEADS, normalizer), ForgetGate(D_MODEL, HEADS)
    x = torch.randn(2, 7, D_MODEL)
    divisors = torch.tensor(normalizer).expand(HEADS)
    torch.testing.assert_close(gate(x), plain(x) / divisors.sqrt()[:, None], rtol=1e-5, atol=0)
    assert torch.equal(plain.bias, torch.full((HEADS,), 4.0))  # models trained before the option
    torch.nn.init.normal_(gate.weight)
    expected = torch.log(torch.sigmoid(x @ gate.weight.T + gate.bias)) / divisors
    torch.testing.assert_close(gate(x), expected.transpose(1, 2), rtol=1e-4, atol=1e-7)  # log near 0 loses digits
    assert torch.isfinite(ForgetGate(D_MODEL, HEADS, 1e9).bias).all()
    with torch.device("meta"):  # as grids and plans count parameters
        assert ForgetGate(D_MODEL, HEADS, normalizer).bias.shape == (HEADS,)
    again = ForgetGate(D_MODEL, HEADS, normalizer).to(torch.bfloat16).float()  # which rounds weights only
    again.load_state_dict(gate.state_dict())
    assert torch.equal(again(x), gate(x))


def test_the_forget_gate_is_computed_in_float32_under_autocast():
    layer, x = LinearAttention(D_MODEL, HEADS, forget_gate=True), torch.randn(2, 7, D_MODEL)
    torch.nn.init.normal_(layer.forget.weight)
    expected = layer.forget(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.forget(x), expected)
        assert layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize("without_silu", [0, 3])
@pytest.mark.parametrize(("length", "dtype"), [(11, torch.float64), (300, torch.float64), (300, torch.float32)])
def test_the_short_convolution_is_its_formula(length, dtype, without_silu):
    """Short and long, fast or not: Σ_i w_i x_{t - width + 1 + i}, outputs and gradients, and the tail it leaves."""
    torch.manual_seed(0)
    conv = ShortConvolution(5, 4, without_silu).to(dtype)
    x = torch.randn(2, length, 5, dtype=dtype, requires_grad=True)
    tail = torch.randn(2, 3, 5, dtype=dtype, requires_grad=True)
    y, after = conv(x, tail)
    padded = torch.cat((tail, x), dim=1)
    expected = sum(conv.weight[:, i] * padded[:, i : i + length] for i in range(4))
    expected = torch.where(torch.arange(5) < without_silu, expected, F.silu(expected))
    close = CLOSE if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}  # sums of 600 terms in the weights' share
    torch.testing.assert_close(y, expected, **close)
    assert torch.equal(after, x[:, -3:])
    _, short = conv(x[:, :1], tail)
    assert torch.equal(short, padded[:, 1:4])
    inputs = [x, tail, conv.weight]
    pairs = zip(torch.autograd.grad(y.sum(), inputs), torch.autograd.grad(expected.sum(), inputs))
    for actual, right in pairs:
        torch.testing.assert_close(actual, right, **close)


def test_other_devices_than_cpus_take_the_sum_of_taps(monkeypatch):
    """cuDNN's convolution, which would take TF32 for float32, is not asked; "meta" stands for them here."""
    monkeypatch.setattr(F, "conv2d", lambda *args, **options: pytest.fail("conv2d was called"))
    y, tail = ShortConvolution(5, 4).to("meta")(torch.empty(2, 300, 5, device="meta"))
    assert (y.shape, tail.shape) == ((2, 300, 5), (2, 3, 5))


@pytest.mark.parametrize("kind", LAYERS)
def test_silu_on_the_values_alone_leaves_queries_and_keys_their_sign(kind):
    """The layer's own convolution without SiLU on what becomes q and k, and with it on what becomes v."""
    layer, x = layer_and_input(kind, {"short_conv": 4, "conv_silu": "v"})
    qkv, _ = layer.conv(layer.qkv(x))
    q, k, v = qkv.chunk(3, dim=-1)
    everywhere, _ = layer_and_input(kind, {"short_conv": 4})
    everywhere.load_state_dict(layer.state_dict())
    activated, _ = everywhere.conv(layer.qkv(x))
    torch.testing.assert_close(torch.cat((F.silu(q), F.silu(k), v), dim=-1), activated, **CLOSE)
    assert max(q.min(), k.min()) < -0.3
    assert v.min() > -0.279  # the least that silu takes


@pytest.mark.parametrize(("kind", "options"), EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_of_the_state_is_what_is_held(kind, options, dtype):
    layer = LAYERS[kind](**options).to(dtype)
    _, state = layer(torch.randn(1, 50, D_MODEL, dtype=dtype), return_state=True)
    tensors = [*vars(state.past).values(), state.conv_tail, state.angle]
    tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert layer.state_bytes(50, dtype) == sum(held.values())
    assert (layer.state_bytes(100, dtype) == layer.state_bytes(50, dtype)) == (kind == "linear" or "window" in options)


@pytest.mark.parametrize(
    "options", [{}, {"short_conv": 4, "forget_gate": True, "output_gate": True}, {"rope": SELECTIVE}], ids=str
)
def test_a_compiled_layer_computes_the_same(options):
    """Traced by torch.compile, with no code generated: outputs, gradients, and from a state."""
    layer, x = layer_and_input("linear", options)
    compiled = torch.compile(layer, backend="aot_eager")
    y, expected = compiled(x), layer(x)
    torch.testing.assert_close(y, expected, **CLOSE)
    pairs = zip(*(torch.autograd.grad(o.square().sum(), layer.parameters()) for o in (y, expected)))
    for actual, right in pairs:
        torch.testing.assert_close(actual, right, **CLOSE)
    _, state = compiled(x[:, :40], return_state=True)
    torch.testing.assert_close(compiled(x[:, 40:], state), expected[:, 40:], **CLOSE)


def test_a_feature_map_with_weights_is_part_of_the_layer():
    phi = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softplus())
    layer = LinearAttention(D_MODEL, HEADS, feature_map=phi).to(torch.bfloat16)
    x = torch.randn(2, 70, D_MODEL, dtype=torch.bfloat16)
    layer(x).sum().backward()
    assert layer.feature_map[0].weight.grad.norm() > 0
    assert "feature_map.0.weight" in layer.state_dict()


@pytest.mark.parametrize(("kind", "options"), EVERY)
def test_gradients_reach_every_parameter(kind, options):
    layer, x = layer_and_input(kind, options)
    layer(x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        unused = options.get("window") == 1 and name in ("qkv.weight", "qkv.bias", "conv.weight")
        assert unused or parameter.grad.flatten(1 if parameter.ndim > 1 else 0).norm(dim=-1).min() > 0, name


@pytest.mark.parametrize("name", MAP_MODULES)
def test_a_learned_map_goes_through_autocast(name):
    torch.manual_seed(0)
    layer, x = (
        LinearAttention(D_MODEL, HEADS, feature_map=name, temperature=True, output_norm=True),
        torch.randn(2, 70, 24),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), rtol=0.1, atol=0.1)  # bfloat16's three digits, after a norm


def test_new_options_leave_a_plain_layer_as_it_was():
    """Their weights come last and start as if they were not there, so that a seed makes the same layer without them."""
    for options in ({"output_norm": True}, {"temperature": True}):
        torch.manual_seed(0)
        more = LinearAttention(D_MODEL, HEADS, **options).state_dict()
        torch.manual_seed(0)
        plain = LinearAttention(D_MODEL, HEADS).state_dict()
        assert all(torch.equal(more[name], plain[name]) for name in plain)


def test_a_packed_state_knows_where_its_document_began():
    """Positions before the map are those in the document: three calls give what each document gives by itself."""
    layer, x = layer_and_input("linear", {"rope": RotaryConfig(placement="before_map")})
    ids = torch.tensor([[0] * 10 + [1] * 80, [0] * 30 + [1] * 60])
    _, state = layer(x[:, :40], segment_ids=ids[:, :40], return_state=True)
    assert state.document_start.tolist() == [10, 30]
    y, state = layer(x[:, 40:60], state, return_state=True)
    z, state = layer(x[:, 60:], state, torch.tensor([[4] * 30, [4] * 20 + [5] * 10]), return_state=True)
    assert state.document_start.tolist() == [10, 80]
    torch.testing.assert_close(y[0], layer(x[:1, 10:])[0, 30:50], **CLOSE)
    torch.testing.assert_close(z[0], layer(x[:1, 10:])[0, 50:], **CLOSE)
    torch.testing.assert_close(z[1, 20:], layer(x[1:, 80:])[0], **CLOSE)
    with pytest.raises(InputError, match=r"state.document_start is \(2,\), this call needs \(1,\)"):
        layer(x[:1], state)


def test_bad_arguments_are_named():
    for make, message in [
        (lambda: LinearAttention(10, 3), "n_heads=3 does not divide d_model=10"),
        (lambda: LinearAttention(10, 0), "n_heads=0"),
        (lambda: LinearAttention(12, 4), "dim=3 cannot be split into pairs"),
        (lambda: LinearAttention(12, 2, feature_map="elu"), "feature_map='elu'"),
        (lambda: LinearAttention(12, 2, normalize="no"), "normalize='no'"),
        (lambda: LinearAttention(12, 2, short_conv=1), "short_conv=1"),
        (lambda: LinearAttention(12, 2, short_conv=4, causal=False), "short_conv=4 sees earlier tokens only"),
        (lambda: LinearAttention(12, 2, short_conv=4, conv_silu="q"), "conv_silu='q'"),
        (lambda: SoftmaxAttention(12, 2, conv_silu="v"), "conv_silu='v' .* set short_conv"),
        (lambda: LinearAttention(12, 2, forget_gate=True, causal=False), "forget_gate=True needs causal=True"),
        (lambda: LinearAttention(12, 2, rope=RotaryEmbedding(6)), "rope is a RotaryEmbedding: pass a linrope.RotaryC"),
        (lambda: SoftmaxAttention(12, 2, rope={"base": 10.0}), "rope is a dict: pass a linrope.RotaryConfig"),
        (lambda: LinearAttention(12, 2, gate_normalizer=16), "gate_normalizer=16 .* set forget_gate"),
        (lambda: LinearAttention(12, 2, forget_gate=True, gate_normalizer=0.5), "gate_normalizer=0.5 .* at least 1"),
        (lambda: LinearAttention(12, 2, forget_gate=True, gate_normalizer=[1, "8"]), "must be finite numbers"),
        (
            lambda: LinearAttention(12, 2, forget_gate=True, gate_normalizer="16"),
            "='16' must be a number",
        ),
        (lambda: LinearAttention(12, 2, forget_gate=True, gate_normalizer=[1] * 3), "has 3 entries for n_heads=2"),
        (lambda: LinearAttention(12, 2, rope=RotaryConfig(rotary_dim=8)), "rotary_dim=8 is larger than dim=6"),
        (lambda: LinearAttention(12, 2, rope=RotaryConfig(base=[5.0] * 3)), "rope.base has 3 entries"),
        (
            lambda: LinearAttention(12, 2, rope=RotaryConfig(rotary_dim=6, placement="signed")),
            "rope.rotary_dim=6 with rope.placement='signed' leaves none of the 6 dimensions",
        ),
        (lambda: LinearAttention(12, 2, rope=RotaryConfig(placement="signd")), "Did you mean 'signed'"),
        (
            lambda: LinearAttention(12, 2, rope=RotaryConfig(placement="selective"), causal=False),
            "rope.placement='selective' sums angles along the row: it needs causal=True",
        ),
        (lambda: LinearAttention(12, 2, feature_map="hedgehgo"), "'hedgehgo'.*Did you mean 'hedgehog'"),
        (lambda: LinearAttention(12, 2, feature_map=3), "feature_map=3 is neither"),
        (lambda: SoftmaxAttention(12, 2, window=0), "window=0 must be at least 1"),
        (lambda: SoftmaxAttention(12, 2, window=5, causal=False), "window=5 sees earlier tokens only"),
    ]:
        with pytest.raises(InputError, match=message):
            make()


@pytest.mark.parametrize("kind", LAYERS)
def test_bad_calls_are_named(kind):
    layer, x = layer_and_input(kind, {"short_conv": 4})
    other, _ = layer_and_input("softmax" if kind == "linear" else "linear", {"short_conv": 4})
    _, state = layer(x, return_state=True)
    for call, message in [
        (lambda: LAYERS["linear"](backend="cuda")(x), "backend='cuda'"),
        (lambda: LAYERS["linear"](eps=-1.0)(x), "eps=-1.0 must be a finite number, at least 0"),
        (lambda: layer(x[0]), r"x is \(90, 24\)"),
        (lambda: layer(x[..., :5]), "d_model=24"),
        (lambda: layer(x.long()), "int64"),
        (lambda: layer(x, segment_ids=torch.zeros(90, dtype=torch.int64)), r"segment_ids is \(90,\)"),
        (lambda: layer(x, state.past), "state holds a"),
        (lambda: other(x, state), "pass the AttentionState that"),
        (lambda: layer(x[:1], state), r"state.conv_tail is \(2, 3, 72\)"),
        (lambda: layer(x, AttentionState(state.past)), "state.conv_tail does not fit short_conv"),
        (lambda: layer(x[:1], AttentionState(state.past, state.conv_tail[:1])), r"state\.(past\.)?k.* \(2, 3"),
    ]:
        with pytest.raises(InputError, match=message):
            call()


def test_signed_beside_a_module_in_half_precision():
    phi = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softplus())
    layer = LinearAttention(32, 2, feature_map=phi, rope=RotaryConfig(placement="signed")).bfloat16()
    assert layer(torch.randn(1, 5, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_state_of_another_rotation_is_named():
    plain, x = layer_and_input("linear", {"rope": replace(SELECTIVE, placement="signed")})
    layer, _ = layer_and_input("linear", {"rope": SELECTIVE})
    (_, of_plain), (_, state) = plain(x, return_state=True), layer(x, return_state=True)
    for call, message in [
        (lambda: layer(x, of_plain), r"state.angle is None, this call needs \(2, 3, 2\)"),
        (lambda: layer(x, replace(state, angle=state.angle[:1])), r"state.angle is \(1, 3, 2\)"),
        (lambda: plain(x, state), "state.angle was given to a layer without rope.placement"),
    ]:
        with pytest.raises(InputError, match=message):
            call()


def test_signed_is_a_matter_of_linear_layers():
    """Softmax layers of a hybrid turn all of their dimensions, and by θ."""
    config = RotaryConfig(placement="signed")
    assert LinearAttention(32, 2, rope=config).rope.rotary_dim == 8
    assert LinearAttention(32, 2, rope=config, feature_map="hedgehog").rope.rotary_dim == 8
    assert LinearAttention(32, 2, rope=config, feature_map="hedgehog").n_features == 8 + 2 * 8
    assert SoftmaxAttention(32, 2, rope=config).rope.rotary_dim == 16
    selective = SoftmaxAttention(32, 2, rope=replace(config, placement="selective"))
    assert selective.selective is None
    assert selective.rope.rotary_dim == 16
