"""The kernels of the CUDA backend, in Triton. φ and the rotation (`triton_tiles.py`) happen on load, never in memory.

The sequence is cut into stretches of `STRETCH` tokens and these into blocks of `BLOCK`. `stretch_sums` forms Σ k̃ vᵀ
and Σ φ(k) of each stretch, `scan` turns those into the state before each stretch, and `attend` gives each block its
output: from the state, and from all pairs within the stretch, over which it walks as flash attention does. The backward
pass is the same three with other operands:

    own, other      values of own                           features of own
    queries, keys   num = (M ∘ q̃ k̃ᵀ) v + a ∘ q̃ S            ∂q̃ = (M ∘ ∂num vᵀ) k̃ + a ∘ ∂num Sᵀ
    keys, queries   ∂v  = (M ∘ q̃ k̃ᵀ)ᵀ ∂num + b ∘ k̃ ∂S       ∂k̃ = (M ∘ ∂num vᵀ)ᵀ q̃ + b ∘ v ∂Sᵀ

so each kernel is written once, for `own` rows that look at `other` rows: earlier ones, or later ones where `LATER`.
With G the running sum of log_decay from a stretch's start, M_ij = e^{G_i - G_j} for j ≤ i of one document and 0
elsewhere, a_i = e^{G_i}, and b_j = e^{G_end - G_j}. The denominator's Σ φ(k) is a running sum in float32, without a
product where nothing is forgotten.

Within a stretch tokens turn by their place in it, from one small table for all stretches; a state is turned by the
exact angle of the stretch's first position when it is written, and back when it is read.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from linrope.ops.triton_kernel.tiles import (
    exact_turn,
    features,
    halves,
    is_mapped,
    load_halves,
    load_turns,
    product,
    pull_features,
    store_halves,
    summed,
    turn,
)

TRIED = ((4, 2),) if os.environ.get("TRITON_INTERPRET") == "1" else ((4, 2), (8, 2), (8, 1))


CONFIGS = [triton.Config({}, num_warps=warps, num_stages=stages) for warps, stages in TRIED]


TUNED_BY = ["D", "E", "BLOCK", "E_TILE", "PHI", "LATER", "VALUES", "FEATURES", "CAUSAL", "PLAIN", "DECAY", "DOCUMENTS"]


TUNED_BY += ["MASKED", "PRECISION"]
"""What a choice among them is kept for, with the tensors' dtypes, on disk too. Another GPU may choose otherwise."""


OPEN = ["T", "N", "rows", "start", "position", "slot_of_all", "n_weights", "sines"]
"""Numbers that follow the length: nothing is compiled anew for some of their values."""


@triton.jit(do_not_specialize=OPEN)
def write_angles(
    theta, out, start, rows, sines, R: tl.constexpr, P: tl.constexpr, STRETCH: tl.constexpr, BLOCK: tl.constexpr
):
    """Two tables in one: turns by 0 … STRETCH - 1, and by the position of each stretch's first token.

    out: (2, heads of θ, rows, R/2), cosines and sines. Grid: heads of θ × blocks of rows.
    """
    n_blocks = tl.cdiv(rows, BLOCK)
    head = (tl.program_id(0) // n_blocks).to(tl.int64)
    row = tl.program_id(0) % n_blocks * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    m = tl.arange(0, P)
    t = tl.where(row < STRETCH, row, start + (row - STRETCH) * STRETCH)
    own = tl.load(theta + head * (R // 2) + m, mask=m < R // 2, other=0.0)
    cos, sin = exact_turn(t[:, None], own[None, :])
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
    """What each token keeps of the state before its stretch, and what of it is kept to the stretch's end.

    G is summed in float64 and stored as a float32 and what that rounded away: strong decays reach thousands, where
    float32 has lost the differences near 0.

    out: (4, B, H, T): G, its rest, a = e^G and b = e^{G_end - G}. between: (B, H, N): e^{G_end}. With a document's
    boundary in between, a, b and e^{G_end} are 0. Grid: B × H × N.
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


# fmt: off
@triton.jit(do_not_specialize=OPEN)
def finish_log_decay(
    from_queries, from_keys, out, state, d_state, T, N, X,
    STRETCH: tl.constexpr, SPAN: tl.constexpr, ACC: tl.constexpr,
):
    # fmt: on
    """∂log_decay, the sum from each token on of ∂G = φ(q)·∂φ(q) - φ(k)·∂φ(k).

    What all tokens after a stretch sum to is the product of the state there with its gradient, which spares a sum, and
    its rounding, over the whole sequence. Grid: B × H × N.
    """
    s = tl.program_id(0) % N
    bh = (tl.program_id(0) // N).to(tl.int64)
    at = (bh * (N + 1) + s + 1) * X
    partial = tl.zeros((SPAN,), dtype=ACC)
    for x0 in range(0, X, SPAN):
        x = x0 + tl.arange(0, SPAN)
        left = tl.load(state + at + x, mask=x < X, other=0.0)
        partial += left * tl.load(d_state + at + x, mask=x < X, other=0.0)
    i = s * STRETCH + tl.arange(0, STRETCH)
    inside = i < T
    own = tl.load(from_queries + bh * T + i, mask=inside, other=0.0).to(tl.float64)
    own -= tl.load(from_keys + bh * T + i, mask=inside, other=0.0).to(tl.float64)
    total = tl.sum(own, axis=0)
    later = total - tl.cumsum(own, axis=0) + own
    tl.store(out + bh * T + i, later + tl.sum(partial.to(tl.float64), axis=0), mask=inside)


# fmt: off
@triton.jit(do_not_specialize=OPEN)
def write_d_den(
    grad_o, o, den, d_den, H, T, stride_b, stride_h, stride_t, stride_e,
    E: tl.constexpr, E_TILE: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):
    # fmt: on
    """∂den = -(∂numᵀ o), ∂num = ∂o / den: (B, H, T). o is contiguous. Grid: B × H × blocks."""
    n_blocks = tl.cdiv(T, BLOCK)
    bh = (tl.program_id(0) // n_blocks).to(tl.int64)
    i = tl.program_id(0) % n_blocks * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    inside = i < T
    grad_o += bh // H * stride_b + bh % H * stride_h
    total = tl.zeros((BLOCK,), dtype=ACC)
    for e0 in range(0, E, E_TILE):
        e = e0 + tl.arange(0, E_TILE)
        mask = inside[:, None] & (e < E)[None, :]
        g = tl.load(grad_o + i[:, None] * stride_t + e[None, :] * stride_e, mask=mask, other=0.0).to(ACC)
        total += tl.sum(g * tl.load(o + (bh * T + i)[:, None] * E + e[None, :], mask=mask, other=0.0).to(ACC), axis=1)
    divisor = tl.load(den + bh * T + i, mask=inside, other=1.0)
    tl.store(d_den + bh * T + i, -total / divisor, mask=inside)


# fmt: off
@triton.jit(do_not_specialize=OPEN)
def stretch_sums(
    x, u, den, d_den, state, angles, weights, key_mask, H, T, N, x_b, x_h, x_t, x_d, u_b, u_h, u_t, u_e, sines,
    heads_of_theta, heads_of_weights, n_weights,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, SIGNED: tl.constexpr, P: tl.constexpr, E_TILE: tl.constexpr,
    STRETCH: tl.constexpr, BLOCK: tl.constexpr, PHI: tl.constexpr, INTERLEAVED: tl.constexpr, LATER: tl.constexpr,
    PLAIN: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr, LOW: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, EMULATED: tl.constexpr,
):
    # fmt: on
    """What a stretch adds to the state: Σ b k̃ vᵀ and Σ b φ(k), into the slot after it; or, where LATER, what it adds to
    the state's gradient, Σ a q̃ ∂numᵀ and Σ a ∂den φ(q), into the slot before it.

    state: (B, H, N + 1, D·E + D). Reads u once, and x once for each tile of E. Grid: B × H × N × tiles of E.
    """
    TILES: tl.constexpr = (E + E_TILE - 1) // E_TILE
    tile = tl.program_id(0) % TILES
    s = tl.program_id(0) // TILES % N
    bh = (tl.program_id(0) // (TILES * N)).to(tl.int64)
    b, h = bh // H, bh % H
    x += b * x_b + h * x_h
    u += b * u_b + h * u_h
    a_dims, b_dims = halves(R, P, INTERLEAVED)
    e = (tile * E_TILE + tl.arange(0, E_TILE)).to(tl.int64)
    if R > 0:
        angles += (h % heads_of_theta) * (sines // heads_of_theta)

    state_a = tl.zeros((P, E_TILE), dtype=ACC)
    state_b = tl.zeros((P, E_TILE), dtype=ACC)
    sum_a = tl.zeros((P,), dtype=ACC)
    sum_b = tl.zeros((P,), dtype=ACC)
    for block in range(STRETCH // BLOCK):
        place = block * BLOCK + tl.arange(0, BLOCK)
        i = (s * STRETCH + place).to(tl.int64)
        inside = i < T
        valid = inside
        if MASKED:
            valid = inside & (tl.load(key_mask + b * T + i, mask=inside, other=0) != 0)
        xa, xb = load_halves(x, i, valid, x_t, x_d, D, R, P, INTERLEAVED)
        fa, fb = features(xa.to(ACC), xb.to(ACC), valid, D, R, P, SIGNED, PHI, INTERLEAVED)
        values = tl.load(u + i[:, None] * u_t + e[None, :] * u_e, mask=valid[:, None] & (e < E)[None, :], other=0.0).to(
            ACC
        )
        weight = tl.full((BLOCK,), 1.0, dtype=ACC)
        if WEIGHTED:
            row, wide = (b * heads_of_weights + h % heads_of_weights) * T, tl.cast(n_weights, tl.int64)
            weight = tl.load(weights + (2 if LATER else 3) * wide + row + i, mask=inside, other=0.0)
        share = weight
        if LATER:
            if PLAIN:
                values = values / tl.load(den + bh * T + i, mask=inside, other=1.0)[:, None]
                share = weight * tl.load(d_den + bh * T + i, mask=inside, other=0.0)
            else:
                share = weight * 0.0
        sum_a += tl.sum(fa * share[:, None], axis=0)
        sum_b += tl.sum(fb * share[:, None], axis=0)
        if R > 0:
            cos, sin = load_turns(angles, place, sines, R, P)
            fa, fb = turn(fa, fb, cos, sin)
        values = values * weight[:, None]
        state_a += product(tl.trans(fa), values, LOW, ACC, PRECISION, EMULATED)
        state_b += product(tl.trans(fb), values, LOW, ACC, PRECISION, EMULATED)
    if R > 0:
        cos, sin = load_turns(angles, STRETCH + s + tl.zeros((1,), dtype=tl.int32), sines, R, P)
        state_a, state_b = turn(state_a, state_b, tl.trans(cos), tl.trans(sin))

    slot = state + (bh * (N + 1) + s + (0 if LATER else 1)) * (D * E + D)
    columns = (e < E)[None, :]
    tl.store(slot + a_dims[:, None] * E + e[None, :], state_a, mask=(a_dims < D)[:, None] & columns)
    tl.store(slot + b_dims[:, None] * E + e[None, :], state_b, mask=(b_dims < D)[:, None] & columns)
    if tile == 0:
        tl.store(slot + D * E + a_dims, tl.where(a_dims < SIGNED, 0.0, sum_a), mask=a_dims < D)
        tl.store(slot + D * E + b_dims, tl.where(b_dims < SIGNED, 0.0, sum_b), mask=b_dims < D)


# fmt: off
@triton.jit(do_not_specialize=OPEN)
def scan(
    state, first_kv, first_k_sum, last_kv, last_k_sum, between, H, N, heads_of_weights,
    KV: tl.constexpr, X: tl.constexpr, SPAN: tl.constexpr, LATER: tl.constexpr, WEIGHTED: tl.constexpr,
    GIVEN_KV: tl.constexpr, GIVEN_SUM: tl.constexpr, ACC: tl.constexpr,
):
    # fmt: on
    """From what stretches add to the state before each and after the last, in place, from `first` to `last`; or, where
    LATER, the state's gradient from the end to the start. Grid: B × H × pieces of the state."""
    n_spans = tl.cdiv(X, SPAN)
    bh = (tl.program_id(0) // n_spans).to(tl.int64)
    x = tl.program_id(0) % n_spans * SPAN + tl.arange(0, SPAN)
    in_kv, in_sum = x < KV, (x >= KV) & (x < X)
    carry = tl.zeros((SPAN,), dtype=ACC)
    if GIVEN_KV:
        carry += tl.load(first_kv + bh * KV + x, mask=in_kv, other=0.0)
    if GIVEN_SUM:
        carry += tl.load(first_k_sum + bh * (X - KV) + x - KV, mask=in_sum, other=0.0)
    if WEIGHTED:
        between += (bh // H * heads_of_weights + bh % H % heads_of_weights) * N
    at = state + (bh * (N + 1) + (N if LATER else 0)) * X + x
    tl.store(at, carry, mask=x < X)
    for step in range(N):
        if LATER:
            at -= X
        else:
            at += X
        if WEIGHTED:
            carry *= tl.load(between + (N - 1 - step if LATER else step))
        carry += tl.load(at, mask=x < X, other=0.0)
        tl.store(at, carry, mask=x < X)
    tl.store(last_kv + bh * KV + x, carry, mask=in_kv)
    tl.store(last_k_sum + bh * (X - KV) + x - KV, carry, mask=in_sum)


# fmt: off
@triton.autotune(CONFIGS, key=TUNED_BY, cache_results=True)
@triton.jit(do_not_specialize=OPEN)
def attend(
    x, y, u, w, out_values, out_features, den, d_den, state, angles, weights, documents, key_mask, d_theta,
    d_running, eps, H, T, N, slot_of_all, x_b, x_h, x_t, x_d, y_b, y_h, y_t, y_d, u_b, u_h, u_t, u_e, w_b, w_h, w_t,
    w_e, sines, heads_of_theta, heads_of_weights, n_weights,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, SIGNED: tl.constexpr, P: tl.constexpr, E_TILE: tl.constexpr,
    SUM_TILE: tl.constexpr, STRETCH: tl.constexpr, BLOCK: tl.constexpr, PHI: tl.constexpr, INTERLEAVED: tl.constexpr,
    LATER: tl.constexpr, VALUES: tl.constexpr, FEATURES: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr,
    SUMS: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr, MASKED: tl.constexpr, D_THETA: tl.constexpr,
    D_DECAY: tl.constexpr, LOW: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, EMULATED: tl.constexpr,
):
    # fmt: on
    """A block's values, or its features, or both: the table above.

    Grid: B × H × blocks, times tiles of E for values alone.

    Args:
        x, y: (B, H, T, D) raw queries or keys, own and other; u, w: (B, H, T, E) values or ∂o, own and other.
        out_values: (B, H, T, E): o or ∂v. out_features: (B, H, T, D): ∂q or ∂k.
        den, d_den: (B, H, T); den is written on the way forward, both are read on the way back.
        state: (B, H, N + 1, D·E + D); a causal block of stretch s reads slot s, or s + 1 where LATER, any other block
            reads `slot_of_all`.
        d_theta: (blocks, 2, R/2): Σ of the pairs' q̃ × ∂q̃, and the same times their places in the stretch.
        d_running: (B, H, T): φ(x)·∂φ(x).
    """
    TILES: tl.constexpr = (E + E_TILE - 1) // E_TILE
    SPLIT: tl.constexpr = 1 if FEATURES else TILES  # programs that share a block's values
    WEIGHTED: tl.constexpr = DECAY or DOCUMENTS
    SUMMED: tl.constexpr = (E + SUM_TILE - 1) // SUM_TILE  # steps of a sum over E
    n_blocks = tl.cdiv(T, BLOCK)
    tile = tl.program_id(0) % SPLIT
    block = tl.program_id(0) // SPLIT % n_blocks
    bh = (tl.program_id(0) // (SPLIT * n_blocks)).to(tl.int64)
    b, h = bh // H, bh % H
    s = block * BLOCK // STRETCH
    x += b * x_b + h * x_h
    y += b * y_b + h * y_h
    u += b * u_b + h * u_h
    w += b * w_b + h * w_h
    if R > 0:
        angles += (h % heads_of_theta) * (sines // heads_of_theta)
    row, wide = (b * heads_of_weights + h % heads_of_weights) * T, tl.cast(n_weights, tl.int64)

    # What this block has of its own.
    i = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    place = (i - s * STRETCH).to(tl.int32)
    inside = i < T
    valid = inside
    if MASKED and LATER:
        valid = inside & (tl.load(key_mask + b * T + i, mask=inside, other=0) != 0)
    if VALUES:
        xa, xb = load_halves(x, i, valid, x_t, x_d, D, R, P, INTERLEAVED)
        fa, fb = features(xa.to(ACC), xb.to(ACC), valid, D, R, P, SIGNED, PHI, INTERLEAVED)
        ta, tb = fa, fb
        if R > 0:
            cos, sin = load_turns(angles, place, sines, R, P)
            ta, tb = turn(fa, fb, cos, sin)
    scale = tl.full((BLOCK,), 1.0, dtype=ACC)  # of own values
    if FEATURES and PLAIN and not LATER:
        scale = 1.0 / tl.load(den + bh * T + i, mask=inside, other=1.0)
    reach = tl.full((BLOCK,), 1.0, dtype=ACC)
    if WEIGHTED:
        reach = tl.load(weights + (3 if LATER else 2) * wide + row + i, mask=inside, other=0.0)
    if DECAY:
        own_high = tl.load(weights + row + i, mask=inside, other=0.0)
        own_low = tl.load(weights + wide + row + i, mask=inside, other=0.0)
    if DOCUMENTS:
        own_document = tl.load(documents + b * T + i, mask=inside, other=-1)
    columns = (tile * E_TILE + tl.arange(0, E_TILE)).to(tl.int64)
    a_dims, b_dims = halves(R, P, INTERLEAVED)
    mapped_a, mapped_b = is_mapped(a_dims, D, SIGNED), is_mapped(b_dims, D, SIGNED)

    # The state, in the frame of the sequence's start: what meets it is turned by the stretch's angle, or back.
    slot = slot_of_all
    if CAUSAL:
        slot = s + (1 if LATER else 0)
    state += (bh * (N + 1) + slot) * (D * E + D)
    if R > 0:
        far_cos, far_sin = load_turns(angles, STRETCH + s + tl.zeros((1,), dtype=tl.int32), sines, R, P)
    values = tl.zeros((BLOCK, E_TILE), dtype=ACC)
    out_a = tl.zeros((BLOCK, P), dtype=ACC)
    out_b = tl.zeros((BLOCK, P), dtype=ACC)
    in_columns = (columns < E)[None, :]
    if VALUES:
        far_a, far_b = ta, tb
        if R > 0:
            far_a, far_b = turn(ta, tb, far_cos, far_sin)
        at = state + a_dims[:, None] * E + columns[None, :]
        half = tl.load(at, mask=(a_dims < D)[:, None] & in_columns, other=0.0)
        values += product(far_a * reach[:, None], half, LOW, ACC, PRECISION, EMULATED)
        at = state + b_dims[:, None] * E + columns[None, :]
        half = tl.load(at, mask=(b_dims < D)[:, None] & in_columns, other=0.0)
        values += product(far_b * reach[:, None], half, LOW, ACC, PRECISION, EMULATED)
    if FEATURES:
        for k in tl.static_range(SUMMED):
            e = (k * SUM_TILE + tl.arange(0, SUM_TILE)).to(tl.int64)
            down_e = (e < E)[:, None]
            own = tl.load(u + i[:, None] * u_t + e[None, :] * u_e, mask=valid[:, None] & (e < E)[None, :], other=0.0)
            own = own.to(ACC) * (scale * reach)[:, None]
            half = tl.load(state + a_dims[None, :] * E + e[:, None], mask=(a_dims < D)[None, :] & down_e, other=0.0)
            out_a += product(own, half, LOW, ACC, PRECISION, EMULATED)
            half = tl.load(state + b_dims[None, :] * E + e[:, None], mask=(b_dims < D)[None, :] & down_e, other=0.0)
            out_b += product(own, half, LOW, ACC, PRECISION, EMULATED)
        if R > 0:
            out_a, out_b = turn(out_a, out_b, far_cos, -far_sin)

    # The sums that the denominator takes: of whole stretches before, then of blocks before, then within the block.
    before_a = tl.zeros((P,), dtype=ACC)
    before_b = tl.zeros((P,), dtype=ACC)
    running_a = tl.zeros((BLOCK, P), dtype=ACC)
    running_b = tl.zeros((BLOCK, P), dtype=ACC)
    total = tl.zeros((BLOCK,), dtype=ACC)
    if SUMS:
        before_a += tl.load(state + D * E + a_dims, mask=a_dims < D, other=0.0)
        before_b += tl.load(state + D * E + b_dims, mask=b_dims < D, other=0.0)
        if FEATURES and (WEIGHTED or not CAUSAL or not PLAIN):
            running_a = reach[:, None] * before_a[None, :]
            running_b = reach[:, None] * before_b[None, :]
        elif not FEATURES and (WEIGHTED or not CAUSAL):
            total = reach * (summed(fa * before_a[None, :], mapped_a) + summed(fb * before_b[None, :], mapped_b))

    # All pairs within the stretch: the other blocks first, then, in the second phase, the block itself.
    if CAUSAL:
        for phase in tl.static_range(2):
            first = s * (STRETCH // BLOCK)
            last = block
            if LATER:
                first = block + 1
                last = tl.minimum((s + 1) * (STRETCH // BLOCK), n_blocks)
            if phase == 1:
                first = block
                last = block + 1
            for other in range(first, last):
                j = (other * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
                j_inside = j < T
                j_valid = j_inside
                if MASKED and not LATER:
                    j_valid = j_inside & (tl.load(key_mask + b * T + j, mask=j_inside, other=0) != 0)
                ya, yb = load_halves(y, j, j_valid, y_t, y_d, D, R, P, INTERLEAVED)
                ga, gb = features(ya.to(ACC), yb.to(ACC), j_valid, D, R, P, SIGNED, PHI, INTERLEAVED)
                visible = (i[:, None] <= j[None, :]) if LATER else (i[:, None] >= j[None, :])
                if DOCUMENTS:
                    other_document = tl.load(documents + b * T + j, mask=j_inside, other=-2)
                    visible = visible & (own_document[:, None] == other_document[None, :])
                weight = visible.to(ACC)
                if DECAY:
                    other_high = tl.load(weights + row + j, mask=j_inside, other=0.0)
                    other_low = tl.load(weights + wide + row + j, mask=j_inside, other=0.0)
                    lasting = (own_high[:, None] - other_high[None, :]) + (own_low[:, None] - other_low[None, :])
                    if LATER:
                        lasting = -lasting
                    weight = tl.where(visible, tl.exp(tl.where(lasting > 0, 0.0, lasting)), 0.0)
                if PLAIN and SUMS:
                    sa, sb = ga, gb
                    if LATER:
                        share = tl.load(d_den + bh * T + j, mask=j_inside, other=0.0)[:, None]
                        sa, sb = ga * share, gb * share
                    if WEIGHTED and FEATURES:
                        running_a += product(weight, sa, LOW, ACC, PRECISION, EMULATED)
                        running_b += product(weight, sb, LOW, ACC, PRECISION, EMULATED)
                    elif WEIGHTED:
                        sa, sb = tl.where(mapped_a, sa, 0.0), tl.where(mapped_b, sb, 0.0)
                        plain = product(fa, tl.trans(sa), LOW, ACC, PRECISION, EMULATED)
                        plain += product(fb, tl.trans(sb), LOW, ACC, PRECISION, EMULATED)
                        total += tl.sum(plain * weight, axis=1)
                    elif phase == 0:
                        before_a += tl.sum(sa, axis=0)
                        before_b += tl.sum(sb, axis=0)
                    else:
                        until_a, until_b = tl.cumsum(sa, axis=0), tl.cumsum(sb, axis=0)
                        if LATER:  # sums from the end
                            until_a = tl.sum(sa, axis=0)[None, :] - until_a + sa
                            until_b = tl.sum(sb, axis=0)[None, :] - until_b + sb
                        until_a += before_a[None, :]
                        until_b += before_b[None, :]
                        if FEATURES:
                            running_a = running_a + until_a
                            running_b = running_b + until_b
                        else:
                            total += summed(fa * until_a, mapped_a) + summed(fb * until_b, mapped_b)
                if R > 0:
                    j_cos, j_sin = load_turns(angles, (j - s * STRETCH).to(tl.int32), sines, R, P)
                    ga, gb = turn(ga, gb, j_cos, j_sin)
                j_scale = tl.full((BLOCK,), 1.0, dtype=ACC)
                if LATER and PLAIN:
                    j_scale = 1.0 / tl.load(den + bh * T + j, mask=j_inside, other=1.0)
                if FEATURES:
                    pairs = tl.zeros((BLOCK, BLOCK), dtype=ACC)
                    for k in tl.static_range(SUMMED):
                        e = (k * SUM_TILE + tl.arange(0, SUM_TILE)).to(tl.int64)
                        in_e = (e < E)[None, :]
                        own = tl.load(u + i[:, None] * u_t + e[None, :] * u_e, mask=valid[:, None] & in_e, other=0.0)
                        mask = j_valid[:, None] & in_e
                        theirs = tl.load(w + j[:, None] * w_t + e[None, :] * w_e, mask=mask, other=0.0)
                        own, theirs = own.to(ACC) * scale[:, None], theirs.to(ACC) * j_scale[:, None]
                        pairs += product(own, tl.trans(theirs), LOW, ACC, PRECISION, EMULATED)
                    pairs = pairs * weight
                    out_a += product(pairs, ga, LOW, ACC, PRECISION, EMULATED)
                    out_b += product(pairs, gb, LOW, ACC, PRECISION, EMULATED)
                if VALUES:
                    pairs = product(ta, tl.trans(ga), LOW, ACC, PRECISION, EMULATED)
                    pairs += product(tb, tl.trans(gb), LOW, ACC, PRECISION, EMULATED)
                    seen = j_valid[:, None] & in_columns
                    across = tl.load(w + j[:, None] * w_t + columns[None, :] * w_e, mask=seen, other=0.0)
                    across = across.to(ACC) * j_scale[:, None]
                    values += product(pairs * weight, across, LOW, ACC, PRECISION, EMULATED)

    # Out.
    if VALUES:
        if PLAIN and not LATER:
            total += eps
            values = values / total[:, None]
            if tile == 0:
                tl.store(den + bh * T + i, total, mask=inside)
        values = tl.where(valid[:, None], values, 0.0)
        mask = inside[:, None] & (columns < E)[None, :]
        tl.store(out_values + (bh * T + i)[:, None] * E + columns[None, :], values, mask=mask)
    if FEATURES:  # own features are read here, so as not to hold registers until now
        xa, xb = load_halves(x, i, valid, x_t, x_d, D, R, P, INTERLEAVED)
        xa, xb = xa.to(ACC), xb.to(ACC)
        fa, fb = features(xa, xb, valid, D, R, P, SIGNED, PHI, INTERLEAVED)
        if R > 0:
            cos, sin = load_turns(angles, place, sines, R, P)
        if D_THETA:
            ta, tb = turn(fa, fb, cos, sin)
            cross = ta * out_b - tb * out_a
            m = tl.arange(0, P)
            at = d_theta + (bh * n_blocks + block) * 2 * (R // 2) + m
            tl.store(at, tl.sum(cross, axis=0), mask=m < R // 2)
            tl.store(at + R // 2, tl.sum(cross * place[:, None], axis=0), mask=m < R // 2)
        if R > 0:
            out_a, out_b = turn(out_a, out_b, cos, -sin)
        if SUMS:
            share = tl.full((BLOCK,), 1.0, dtype=ACC)
            if not LATER:
                share = tl.load(d_den + bh * T + i, mask=inside, other=0.0)
            out_a += tl.where(mapped_a, share[:, None] * running_a, 0.0)
            out_b += tl.where(mapped_b, share[:, None] * running_b, 0.0)
        if D_DECAY:
            d_total = tl.sum(fa * out_a, axis=1) + tl.sum(fb * out_b, axis=1)
            tl.store(d_running + bh * T + i, d_total, mask=inside)
        out_a, out_b = pull_features(xa, xb, fa, fb, out_a, out_b, D, R, P, SIGNED, PHI, INTERLEAVED)
        out_a, out_b = tl.where(valid[:, None], out_a, 0.0), tl.where(valid[:, None], out_b, 0.0)
        size = out_features.dtype.element_ty
        store_halves(out_features + bh * T * D, i, inside, out_a.to(size), out_b.to(size), D, R, P, INTERLEAVED)


# fmt: off
@triton.jit(do_not_specialize=OPEN)
def decode(
    q, k, v, o, kv, k_sum, new_kv, new_k_sum, log_decay, theta, key_mask, position, eps, H, qb, qh, qd, kb, kh, kd,
    vb, vh, ve, heads_of_theta,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, SIGNED: tl.constexpr, P: tl.constexpr, E_TILE: tl.constexpr,
    PHI: tl.constexpr, INTERLEAVED: tl.constexpr, PLAIN: tl.constexpr, DECAY: tl.constexpr, MASKED: tl.constexpr,
    ACC: tl.constexpr,
):
    # fmt: on
    """One token: the state takes it in and is read, each of its numbers read once and written once.

    Grid: B × H × tiles of E.
    """
    TILES: tl.constexpr = (E + E_TILE - 1) // E_TILE
    tile = tl.program_id(0) % TILES
    bh = (tl.program_id(0) // TILES).to(tl.int64)
    b, h = bh // H, bh % H
    one = tl.zeros((1,), dtype=tl.int64)
    always = one == 0
    valid = always
    if MASKED:
        valid = tl.load(key_mask + b + one) != 0
    qa, qb_ = load_halves(q + b * qb + h * qh, one, always, 0, qd, D, R, P, INTERLEAVED)
    ka, kb_ = load_halves(k + b * kb + h * kh, one, valid, 0, kd, D, R, P, INTERLEAVED)
    qa, qb_ = features(qa.to(ACC), qb_.to(ACC), always, D, R, P, SIGNED, PHI, INTERLEAVED)
    ka, kb_ = features(ka.to(ACC), kb_.to(ACC), valid, D, R, P, SIGNED, PHI, INTERLEAVED)
    kept = 1.0
    if DECAY:
        kept = tl.exp(tl.load(log_decay + bh))

    a, c = halves(R, P, INTERLEAVED)
    e = tile * E_TILE + tl.arange(0, E_TILE)
    in_e = (e < E)[None, :]
    sum_at = bh * D
    sum_a = kept * tl.load(k_sum + sum_at + a, mask=a < D, other=0.0)[None, :] + tl.where(a < SIGNED, 0.0, ka)
    sum_b = kept * tl.load(k_sum + sum_at + c, mask=c < D, other=0.0)[None, :] + tl.where(c < SIGNED, 0.0, kb_)
    if tile == 0:
        tl.store(new_k_sum + sum_at + a[None, :], sum_a, mask=(a < D)[None, :])
        tl.store(new_k_sum + sum_at + c[None, :], sum_b, mask=(c < D)[None, :])
    den = tl.full((1,), 1.0, dtype=ACC)
    if PLAIN:
        den = tl.sum(tl.where(is_mapped(a, D, SIGNED), qa * sum_a, 0.0), axis=1)
        den += tl.sum(tl.where(is_mapped(c, D, SIGNED), qb_ * sum_b, 0.0), axis=1) + eps
    if R > 0:
        m = tl.arange(0, P)
        own = tl.load(theta + h % heads_of_theta * (R // 2) + m, mask=m < R // 2, other=0.0)
        cos, sin = exact_turn(position + tl.zeros((1, 1), dtype=tl.int64), own[None, :])
        cos, sin = cos.to(ACC), sin.to(ACC)
        qa, qb_ = turn(qa, qb_, cos, sin)
        ka, kb_ = turn(ka, kb_, cos, sin)
    values = tl.load(v + b * vb + h * vh + e[None, :] * ve, mask=in_e & valid[:, None], other=0.0).to(ACC)
    at = bh * D * E
    mask_a, mask_b = (a < D)[:, None] & in_e, (c < D)[:, None] & in_e
    state_a = tl.load(kv + at + a[:, None] * E + e[None, :], mask=mask_a, other=0.0)
    state_b = tl.load(kv + at + c[:, None] * E + e[None, :], mask=mask_b, other=0.0)
    state_a = kept * state_a + tl.trans(ka) * values
    state_b = kept * state_b + tl.trans(kb_) * values
    tl.store(new_kv + at + a[:, None] * E + e[None, :], state_a, mask=mask_a)
    tl.store(new_kv + at + c[:, None] * E + e[None, :], state_b, mask=mask_b)
    num = tl.sum(tl.trans(qa) * state_a, axis=0) + tl.sum(tl.trans(qb_) * state_b, axis=0)
    tl.store(o + bh * E + e[None, :], num[None, :] / den[:, None], mask=in_e)
