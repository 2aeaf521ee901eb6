"""The small kernels: the scan over stretches, tables of angles, gradients of sums, and a decoding step."""

from __future__ import annotations

import triton
import triton.language as tl

from linrope.ops.triton_kernel.primitives import (
    OPEN,
    are_mapped,
    are_there,
    exact_rotation,
    features,
    load_rows,
    pair_dims,
    rotate,
    store_rows,
    vjp_features,
)


@triton.jit(do_not_specialize=OPEN)
def scan(
    state, first_kv, first_k_sum, last_kv, last_k_sum, between, H, N, heads_of_decay,
    KV: tl.constexpr, X: tl.constexpr, SCAN_BLOCK: tl.constexpr, LATER: tl.constexpr, WEIGHTED: tl.constexpr,
    GIVEN_KV: tl.constexpr, GIVEN_SUM: tl.constexpr, ACC: tl.constexpr, PIPELINED: tl.constexpr,
):  # fmt: skip
    """From what each stretch adds to the state before each stretch and after the last, in place, from `first` to
    `last`. If LATER, the state's gradient, from the end to the start. Loads run PIPELINED stretches ahead.
    Grid: B × H × blocks of the state."""
    n_blocks = tl.cdiv(X, SCAN_BLOCK)
    bh = (tl.program_id(0) // n_blocks).to(tl.int64)
    x = tl.program_id(0) % n_blocks * SCAN_BLOCK + tl.arange(0, SCAN_BLOCK)
    in_kv, in_sum = x < KV, (x >= KV) & (x < X)
    carry = tl.zeros((SCAN_BLOCK,), dtype=ACC)
    if GIVEN_KV:
        carry += tl.load(first_kv + bh * KV + x, mask=in_kv, other=0.0)
    if GIVEN_SUM:
        carry += tl.load(first_k_sum + bh * (X - KV) + x - KV, mask=in_sum, other=0.0)
    if WEIGHTED:
        between += (bh // H * heads_of_decay + bh % H % heads_of_decay) * N
    slots = state + bh * (N + 1) * X
    tl.store(slots + (N if LATER else 0) * tl.cast(X, tl.int64) + x, carry, mask=x < X)
    for step in tl.range(N, num_stages=PIPELINED):
        slot = step + 1
        if LATER:
            slot = N - 1 - step
        at = slots + slot.to(tl.int64) * X + x
        if WEIGHTED:
            carry *= tl.load(between + (slot if LATER else step))
        carry += tl.load(at, mask=x < X, other=0.0)
        tl.store(at, carry, mask=x < X)
    tl.store(last_kv + bh * KV + x, carry, mask=in_kv)
    tl.store(last_k_sum + bh * (X - KV) + x - KV, carry, mask=in_sum)


@triton.jit(do_not_specialize=OPEN)
def write_angles(
    theta, out, start, rows, sines, R: tl.constexpr, P: tl.constexpr, STRETCH: tl.constexpr, BLOCK: tl.constexpr
):
    """Two tables in one: rotations by each position in a stretch, and by the position of each stretch's first token.

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


@triton.jit(do_not_specialize=OPEN)
def finish_features(
    x, parts, out, key_mask, H, T, n_parts, n_features, x_b, x_h, x_t, x_d,
    D: tl.constexpr, R: tl.constexpr, SIGNED: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr, PHI: tl.constexpr,
    INTERLEAVED: tl.constexpr, MASKED: tl.constexpr, ACC: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """∂x (B, H, T, D) from the gradients of its features, (parts, B, H, T, D) with `n_features` numbers each.

    Grid: B × H × chunks.
    """
    n_chunks = tl.cdiv(T, CHUNK)
    bh = (tl.program_id(0) // n_chunks).to(tl.int64)
    i0 = (tl.program_id(0) % n_chunks).to(tl.int64) * CHUNK
    p = tl.arange(0, CHUNK)
    inside = i0 + p < T
    valid = inside
    if MASKED:
        valid = inside & (tl.load(key_mask + bh // H * T + i0 + p, mask=inside, other=0) != 0)
    x += bh // H * x_b + bh % H * x_h + i0 * x_t
    xa, xb = load_rows(x, p, valid, x_t, x_d, D, R, P, TILES, INTERLEAVED, ACC)
    fa, fb = features(xa, xb, valid, D, P, TILES, SIGNED, PHI)
    parts += (bh * T + i0) * D
    da, db = load_rows(parts, p, valid, D, 1, D, R, P, TILES, INTERLEAVED, ACC)
    for part in range(1, n_parts):
        more_a, more_b = load_rows(
            parts + part * tl.cast(n_features, tl.int64), p, valid, D, 1, D, R, P, TILES, INTERLEAVED, ACC
        )
        na, nb = (), ()
        for tile in tl.static_range(TILES):
            na, nb = na + (da[tile] + more_a[tile],), nb + (db[tile] + more_b[tile],)
        da, db = na, nb
    da, db = vjp_features(xa, xb, fa, fb, da, db, D, P, TILES, SIGNED, PHI)
    na, nb = (), ()
    for tile in tl.static_range(TILES):
        na = na + (tl.where(valid[:, None], da[tile], 0.0),)
        nb = nb + (tl.where(valid[:, None], db[tile], 0.0),)
    store_rows(out + (bh * T + i0) * D, p, inside, na, nb, D, R, P, TILES, INTERLEAVED)


@triton.jit(do_not_specialize=OPEN)
def finish_log_decay(
    from_queries, from_keys, out, state, d_state, T, N, X, parts, n_running,
    STRETCH: tl.constexpr, SCAN_BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """∂log_decay, the sum from each token on of ∂G = φ(q)·∂φ(q) - φ(k)·∂φ(k).

    The sum of ∂G over all tokens after a stretch is the product of the state there with its gradient. This avoids a
    sum over the whole sequence, and its rounding. from_queries, from_keys: (parts, B, H, T), with `n_running` numbers
    each. Grid: B × H × N.
    """
    s = tl.program_id(0) % N
    bh = (tl.program_id(0) // N).to(tl.int64)
    at = (bh * (N + 1) + s + 1) * X
    partial = tl.zeros((SCAN_BLOCK,), dtype=ACC)
    for x0 in range(0, X, SCAN_BLOCK):
        x = x0 + tl.arange(0, SCAN_BLOCK)
        left = tl.load(state + at + x, mask=x < X, other=0.0)
        partial += left * tl.load(d_state + at + x, mask=x < X, other=0.0)
    i = s * STRETCH + tl.arange(0, STRETCH)
    inside = i < T
    own = tl.zeros((STRETCH,), dtype=tl.float64)
    for part in range(parts):
        at_part = part * tl.cast(n_running, tl.int64) + bh * T + i
        own += tl.load(from_queries + at_part, mask=inside, other=0.0).to(tl.float64)
        own -= tl.load(from_keys + at_part, mask=inside, other=0.0).to(tl.float64)
    total = tl.sum(own, axis=0)
    later = total - tl.cumsum(own, axis=0) + own
    tl.store(out + bh * T + i, later + tl.sum(partial.to(tl.float64), axis=0), mask=inside)


@triton.jit(do_not_specialize=OPEN)
def decode(
    q, k, v, o, kv, k_sum, new_kv, new_k_sum, log_decay, theta, key_mask, position, eps, H, qb, qh, qd, kb, kh, kd,
    vb, vh, ve, heads_of_theta,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, SIGNED: tl.constexpr, P: tl.constexpr, BLOCK_E: tl.constexpr,
    PHI: tl.constexpr, INTERLEAVED: tl.constexpr, PLAIN: tl.constexpr, DECAY: tl.constexpr, MASKED: tl.constexpr,
    ON_DEVICE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One token: the state takes it in and is read. Each entry of the state is read once and written once.

    The new state has memory of its own: all programs of a head read `k_sum`, and one writes `new_k_sum`.
    Grid: B × H × blocks of E.

    Args:
        position: that of the token; if ON_DEVICE where it is, so that a captured graph reads it anew.
    """
    E_BLOCKS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    e_block = tl.program_id(0) % E_BLOCKS
    bh = (tl.program_id(0) // E_BLOCKS).to(tl.int64)
    b, h = bh // H, bh % H
    one = tl.zeros((1,), dtype=tl.int32)
    always = one == 0
    valid = always
    if MASKED:
        valid = tl.load(key_mask + b + one) != 0
    xa, xb = load_rows(q + b * qb + h * qh, one, always, 0, qd, D, R, P, 1, INTERLEAVED, ACC)
    ya, yb = load_rows(k + b * kb + h * kh, one, valid, 0, kd, D, R, P, 1, INTERLEAVED, ACC)
    xa, xb = features(xa, xb, always, D, P, 1, SIGNED, PHI)
    ya, yb = features(ya, yb, valid, D, P, 1, SIGNED, PHI)
    qa, qb_, ka, kb_ = xa[0], xb[0], ya[0], yb[0]
    kept = 1.0
    if DECAY:
        kept = tl.exp(tl.load(log_decay + bh))

    a, c = pair_dims(0, D, R, P, INTERLEAVED)
    in_a, in_c = are_there(0, D, P)
    mapped_a, mapped_c = are_mapped(0, D, P, SIGNED)
    e = e_block * BLOCK_E + tl.arange(0, BLOCK_E)
    in_e = (e < E)[None, :]
    sum_at = bh * D
    sum_a = kept * tl.load(k_sum + sum_at + a, mask=in_a, other=0.0)[None, :] + tl.where(mapped_a, ka, 0.0)
    sum_b = kept * tl.load(k_sum + sum_at + c, mask=in_c, other=0.0)[None, :] + tl.where(mapped_c, kb_, 0.0)
    if e_block == 0:
        tl.store(new_k_sum + sum_at + a[None, :], sum_a, mask=in_a[None, :])
        tl.store(new_k_sum + sum_at + c[None, :], sum_b, mask=in_c[None, :])
    den = tl.full((1,), 1.0, dtype=ACC)
    if PLAIN:
        den = tl.sum(tl.where(mapped_a, qa * sum_a, 0.0), axis=1)
        den += tl.sum(tl.where(mapped_c, qb_ * sum_b, 0.0), axis=1) + eps
    if R > 0:
        m = tl.arange(0, P)
        own = tl.load(theta + h % heads_of_theta * (R // 2) + m, mask=m < R // 2, other=0.0)
        if ON_DEVICE:
            position = tl.load(position)
        cos, sin = exact_rotation(position + tl.zeros((1, 1), dtype=tl.int64), own[None, :])
        cos, sin = cos.to(ACC), sin.to(ACC)
        qa, qb_ = rotate(qa, qb_, cos, sin)
        ka, kb_ = rotate(ka, kb_, cos, sin)
    values = tl.load(v + b * vb + h * vh + e[None, :] * ve, mask=in_e & valid[:, None], other=0.0).to(ACC)
    at = bh * D * E
    mask_a, mask_b = in_a[:, None] & in_e, in_c[:, None] & in_e
    state_a = tl.load(kv + at + a[:, None] * E + e[None, :], mask=mask_a, other=0.0)
    state_b = tl.load(kv + at + c[:, None] * E + e[None, :], mask=mask_b, other=0.0)
    state_a = kept * state_a + tl.trans(ka) * values
    state_b = kept * state_b + tl.trans(kb_) * values
    tl.store(new_kv + at + a[:, None] * E + e[None, :], state_a, mask=mask_a)
    tl.store(new_kv + at + c[:, None] * E + e[None, :], state_b, mask=mask_b)
    num = tl.sum(tl.trans(qa) * state_a, axis=0) + tl.sum(tl.trans(qb_) * state_b, axis=0)
    tl.store(o + bh * E + e[None, :], num[None, :] / den[:, None], mask=in_e)
