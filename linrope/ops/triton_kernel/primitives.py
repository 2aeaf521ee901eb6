"""Device functions that the Triton kernels share: features, their maps and rotations, products, decay weights.

The features of C tokens are held as `TILES` tiles, and a tile as two matrices (C, P): the first and the second
dimensions of P pairs that RoPE rotates, for either pairing. A rotation is then elementwise. Products take both halves
as one matrix, the dimensions of a pair side by side. Rows are read as they lie in memory, and neighbours are split in
registers: a load of the even dimensions alone would be one of 16 bits.

Offsets are 32-bit numbers from the 64-bit address of a chunk's first row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linrope.ops.triton_kernel import plan

OPEN = ["T", "N", "S", "rows", "start", "slot_of_all", "sines", "bucket", "position"]
"""Arguments that follow the length: Triton compiles nothing anew for particular values of them."""
SMALL, TILE = tl.constexpr(plan.SMALL), tl.constexpr(plan.TILE)
INTERPRETED = tl.constexpr(plan.interpreted())
"""The interpreter has no assembler."""


@triton.jit
def pair_dims(tile: tl.constexpr, D: tl.constexpr, R: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """(P,) and (P,): the first and the second dimension of each pair of a tile.

    Pairs are neighbours, or with half-split pairing (m, m + R/2), and then the first and second half of the rest.
    """
    m = tile * P + tl.arange(0, P)
    if INTERLEAVED:
        return 2 * m, 2 * m + 1
    else:
        return tl.where(m < R // 2, m, m + R // 2), tl.where(m < R // 2, m + R // 2, m + (D + 1) // 2)


@triton.jit
def are_there(tile: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """(P,) and (P,): whether the pairs of a tile have their first and their second dimension."""
    m = tile * P + tl.arange(0, P)
    return m < (D + 1) // 2, m < D // 2


@triton.jit
def are_mapped(tile: tl.constexpr, D: tl.constexpr, P: tl.constexpr, SIGNED: tl.constexpr):
    """(1, P) and (1, P): whether φ and the denominator use them: not the first SIGNED, which are rotated pairs."""
    m = tile * P + tl.arange(0, P)
    a, b = are_there(tile, D, P)
    return ((m >= SIGNED // 2) & a)[None, :], ((m >= SIGNED // 2) & b)[None, :]


@triton.jit
def place_of_program(stretches, H, E_BLOCKS: tl.constexpr):
    """The block of E, the stretch, the number among B × H, the row and the head. Grid: B × H × stretches × E_BLOCKS."""
    e_block = tl.program_id(0) % E_BLOCKS
    s = tl.program_id(0) // E_BLOCKS % stretches
    bh = (tl.program_id(0) // (E_BLOCKS * stretches)).to(tl.int64)
    return e_block, s, bh, bh // H, bh % H


@triton.jit
def row_mask(valid, columns, WHOLE: tl.constexpr):
    """The mask of a tile: of its rows alone if all of its columns are there, which takes fewer registers."""
    if WHOLE:
        return valid[:, None]
    else:
        return valid[:, None] & columns[None, :]


@triton.jit
def load_rows(
    ptr, p, valid, stride_t, stride_d, D: tl.constexpr, R: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr,
    INTERLEAVED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Both halves of each tile, (C, P), of rows p from `ptr` on; 0 beyond D and in rows that are not valid."""
    WHOLE: tl.constexpr = D == 2 * P * TILES
    xa, xb = (), ()
    rows = ptr + p[:, None] * stride_t
    for tile in tl.static_range(TILES):
        if INTERLEAVED:
            d = tile * 2 * P + tl.arange(0, 2 * P)
            x = tl.load(rows + d[None, :] * stride_d, mask=row_mask(valid, d < D, WHOLE), other=0.0)
            a, b = tl.split(tl.reshape(x, (x.shape[0], P, 2)))
        else:
            in_a, in_b = are_there(tile, D, P)
            at_a, at_b = pair_dims(tile, D, R, P, INTERLEAVED)
            a = tl.load(rows + at_a[None, :] * stride_d, mask=row_mask(valid, in_a, WHOLE), other=0.0)
            b = tl.load(rows + at_b[None, :] * stride_d, mask=row_mask(valid, in_b, WHOLE), other=0.0)
        xa, xb = xa + (a.to(ACC),), xb + (b.to(ACC),)
    return xa, xb


@triton.jit
def store_rows(
    ptr, p, inside, xa, xb, D: tl.constexpr, R: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Into rows p of a contiguous (·, D) from `ptr` on."""
    WHOLE: tl.constexpr = D == 2 * P * TILES
    size = ptr.dtype.element_ty
    rows = ptr + p[:, None] * D
    for tile in tl.static_range(TILES):
        a, b = xa[tile].to(size), xb[tile].to(size)
        if INTERLEAVED:
            d = tile * 2 * P + tl.arange(0, 2 * P)
            whole = tl.reshape(tl.join(a, b), (a.shape[0], 2 * P))
            tl.store(rows + d[None, :], whole, mask=row_mask(inside, d < D, WHOLE))
        else:
            in_a, in_b = are_there(tile, D, P)
            at_a, at_b = pair_dims(tile, D, R, P, INTERLEAVED)
            tl.store(rows + at_a[None, :], a, mask=row_mask(inside, in_a, WHOLE))
            tl.store(rows + at_b[None, :], b, mask=row_mask(inside, in_b, WHOLE))


@triton.jit
def load_values(ptr, p, e, valid, stride_t, stride_e, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """(C, columns) of rows p from `ptr` on; 0 beyond E and in rows that are not valid."""
    mask = row_mask(valid, e < E, E % BLOCK_E == 0)
    return tl.load(ptr + p[:, None] * stride_t + e[None, :] * stride_e, mask=mask, other=0.0)


@triton.jit
def load_columns(ptr, p, e, valid, stride_t, stride_e, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """The transpose of `load_values`, (columns, C). Read so, it is an operand of products without a copy."""
    mask = valid[None, :]
    if E % BLOCK_E != 0:
        mask = mask & (e < E)[:, None]
    return tl.load(ptr + p[None, :] * stride_t + e[:, None] * stride_e, mask=mask, other=0.0)


@triton.jit
def store_values(ptr, p, e, inside, values, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Into columns e of rows p of a contiguous (·, E) from `ptr` on."""
    tl.store(ptr + p[:, None] * E + e[None, :], values, mask=row_mask(inside, e < E, E % BLOCK_E == 0))


@triton.jit
def is_kept(key_mask, p, inside, MASKED: tl.constexpr):
    """Which of rows p from `key_mask` on are not masked."""
    if MASKED:
        return inside & (tl.load(key_mask + p, mask=inside, other=0) != 0)
    else:
        return inside


@triton.jit
def exponential(x):
    """e^x; on a GPU results below 10⁻³⁸ are 0, which saves the three instructions that would keep them.

    A pure instruction would be moved behind the layouts of products, where each warp repeats it.
    """
    if INTERPRETED:
        return tl.exp(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=False, pack=1
        )


@triton.jit
def at_least(x, low):
    """max(x, low), which keeps a NaN."""
    return tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def at_most(x, high):
    """min(x, high), which keeps a NaN."""
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def phi(x, PHI: tl.constexpr):
    """The elementwise maps."""
    if PHI == "elu1":
        return at_least(x, 0.0) + exponential(at_most(x, 0.0))
    elif PHI == "relu":
        return at_least(x, 0.0)
    elif PHI == "exp":
        return exponential(at_most(x, 10.0))  # feature_maps.EXP_CEILING
    else:
        return x


@triton.jit
def features(
    xa, xb, valid, D: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr, SIGNED: tl.constexpr, PHI: tl.constexpr,
    ALL_ROWS: tl.constexpr = False,
):  # fmt: skip
    """φ of all tiles; 0 beyond D and in rows that are not valid, where φ(0) need not be 0. With ALL_ROWS rows that are
    not valid are left as they are, for a caller that does not use them."""
    WHOLE: tl.constexpr = D == 2 * P * TILES
    if PHI == "softmax":
        low = float("-inf")
        top = tl.full((xa[0].shape[0],), low, dtype=xa[0].dtype)
        for tile in tl.static_range(TILES):
            mapped_a, mapped_b = are_mapped(tile, D, P, SIGNED)
            top = tl.maximum(top, tl.max(tl.where(mapped_a, xa[tile], low), axis=1))
            top = tl.maximum(top, tl.max(tl.where(mapped_b, xb[tile], low), axis=1))
        total = tl.zeros_like(top)
        for tile in tl.static_range(TILES):
            mapped_a, mapped_b = are_mapped(tile, D, P, SIGNED)
            total += tl.sum(tl.where(mapped_a, exponential(xa[tile] - top[:, None]), 0.0), axis=1)
            total += tl.sum(tl.where(mapped_b, exponential(xb[tile] - top[:, None]), 0.0), axis=1)
    fa, fb = (), ()
    for tile in tl.static_range(TILES):
        if PHI == "softmax":
            a, b = (
                exponential(xa[tile] - top[:, None]) / total[:, None],
                exponential(xb[tile] - top[:, None]) / total[:, None],
            )
        else:
            a, b = phi(xa[tile], PHI), phi(xb[tile], PHI)
        if SIGNED > 0:
            mapped_a, mapped_b = are_mapped(tile, D, P, SIGNED)
            a, b = tl.where(mapped_a, a, xa[tile]), tl.where(mapped_b, b, xb[tile])
        if not (ALL_ROWS and WHOLE):
            in_a, in_b = are_there(tile, D, P)
            a, b = tl.where(row_mask(valid, in_a, WHOLE), a, 0.0), tl.where(row_mask(valid, in_b, WHOLE), b, 0.0)
        fa, fb = fa + (a,), fb + (b,)
    return fa, fb


@triton.jit
def summed_features(fa, fb, D: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr, SIGNED: tl.constexpr):
    """The features that the denominator sums: 0 in the first SIGNED dimensions."""
    if SIGNED == 0:
        return fa, fb
    else:
        ga, gb = (), ()
        for tile in tl.static_range(TILES):
            mapped_a, mapped_b = are_mapped(tile, D, P, SIGNED)
            ga = ga + (tl.where(mapped_a, fa[tile], 0.0),)
            gb = gb + (tl.where(mapped_b, fb[tile], 0.0),)
        return ga, gb


@triton.jit
def times_derivative(x, f, df, PHI: tl.constexpr, KNOWN: tl.constexpr):
    """φ'(x) ∂f for the elementwise maps. KNOWN: whether f = φ(x) is needed elsewhere too; otherwise x is enough, in
    fewer instructions."""
    if PHI == "elu1":
        if KNOWN:
            return df * at_most(f, 1.0)
        else:
            return df * exponential(at_most(x, 0.0))
    elif PHI == "relu":
        return tl.where(f > 0, df, 0.0)
    elif PHI == "exp":
        return tl.where(x > 10, 0.0, df * f)
    else:
        return df


@triton.jit
def vjp_features(
    xa, xb, fa, fb, da, db, D: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr, SIGNED: tl.constexpr,
    PHI: tl.constexpr, KNOWN: tl.constexpr = True,
):  # fmt: skip
    """From the gradient of all tiles of φ(x) to that of x. KNOWN: as in `times_derivative`."""
    if PHI == "softmax":
        total = tl.zeros((xa[0].shape[0],), dtype=xa[0].dtype)
        for tile in tl.static_range(TILES):
            mapped_a, mapped_b = are_mapped(tile, D, P, SIGNED)
            total += tl.sum(tl.where(mapped_a, fa[tile] * da[tile], 0.0), axis=1)
            total += tl.sum(tl.where(mapped_b, fb[tile] * db[tile], 0.0), axis=1)
    ga, gb = (), ()
    for tile in tl.static_range(TILES):
        if PHI == "softmax":
            a, b = fa[tile] * (da[tile] - total[:, None]), fb[tile] * (db[tile] - total[:, None])
        else:
            a = times_derivative(xa[tile], fa[tile], da[tile], PHI, KNOWN)
            b = times_derivative(xb[tile], fb[tile], db[tile], PHI, KNOWN)
        if SIGNED > 0:
            mapped_a, mapped_b = are_mapped(tile, D, P, SIGNED)
            a, b = tl.where(mapped_a, a, da[tile]), tl.where(mapped_b, b, db[tile])
        ga, gb = ga + (a,), gb + (b,)
    return ga, gb


@triton.jit
def load_rotation(angles, row, sines, tile: tl.constexpr, R: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr):
    """cos and sin, (rows, P), of some rows of a table (·, R/2). Sines begin `sines` elements after cosines."""
    m = tile * P + tl.arange(0, P)
    at = angles + row[:, None] * (R // 2) + m[None, :]
    if R == 2 * P * TILES:
        return tl.load(at), tl.load(at + sines)
    else:
        rotated = (m < R // 2)[None, :]
        return tl.load(at, mask=rotated, other=1.0), tl.load(at + sines, mask=rotated, other=0.0)


@triton.jit
def rotate(a, b, cos, sin):
    """Both halves, rotated."""
    return a * cos - b * sin, a * sin + b * cos


@triton.jit
def load_rotations(angles, place, sines, C: tl.constexpr, R: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr):
    """cos and sin of all tiles, (C, P), for a chunk that begins at `place` of its stretch."""
    cos, sin = (), ()
    if R > 0:
        for tile in tl.static_range(TILES):
            own_cos, own_sin = load_rotation(angles, place + tl.arange(0, C), sines, tile, R, P, TILES)
            cos, sin = cos + (own_cos,), sin + (own_sin,)
    return cos, sin


@triton.jit
def rotate_all(xa, xb, cos, sin, R: tl.constexpr, TILES: tl.constexpr, BACK: tl.constexpr = False):
    """All tiles, rotated, or with BACK the other way."""
    if R == 0:
        return xa, xb
    else:
        ya, yb = (), ()
        for tile in tl.static_range(TILES):
            a, b = rotate(xa[tile], xb[tile], cos[tile], -sin[tile] if BACK else sin[tile])
            ya, yb = ya + (a,), yb + (b,)
        return ya, yb


@triton.jit
def scaled(xa, xb, weight, TILES: tl.constexpr):
    """All tiles (C, P), each row times its weight (C,)."""
    ya, yb = (), ()
    for tile in tl.static_range(TILES):
        ya, yb = ya + (xa[tile] * weight[:, None],), yb + (xb[tile] * weight[:, None],)
    return ya, yb


@triton.jit
def zeros_of(rows: tl.constexpr, columns: tl.constexpr, TILES: tl.constexpr, ACC: tl.constexpr):
    """All tiles, (rows, columns)."""
    zeros = ()
    for tile in tl.static_range(TILES):
        zeros = zeros + (tl.zeros((rows, columns), dtype=ACC),)
    return zeros


@triton.jit
def zero_sums(P: tl.constexpr, TILES: tl.constexpr, ACC: tl.constexpr):
    """Both halves of all tiles, (P,)."""
    a, b = (), ()
    for tile in tl.static_range(TILES):
        a, b = a + (tl.zeros((P,), dtype=ACC),), b + (tl.zeros((P,), dtype=ACC),)
    return a, b


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
