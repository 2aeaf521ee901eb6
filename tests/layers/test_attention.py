"""The attention layers: what they compute, their options, and continuing from a state."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from linrope import (
    AttentionState,
    CosineAttention,
    LinearAttention,
    RotaryConfig,
    RotaryEmbedding,
    SoftmaxAttention,
    linear_attention,
)
from linrope.feature_maps import MAP_MODULES, elu1
from linrope.layers.state import from_serialized, tensors_of
from linrope.rotary import RotaryScaling
from tests.conftest import assert_input_errors
from tests.layers.cases import (
    CLOSE,
    D_MODEL,
    EVERY,
    FEW,
    HEADS,
    LAYERS,
    assert_outputs,
    layer_and_input,
    projected,
    weighted,
)


def test_the_default_is_the_plain_form():
    layer, x = layer_and_input("linear", {})
    rope = RotaryEmbedding(D_MODEL // HEADS)
    assert_outputs(layer, x, linear_attention(*projected(layer, x), rope, backend="reference"))
    assert {name for name, _ in layer.named_parameters()} == {"qkv.weight", "out.weight"}


@pytest.mark.parametrize("scaling", [None, RotaryScaling("yarn", 4.0, 16)], ids=["plain", "yarn"])
def test_the_baseline_is_rope_then_softmax_which_yarn_sharpens(scaling):
    layer, x = layer_and_input("softmax", {"rope": RotaryConfig(scaling=scaling)})
    q, k, v = projected(layer, x)
    rope = RotaryEmbedding(D_MODEL // HEADS, scaling=scaling)
    assert (rope.logit_scale > 1) == (scaling is not None)
    scores = rope.rotate(q) @ rope.rotate(k).mT * rope.logit_scale**2 / (D_MODEL // HEADS) ** 0.5
    assert_outputs(layer, x, scores.masked_fill(torch.ones(90, 90).triu(1).bool(), -torch.inf).softmax(-1) @ v)


def test_positions_before_the_map_stand_in_both_sums():
    layer, x = layer_and_input("linear", {"rope": RotaryConfig(placement="before_map")})
    q, k, v = projected(layer, x)
    rope = RotaryEmbedding(D_MODEL // HEADS)
    assert_outputs(layer, x, weighted(elu1(rope.rotate(q)) @ elu1(rope.rotate(k)).mT, v))


def test_the_temperature_scales_inside_the_map():
    layer, x = layer_and_input("linear", {"temperature": True, "rope": None})
    q, k, v = projected(layer, x)
    scale = layer.log_scale.exp().view(HEADS, 1, 1)
    assert_outputs(layer, x, weighted(elu1(scale * q) @ elu1(scale * k).mT, v))
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
def test_rope_rotates_the_features_of_a_learned_map(name):
    layer, x = layer_and_input("linear", {"feature_map": name})
    q, k, v = projected(layer, x)
    q, k = layer.feature_map(q), layer.feature_map(k)
    n_features = q.shape[-1]
    rope = RotaryEmbedding(n_features, rotary_dim=n_features - n_features % 2)
    assert_outputs(layer, x, weighted(rope.rotate(q) @ rope.rotate(k).mT, v, q @ k.mT))


def test_performer_with_rope_sees_both_directions():
    layer, x = layer_and_input("linear", {"feature_map": "favor", "causal": False})
    q, k, v = projected(layer, x)
    q, k = layer.feature_map(q), layer.feature_map(k)
    rope = RotaryEmbedding(q.shape[-1])
    denominator = (q @ k.mT).sum(-1, keepdim=True)
    assert_outputs(layer, x, (rope.rotate(q) @ rope.rotate(k).mT) @ v / (denominator + 1e-6))


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
    torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize(("kind", "options"), FEW)
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
def test_padding_is_not_seen_whatever_it_holds(kind, options):
    """A row that is padded on the left is computed, and continued, as the row alone."""
    layer, x = layer_and_input(kind, options)
    rope = options.get("rope")
    padded = torch.cat((torch.full_like(x[:, :7], torch.nan), x), dim=1)
    key_mask = (torch.arange(97) >= 7).expand(2, -1)
    y, state = layer(padded, return_state=True, key_mask=key_mask)
    assert torch.isfinite(y).all()
    if rope is None or rope.placement != "before_map":  # whose weights are no function of the distance
        alone, expected = layer(x, return_state=True)
        torch.testing.assert_close(y[:, 7:], alone, **CLOSE)
        torch.testing.assert_close(layer(x, state), layer(x, expected), **CLOSE)
        torch.testing.assert_close(layer(x, layer.advance(padded, key_mask=key_mask)), layer(x, expected), **CLOSE)
    grad = torch.autograd.grad(y[:, 7:].square().sum(), layer.parameters())
    assert all(torch.isfinite(one).all() for one in grad)


@pytest.mark.parametrize(("kind", "options"), EVERY)
def test_padding_anywhere_in_packed_rows_which_are_cut_anywhere(kind, options):
    layer, x = layer_and_input(kind, options)
    ids = torch.tensor([5] * 31 + [2] * 33 + [5] * 26).expand(2, -1)
    key_mask = torch.rand(2, 90, generator=torch.Generator().manual_seed(0)) < 0.6
    packed = layer(x, segment_ids=ids, key_mask=key_mask)
    pieces = zip(x.split([31, 33, 26], dim=1), key_mask.split([31, 33, 26], dim=1))
    apart = torch.cat([layer(piece, key_mask=mask) for piece, mask in pieces], dim=1)
    torch.testing.assert_close(packed, apart, **CLOSE)
    other = torch.where(key_mask[..., None], x, torch.randn_like(x))
    torch.testing.assert_close(layer(other, None, ids, key_mask=key_mask)[key_mask], packed[key_mask], **CLOSE)
    for cut in (30, 40, 65):
        first, state = layer(x[:, :cut], segment_ids=ids[:, :cut], return_state=True, key_mask=key_mask[:, :cut])
        rest = layer(x[:, cut:], state, ids[:, cut:], key_mask=key_mask[:, cut:])
        torch.testing.assert_close(torch.cat((first, rest), dim=1), packed, **CLOSE)


@pytest.mark.parametrize("kind", LAYERS)
def test_noncausal_layers_do_not_see_padding(kind):
    layer, x = layer_and_input(kind, {"causal": False, "bias": True})
    key_mask = torch.rand(2, 90, generator=torch.Generator().manual_seed(0)) < 0.6
    other = torch.where(key_mask[..., None], x, torch.nan)
    torch.testing.assert_close(
        layer(other, key_mask=key_mask)[key_mask], layer(x, key_mask=key_mask)[key_mask], **CLOSE
    )
    assert not torch.allclose(layer(x)[key_mask], layer(x, key_mask=key_mask)[key_mask], rtol=0.01)


@pytest.mark.parametrize(("kind", "options"), EVERY)
def test_a_layer_without_memory_is_initialised_as_a_new_one(kind, options):
    make = {"linear": LinearAttention, "softmax": SoftmaxAttention, "cosine": CosineAttention}[kind]
    torch.manual_seed(0)
    new, drawn = make(D_MODEL, HEADS, **options), torch.rand(1)
    with torch.device("meta"):
        layer = make(D_MODEL, HEADS, **options)
    for empty in (layer, new.to("meta")):
        empty.to_empty(device="cpu")
        for tensor in empty.state_dict().values():
            tensor.fill_(torch.nan)
        torch.manual_seed(0)
        empty.reset_parameters()
        assert torch.equal(torch.rand(1), drawn)
    torch.manual_seed(0)
    expected = make(D_MODEL, HEADS, **options).state_dict()
    for found in (layer.state_dict(), new.state_dict()):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_feature_map_of_the_caller_is_initialised_with_the_layer():
    def made():
        torch.manual_seed(0)
        phi = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softplus())
        return LinearAttention(D_MODEL, HEADS, feature_map=phi)

    layer, expected = made().to("meta").to_empty(device="cpu"), made().state_dict()
    torch.manual_seed(0)
    layer.reset_parameters()
    assert all(torch.equal(layer.state_dict()[name], expected[name]) for name in expected)
    layer.feature_map.register_parameter("shift", torch.nn.Parameter(torch.zeros(8)))
    message = r"Sequential has shift and no reset_parameters\(\): define one"
    assert_input_errors((layer.reset_parameters, message))


def numbers(state):
    """A layer's state by name, without what it does not have."""
    values = {**vars(state), **vars(state.past)}
    return {name: value for name, value in values.items() if isinstance(value, (int, torch.Tensor))}


@pytest.mark.parametrize(("kind", "options"), EVERY)
def test_the_state_without_outputs_is_that_of_a_call(kind, options):
    """From nothing and from a state, of one document and of packed ones, one of which the state holds the beginning."""
    layer, x = layer_and_input(kind, options)
    ids = (torch.arange(90) >= 60).long().expand(2, -1)
    for documents in (None, ids):
        first, rest = (None, None) if documents is None else documents.split([40, 50], dim=1)
        _, before = layer(x[:, :40], segment_ids=first, return_state=True)
        _, after = layer(x[:, 40:], before, rest, return_state=True)
        found = layer.advance(x[:, :40], segment_ids=first), layer.advance(x[:, 40:], before, rest)
        torch.testing.assert_close([*map(numbers, found)], [numbers(before), numbers(after)], **CLOSE)


@pytest.mark.parametrize(("kind", "options"), FEW)
def test_on_the_device_meta_a_layer_computes_shapes(kind, options):
    layer, x = layer_and_input(kind, options)
    ids, key_mask = torch.zeros(2, 90, dtype=torch.int64), torch.ones(2, 90, dtype=torch.bool)

    def results(layer, x, ids, key_mask):
        y, state = layer(x, return_state=True, segment_ids=ids, key_mask=key_mask)
        z, after = layer(x[:, :1], state, return_state=True)
        (y.sum() + z.sum()).backward()
        tensors = [y, z, *numbers(after).values(), *numbers(layer.advance(x, after)).values()]
        tensors += [parameter.grad for parameter in layer.parameters()]
        return [(one.shape, one.dtype) if isinstance(one, torch.Tensor) else one for one in tensors if one is not None]

    expected = results(layer, x, ids, key_mask)
    layer.zero_grad()
    assert results(layer.to("meta"), *(tensor.to("meta") for tensor in (x, ids, key_mask))) == expected


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


@pytest.mark.parametrize(("kind", "options"), EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_of_the_state_is_what_is_held(kind, options, dtype):
    layer = LAYERS[kind](**options).to(dtype)
    _, state = layer(torch.randn(1, 50, D_MODEL, dtype=dtype), return_state=True)
    storages = [tensor.untyped_storage() for tensor in tensors_of((state,))]
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert layer.state_bytes(50, dtype) == sum(held.values())
    assert (layer.state_bytes(100, dtype) == layer.state_bytes(50, dtype)) == (kind != "softmax" or "window" in options)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options", [{"short_conv": 4, "forget_gate": True, "output_gate": True}, {}], ids=["all", "plain"]
)
def test_a_compiled_layer_computes_the_same(options):
    """Traced by torch.compile, with no code generated: outputs, and gradients also through a state."""
    layer, x = layer_and_input("linear", options)
    first, second = x.chunk(2, dim=1)

    def outputs_and_gradients(called):
        y, state = called(first, return_state=True)
        y = torch.cat((y, called(second, state)), dim=1)
        return y, *torch.autograd.grad(y.square().sum(), layer.parameters())

    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(outputs_and_gradients(compiled), outputs_and_gradients(layer), **CLOSE)


@pytest.mark.parametrize(("head_dim", "placement"), [(8, "numerator"), (16, "signed")])
def test_a_feature_map_with_weights_is_part_of_the_layer(head_dim, placement):
    phi, rope = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softplus()), RotaryConfig(placement=placement)
    layer = LinearAttention(D_MODEL, HEADS, head_dim=head_dim, rope=rope, feature_map=phi).to(torch.bfloat16)
    y = layer(torch.randn(2, 70, D_MODEL, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
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
    options = {"temperature": True, "output_norm": True, "forget_gate": True}
    layer = LinearAttention(D_MODEL, HEADS, feature_map=name, **options)
    x = torch.randn(2, 70, D_MODEL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), rtol=0.1, atol=0.1)  # bfloat16's three digits, after a norm


@pytest.mark.parametrize("options", [{"output_norm": True}, {"temperature": True}], ids=str)
def test_new_options_leave_a_plain_layer_as_it_was(options):
    """Their weights come last and draw no random numbers, so that a seed makes the same layer without them."""
    torch.manual_seed(0)
    more, drawn = LinearAttention(D_MODEL, HEADS, **options).state_dict(), torch.rand(1)
    torch.manual_seed(0)
    plain, same = LinearAttention(D_MODEL, HEADS).state_dict(), torch.rand(1)
    assert torch.equal(drawn, same)
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
    message = r"state.document_start is \(2,\), this call needs \(1,\)"
    assert_input_errors((lambda: layer(x[:1], state), message))


def test_bad_arguments_are_named():
    linear, softmax = partial(LinearAttention, 12, 2), partial(SoftmaxAttention, 12, 2)
    gated = partial(linear, forget_gate=True)
    for make in (linear, softmax):
        with pytest.raises(TypeError, match="unexpected keyword argument 'short_cnov'"):
            make(short_cnov=4)
    assert_input_errors(
        (lambda: LinearAttention(10, 3), "n_heads=3 does not divide d_model=10"),
        (lambda: LinearAttention(10, 0), "n_heads=0"),
        (lambda: linear(normalize="no"), "normalize='no'"),
        (lambda: linear(backend="cuda"), "backend='cuda' is unknown"),
        (lambda: linear(eps=-1.0), "eps=-1.0 must be a finite number, at least 0"),
        (lambda: linear(short_conv=1), "short_conv=1"),
        (lambda: linear(short_conv=4, causal=False), "short_conv=4 sees earlier tokens only"),
        (lambda: linear(short_conv=4, conv_silu="q"), "conv_silu='q'"),
        (lambda: softmax(conv_silu="v"), "conv_silu='v' .* set short_conv"),
        (lambda: gated(causal=False), "forget_gate=True needs causal=True"),
        (lambda: linear(rope=RotaryEmbedding(6)), "rope is a RotaryEmbedding: pass a linrope.RotaryC"),
        (lambda: linear(gate_normalizer=16), "gate_normalizer=16 .* set forget_gate"),
        (lambda: gated(gate_normalizer=0.5), "gate_normalizer=0.5 .* at least 1"),
        (lambda: gated(gate_normalizer=[1, "8"]), "must be finite numbers"),
        (lambda: gated(gate_normalizer="16"), "='16' must be a number"),
        (lambda: gated(gate_normalizer=[1] * 3), "has 3 entries for n_heads=2"),
        (lambda: linear(rope=RotaryConfig(base=[5.0] * 3)), "rope.base has 3 entries"),
        (lambda: linear(rope=RotaryConfig(rotary_dim=6, placement="signed")), "'signed' leaves none of the 6 dim"),
        (lambda: linear(feature_map="hedgehgo"), "'hedgehgo'.*Did you mean 'hedgehog'"),
        (lambda: softmax(window=0), "window=0 must be a whole number, at least 1, the token itself; None sees all"),
        (lambda: softmax(window=2.5), "window=2.5 must be a whole number"),
        (lambda: softmax(window=True), "window=True must be a whole number"),
        (lambda: LinearAttention(16.0, 2), "d_model=16.0 must be a whole number"),
        (lambda: LinearAttention(16, "2"), "n_heads='2' must be a whole number"),
        (lambda: linear(head_dim=4.0), "head_dim=4.0 must be a whole number"),
        (lambda: linear(n_kv_heads=1.0), "n_kv_heads=1.0 must be a whole number"),
        (lambda: linear(short_conv=2.5), "short_conv=2.5"),
        (lambda: softmax(window=5, causal=False), "window=5 sees earlier tokens only"),
    )


@pytest.mark.parametrize("kind", LAYERS)
def test_bad_calls_are_named(kind):
    layer, x = layer_and_input(kind, {"short_conv": 4})
    other, _ = layer_and_input("linear" if kind == "softmax" else "softmax", {"short_conv": 4})
    _, state = layer(x, return_state=True)
    assert_input_errors(
        (lambda: LAYERS["linear"](backend="cuda")(x), "backend='cuda'"),
        (lambda: layer(x[0]), r"x is \(90, 24\)"),
        (lambda: layer(x[..., :5]), "d_model=24"),
        (lambda: layer(x.long()), "int64"),
        (lambda: layer(x, segment_ids=torch.zeros(90, dtype=torch.int64)), r"segment_ids is \(90,\)"),
        (lambda: layer(x, key_mask=torch.ones(2, 90)), r"key_mask is \(2, 90\) torch.float32: pass booleans"),
        (lambda: layer(x, key_mask=torch.ones(2, 9).bool()), r"key_mask is \(2, 9\) .* \(B, T\) = \(2, 90\)"),
        (lambda: layer(x, state.past), "state holds a"),
        (lambda: layer(x, x, x), r"state holds a Tensor: .* q, k and v are all made from x; a padding .* `key_mask`"),
        (lambda: other(x, state), "pass the AttentionState that"),
        (lambda: layer(x[:1], state), r"state.conv_tail is \(2, 3, 72\)"),
        (lambda: layer(x, AttentionState(state.past)), "state.conv_tail is None, this call needs .* short_conv"),
        (lambda: layer(x[:1], AttentionState(state.past, state.conv_tail[:1])), r"state\.(past\.)?k.* \(2, 3"),
    )


def test_what_is_no_state_of_a_model_is_refused():
    no_past = {"type": "AttentionState", "past": None}
    for values in ([{}], [{"type": "Other"}], [{"type": "State"}], 3, [3], [no_past], [{"type": "State", "kv": 1}]):
        assert_input_errors((partial(from_serialized, values), "not the state of a model"))


def test_signed_is_a_matter_of_linear_layers():
    """Softmax layers of a hybrid rotate all of their dimensions, and by θ."""
    config = RotaryConfig(placement="signed")
    assert [LinearAttention(2 * dim, 2, rope=config).rope.rotary_dim for dim in (16, 14, 7)] == [8, 6, 2]
    assert LinearAttention(32, 2, rope=config, feature_map="hedgehog").rope.rotary_dim == 8
    assert LinearAttention(32, 2, rope=config, feature_map="hedgehog").n_features == 8 + 2 * 8
    assert SoftmaxAttention(32, 2, rope=config).rope.rotary_dim == 16


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_rotated_values_of_a_packed_document_are_those_of_it_alone(kind, causal):
    layer, x = layer_and_input(kind, {"rotate_values": True, "causal": causal}, length=23)
    documents = torch.tensor([[0] * 9 + [1] * 14] * 2)
    alone = torch.cat((layer(x[:, :9]), layer(x[:, 9:])), dim=1)
    torch.testing.assert_close(layer(x, segment_ids=documents), alone, **CLOSE)
