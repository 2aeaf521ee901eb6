"""Kernels that write small tables: angles, and decay weights of tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from linrope.ops.triton_kernel.primitives import OPEN, exact_rotation


@triton.jit(do_not_specialize=OPEN)
def write_angles(
    theta, out, start, rows, sines, R: tl.constexpr, P: tl.constexpr, STRETCH: tl.constexpr, BLOCK: tl.constexpr
):
    """Two tables in one: rotations by 0 … STRETCH - 1, and by the position of each stretch's first token.

    out: (2, heads of θ, rows, R/2), cosines and sines. Grid: heads of θ × blocks of rows.
    """
    n_blocks = tl.cdiv(rows, BLOCK)
    head = (tl.program_id(0) // n_blocks).to(tl.int64)
    row = tl.program_id(0) % n_blocks * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    m = tl.arange(0, P)
    t = tl.where(row < STRETCH, row, start + (row - STRETCH) * STRETCH)
    own = tl.load(theta + head * (R // 2) + m, mask=m < R // 2, other=0.0)
    cos, sin = exact_rotation(t[:, None], own[None, :])
    at = out + (head * rows + row)[:, None] * (R // 2) + m[None, :]
    mask = (row < rows)[:, None] & (m < R // 2)[None, :]
    tl.store(at, cos, mask=mask)
    tl.store(at + sines, sin, mask=mask)


# fmt: off
@triton.jit(do_not_specialize=OPEN)
def write_weights(
    log_decay, documents, out, between, H, T, N, stride_b, stride_h, stride_t, n_weights,
    STRETCH: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr,
):
    # fmt: on
    """Decay weights of each token within its stretch.

    G is summed in float64 and stored as two float32, rounded and the rest: with strong decays it is in the thousands,
    where float32 loses differences near 0.

    out: (4, B, H, T): G, its rest, a = e^G and b = e^{G_end - G}. between: (B, H, N): e^{G_end}. Across a document
    boundary a, b and e^{G_end} are 0. Grid: B × H × N.
    """
    s = tl.program_id(0) % N
    bh = (tl.program_id(0) // N).to(tl.int64)
    b, h = bh // H, bh % H
    i = (s * STRETCH + tl.arange(0, STRETCH)).to(tl.int64)
    inside = i < T
    if DECAY:
        own = tl.load(log_decay + b * stride_b + h * stride_h + i * stride_t, mask=inside, other=0.0).to(tl.float64)
    else:
        own = tl.zeros((STRETCH,), dtype=tl.float64)
    total = tl.cumsum(own, axis=0)
    end = tl.sum(own, axis=0)
    reach, kept, passed = tl.exp(total), tl.exp(end - total), tl.exp(end)
    if DOCUMENTS:
        document = tl.load(documents + b * T + i, mask=inside, other=-1)
        before = tl.load(documents + b * T + tl.maximum(s * STRETCH - 1, 0))
        last = tl.load(documents + b * T + tl.minimum(s * STRETCH + STRETCH, T) - 1)
        reach = tl.where(document == before, reach, 0.0)
        kept = tl.where(document == last, kept, 0.0)
        passed = tl.where(before == last, passed, 0.0)
    size = out.dtype.element_ty
    high = total.to(size)
    at = out + bh * T + i
    tl.store(at, high, mask=inside)
    wide = tl.cast(n_weights, tl.int64)
    tl.store(at + wide, total - high.to(tl.float64), mask=inside)
    tl.store(at + 2 * wide, reach, mask=inside)
    tl.store(at + 3 * wide, kept, mask=inside)
    tl.store(between + bh * N + s, passed)
