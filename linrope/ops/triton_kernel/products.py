"""Device functions of the Triton kernels: matrix products, the state of a stretch in registers, and decay weights."""

from __future__ import annotations

import triton
import triton.language as tl

from linrope.ops.triton_kernel.primitives import LOCAL, STEP, are_there, load_rotation, pair_dims, rotate


@triton.jit
def to_bfloat16(x):
    """float32 rounded to the nearest bfloat16, by its bits, and still float32."""
    x = x.to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -(1 << 16)).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)  # a NaN's bits may overflow


@triton.jit
def to_tf32(x):
    """float32 rounded to the nearest TF32, and still float32: tensor cores truncate the other digits."""
    rounded = ((x.to(tl.int32, bitcast=True) + 0x1000) & -(1 << 13)).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)  # a NaN's bits may overflow


@triton.jit
def operand(x, LOW: tl.constexpr, PRECISION: tl.constexpr, EMULATED: tl.constexpr):
    """x rounded to LOW, as products take it. Triton's interpreter has no bfloat16 products: EMULATED."""
    if EMULATED:
        return to_bfloat16(x)
    elif PRECISION == "tf32" and tl.float32 == LOW:
        return to_tf32(x.to(LOW))
    else:
        return x.to(LOW)


@triton.jit
def operands(xa, xb, TILES: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr, EMULATED: tl.constexpr):
    """Both halves of all tiles as operands. Rounded before the first product of a chunk, they are written to shared
    memory together, which takes fewer barriers and registers than one product after the other."""
    ya, yb = (), ()
    for tile in tl.static_range(TILES):
        ya = ya + (operand(xa[tile], LOW, PRECISION, EMULATED),)
        yb = yb + (operand(xb[tile], LOW, PRECISION, EMULATED),)
    return ya, yb


@triton.jit
def product(x, y, LOW: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, EMULATED: tl.constexpr):
    """x @ y of operands, or of what is rounded here, summed in ACC."""
    x, y = operand(x, LOW, PRECISION, EMULATED), operand(y, LOW, PRECISION, EMULATED)
    return tl.dot(x, y, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def dots(
    xa, xb, ya, yb, TILES: tl.constexpr, LOW: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    """x yᵀ of features: (C, C)."""
    total = product(xa[0], tl.trans(ya[0]), LOW, ACC, PRECISION, EMULATED)
    total += product(xb[0], tl.trans(yb[0]), LOW, ACC, PRECISION, EMULATED)
    for tile in tl.static_range(1, TILES):
        total += product(xa[tile], tl.trans(ya[tile]), LOW, ACC, PRECISION, EMULATED)
        total += product(xb[tile], tl.trans(yb[tile]), LOW, ACC, PRECISION, EMULATED)
    return total


@triton.jit
def add_products(
    da, db, pairs, xa, xb, TILES: tl.constexpr, LOW: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    """Both halves of all tiles plus those of pairs (C, C) times features."""
    na, nb = (), ()
    for tile in tl.static_range(TILES):
        na = na + (da[tile] + product(pairs, xa[tile], LOW, ACC, PRECISION, EMULATED),)
        nb = nb + (db[tile] + product(pairs, xb[tile], LOW, ACC, PRECISION, EMULATED),)
    return na, nb


@triton.jit
def read_state(
    xa, xb, sa, sb, TILES: tl.constexpr, LOW: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    """x S of features and a state: (C, columns)."""
    total = product(xa[0], sa[0], LOW, ACC, PRECISION, EMULATED)
    total += product(xb[0], sb[0], LOW, ACC, PRECISION, EMULATED)
    for tile in tl.static_range(1, TILES):
        total += product(xa[tile], sa[tile], LOW, ACC, PRECISION, EMULATED)
        total += product(xb[tile], sb[tile], LOW, ACC, PRECISION, EMULATED)
    return total


@triton.jit
def read_state_back(
    values, sa, sb, TILES: tl.constexpr, LOW: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    """values Sᵀ of a state: both halves of all tiles, (C, P)."""
    da, db = (), ()
    for tile in tl.static_range(TILES):
        da = da + (product(values, tl.trans(sa[tile]), LOW, ACC, PRECISION, EMULATED),)
        db = db + (product(values, tl.trans(sb[tile]), LOW, ACC, PRECISION, EMULATED),)
    return da, db


@triton.jit
def grown(
    sa, sb, xa, xb, values, passed, TILES: tl.constexpr, WEIGHTED: tl.constexpr, LOW: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """The state after a chunk: `passed` times the one before, plus xᵀ values."""
    na, nb = (), ()
    for tile in tl.static_range(TILES):
        a, b = sa[tile], sb[tile]
        if WEIGHTED:
            a, b = a * passed, b * passed
        a += product(tl.trans(xa[tile]), values, LOW, ACC, PRECISION, EMULATED)
        b += product(tl.trans(xb[tile]), values, LOW, ACC, PRECISION, EMULATED)
        na, nb = na + (a,), nb + (b,)
    return na, nb


@triton.jit
def grown_sums(ua, ub, xa, xb, weight, passed, TILES: tl.constexpr):
    """The sums after a chunk: `passed` times those before, plus the features (C, P) times their weights (C,)."""
    na, nb = (), ()
    for tile in tl.static_range(TILES):
        na = na + (ua[tile] * passed + tl.sum(xa[tile] * weight[:, None], axis=0),)
        nb = nb + (ub[tile] * passed + tl.sum(xb[tile] * weight[:, None], axis=0),)
    return na, nb


@triton.jit
def read_sums(xa, xb, ua, ub, TILES: tl.constexpr):
    """x·u of features and their sums: (C,)."""
    total = tl.sum(xa[0] * ua[0][None, :], axis=1) + tl.sum(xb[0] * ub[0][None, :], axis=1)
    for tile in tl.static_range(1, TILES):
        total += tl.sum(xa[tile] * ua[tile][None, :], axis=1) + tl.sum(xb[tile] * ub[tile][None, :], axis=1)
    return total


@triton.jit
def load_state(
    slot, e, angles, s, sines, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr,
    STRETCH: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Columns e of a state (D, E), both halves of each tile, brought to the frame of stretch s."""
    sa, sb = (), ()
    columns = (e < E)[None, :]
    for tile in tl.static_range(TILES):
        in_a, in_b = are_there(tile, D, P)
        at_a, at_b = pair_dims(tile, D, R, P, INTERLEAVED)
        a = tl.load(slot + at_a[:, None] * E + e[None, :], mask=in_a[:, None] & columns, other=0.0)
        b = tl.load(slot + at_b[:, None] * E + e[None, :], mask=in_b[:, None] & columns, other=0.0)
        if R > 0:
            row = LOCAL + STRETCH // STEP + s + tl.zeros((1,), dtype=tl.int32)
            cos, sin = load_rotation(angles, row, sines, tile, R, P, TILES)
            a, b = rotate(a, b, tl.trans(cos), -tl.trans(sin))
        sa, sb = sa + (a,), sb + (b,)
    return sa, sb


@triton.jit
def store_state(
    slot, sa, sb, e, angles, s, sines, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    TILES: tl.constexpr, STRETCH: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Columns e of a state in the frame of stretch s, brought to that of the sequence's start."""
    columns = (e < E)[None, :]
    for tile in tl.static_range(TILES):
        a, b = sa[tile], sb[tile]
        if R > 0:
            row = LOCAL + STRETCH // STEP + s + tl.zeros((1,), dtype=tl.int32)
            cos, sin = load_rotation(angles, row, sines, tile, R, P, TILES)
            a, b = rotate(a, b, tl.trans(cos), tl.trans(sin))
        in_a, in_b = are_there(tile, D, P)
        at_a, at_b = pair_dims(tile, D, R, P, INTERLEAVED)
        tl.store(slot + at_a[:, None] * E + e[None, :], a, mask=in_a[:, None] & columns)
        tl.store(slot + at_b[:, None] * E + e[None, :], b, mask=in_b[:, None] & columns)


@triton.jit
def load_sums(
    ptr, D: tl.constexpr, R: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr, SIGNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The sums of features (D,), both halves of each tile; 0 in the first SIGNED dimensions."""
    ua, ub = (), ()
    for tile in tl.static_range(TILES):
        in_a, in_b = are_there(tile, D, P)
        m = tile * P + tl.arange(0, P)
        at_a, at_b = pair_dims(tile, D, R, P, INTERLEAVED)
        ua = ua + (tl.load(ptr + at_a, mask=in_a & (m >= SIGNED // 2), other=0.0),)
        ub = ub + (tl.load(ptr + at_b, mask=in_b & (m >= SIGNED // 2), other=0.0),)
    return ua, ub


@triton.jit
def store_sums(
    ptr, ua, ub, D: tl.constexpr, R: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Sums of features, to (D,)."""
    for tile in tl.static_range(TILES):
        in_a, in_b = are_there(tile, D, P)
        at_a, at_b = pair_dims(tile, D, R, P, INTERLEAVED)
        tl.store(ptr + at_a, ua[tile], mask=in_a)
        tl.store(ptr + at_b, ub[tile], mask=in_b)


@triton.jit
def chunk_decay(
    log_decay, documents, i0, T, stride, C: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Decay of the chunk of tokens from i0 on; pointers to a row.

    G, the running sum of log_decay from the chunk's start, is summed in float64 and returned as two numbers, rounded
    and the rest: with strong decays it is in the thousands, where float32 loses differences near 0.

    Returns: G and its rest; a = e^G and b = e^{G_end - G} of each token; e^{G_end}; each token's document. Across a
    document boundary a, b and e^{G_end} are 0.
    """
    p = tl.arange(0, C)
    inside = i0 + p < T
    high = tl.zeros((C,), dtype=ACC)
    low, reach, kept = high, high + 1.0, high + 1.0
    passed = tl.sum(high, axis=0) + 1.0
    document = tl.zeros((C,), dtype=tl.int64)
    if DECAY:
        own = tl.load(log_decay + (i0 + p) * stride, mask=inside, other=0.0).to(tl.float64)
        total, end = tl.cumsum(own, axis=0), tl.sum(own, axis=0)
        high = total.to(ACC)
        low = (total - high.to(tl.float64)).to(ACC)
        reach, kept, passed = tl.exp(total.to(ACC)), tl.exp((end - total).to(ACC)), tl.exp(end.to(ACC))
    if DOCUMENTS:
        document = tl.load(documents + i0 + p, mask=inside, other=-1)
        before = tl.load(documents + tl.maximum(i0 - 1, 0))
        last = tl.load(documents + tl.minimum(i0 + C, T) - 1)
        reach = tl.where(document == before, reach, 0.0)
        kept = tl.where(document == last, kept, 0.0)
        passed = tl.where(before == last, passed, 0.0)
    return high, low, reach, kept, passed, document


@triton.jit
def pair_weights(
    high, low, document, C: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr, KEYS_FIRST: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """M_ij = e^{G_i - G_j} for queries i and keys j ≤ i of one document in a chunk, 0 elsewhere: (C, C), queries by
    keys, or with KEYS_FIRST keys by queries."""
    p = tl.arange(0, C)
    if KEYS_FIRST:
        visible = p[:, None] <= p[None, :]
    else:
        visible = p[:, None] >= p[None, :]
    if DOCUMENTS:
        visible = visible & (document[:, None] == document[None, :])
    weight = visible.to(ACC)
    if DECAY:
        lasting = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
        if KEYS_FIRST:
            lasting = -lasting
        weight = tl.where(visible, tl.exp(tl.where(lasting > 0, 0.0, lasting)), 0.0)
    return weight
