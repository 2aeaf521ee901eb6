"""The small kernels: tables of angles and decay weights, gradients of sums, and a decoding step."""

from __future__ import annotations

import triton
import triton.language as tl

from linrope.ops.triton_kernel.primitives import OPEN, exact_rotation, features, halves, is_mapped, load_halves, rotate


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


@triton.jit(do_not_specialize=OPEN)
def write_weights(
    log_decay, documents, out, between, H, T, N, stride_b, stride_h, stride_t, n_weights,
    STRETCH: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
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


@triton.jit(do_not_specialize=OPEN)
def finish_log_decay(
    from_queries, from_keys, out, state, d_state, T, N, X,
    STRETCH: tl.constexpr, SCAN_BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """∂log_decay, the sum from each token on of ∂G = φ(q)·∂φ(q) - φ(k)·∂φ(k).

    The sum of ∂G over all tokens after a stretch is the product of the state there with its gradient. This avoids a
    sum over the whole sequence, and its rounding. Grid: B × H × N.
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
    own = tl.load(from_queries + bh * T + i, mask=inside, other=0.0).to(tl.float64)
    own -= tl.load(from_keys + bh * T + i, mask=inside, other=0.0).to(tl.float64)
    total = tl.sum(own, axis=0)
    later = total - tl.cumsum(own, axis=0) + own
    tl.store(out + bh * T + i, later + tl.sum(partial.to(tl.float64), axis=0), mask=inside)


@triton.jit(do_not_specialize=OPEN)
def write_d_den(
    grad_o, o, den, d_den, H, T, stride_b, stride_h, stride_t, stride_e,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """∂den = -(∂numᵀ o), ∂num = ∂o / den: (B, H, T). o is contiguous. Grid: B × H × blocks."""
    n_blocks = tl.cdiv(T, BLOCK)
    bh = (tl.program_id(0) // n_blocks).to(tl.int64)
    i = tl.program_id(0) % n_blocks * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    inside = i < T
    grad_o += bh // H * stride_b + bh % H * stride_h
    total = tl.zeros((BLOCK,), dtype=ACC)
    for e0 in range(0, E, BLOCK_E):
        e = e0 + tl.arange(0, BLOCK_E)
        mask = inside[:, None] & (e < E)[None, :]
        g = tl.load(grad_o + i[:, None] * stride_t + e[None, :] * stride_e, mask=mask, other=0.0).to(ACC)
        total += tl.sum(g * tl.load(o + (bh * T + i)[:, None] * E + e[None, :], mask=mask, other=0.0).to(ACC), axis=1)
    divisor = tl.load(den + bh * T + i, mask=inside, other=1.0)
    tl.store(d_den + bh * T + i, -total / divisor, mask=inside)


@triton.jit(do_not_specialize=OPEN)
def decode(
    q, k, v, o, kv, k_sum, new_kv, new_k_sum, log_decay, theta, key_mask, position, eps, H, qb, qh, qd, kb, kh, kd,
    vb, vh, ve, heads_of_theta,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, SIGNED: tl.constexpr, P: tl.constexpr, BLOCK_E: tl.constexpr,
    PHI: tl.constexpr, INTERLEAVED: tl.constexpr, PLAIN: tl.constexpr, DECAY: tl.constexpr, MASKED: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """One token: the state takes it in and is read. Each entry of the state is read once and written once.

    Grid: B × H × blocks of E.
    """
    E_BLOCKS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    e_block = tl.program_id(0) % E_BLOCKS
    bh = (tl.program_id(0) // E_BLOCKS).to(tl.int64)
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
    e = e_block * BLOCK_E + tl.arange(0, BLOCK_E)
    in_e = (e < E)[None, :]
    sum_at = bh * D
    sum_a = kept * tl.load(k_sum + sum_at + a, mask=a < D, other=0.0)[None, :] + tl.where(a < SIGNED, 0.0, ka)
    sum_b = kept * tl.load(k_sum + sum_at + c, mask=c < D, other=0.0)[None, :] + tl.where(c < SIGNED, 0.0, kb_)
    if e_block == 0:
        tl.store(new_k_sum + sum_at + a[None, :], sum_a, mask=(a < D)[None, :])
        tl.store(new_k_sum + sum_at + c[None, :], sum_b, mask=(c < D)[None, :])
    den = tl.full((1,), 1.0, dtype=ACC)
    if PLAIN:
        den = tl.sum(tl.where(is_mapped(a, D, SIGNED), qa * sum_a, 0.0), axis=1)
        den += tl.sum(tl.where(is_mapped(c, D, SIGNED), qb_ * sum_b, 0.0), axis=1) + eps
    if R > 0:
        m = tl.arange(0, P)
        own = tl.load(theta + h % heads_of_theta * (R // 2) + m, mask=m < R // 2, other=0.0)
        cos, sin = exact_rotation(position + tl.zeros((1, 1), dtype=tl.int64), own[None, :])
        cos, sin = cos.to(ACC), sin.to(ACC)
        qa, qb_ = rotate(qa, qb_, cos, sin)
        ka, kb_ = rotate(ka, kb_, cos, sin)
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
