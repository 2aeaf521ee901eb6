"""The peers of the CUDA backend: attention as others write it, at its fastest.

Their tables of angles exist before the call, and their elementwise operations are compiled, so that only their kernels
and the memory traffic between them are timed. Both pair dimension m with m + D/2, as they do by default.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.speed.methods import EPS, Inputs, Method, linear, missing
from linrope.feature_maps import elu1
from linrope.rotary import unit_rotations

LINEAR, SOFTMAX, FLA = "linear", "RoPE + SDPA flash", "flash-linear-attention"


@functools.lru_cache(maxsize=2)
def tables(length: int, dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin (T, D/2) of the angles of `RotaryEmbedding(dim)`."""
    theta = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    rotations = unit_rotations(torch.arange(length, device=device), theta)
    return rotations.real.to(dtype), rotations.imag.to(dtype)


def tables_of(x: Inputs) -> tuple[Tensor, Tensor]:
    return tables(x.q.shape[2], x.q.shape[3], x.q.dtype, x.q.device)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on pairs (m, m + D/2) of x (..., T, D)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def divide(num: Tensor, den: Tensor) -> Tensor:
    return num / (den + EPS)


@functools.cache
def fused(function: Callable) -> Callable:
    """The function, compiled once for all lengths."""
    return torch.compile(function, dynamic=True)


def softmax_flash(x: Inputs) -> Tensor:
    """RoPE, then FlashAttention of PyTorch."""
    rotate = fused(rotate_halves)
    cos, sin = tables_of(x)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(rotate(x.q, cos, sin), rotate(x.k, cos, sin), x.v, is_causal=True)


def flash_linear_attention(x: Inputs) -> Tensor:
    """Numerator-only RoPE with the plain denominator on the chunked kernel and the rotary embedding of fla.

    They take (B, T, H, D). The inputs' memory is read as such without a copy, which makes other numbers of it. The
    denominator is the same kernel's with values of 1, so that no running sum of features is written.
    """
    from fla.modules.rotary import rotary_embedding
    from fla.ops.simple_gla import chunk_simple_gla

    q, k, v = (tensor.view(tensor.shape[0], tensor.shape[2], tensor.shape[1], -1) for tensor in (x.q, x.k, x.v))
    q, k = (fused(elu1)(tensor) for tensor in (q, k))
    cos, sin = tables_of(x)
    num, _ = chunk_simple_gla(rotary_embedding(q, cos, sin), rotary_embedding(k, cos, sin), v, scale=1.0)
    den, _ = chunk_simple_gla(q, k, torch.ones_like(v[..., :16], memory_format=torch.contiguous_format), scale=1.0)
    return fused(divide)(num, den[..., :1]).reshape(x.v.shape)


def forms() -> dict[str, Method]:
    """By name, ours first; a missing package is absent with the reason."""
    absent = missing("fla.modules.rotary") or missing("fla.ops.simple_gla")
    return {
        form.name: form
        for form in (
            Method(LINEAR, functools.partial(linear, backend="triton")),
            Method(SOFTMAX, softmax_flash, quadratic=True),
            Method(FLA, flash_linear_attention, absent=absent),
        )
    }
