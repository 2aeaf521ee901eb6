"""Cross-attention against its equation, written out token by token."""

import pytest
import torch

from linrope import RotaryConfig
from linrope.errors import InputError
from linrope.layers.cross_attention import CrossAttention

B, S, T, H, D = 3, 7, 5, 2, 6


def written_out(layer, x, source, mask, offset):
    """The equation, one query and one key at a time; rows of the mask may be all False."""

    def rotate(vector, position):
        if layer.rope is None:
            return vector
        angles = position * 10000.0 ** (-2 * torch.arange(D // 2).double() / D)
        a, b = vector[0::2], vector[1::2]
        return torch.stack((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1).flatten()

    def phi(vector):
        return torch.where(vector > 0, vector + 1, vector.exp())

    rows = []
    for row in range(B):
        q = layer.q(x[row]).view(T, H, D)
        k, v = layer.kv(source[row]).view(S, 2, H, D).unbind(1)
        keys = [j for j in range(S) if mask is None or mask[row, j]]
        tokens = []
        for i in range(T):
            heads = []
            for h in range(H):
                if not keys:
                    heads.append(torch.zeros(D).double())
                elif layer.kind == "softmax":
                    scores = [rotate(q[i, h], i + offset) @ rotate(k[j, h], j) / D**0.5 for j in keys]
                    weights = torch.stack(scores).softmax(0)
                    heads.append(sum(w * v[j, h] for w, j in zip(weights, keys, strict=True)))
                else:
                    over = [rotate(phi(q[i, h]), i + offset) @ rotate(phi(k[j, h]), j) * v[j, h] for j in keys]
                    under = [phi(q[i, h]) @ phi(k[j, h]) for j in keys]
                    heads.append(sum(over) / (sum(under) + layer.eps))
            tokens.append(torch.cat(heads))
        rows.append(layer.out(torch.stack(tokens)))
    return torch.stack(rows)


@pytest.mark.parametrize("rope", [RotaryConfig(), None], ids=["rope", "no positions"])
@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no mask"])
@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_outputs_and_gradients_are_those_of_the_equation(kind, masked, rope):
    torch.manual_seed(0)
    layer = CrossAttention(H * D, H, kind=kind, rope=rope, bias=True).double()
    x, source = torch.randn(B, T, H * D).double(), torch.randn(B, S, H * D).double()
    mask = torch.rand(B, S) > 0.4 if masked else None
    if masked:
        mask[1] = False
    inputs = [x.requires_grad_(), source.requires_grad_(), *layer.parameters()]
    o = layer(x, layer.memory(source, mask), offset=3)
    expected = written_out(layer, x, source, mask, offset=3)
    torch.testing.assert_close(o, expected, rtol=1e-9, atol=1e-9)
    direction = torch.randn_like(o)
    found = torch.autograd.grad(o, inputs, direction)
    torch.testing.assert_close(found, torch.autograd.grad(expected, inputs, direction), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_padding_may_hold_anything_and_a_masked_source_gives_zeros(kind):
    torch.manual_seed(0)
    layer = CrossAttention(H * D, H, kind=kind)
    x, source = torch.randn(B, T, H * D), torch.randn(B, S, H * D)
    mask = torch.arange(S) < torch.tensor([[S], [0], [4]])
    padded = source.masked_fill(~mask[..., None], float("nan"))
    o = layer(x, layer.memory(padded, mask))
    assert o[1].eq(0).all()
    torch.testing.assert_close(o[2:], layer(x[2:], layer.memory(source[2:, :4])))


def test_the_memory_of_linear_attention_has_a_fixed_size_and_float32_sums():
    layer = CrossAttention(H * D, H, kind="linear").bfloat16()
    short, long = (layer.memory(torch.randn(B, length, H * D).bfloat16()) for length in (3, 50))
    assert short.kv.shape == long.kv.shape == (B, H, D, D)
    assert long.kv.dtype == long.k_sum.dtype == torch.float32
    assert layer(torch.randn(B, T, H * D).bfloat16(), long).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_a_memory_made_in_autocast_is_read_outside_of_it(kind):
    torch.manual_seed(0)
    layer, x = CrossAttention(H * D, H, kind=kind), torch.randn(B, T, H * D)
    memory = layer.memory(x)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = layer.memory(x)
        o = layer(x, memory)
    for mixed in (o, layer(x, rounded)):  # within two roundings to bfloat16
        torch.testing.assert_close(mixed.float(), layer(x, memory), rtol=0.02, atol=0.02)


def test_a_map_with_weights_keeps_their_dtype():
    torch.manual_seed(0)
    phi = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Softplus())
    layer, x = CrossAttention(H * D, H, feature_map=phi), torch.randn(B, T, H * D)
    expected = layer(x, layer.memory(x))
    layer = layer.bfloat16()
    found = layer(x.bfloat16(), layer.memory(x.bfloat16()))
    torch.testing.assert_close(found.float(), expected, rtol=0.03, atol=0.03)
    layer = CrossAttention(H * D, H, feature_map=lambda x: x.sum(-1))
    with pytest.raises(InputError, match=r"feature_map=.* maps source of shape"):
        layer.memory(x)


def test_errors():
    layer = CrossAttention(12, 2, kind="linear")
    with pytest.raises(InputError, match="placement"):
        CrossAttention(12, 2, kind="linear", rope=RotaryConfig(placement="both"))
    with pytest.raises(InputError, match="eps=-1 must be a finite number, at least 0"):
        CrossAttention(12, 2, eps=-1)
    with pytest.raises(InputError, match="source is"):
        layer.memory(torch.zeros(2, 3, 11))
    with pytest.raises(InputError, match="rows"):
        layer(torch.zeros(3, 1, 12), layer.memory(torch.zeros(2, 3, 12)))
    softmax = CrossAttention(12, 2, kind="softmax")
    with pytest.raises(InputError, match="another layer"):
        softmax(torch.zeros(2, 1, 12), layer.memory(torch.zeros(2, 3, 12)))
    for kind in ("softmax", "linear"):  # of as many channels a head, or of as many heads
        for width, heads in ((6, 1), (8, 2)):
            memory = CrossAttention(width, heads, kind=kind).memory(torch.zeros(2, 3, width))
            with pytest.raises(InputError, match="another layer"):
                CrossAttention(12, 2, kind=kind)(torch.zeros(2, 1, 12), memory)
