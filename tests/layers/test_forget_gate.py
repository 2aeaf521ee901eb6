"""The forget gate: its start, its normalizer, its precision."""

import pytest
import torch
import torch.nn.functional as F

from linrope import LinearAttention
from linrope.layers.forget_gate import ForgetGate
from tests.layers.cases import D_MODEL, HEADS


def test_the_forget_gate_starts_slow_and_forgets():
    layer = LinearAttention(D_MODEL, HEADS, forget_gate=True)
    decay = layer.forget(torch.randn(2, 7, D_MODEL))
    torch.testing.assert_close(decay, torch.full((2, HEADS, 7), torch.tensor(4.0).sigmoid().log().item()))
    half_life = torch.log(torch.tensor(0.5)) / decay[0, 0, 0]
    assert 37 < half_life < 39  # as the docstring says
    # forget all but the token itself: it attends to its own value
    torch.nn.init.constant_(layer.forget.linear.bias, -100.0)
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
    assert torch.equal(plain.linear.bias, torch.full((HEADS,), 4.0))  # models trained before the option
    torch.nn.init.normal_(gate.linear.weight)
    expected = torch.log(torch.sigmoid(x @ gate.linear.weight.T + gate.linear.bias)) / divisors
    torch.testing.assert_close(gate(x), expected.transpose(1, 2), rtol=1e-4, atol=1e-7)  # log near 0 loses digits
    assert torch.isfinite(ForgetGate(D_MODEL, HEADS, 1e9).linear.bias).all()
    with torch.device("meta"):  # as grids and plans count parameters
        assert ForgetGate(D_MODEL, HEADS, normalizer).linear.bias.shape == (HEADS,)
    again = ForgetGate(D_MODEL, HEADS, normalizer).to(torch.bfloat16).float()  # which rounds weights only
    again.load_state_dict(gate.state_dict())
    decay = gate(x)
    assert torch.equal(again(x), decay)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # computed in float32 all the same
        assert torch.equal(again(x), decay)
