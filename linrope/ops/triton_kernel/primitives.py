"""Device functions that the Triton kernels share: features, their maps and rotations, and products.

The features of C tokens are two matrices (C, P): the first and the second dimensions of all pairs that RoPE rotates,
for either pairing. A rotation is then elementwise, and a product of features is the sum of two products of halves.
"""

from __future__ import annotations

import triton
import triton.language as tl

OPEN = ["T", "N", "rows", "start", "position", "slot_of_all", "n_weights", "sines"]
"""Arguments that follow the length: Triton compiles nothing anew for particular values of them."""


@triton.jit
def halves(R: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """(P,) and (P,): the first and the second dimension of pair m. Beyond the rotated ones, pairs are neighbours."""
    m = tl.arange(0, P)
    if INTERLEAVED:
        return 2 * m, 2 * m + 1
    else:
        return tl.where(m < R // 2, m, 2 * m), tl.where(m < R // 2, m + R // 2, 2 * m + 1)


@triton.jit
def load_halves(
    ptr, t, valid, stride_t, stride_d, D: tl.constexpr, R: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Both halves, (C, P) each, of rows t; 0 beyond D and in rows that are not valid."""
    a, b = halves(R, P, INTERLEAVED)
    a, b = a.to(tl.int64), b.to(tl.int64)
    row = ptr + t[:, None] * stride_t
    xa = tl.load(row + a[None, :] * stride_d, mask=valid[:, None] & (a < D)[None, :], other=0.0)
    xb = tl.load(row + b[None, :] * stride_d, mask=valid[:, None] & (b < D)[None, :], other=0.0)
    return xa, xb


@triton.jit
def store_halves(ptr, t, inside, xa, xb, D: tl.constexpr, R: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Into rows t of a contiguous (T, D)."""
    a, b = halves(R, P, INTERLEAVED)
    tl.store(ptr + t[:, None] * D + a[None, :], xa, mask=inside[:, None] & (a < D)[None, :])
    tl.store(ptr + t[:, None] * D + b[None, :], xb, mask=inside[:, None] & (b < D)[None, :])


@triton.jit
def is_mapped(d, D: tl.constexpr, SIGNED: tl.constexpr):
    """(1, P): whether φ and the denominator use a dimension: not the first SIGNED."""
    return ((d >= SIGNED) & (d < D))[None, :]


@triton.jit
def summed(x, where):
    """(C, P) -> (C,): the sum of each row over the dimensions in `where`."""
    return tl.sum(tl.where(where, x, 0.0), axis=1)


@triton.jit
def phi(x, PHI: tl.constexpr):
    """The elementwise maps. The comparisons keep a NaN."""
    if PHI == "elu1":
        return tl.where(x > 0, x + 1, tl.exp(x))
    elif PHI == "relu":
        return tl.where(x < 0, 0.0, x)
    elif PHI == "exp":
        return tl.exp(tl.where(x > 10, 10.0, x))  # feature_maps.EXP_CEILING
    else:
        return x


@triton.jit
def features(
    xa, xb, valid, D: tl.constexpr, R: tl.constexpr, P: tl.constexpr, SIGNED: tl.constexpr, PHI: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """φ of both halves; 0 beyond D and in rows that are not valid, where φ(0) need not be 0."""
    a, b = halves(R, P, INTERLEAVED)
    mapped_a, mapped_b = is_mapped(a, D, SIGNED), is_mapped(b, D, SIGNED)
    if PHI == "softmax":
        low = float("-inf")
        top_a, top_b = tl.max(tl.where(mapped_a, xa, low), axis=1), tl.max(tl.where(mapped_b, xb, low), axis=1)
        top = tl.maximum(top_a, top_b)[:, None]
        ea = tl.where(mapped_a, tl.exp(xa - top), 0.0)
        eb = tl.where(mapped_b, tl.exp(xb - top), 0.0)
        total = (tl.sum(ea, axis=1) + tl.sum(eb, axis=1))[:, None]
        fa, fb = ea / total, eb / total
    else:
        fa, fb = phi(xa, PHI), phi(xb, PHI)
    if SIGNED > 0:
        fa, fb = tl.where(mapped_a, fa, xa), tl.where(mapped_b, fb, xb)
    rows = valid[:, None]
    return tl.where(rows & (a < D)[None, :], fa, 0.0), tl.where(rows & (b < D)[None, :], fb, 0.0)


@triton.jit
def times_derivative(x, f, df, PHI: tl.constexpr):
    """φ'(x) ∂f for the elementwise maps."""
    if PHI == "elu1":
        return df * tl.where(x > 0, 1.0, f)
    elif PHI == "relu":
        return tl.where(x > 0, df, 0.0)
    elif PHI == "exp":
        return tl.where(x > 10, 0.0, df * f)
    else:
        return df


@triton.jit
def vjp_features(
    xa, xb, fa, fb, da, db, D: tl.constexpr, R: tl.constexpr, P: tl.constexpr, SIGNED: tl.constexpr, PHI: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """From the gradient of both halves of φ(x) to that of x."""
    a, b = halves(R, P, INTERLEAVED)
    mapped_a, mapped_b = is_mapped(a, D, SIGNED), is_mapped(b, D, SIGNED)
    if PHI == "softmax":
        wa, w_b = tl.where(mapped_a, fa * da, 0.0), tl.where(mapped_b, fb * db, 0.0)
        total = (tl.sum(wa, axis=1) + tl.sum(w_b, axis=1))[:, None]
        ga, gb = wa - fa * total, w_b - fb * total
    else:
        ga, gb = times_derivative(xa, fa, da, PHI), times_derivative(xb, fb, db, PHI)
    return tl.where(mapped_a, ga, da), tl.where(mapped_b, gb, db)


@triton.jit
def load_rotations(angles, row, sines, R: tl.constexpr, P: tl.constexpr):
    """cos and sin, (rows, P), of some rows of a table (·, R/2). Sines begin `sines` elements after cosines."""
    m = tl.arange(0, P)
    at = angles + row[:, None] * (R // 2) + m[None, :]
    rotated = (m < R // 2)[None, :]
    return tl.load(at, mask=rotated, other=1.0), tl.load(at + sines, mask=rotated, other=0.0)


@triton.jit
def rotate(a, b, cos, sin):
    """Both halves, rotated."""
    return a * cos - b * sin, a * sin + b * cos


@triton.jit
def to_bfloat16(x):
    """float32 rounded to the nearest bfloat16, by its bits, and still float32."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -(1 << 16)).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)  # a NaN's bits may overflow


@triton.jit
def to_tf32(x):
    """float32 rounded to the nearest TF32, and still float32: tensor cores truncate the other digits."""
    rounded = ((x.to(tl.int32, bitcast=True) + 0x1000) & -(1 << 13)).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)  # a NaN's bits may overflow


@triton.jit
def product(x, y, LOW: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, EMULATED: tl.constexpr):
    """x @ y of operands rounded to LOW, summed in ACC. Triton's interpreter has no bfloat16 products: EMULATED."""
    if EMULATED:
        x, y = to_bfloat16(x), to_bfloat16(y)
    else:
        x, y = x.to(LOW), y.to(LOW)
    if PRECISION == "tf32" and tl.float32 == LOW:
        x, y = to_tf32(x), to_tf32(y)
    return tl.dot(x, y, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def exact_rotation(t, theta):
    """cos and sin of t·θ in float64 for 0 ≤ t < 2^52 (for twice that with an error of 10⁻⁸).

    Both factors are split in two so that the four products are exact: nothing is rounded before a sine. θ is split by
    its bits, since a compiler may contract products and sums.
    """
    t_low = t & ((1 << 26) - 1)
    t_high = (t - t_low).to(tl.float64)
    theta_high = (theta.to(tl.int64, bitcast=True) & -(1 << 27)).to(tl.float64, bitcast=True)
    theta_low = theta - theta_high
    t_low = t_low.to(tl.float64)
    cos, sin = tl.cos(t_high * theta_high), tl.sin(t_high * theta_high)
    cos, sin = rotate(cos, sin, tl.cos(t_low * theta_high), tl.sin(t_low * theta_high))
    cos, sin = rotate(cos, sin, tl.cos(t_high * theta_low), tl.sin(t_high * theta_low))
    return rotate(cos, sin, tl.cos(t_low * theta_low), tl.sin(t_low * theta_low))
