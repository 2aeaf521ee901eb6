"""Each benchmarked form computes what it says, so that times are compared of equals."""

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.speed import methods
from benchmarks.speed.methods import Inputs, LinearDecoding, Setting, SoftmaxDecoding, catalogue
from linrope import RotaryEmbedding, linear_attention

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}  # float64, a few hundred terms in another order


def inputs(length: int = 128, **changes) -> Inputs:
    return Inputs.make(Setting(length, batch=2, heads=2, head_dim=8, value_dim=6, dtype="float64", **changes))


def outputs_and_gradients(attend, x: Inputs) -> tuple:
    o = attend(x)
    return o, *torch.autograd.grad(o, (x.q, x.k, x.v), x.grad)


def reference(x: Inputs, **options) -> torch.Tensor:
    return linear_attention(x.q, x.k, x.v, x.rope, backend="reference", **options)


def softmax_by_definition(x: Inputs) -> torch.Tensor:
    """o_i = Σ_{j≤i} exp(q̃_iᵀ k̃_j / √D) v_j / Σ_{j≤i} exp(q̃_iᵀ k̃_j / √D), row by row."""
    q, k = x.rope.rotate(x.q), x.rope.rotate(x.k)
    rows = []
    for i in range(q.shape[2]):
        weight = (torch.einsum("bhd,bhjd->bhj", q[:, :, i], k[:, :, : i + 1]) / math.sqrt(q.shape[-1])).exp()
        rows.append(torch.einsum("bhj,bhje->bhe", weight, x.v[:, :, : i + 1]) / weight.sum(-1, keepdim=True))
    return torch.stack(rows, dim=2)


def assert_same(attend, expected, x: Inputs, **tolerance) -> None:
    for ours, theirs in zip(outputs_and_gradients(attend, x), outputs_and_gradients(expected, x)):
        torch.testing.assert_close(ours, theirs, **tolerance or TOLERANCE)


def test_the_whole_sequence_form_is_linear_attention():
    assert_same(methods.whole_sequence, reference, inputs(192))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear-rope", reference),
        ("linear-rope-decay", lambda x: reference(x, log_decay=x.log_decay)),
        ("linear", lambda x: linear_attention(x.q, x.k, x.v, backend="reference")),
        ("softmax-rope", softmax_by_definition),
        ("softmax-rope-materialised", softmax_by_definition),
    ],
)
def test_methods_agree_with_their_definitions(name, expected):
    found = [method for key, method in catalogue("cpu", "float64").items() if key.split("[")[0] == name]
    assert found
    for method in found:
        if not method.absent:
            assert_same(method.attend, expected, inputs(67))


def causal_product(q, k, v):
    return (q @ k.mT).tril() @ v


def simple_gla(q, k, v, scale):
    return causal_product(*(x.transpose(1, 2) for x in (q * scale, k, v))).transpose(1, 2), None


@pytest.fixture
def peers(monkeypatch):
    """Their own packages need not be there: what they promise to compute stands in for them, uncompiled."""
    stand_ins = {
        "fast_transformers.causal_product": {"causal_dot_product": causal_product},
        "fla.ops.simple_gla": {"chunk_simple_gla": simple_gla},
        "fla.modules.rotary": {
            "rotary_embedding": lambda x, cos, sin: methods.rotate_halves(x, cos[:, None], sin[:, None])
        },
    }
    for name, contents in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**contents))
    monkeypatch.setattr(methods, "fused", lambda function: function)


def test_peers_compute_the_same_around_their_kernels(peers):
    assert catalogue("cpu", "float32")["fast-transformers"].absent == ""
    assert catalogue("cpu", "bfloat16")["fast-transformers"].absent == "float32 only"
    assert catalogue("cpu", "float32")["flash-linear-attention"].absent == "needs CUDA"
    x = inputs(65)
    torch.testing.assert_close(methods.fast_transformers(x), reference(x), **TOLERANCE)


def fused_by_definition(x: Inputs) -> torch.Tensor:
    """Of the memory of x read as (B, T, H, D), with the angles of the half-split RoPE."""
    q, k, v = (tensor.view(tensor.shape[0], tensor.shape[2], 3, -1).transpose(1, 2) for tensor in (x.q, x.k, x.v))
    o = linear_attention(q, k, v, RotaryEmbedding(16, interleaved=False), backend="reference")
    return o.transpose(1, 2).reshape(x.v.shape)


def test_peers_of_the_cuda_backend_compute_the_same(peers):
    """Outputs and gradients, to float32's rounding over 70 terms."""
    assert list(methods.gpu_forms()) == [methods.LINEAR, methods.SOFTMAX, methods.FLA]
    assert not methods.gpu_forms()[methods.FLA].absent
    x = Inputs.make(Setting(70, heads=3, head_dim=16))
    halves = replace(x, rope=RotaryEmbedding(16, interleaved=False))
    for name, expected in ((methods.SOFTMAX, lambda _: methods.softmax(halves)), (methods.FLA, fused_by_definition)):
        assert_same(methods.gpu_forms()[name].attend, expected, x, rtol=1e-5, atol=1e-5)


def test_several_backends_have_names_of_their_own(monkeypatch):
    def refuses(inputs):
        raise ValueError("no such device")

    chunked = methods.BACKENDS["chunked"]
    monkeypatch.setitem(methods.BACKENDS, "elsewhere", refuses)
    known = catalogue("cpu", "float32")
    assert known["linear-rope[elsewhere]"].absent == "does not run here: no such device"
    assert "linear-rope" in known or "linear-rope[chunked]" in known
    monkeypatch.setitem(methods.BACKENDS, "elsewhere", chunked)
    known = catalogue("cpu", "float32")
    assert not known["linear-rope[elsewhere]"].absent
    assert not known["linear-rope[chunked]"].absent
    assert "linear-rope" not in known


def test_decoding_is_one_more_token_of_the_past():
    x = inputs(40, mode="decode")
    x = replace(x, v=x.q)  # a cache holds keys and values of one size
    past = torch.randn(2, 2, 2, 40, 8, dtype=torch.float64)
    _, state = linear_attention(past[0], past[0], past[1], x.rope, return_state=True)
    linear = LinearDecoding(x)
    assert linear.nbytes == state.nbytes
    linear.state = state
    cache = torch.empty(2, 2, 2, 41, 8, dtype=torch.float64)
    cache[0, :, :, :40], cache[1, :, :, :40] = x.rope.rotate(past[0]), past[1]
    q, k, v = (torch.cat(pair, dim=2) for pair in ((past[0], x.q), (past[0], x.k), (past[1], x.v)))
    whole = replace(x, q=q, k=k, v=v)
    torch.testing.assert_close(linear()[0], reference(whole)[:, :, -1:], **TOLERANCE)
    softmax = SoftmaxDecoding(x, cache)
    torch.testing.assert_close(softmax(), softmax_by_definition(whole)[:, :, -1:], **TOLERANCE)
    assert softmax.nbytes == 2 * 2 * 2 * 41 * 8 * 8
