"""The kernels of the CUDA backend. φ and rotations are computed on load, never stored in memory.

The sequence is cut into stretches of `STRETCH` tokens, and these into blocks of `BLOCK`. `stretch_sums` computes
Σ k̃ vᵀ and Σ φ(k) of each stretch, `scan` turns them into the state before each stretch, and `attend` computes each
block's output from that state and from all pairs within the stretch, in the order of flash attention. The backward is
the same three with other operands:

    own, other      values of own                           features of own
    queries, keys   num = (M ∘ q̃ k̃ᵀ) v + a ∘ q̃ S            ∂q̃ = (M ∘ ∂num vᵀ) k̃ + a ∘ ∂num Sᵀ
    keys, queries   ∂v  = (M ∘ q̃ k̃ᵀ)ᵀ ∂num + b ∘ k̃ ∂S       ∂k̃ = (M ∘ ∂num vᵀ)ᵀ q̃ + b ∘ v ∂Sᵀ

so each kernel is written once, for `own` rows that see `other` rows: earlier ones, or later ones if `LATER`. With G the
running sum of log_decay from a stretch's start, M_ij = e^{G_i - G_j} for j ≤ i of one document and 0 elsewhere,
a_i = e^{G_i}, and b_j = e^{G_end - G_j}. The denominator's Σ φ(k) is a running sum in float32; without decay it needs
no product.

Tokens are rotated by their position within the stretch, from one small table for all stretches. A state is rotated by
the exact angle of the stretch's first position when it is written, and back when it is read.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from linrope.ops.triton_kernel.primitives import (
    OPEN,
    features,
    halves,
    is_mapped,
    load_halves,
    load_rotations,
    product,
    rotate,
    store_halves,
    summed,
    vjp_features,
)
from linrope.ops.triton_kernel.small_kernels import decode, finish_log_decay, write_angles, write_d_den, write_weights

__all__ = ["attend", "scan", "stretch_sums"]
__all__ += ["decode", "finish_log_decay", "write_angles", "write_d_den", "write_weights"]
TRIED = ((4, 2),) if os.environ.get("TRITON_INTERPRET") == "1" else ((4, 2), (8, 2), (8, 1))
CONFIGS = [triton.Config({}, num_warps=warps, num_stages=stages) for warps, stages in TRIED]
TUNED_BY = ["D", "E", "BLOCK", "BLOCK_E", "PHI", "LATER", "VALUES", "FEATURES", "CAUSAL", "PLAIN", "DECAY", "DOCUMENTS"]
TUNED_BY += ["MASKED", "PRECISION"]
"""Autotuning chooses one of `CONFIGS` for each combination of these and the tensors' dtypes, and keeps it on disk."""


@triton.jit(do_not_specialize=OPEN)
def stretch_sums(
    x, u, den, d_den, state, angles, weights, key_mask, H, T, N, x_b, x_h, x_t, x_d, u_b, u_h, u_t, u_e, sines,
    heads_of_theta, heads_of_weights, n_weights,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, SIGNED: tl.constexpr, P: tl.constexpr, BLOCK_E: tl.constexpr,
    STRETCH: tl.constexpr, BLOCK: tl.constexpr, PHI: tl.constexpr, INTERLEAVED: tl.constexpr, LATER: tl.constexpr,
    PLAIN: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr, LOW: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """What a stretch adds to the state: Σ b k̃ vᵀ and Σ b φ(k), into the slot after it. If LATER, what it adds to the
    state's gradient: Σ a q̃ ∂numᵀ and Σ a ∂den φ(q), into the slot before it.

    state: (B, H, N + 1, D·E + D). Reads u once, and x once for each block of E. Grid: B × H × N × blocks of E.
    """
    E_BLOCKS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    e_block = tl.program_id(0) % E_BLOCKS
    s = tl.program_id(0) // E_BLOCKS % N
    bh = (tl.program_id(0) // (E_BLOCKS * N)).to(tl.int64)
    b, h = bh // H, bh % H
    x += b * x_b + h * x_h
    u += b * u_b + h * u_h
    a_dims, b_dims = halves(R, P, INTERLEAVED)
    e = (e_block * BLOCK_E + tl.arange(0, BLOCK_E)).to(tl.int64)
    if R > 0:
        angles += (h % heads_of_theta) * (sines // heads_of_theta)

    state_a = tl.zeros((P, BLOCK_E), dtype=ACC)
    state_b = tl.zeros((P, BLOCK_E), dtype=ACC)
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
        mask = valid[:, None] & (e < E)[None, :]
        values = tl.load(u + i[:, None] * u_t + e[None, :] * u_e, mask=mask, other=0.0).to(ACC)
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
            cos, sin = load_rotations(angles, place, sines, R, P)
            fa, fb = rotate(fa, fb, cos, sin)
        values = values * weight[:, None]
        state_a += product(tl.trans(fa), values, LOW, ACC, PRECISION, EMULATED)
        state_b += product(tl.trans(fb), values, LOW, ACC, PRECISION, EMULATED)
    if R > 0:
        cos, sin = load_rotations(angles, STRETCH + s + tl.zeros((1,), dtype=tl.int32), sines, R, P)
        state_a, state_b = rotate(state_a, state_b, tl.trans(cos), tl.trans(sin))

    slot = state + (bh * (N + 1) + s + (0 if LATER else 1)) * (D * E + D)
    columns = (e < E)[None, :]
    tl.store(slot + a_dims[:, None] * E + e[None, :], state_a, mask=(a_dims < D)[:, None] & columns)
    tl.store(slot + b_dims[:, None] * E + e[None, :], state_b, mask=(b_dims < D)[:, None] & columns)
    if e_block == 0:
        tl.store(slot + D * E + a_dims, tl.where(a_dims < SIGNED, 0.0, sum_a), mask=a_dims < D)
        tl.store(slot + D * E + b_dims, tl.where(b_dims < SIGNED, 0.0, sum_b), mask=b_dims < D)


@triton.jit(do_not_specialize=OPEN)
def scan(
    state, first_kv, first_k_sum, last_kv, last_k_sum, between, H, N, heads_of_weights,
    KV: tl.constexpr, X: tl.constexpr, SCAN_BLOCK: tl.constexpr, LATER: tl.constexpr, WEIGHTED: tl.constexpr,
    GIVEN_KV: tl.constexpr, GIVEN_SUM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """From what each stretch adds to the state before each stretch and after the last, in place, from `first` to
    `last`. If LATER, the state's gradient, from the end to the start. Grid: B × H × blocks of the state."""
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


@triton.autotune(CONFIGS, key=TUNED_BY, cache_results=True)
@triton.jit(do_not_specialize=OPEN)
def attend(
    x, y, u, w, out_values, out_features, den, d_den, state, angles, weights, documents, key_mask, d_theta,
    d_running, eps, H, T, N, slot_of_all, x_b, x_h, x_t, x_d, y_b, y_h, y_t, y_d, u_b, u_h, u_t, u_e, w_b, w_h, w_t,
    w_e, sines, heads_of_theta, heads_of_weights, n_weights,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, SIGNED: tl.constexpr, P: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_SUM: tl.constexpr, STRETCH: tl.constexpr, BLOCK: tl.constexpr, PHI: tl.constexpr, INTERLEAVED: tl.constexpr,
    LATER: tl.constexpr, VALUES: tl.constexpr, FEATURES: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr,
    SUMS: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr, MASKED: tl.constexpr, D_THETA: tl.constexpr,
    D_DECAY: tl.constexpr, LOW: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """A block's values, or its features, or both: the table in the module's docstring.

    Grid: B × H × blocks, times blocks of E for values alone.

    Args:
        x, y: (B, H, T, D) raw queries or keys, own and other; u, w: (B, H, T, E) values or ∂o, own and other.
        out_values: (B, H, T, E): o or ∂v. out_features: (B, H, T, D): ∂q or ∂k.
        den, d_den: (B, H, T); the forward writes den, the backward reads both.
        state: (B, H, N + 1, D·E + D); a causal block of stretch s reads slot s, or s + 1 where LATER, any other block
            reads `slot_of_all`.
        d_theta: (blocks, 2, R/2): Σ of the pairs' q̃ × ∂q̃, and the same times the positions in the stretch.
        d_running: (B, H, T): φ(x)·∂φ(x).
    """
    E_BLOCKS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    SPLIT: tl.constexpr = 1 if FEATURES else E_BLOCKS  # programs for one block's values
    WEIGHTED: tl.constexpr = DECAY or DOCUMENTS
    SUMMED: tl.constexpr = (E + BLOCK_SUM - 1) // BLOCK_SUM  # steps of a sum over E
    n_blocks = tl.cdiv(T, BLOCK)
    e_block = tl.program_id(0) % SPLIT
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

    # This block's own rows.
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
            cos, sin = load_rotations(angles, place, sines, R, P)
            ta, tb = rotate(fa, fb, cos, sin)
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
    columns = (e_block * BLOCK_E + tl.arange(0, BLOCK_E)).to(tl.int64)
    a_dims, b_dims = halves(R, P, INTERLEAVED)
    mapped_a, mapped_b = is_mapped(a_dims, D, SIGNED), is_mapped(b_dims, D, SIGNED)

    # The state, in the frame of the sequence's start: its products are rotated by the stretch's angle, or back.
    slot = slot_of_all
    if CAUSAL:
        slot = s + (1 if LATER else 0)
    state += (bh * (N + 1) + slot) * (D * E + D)
    if R > 0:
        far_cos, far_sin = load_rotations(angles, STRETCH + s + tl.zeros((1,), dtype=tl.int32), sines, R, P)
    values = tl.zeros((BLOCK, BLOCK_E), dtype=ACC)
    out_a = tl.zeros((BLOCK, P), dtype=ACC)
    out_b = tl.zeros((BLOCK, P), dtype=ACC)
    in_columns = (columns < E)[None, :]
    if VALUES:
        far_a, far_b = ta, tb
        if R > 0:
            far_a, far_b = rotate(ta, tb, far_cos, far_sin)
        at = state + a_dims[:, None] * E + columns[None, :]
        half = tl.load(at, mask=(a_dims < D)[:, None] & in_columns, other=0.0)
        values += product(far_a * reach[:, None], half, LOW, ACC, PRECISION, EMULATED)
        at = state + b_dims[:, None] * E + columns[None, :]
        half = tl.load(at, mask=(b_dims < D)[:, None] & in_columns, other=0.0)
        values += product(far_b * reach[:, None], half, LOW, ACC, PRECISION, EMULATED)
    if FEATURES:
        for k in tl.static_range(SUMMED):
            e = (k * BLOCK_SUM + tl.arange(0, BLOCK_SUM)).to(tl.int64)
            down_e = (e < E)[:, None]
            own = tl.load(u + i[:, None] * u_t + e[None, :] * u_e, mask=valid[:, None] & (e < E)[None, :], other=0.0)
            own = own.to(ACC) * (scale * reach)[:, None]
            half = tl.load(state + a_dims[None, :] * E + e[:, None], mask=(a_dims < D)[None, :] & down_e, other=0.0)
            out_a += product(own, half, LOW, ACC, PRECISION, EMULATED)
            half = tl.load(state + b_dims[None, :] * E + e[:, None], mask=(b_dims < D)[None, :] & down_e, other=0.0)
            out_b += product(own, half, LOW, ACC, PRECISION, EMULATED)
        if R > 0:
            out_a, out_b = rotate(out_a, out_b, far_cos, -far_sin)

    # The denominator's sums: over whole stretches before, then over blocks before, then within the block.
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

    # All pairs within the stretch: first the other blocks, then the block itself.
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
                    j_cos, j_sin = load_rotations(angles, (j - s * STRETCH).to(tl.int32), sines, R, P)
                    ga, gb = rotate(ga, gb, j_cos, j_sin)
                j_scale = tl.full((BLOCK,), 1.0, dtype=ACC)
                if LATER and PLAIN:
                    j_scale = 1.0 / tl.load(den + bh * T + j, mask=j_inside, other=1.0)
                if FEATURES:
                    pairs = tl.zeros((BLOCK, BLOCK), dtype=ACC)
                    for k in tl.static_range(SUMMED):
                        e = (k * BLOCK_SUM + tl.arange(0, BLOCK_SUM)).to(tl.int64)
                        in_e = (e < E)[None, :]
                        own = tl.load(u + i[:, None] * u_t + e[None, :] * u_e, mask=valid[:, None] & in_e, other=0.0)
                        mask = j_valid[:, None] & in_e
                        others = tl.load(w + j[:, None] * w_t + e[None, :] * w_e, mask=mask, other=0.0)
                        own, others = own.to(ACC) * scale[:, None], others.to(ACC) * j_scale[:, None]
                        pairs += product(own, tl.trans(others), LOW, ACC, PRECISION, EMULATED)
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
            if e_block == 0:
                tl.store(den + bh * T + i, total, mask=inside)
        values = tl.where(valid[:, None], values, 0.0)
        mask = inside[:, None] & (columns < E)[None, :]
        tl.store(out_values + (bh * T + i)[:, None] * E + columns[None, :], values, mask=mask)
    if FEATURES:  # read own features only now, which saves registers
        xa, xb = load_halves(x, i, valid, x_t, x_d, D, R, P, INTERLEAVED)
        xa, xb = xa.to(ACC), xb.to(ACC)
        fa, fb = features(xa, xb, valid, D, R, P, SIGNED, PHI, INTERLEAVED)
        if R > 0:
            cos, sin = load_rotations(angles, place, sines, R, P)
        if D_THETA:
            ta, tb = rotate(fa, fb, cos, sin)
            cross = ta * out_b - tb * out_a
            m = tl.arange(0, P)
            at = d_theta + (bh * n_blocks + block) * 2 * (R // 2) + m
            tl.store(at, tl.sum(cross, axis=0), mask=m < R // 2)
            tl.store(at + R // 2, tl.sum(cross * place[:, None], axis=0), mask=m < R // 2)
        if R > 0:
            out_a, out_b = rotate(out_a, out_b, cos, -sin)
        if SUMS:
            share = tl.full((BLOCK,), 1.0, dtype=ACC)
            if not LATER:
                share = tl.load(d_den + bh * T + i, mask=inside, other=0.0)
            out_a += tl.where(mapped_a, share[:, None] * running_a, 0.0)
            out_b += tl.where(mapped_b, share[:, None] * running_b, 0.0)
        if D_DECAY:
            d_total = tl.sum(fa * out_a, axis=1) + tl.sum(fb * out_b, axis=1)
            tl.store(d_running + bh * T + i, d_total, mask=inside)
        out_a, out_b = vjp_features(xa, xb, fa, fb, out_a, out_b, D, R, P, SIGNED, PHI, INTERLEAVED)
        out_a, out_b = tl.where(valid[:, None], out_a, 0.0), tl.where(valid[:, None], out_b, 0.0)
        size = out_features.dtype.element_ty
        store_halves(out_features + bh * T * D, i, inside, out_a.to(size), out_b.to(size), D, R, P, INTERLEAVED)
