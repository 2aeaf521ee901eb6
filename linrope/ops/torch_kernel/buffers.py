"""What a pass saves and writes, buffers of one block's tokens, and the elementwise passes over them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from linrope.feature_maps import FeatureMap
from linrope.ops.theta_gradient import ThetaGradient
from linrope.ops.torch_kernel.memory import Pool
from linrope.ops.torch_kernel.plan import sum_chunk
from linrope.rotary import rotate


@dataclass(frozen=True)
class Saved:
    """What the forward writes and the backward reads. `den` is empty without a denominator."""

    o: Tensor
    den: Tensor
    kv_at: Tensor  # (n, b, h, E, D): causal, before each block and at the end; else before and after
    k_sum_at: Tensor  # (n, b, h, D)

    def rows(self, batch: slice, heads: slice) -> Saved:
        o, den = (x if x.numel() == 0 else x[batch, heads] for x in (self.o, self.den))
        return Saved(o, den, self.kv_at[:, batch, heads], self.k_sum_at[:, batch, heads])


@dataclass(frozen=True)
class Gradients:
    """What the backward writes. `d_kv` and `d_k_sum` are those of the final state first, and of the past at the end."""

    grad_o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_log_decay: Tensor | None
    d_theta: ThetaGradient | None
    d_kv: Tensor  # (b, h, E, D)
    d_k_sum: Tensor  # (b, h, D)
    reach_sums: bool  # whether any gradient comes through sums of unrotated keys

    def rows(self, batch: slice, heads: slice) -> Gradients:
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        parts = {name: x[batch, heads] for name, x in own.items() if isinstance(x, Tensor)}
        return replace(self, **parts, d_theta=None if self.d_theta is None else self.d_theta.of_heads(heads))


class Tokens:
    """A buffer of one block's tokens, in three views."""

    def __init__(self, flat: Tensor, n_chunks: int, chunk: int):
        batch, heads, _, width = flat.shape
        self.rows = flat  # (b, h, t, D)
        self.chunks = flat.view(batch * heads * n_chunks, chunk, width)  # (G, C, D)
        self.sum_chunks = flat.view(-1, sum_chunk(chunk), width)  # (G', c, D)

    @cached_property
    def complex(self) -> Tensor:
        """(b, h, t, D/2): dimensions (2m, 2m+1) as one number."""
        return torch.view_as_complex(self.rows.unflatten(-1, (-1, 2)))

    def filled(self, other: Tokens) -> Tokens:
        """This buffer, with the other's values."""
        self.rows.copy_(other.rows)
        return self

    def rotated(self, rotation: Tensor, interleaved: bool, out: Tokens) -> Tokens:
        """Rotate into `out`: one complex product if all dimensions of the head are rotated."""
        if interleaved and 2 * rotation.shape[-1] == self.rows.shape[-1]:
            torch.mul(self.complex, rotation, out=out.complex)
        else:
            rotate(self.rows, rotation, interleaved, out=out.rows)
        return out


def load_features(phi: FeatureMap, x: Tensor, into: Tensor, derivative: Tensor, hidden: Tensor | None = None) -> None:
    """φ of x, of any strides and dtype, and its derivative, into buffers. `hidden` tokens become φ(0)."""
    # Read in place only in whole vectors: else exp may differ in the last bit with the strides.
    whole = x.dtype == into.dtype and x.stride(-1) == 1 and x.shape[-1] % 64 == 0
    if hidden is not None or not whole:
        x = into.copy_(x)
    if hidden is not None:
        x.masked_fill_(hidden, 0)  # not by a product: NaN · 0 is NaN
    phi.load(x, into, derivative)


def vjp_features(phi: FeatureMap, grad: Tensor, y: Tensor, derivative: Tensor, out: Tensor) -> None:
    """From ∂φ(x), which may be overwritten, to ∂x in out."""
    if out.dtype == grad.dtype:
        phi.vjp(grad, y, derivative, out=out)
    else:  # one pass over two dtypes takes several times as long as one over each
        phi.vjp(grad, y, derivative, out=grad)
        out.copy_(grad)


def divide(x: Tensor, by: Tensor, out: Tensor, pool: Pool) -> None:
    """x / by, in by's dtype, into out."""
    if x.dtype == by.dtype:
        torch.div(x, by, out=out)
    else:
        out.copy_(pool("divided", x.shape, by.dtype).copy_(x).div_(by))


def scaled(x: Tensor, weight: Tensor | None, out: Tensor | None) -> Tensor:
    """weight ∘ x, or x itself without a weight."""
    return x if weight is None else torch.mul(x, weight, out=out)
