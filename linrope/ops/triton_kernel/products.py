"""Device functions of the Triton kernels: matrix products, the state of a stretch in registers, and decay weights."""

from __future__ import annotations

import triton
import triton.language as tl

from linrope.ops.triton_kernel.primitives import (
    INTERPRETED,
    are_there,
    at_most,
    exponential,
    load_rotation,
    pair_dims,
    rotate,
)


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
def opaque(x):
    """x, as if it were loaded: the compiler does not see what it was made of. To an operand made by a join it would
    give a layout into which results of other products must be shuffled, and it would shuffle a state, where the way
    through shared memory takes a quarter of the instructions."""
    if INTERPRETED:
        return x
    elif x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def operands(xa, xb, TILES: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr, EMULATED: tl.constexpr):
    """All tiles of features as operands, (C, 2P), the two dimensions of a pair side by side. Rounded before the first
    product of a chunk, they are written to shared memory together, which takes fewer barriers and registers than one
    product after the other."""
    y = ()
    for tile in tl.static_range(TILES):
        both = tl.join(operand(xa[tile], LOW, PRECISION, EMULATED), operand(xb[tile], LOW, PRECISION, EMULATED))
        y = y + (opaque(tl.reshape(both, (both.shape[0], 2 * both.shape[1]))),)
    return y


@triton.jit
def halves(x, TILES: tl.constexpr):
    """Both halves of all tiles, (C, P), of those of `operands` or their gradients."""
    xa, xb = (), ()
    for tile in tl.static_range(TILES):
        a, b = tl.split(tl.reshape(x[tile], (x[tile].shape[0], x[tile].shape[1] // 2, 2)))
        xa, xb = xa + (a,), xb + (b,)
    return xa, xb


@triton.jit
def rounded(x, TILES: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr, EMULATED: tl.constexpr):
    """All tiles of a state or of sums as operands."""
    y = ()
    for tile in tl.static_range(TILES):
        y = y + (operand(x[tile], LOW, PRECISION, EMULATED),)
    return y


@triton.jit
def as_operands(xa, xb, TILES: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr, EMULATED: tl.constexpr):
    """Both halves of all tiles with the values that products take, in their own dtype."""
    ya, yb = (), ()
    for tile in tl.static_range(TILES):
        ya = ya + (operand(xa[tile], LOW, PRECISION, EMULATED).to(xa[tile].dtype),)
        yb = yb + (operand(xb[tile], LOW, PRECISION, EMULATED).to(xb[tile].dtype),)
    return ya, yb


@triton.jit
def product(x, y, LOW: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, EMULATED: tl.constexpr):
    """x @ y of operands, or of what is rounded here, summed in ACC."""
    x, y = operand(x, LOW, PRECISION, EMULATED), operand(y, LOW, PRECISION, EMULATED)
    return tl.dot(x, y, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def dots(
    x, y, TILES: tl.constexpr, LOW: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, EMULATED: tl.constexpr
):
    """x yᵀ of features: (rows of x, rows of y)."""
    total = product(x[0], tl.trans(y[0]), LOW, ACC, PRECISION, EMULATED)
    for tile in tl.static_range(1, TILES):
        total += product(x[tile], tl.trans(y[tile]), LOW, ACC, PRECISION, EMULATED)
    return total


@triton.jit
def add_products(
    d, pairs, x, TILES: tl.constexpr, LOW: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    """All tiles plus those of pairs (C, C) times features."""
    n = ()
    for tile in tl.static_range(TILES):
        n = n + (d[tile] + product(pairs, x[tile], LOW, ACC, PRECISION, EMULATED),)
    return n


@triton.jit
def read_state(
    x, s, TILES: tl.constexpr, LOW: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, EMULATED: tl.constexpr
):
    """x S of features and a state: (C, columns). The state goes through shared memory: see `opaque`."""
    transposes = ()
    for tile in tl.static_range(TILES):
        transposes = transposes + (opaque(tl.trans(s[tile])),)
    return dots(x, transposes, TILES, LOW, ACC, PRECISION, EMULATED)


@triton.jit
def read_state_back(
    values, s, TILES: tl.constexpr, LOW: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    """values Sᵀ of a state: all tiles, (C, 2P)."""
    d = ()
    for tile in tl.static_range(TILES):
        d = d + (product(values, tl.trans(s[tile]), LOW, ACC, PRECISION, EMULATED),)
    return d


@triton.jit
def along(weight, COLUMNS: tl.constexpr):
    """The weight of each row, or column, to multiply a matrix by."""
    if COLUMNS:
        return weight[None, :]
    else:
        return weight[:, None]


@triton.jit
def times(x, weight, TILES: tl.constexpr):
    """All tiles, each row times its weight."""
    y = ()
    for tile in tl.static_range(TILES):
        y = y + (x[tile] * weight[:, None],)
    return y


@triton.jit
def grown(
    s, x, values, passed, TILES: tl.constexpr, WEIGHTED: tl.constexpr, LOW: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, EMULATED: tl.constexpr, VALUES_FIRST: tl.constexpr = False,
):  # fmt: skip
    """The state after a chunk: `passed` times the one before, plus xᵀ values. If VALUES_FIRST, the transpose of the
    state, and of values."""
    n = ()
    for tile in tl.static_range(TILES):
        more = s[tile]
        if WEIGHTED:
            more = more * passed
        if VALUES_FIRST:
            more += product(values, x[tile], LOW, ACC, PRECISION, EMULATED)
        else:
            more += product(tl.trans(x[tile]), values, LOW, ACC, PRECISION, EMULATED)
        n = n + (more,)
    return n


@triton.jit
def first_row(x):
    """(C, C) with x (C,) in the first row and 0 in the others: sums take part in products as such a row."""
    rows = tl.arange(0, x.shape[0])
    return tl.where((rows == 0)[:, None], x[None, :], 0.0)


@triton.jit
def grown_sums(
    u, x, weight, passed, TILES: tl.constexpr, WEIGHTED: tl.constexpr, LOW: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """The sums after a chunk: `passed` times those before, plus the features times their weights (C,)."""
    n = ()
    weights = first_row(weight)
    for tile in tl.static_range(TILES):
        more = u[tile]
        if WEIGHTED:
            more = more * passed
        n = n + (more + product(weights, x[tile], LOW, ACC, PRECISION, EMULATED),)
    return n


@triton.jit
def read_sums_back(
    weight, u, TILES: tl.constexpr, LOW: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    """The sums times the weight of each row: all tiles, (C, 2P)."""
    d = ()
    weights = tl.trans(first_row(weight))
    for tile in tl.static_range(TILES):
        d = d + (product(weights, u[tile], LOW, ACC, PRECISION, EMULATED),)
    return d


@triton.jit
def added(da, db, more, TILES: tl.constexpr):
    """Both halves of all tiles plus those of `more`."""
    na, nb = (), ()
    more_a, more_b = halves(more, TILES)
    for tile in tl.static_range(TILES):
        na, nb = na + (da[tile] + more_a[tile],), nb + (db[tile] + more_b[tile],)
    return na, nb


@triton.jit
def added_rows(ua, ub, xa, xb, weight, passed, TILES: tl.constexpr, WEIGHTED: tl.constexpr):
    """Sums over chunks of features times their weights, (C, P): the rows are added up once, after the last chunk."""
    na, nb = (), ()
    for tile in tl.static_range(TILES):
        a, b = ua[tile], ub[tile]
        if WEIGHTED:
            a, b = a * passed, b * passed
        na, nb = na + (a + xa[tile] * weight[:, None],), nb + (b + xb[tile] * weight[:, None],)
    return na, nb


@triton.jit
def load_state(
    slot, e, angles, s, sines, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr,
    STRETCH: tl.constexpr, INTERLEAVED: tl.constexpr, VALUES_FIRST: tl.constexpr = False,
):  # fmt: skip
    """Columns e of a state (D, E), brought to the frame of stretch s: all tiles, (2P, columns), or the transposes."""
    whole = ()
    rows = (e < E)[:, None]
    for tile in tl.static_range(TILES):
        in_a, in_b = are_there(tile, D, P)
        at_a, at_b = pair_dims(tile, D, R, P, INTERLEAVED)
        a = tl.load(slot + at_a[None, :] * E + e[:, None], mask=in_a[None, :] & rows, other=0.0)
        b = tl.load(slot + at_b[None, :] * E + e[:, None], mask=in_b[None, :] & rows, other=0.0)
        if R > 0:
            row = STRETCH + s + tl.zeros((1,), dtype=tl.int32)
            cos, sin = load_rotation(angles, row, sines, tile, R, P, TILES)
            a, b = rotate(a, b, cos, -sin)
        both = tl.reshape(tl.join(a, b), (a.shape[0], 2 * P))
        if not VALUES_FIRST:
            both = tl.trans(both)
        whole = whole + (both,)
    return whole


@triton.jit
def store_state(
    slot, state, e, angles, s, sines, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    TILES: tl.constexpr, STRETCH: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Columns e of a state in the frame of stretch s, brought to that of the sequence's start."""
    rows = (e < E)[:, None]
    for tile in tl.static_range(TILES):
        both = tl.trans(state[tile])
        a, b = tl.split(tl.reshape(both, (both.shape[0], P, 2)))
        if R > 0:
            row = STRETCH + s + tl.zeros((1,), dtype=tl.int32)
            cos, sin = load_rotation(angles, row, sines, tile, R, P, TILES)
            a, b = rotate(a, b, cos, sin)
        in_a, in_b = are_there(tile, D, P)
        at_a, at_b = pair_dims(tile, D, R, P, INTERLEAVED)
        tl.store(slot + at_a[None, :] * E + e[:, None], a, mask=in_a[None, :] & rows)
        tl.store(slot + at_b[None, :] * E + e[:, None], b, mask=in_b[None, :] & rows)


@triton.jit
def load_sums(
    ptr, C: tl.constexpr, D: tl.constexpr, R: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr,
    SIGNED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The sums of features (D,), all tiles, in the first of C rows; 0 in the first SIGNED dimensions."""
    u = ()
    first = (tl.arange(0, C) == 0)[:, None]
    for tile in tl.static_range(TILES):
        in_a, in_b = are_there(tile, D, P)
        m = tile * P + tl.arange(0, P)
        at_a, at_b = pair_dims(tile, D, R, P, INTERLEAVED)
        a = tl.load(ptr + at_a, mask=in_a & (m >= SIGNED // 2), other=0.0)
        b = tl.load(ptr + at_b, mask=in_b & (m >= SIGNED // 2), other=0.0)
        u = u + (tl.where(first, tl.reshape(tl.join(a, b), (2 * P,))[None, :], 0.0),)
    return u


@triton.jit
def store_sums(
    ptr, ua, ub, D: tl.constexpr, R: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """The sums of the rows of features, to (D,)."""
    for tile in tl.static_range(TILES):
        in_a, in_b = are_there(tile, D, P)
        at_a, at_b = pair_dims(tile, D, R, P, INTERLEAVED)
        tl.store(ptr + at_a, tl.sum(ua[tile], axis=0), mask=in_a)
        tl.store(ptr + at_b, tl.sum(ub[tile], axis=0), mask=in_b)


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
        reach, kept = exponential(high), exponential((end - total).to(ACC))
        passed = exponential(end.to(ACC))
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
        weight = tl.where(visible, exponential(at_most(lasting, 0.0)), 0.0)
    return weight
