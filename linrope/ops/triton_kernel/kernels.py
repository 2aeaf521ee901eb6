"""The kernels of the CUDA backend that march through a sequence. φ and rotations are computed on load, never stored.

The sequence is cut into stretches of `STRETCH` tokens, one program each, which goes through its stretch in chunks of
`CHUNK` tokens with the state in registers. `stretch_sums` computes what each stretch adds to the state, `scan` (in
`small_kernels.py`) makes of that the state before each stretch, and the others begin from it:

    attend           num = (M ∘ q̃ k̃ᵀ) v + a ∘ q̃ S           den = (M ∘ φ(q) φ(k)ᵀ) 1 + a ∘ φ(q) u + ε
    query_gradients  ∂q̃ = (M ∘ ∂num vᵀ) k̃ + a ∘ ∂num Sᵀ
    key_gradients    ∂k̃ = (M ∘ ∂num vᵀ)ᵀ q̃ + b ∘ v ∂Sᵀ      ∂v = (M ∘ q̃ k̃ᵀ)ᵀ ∂num + b ∘ k̃ ∂S

with S the state and u the sum of features before the chunk, and ∂S that of the gradients after it. With G the running
sum of log_decay from the chunk's start, M_ij = e^{G_i - G_j} for j ≤ i of one document and 0 elsewhere, a_i = e^{G_i}
and b_j = e^{G_end - G_j}. `key_gradients` goes from the end of a stretch to its start.

Sums of features take part in products as the first row of a matrix: `u` of a chunk is read, and grows, without a sum
across threads. ∂num = ∂o / den; the denominators divide q̃ or the result instead, so that ∂o is an operand as it lies in
memory.

Tokens are rotated by their position within the stretch. A state in memory has the frame of the sequence's start: it is
rotated by the exact angle of the stretch's first position when it is written, and back when it is read.

Values wider than `BLOCK_E` are split among programs. Gradients of features are then sums of `PARTIAL` results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linrope.ops.triton_kernel.configurations import autotuned
from linrope.ops.triton_kernel.gradients import more_crosses, only_valid, store_crosses, terms
from linrope.ops.triton_kernel.primitives import (
    OPEN,
    SMALL,
    TILE,
    features,
    is_kept,
    load_columns,
    load_rotations,
    load_rows,
    load_values,
    place_of_program,
    rotate_all,
    scaled,
    store_rows,
    store_values,
    summed_features,
    vjp_features,
    zero_sums,
    zeros_of,
)
from linrope.ops.triton_kernel.products import (
    add_products,
    added,
    added_rows,
    along,
    as_operands,
    chunk_decay,
    dots,
    grown,
    grown_sums,
    halves,
    load_state,
    load_sums,
    operand,
    operands,
    pair_weights,
    product,
    read_state,
    read_state_back,
    read_sums_back,
    rounded,
    store_state,
    store_sums,
    times,
)
from linrope.ops.triton_kernel.small_kernels import decode, finish_features, finish_log_decay, scan, write_angles

__all__ = ["attend", "key_gradients", "query_gradients", "stretch_sums"]
__all__ += ["decode", "finish_features", "finish_log_decay", "scan", "write_angles"]


@autotuned
@triton.jit(do_not_specialize=OPEN)
def stretch_sums(
    x, u, den, d_den, state, between, angles, log_decay, documents, key_mask, H, T, N,
    x_b, x_h, x_t, x_d, u_b, u_h, u_t, u_e, g_b, g_h, g_t, sines, heads_of_theta, heads_of_decay, bucket,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, SIGNED: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr,
    BLOCK_E: tl.constexpr, STRETCH: tl.constexpr, PHI: tl.constexpr, INTERLEAVED: tl.constexpr, LATER: tl.constexpr,
    PLAIN: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr, MASKED: tl.constexpr, LOW: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, EMULATED: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a stretch adds to the state: Σ b k̃ vᵀ and Σ b φ(k), into the slot after it. If LATER, what it adds to the
    state's gradient: Σ a q̃ ∂numᵀ and Σ a ∂den φ(q), into the slot before it.

    state: (B, H, N + 1, D·E + D). between: (B, H or 1, N), how much of the past a stretch keeps, if there is decay or
    documents. Reads u once, and x once for each block of E. Grid: B × H × N × blocks of E.
    """
    E_BLOCKS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    WEIGHTED: tl.constexpr = DECAY or DOCUMENTS
    SUMS: tl.constexpr = PLAIN or not LATER
    e_block, s, bh, b, h = place_of_program(N, H, E_BLOCKS)
    x += b * x_b + h * x_h
    u += b * u_b + h * u_h
    if R > 0:
        angles += (h % heads_of_theta) * (sines // heads_of_theta)
    if DECAY:
        log_decay += b * g_b + h * g_h
    if DOCUMENTS:
        documents += b * T
    if MASKED:
        key_mask += b * T
    e = e_block * BLOCK_E + tl.arange(0, BLOCK_E)
    p = tl.arange(0, CHUNK)
    first = s.to(tl.int64) * STRETCH
    chunks = tl.cdiv(tl.minimum(T - first, STRETCH), CHUNK).to(tl.int32)

    state_tiles = zeros_of(2 * P, BLOCK_E, TILES, ACC)
    ua, ub = zeros_of(CHUNK, P, TILES, ACC), zeros_of(CHUNK, P, TILES, ACC)
    kept_of_all = tl.sum(tl.zeros((CHUNK,), dtype=ACC), axis=0) + 1.0
    for step in tl.range(chunks, num_stages=STAGES):
        chunk = step
        if LATER:
            chunk = chunks - 1 - step
        place = chunk * CHUNK
        i0 = first + place
        inside = i0 + p < T
        valid = inside
        if MASKED:
            valid = is_kept(key_mask + i0, p, inside, MASKED)
        xa, xb = load_rows(x + i0 * x_t, p, valid, x_t, x_d, D, R, P, TILES, INTERLEAVED, ACC)
        values = load_values(u + i0 * u_t, p, e, valid, u_t, u_e, E, BLOCK_E)
        fa, fb = features(xa, xb, valid, D, P, TILES, SIGNED, PHI, ALL_ROWS=not MASKED)
        high, low, reach, kept, passed, document = chunk_decay(
            log_decay, documents, i0, T, g_t, CHUNK, DECAY, DOCUMENTS, ACC
        )
        weight = kept
        if LATER:
            weight = reach
        share = weight
        if LATER and PLAIN:
            scale = 1.0 / tl.load(den + bh * T + i0 + p, mask=inside, other=1.0)
            share = weight * tl.load(d_den + bh * T + i0 + p, mask=inside, other=0.0)
        if SUMS:
            ga, gb = summed_features(fa, fb, D, P, TILES, SIGNED)
            ua, ub = added_rows(ua, ub, ga, gb, tl.where(inside, share, 0.0), passed, TILES, WEIGHTED)
        cos, sin = load_rotations(angles, place, sines, CHUNK, R, P, TILES)
        fa, fb = rotate_all(fa, fb, cos, sin, R, TILES)
        if LATER and PLAIN:  # in place of ∂o, which products then take as it was loaded
            fa, fb = scaled(fa, fb, scale, TILES)
        if WEIGHTED:
            values = values * weight[:, None]
            kept_of_all *= passed
        f = operands(fa, fb, TILES, LOW, PRECISION, EMULATED)
        state_tiles = grown(state_tiles, f, values, passed, TILES, WEIGHTED, LOW, ACC, PRECISION, EMULATED)

    slot = state + (bh * (N + 1) + s + (0 if LATER else 1)) * (D * E + D)
    store_state(slot, state_tiles, e, angles, s, sines, D, E, R, P, TILES, STRETCH, INTERLEAVED)
    if e_block == 0:
        store_sums(slot + D * E, ua, ub, D, R, P, TILES, INTERLEAVED)
        if WEIGHTED:
            if h < heads_of_decay:
                tl.store(between + (b * heads_of_decay + h) * N + s, kept_of_all)


@autotuned
@triton.jit(do_not_specialize=OPEN)
def attend(
    q, k, v, o, den, state, angles, log_decay, documents, key_mask, eps, H, T, N, slot_of_all,
    q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_e, g_b, g_h, g_t, sines, heads_of_theta, bucket,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, SIGNED: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr,
    BLOCK_E: tl.constexpr, STRETCH: tl.constexpr, PHI: tl.constexpr, INTERLEAVED: tl.constexpr, CAUSAL: tl.constexpr,
    PLAIN: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr, MASKED: tl.constexpr, LOW: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, EMULATED: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """o (B, H, T, E), and den (B, H, T) if PLAIN.

    state: (B, H, N + 1, D·E + D); a causal stretch s begins from slot s, any other one reads `slot_of_all`.
    Grid: B × H × stretches × blocks of E.
    """
    E_BLOCKS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    WEIGHTED: tl.constexpr = DECAY or DOCUMENTS
    # the transpose of a state is an operand in the registers where it is; 64 rows are for two warps
    VALUES_FIRST: tl.constexpr = 2 * P * TILES * BLOCK_E <= SMALL and (P == TILE or BLOCK_E < 64)
    e_block, s, bh, b, h = place_of_program(tl.cdiv(T, STRETCH), H, E_BLOCKS)
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    if R > 0:
        angles += (h % heads_of_theta) * (sines // heads_of_theta)
    if DECAY:
        log_decay += b * g_b + h * g_h
    if DOCUMENTS:
        documents += b * T
    if MASKED and CAUSAL:
        key_mask += b * T
    e = e_block * BLOCK_E + tl.arange(0, BLOCK_E)
    p = tl.arange(0, CHUNK)
    first = s.to(tl.int64) * STRETCH
    chunks = tl.cdiv(tl.minimum(T - first, STRETCH), CHUNK).to(tl.int32)
    slot = state + (bh * (N + 1) + (s if CAUSAL else slot_of_all)) * (D * E + D)
    state_tiles = load_state(slot, e, angles, s, sines, D, E, R, P, TILES, STRETCH, INTERLEAVED, VALUES_FIRST)
    u = load_sums(slot + D * E, CHUNK, D, R, P, TILES, SIGNED, INTERLEAVED)

    for chunk in tl.range(chunks, num_stages=STAGES):
        place = chunk * CHUNK
        i0 = first + place
        inside = i0 + p < T
        cos, sin = load_rotations(angles, place, sines, CHUNK, R, P, TILES)
        xa, xb = load_rows(q + i0 * q_t, p, inside, q_t, q_d, D, R, P, TILES, INTERLEAVED, ACC)
        fa, fb = features(xa, xb, inside, D, P, TILES, SIGNED, PHI, ALL_ROWS=True)
        ta, tb = rotate_all(fa, fb, cos, sin, R, TILES)
        rotated_q = operands(ta, tb, TILES, LOW, PRECISION, EMULATED)
        past = rounded(state_tiles, TILES, LOW, PRECISION, EMULATED)
        high, low, reach, kept, passed, document = chunk_decay(
            log_decay, documents, i0, T, g_t, CHUNK, DECAY, DOCUMENTS, ACC
        )
        if PLAIN:
            plain_q = operands(fa, fb, TILES, LOW, PRECISION, EMULATED)
            sums = rounded(u, TILES, LOW, PRECISION, EMULATED)
        if CAUSAL:
            valid = inside
            if MASKED:
                valid = is_kept(key_mask + i0, p, inside, MASKED)
            ya, yb = load_rows(k + i0 * k_t, p, valid, k_t, k_d, D, R, P, TILES, INTERLEAVED, ACC)
            if VALUES_FIRST:
                across = load_columns(v + i0 * v_t, p, e, valid, v_t, v_e, E, BLOCK_E)
            else:
                across = load_values(v + i0 * v_t, p, e, valid, v_t, v_e, E, BLOCK_E)
            ga, gb = features(ya, yb, valid, D, P, TILES, SIGNED, PHI, ALL_ROWS=not MASKED)
            weight = pair_weights(high, low, document, CHUNK, DECAY, DOCUMENTS, True, ACC)
            if PLAIN:
                pa, pb = summed_features(ga, gb, D, P, TILES, SIGNED)
                plain_k = operands(pa, pb, TILES, LOW, PRECISION, EMULATED)
            ga, gb = rotate_all(ga, gb, cos, sin, R, TILES)
            rotated_k = operands(ga, gb, TILES, LOW, PRECISION, EMULATED)
        if VALUES_FIRST:
            values = dots(past, rotated_q, TILES, LOW, ACC, PRECISION, EMULATED)
        else:
            values = read_state(rotated_q, past, TILES, LOW, ACC, PRECISION, EMULATED)
        if WEIGHTED:
            values = values * along(reach, VALUES_FIRST)
        if PLAIN:
            dens = dots(sums, plain_q, TILES, LOW, ACC, PRECISION, EMULATED) * reach[None, :]
        if CAUSAL:
            if PLAIN:
                dens += dots(plain_k, plain_q, TILES, LOW, ACC, PRECISION, EMULATED) * weight
                u = grown_sums(u, plain_k, kept, passed, TILES, WEIGHTED, LOW, ACC, PRECISION, EMULATED)
            pairs = dots(rotated_k, rotated_q, TILES, LOW, ACC, PRECISION, EMULATED) * weight
            if VALUES_FIRST:
                values += product(across, pairs, LOW, ACC, PRECISION, EMULATED)
            else:
                values += product(tl.trans(pairs), across, LOW, ACC, PRECISION, EMULATED)
            if WEIGHTED:
                across = across * along(kept, VALUES_FIRST)
            state_tiles = grown(
                state_tiles, rotated_k, across, passed, TILES, WEIGHTED, LOW, ACC, PRECISION, EMULATED, VALUES_FIRST
            )
        if PLAIN:
            total = tl.sum(dens, axis=0) + eps
            values = values * along(1.0 / total, VALUES_FIRST)
            if e_block == 0:
                tl.store(den + bh * T + i0 + p, total, mask=inside)
        values = values.to(o.dtype.element_ty)
        if VALUES_FIRST:
            values = tl.trans(values)
        store_values(o + (bh * T + i0) * E, p, e, inside, values, E, BLOCK_E)


@autotuned
@triton.jit(do_not_specialize=OPEN)
def query_gradients(
    q, k, v, grad_o, o, den, d_den, out, state, angles, log_decay, documents, key_mask, d_theta, d_running, H, T, N,
    slot_of_all, q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_e, o_b, o_h, o_t, o_e, g_b, g_h, g_t,
    sines, heads_of_theta, bucket,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, SIGNED: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr,
    BLOCK_E: tl.constexpr, STRETCH: tl.constexpr, PHI: tl.constexpr, INTERLEAVED: tl.constexpr, CAUSAL: tl.constexpr,
    PLAIN: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr, MASKED: tl.constexpr, PARTIAL: tl.constexpr,
    D_THETA: tl.constexpr, D_DECAY: tl.constexpr, LOW: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    EMULATED: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """∂q, and ∂den (B, H, T) if PLAIN. Grid and state as in `attend`.

    Args:
        grad_o: ∂o with the strides o_b … o_e; o is contiguous.
        out: ∂q (B, H, T, D). If PARTIAL, ∂φ(q) for each block of E, (blocks, B, H, T, D).
        d_theta: (blocks of E, B, H, stretches, 2, R/2), float64: Σ of the pairs' q̃ × ∂q̃, and the same times the
            positions in the stretch.
        d_running: (blocks of E, B, H, T): φ(q)·∂φ(q).
    """
    E_BLOCKS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    WEIGHTED: tl.constexpr = DECAY or DOCUMENTS
    stretches = tl.cdiv(T, STRETCH)
    e_block, s, bh, b, h = place_of_program(stretches, H, E_BLOCKS)
    part = bh + e_block * (tl.num_programs(0) // (E_BLOCKS * stretches)).to(tl.int64)
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    grad_o += b * o_b + h * o_h
    if R > 0:
        angles += (h % heads_of_theta) * (sines // heads_of_theta)
    if DECAY:
        log_decay += b * g_b + h * g_h
    if DOCUMENTS:
        documents += b * T
    if MASKED and CAUSAL:
        key_mask += b * T
    e = e_block * BLOCK_E + tl.arange(0, BLOCK_E)
    p = tl.arange(0, CHUNK)
    first = s.to(tl.int64) * STRETCH
    chunks = tl.cdiv(tl.minimum(T - first, STRETCH), CHUNK).to(tl.int32)
    slot = state + (bh * (N + 1) + (s if CAUSAL else slot_of_all)) * (D * E + D)
    state_tiles = load_state(slot, e, angles, s, sines, D, E, R, P, TILES, STRETCH, INTERLEAVED)
    u = load_sums(slot + D * E, CHUNK, D, R, P, TILES, SIGNED, INTERLEAVED)
    crosses, placed = zero_sums(P, TILES, tl.float64)

    for chunk in tl.range(chunks, num_stages=STAGES):
        place = chunk * CHUNK
        i0 = first + place
        inside = i0 + p < T
        cos, sin = load_rotations(angles, place, sines, CHUNK, R, P, TILES)
        high, low, reach, kept, passed, document = chunk_decay(
            log_decay, documents, i0, T, g_t, CHUNK, DECAY, DOCUMENTS, ACC
        )
        given = load_values(grad_o + i0 * o_t, p, e, inside, o_t, o_e, E, BLOCK_E)
        if PLAIN:
            scale = 1.0 / tl.load(den + bh * T + i0 + p, mask=inside, other=1.0)
            own = load_values(o + (bh * T + i0) * E, p, e, inside, E, 1, E, BLOCK_E).to(ACC)
            share = tl.sum(given.to(ACC) * own, axis=1)
            if PARTIAL:  # ∂den is a sum over all of E
                share = tl.zeros_like(share)
                for block in tl.static_range(E_BLOCKS):
                    all_e = block * BLOCK_E + tl.arange(0, BLOCK_E)
                    own = load_values(o + (bh * T + i0) * E, p, all_e, inside, E, 1, E, BLOCK_E).to(ACC)
                    share += tl.sum(
                        own * load_values(grad_o + i0 * o_t, p, all_e, inside, o_t, o_e, E, BLOCK_E).to(ACC), axis=1
                    )
            share = -share * scale
            if e_block == 0:
                tl.store(d_den + bh * T + i0 + p, share, mask=inside)
            if PARTIAL:
                share = tl.where(e_block == 0, share, 0.0)
        given = operand(given, LOW, PRECISION, EMULATED)
        past = rounded(state_tiles, TILES, LOW, PRECISION, EMULATED)
        if CAUSAL:
            valid = inside
            if MASKED:
                valid = is_kept(key_mask + i0, p, inside, MASKED)
            ya, yb = load_rows(k + i0 * k_t, p, valid, k_t, k_d, D, R, P, TILES, INTERLEAVED, ACC)
            across = load_values(v + i0 * v_t, p, e, valid, v_t, v_e, E, BLOCK_E)
            ka, kb = features(ya, yb, valid, D, P, TILES, SIGNED, PHI, ALL_ROWS=not MASKED)
            weight = pair_weights(high, low, document, CHUNK, DECAY, DOCUMENTS, False, ACC)
            ga, gb = rotate_all(ka, kb, cos, sin, R, TILES)
            rotated_k = operands(ga, gb, TILES, LOW, PRECISION, EMULATED)
        d = read_state_back(given, past, TILES, LOW, ACC, PRECISION, EMULATED)
        if WEIGHTED:
            d = times(d, reach, TILES)
        if CAUSAL:
            pairs = product(given, tl.trans(across), LOW, ACC, PRECISION, EMULATED) * weight
            d = add_products(d, pairs, rotated_k, TILES, LOW, ACC, PRECISION, EMULATED)
            if WEIGHTED:
                across = across * kept[:, None]
            state_tiles = grown(state_tiles, rotated_k, across, passed, TILES, WEIGHTED, LOW, ACC, PRECISION, EMULATED)

        da, db = halves(d, TILES)
        if PLAIN:  # the gradient of num is ∂o / den
            da, db = scaled(da, db, scale, TILES)
        xa, xb = load_rows(q + i0 * q_t, p, inside, q_t, q_d, D, R, P, TILES, INTERLEAVED, ACC)
        fa, fb = features(xa, xb, inside, D, P, TILES, SIGNED, PHI, ALL_ROWS=True)
        if D_THETA:
            ta, tb = rotate_all(fa, fb, cos, sin, R, TILES)
            crosses, placed = more_crosses(crosses, placed, ta, tb, da, db, place + p, TILES)
        da, db = rotate_all(da, db, cos, sin, R, TILES, True)
        if PLAIN:  # ∂den times the sum of keys so far
            d = read_sums_back(reach, u, TILES, LOW, ACC, PRECISION, EMULATED)
            if CAUSAL:
                pa, pb = summed_features(ka, kb, D, P, TILES, SIGNED)
                plain_k = operands(pa, pb, TILES, LOW, PRECISION, EMULATED)
                d = add_products(d, weight, plain_k, TILES, LOW, ACC, PRECISION, EMULATED)
                u = grown_sums(u, plain_k, kept, passed, TILES, WEIGHTED, LOW, ACC, PRECISION, EMULATED)
            da, db = added(da, db, times(d, share, TILES), TILES)
        if D_DECAY:
            tl.store(d_running + part * T + i0 + p, tl.sum(terms(fa, fb, da, db, TILES), axis=1), mask=inside)
        if not PARTIAL:
            da, db = vjp_features(xa, xb, fa, fb, da, db, D, P, TILES, SIGNED, PHI, D_THETA or D_DECAY)
        store_rows(out + (part * T + i0) * D, p, inside, da, db, D, R, P, TILES, INTERLEAVED)
    if D_THETA:
        store_crosses(d_theta + (part * stretches + s) * 2 * (R // 2), crosses, placed, R, P, TILES)


@autotuned
@triton.jit(do_not_specialize=OPEN)
def key_gradients(
    q, k, v, grad_o, den, d_den, out, d_v, state, angles, log_decay, documents, key_mask, d_theta, d_running, H, T, N,
    slot_of_all, q_b, q_h, q_t, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_e, o_b, o_h, o_t, o_e, g_b, g_h, g_t,
    sines, heads_of_theta, bucket,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, SIGNED: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr,
    BLOCK_E: tl.constexpr, STRETCH: tl.constexpr, PHI: tl.constexpr, INTERLEAVED: tl.constexpr, CAUSAL: tl.constexpr,
    PLAIN: tl.constexpr, SUMS: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr, MASKED: tl.constexpr,
    PARTIAL: tl.constexpr, D_THETA: tl.constexpr, D_DECAY: tl.constexpr, LOW: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, EMULATED: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """∂k and ∂v, from the end of each stretch to its start. Arguments as in `query_gradients`; T counts keys.

    state: the gradients of states, (B, H, N + 1, D·E + D); a causal stretch s begins from slot s + 1. SUMS: whether
    those of sums of features are not 0. d_v: (B, H, T, E).
    """
    E_BLOCKS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    WEIGHTED: tl.constexpr = DECAY or DOCUMENTS
    stretches = tl.cdiv(T, STRETCH)
    e_block, s, bh, b, h = place_of_program(stretches, H, E_BLOCKS)
    part = bh + e_block * (tl.num_programs(0) // (E_BLOCKS * stretches)).to(tl.int64)
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    grad_o += b * o_b + h * o_h
    if R > 0:
        angles += (h % heads_of_theta) * (sines // heads_of_theta)
    if DECAY:
        log_decay += b * g_b + h * g_h
    if DOCUMENTS:
        documents += b * T
    if MASKED:
        key_mask += b * T
    e = e_block * BLOCK_E + tl.arange(0, BLOCK_E)
    p = tl.arange(0, CHUNK)
    first = s.to(tl.int64) * STRETCH
    chunks = tl.cdiv(tl.minimum(T - first, STRETCH), CHUNK).to(tl.int32)
    slot = state + (bh * (N + 1) + (s + 1 if CAUSAL else slot_of_all)) * (D * E + D)
    state_tiles = load_state(slot, e, angles, s, sines, D, E, R, P, TILES, STRETCH, INTERLEAVED)
    u = load_sums(slot + D * E, CHUNK, D, R, P, TILES, SIGNED, INTERLEAVED)
    crosses, placed = zero_sums(P, TILES, tl.float64)

    for step in tl.range(chunks, num_stages=STAGES):
        place = (chunks - 1 - step) * CHUNK
        i0 = first + place
        inside = i0 + p < T
        valid = inside
        if MASKED:
            valid = is_kept(key_mask + i0, p, inside, MASKED)
        cos, sin = load_rotations(angles, place, sines, CHUNK, R, P, TILES)
        high, low, reach, kept, passed, document = chunk_decay(
            log_decay, documents, i0, T, g_t, CHUNK, DECAY, DOCUMENTS, ACC
        )
        ya, yb = load_rows(k + i0 * k_t, p, valid, k_t, k_d, D, R, P, TILES, INTERLEAVED, ACC)
        ga, gb = features(ya, yb, valid, D, P, TILES, SIGNED, PHI, ALL_ROWS=not MASKED)
        across = load_values(v + i0 * v_t, p, e, valid, v_t, v_e, E, BLOCK_E)
        ta, tb = rotate_all(ga, gb, cos, sin, R, TILES)
        rotated_k = operands(ta, tb, TILES, LOW, PRECISION, EMULATED)
        past = rounded(state_tiles, TILES, LOW, PRECISION, EMULATED)
        if CAUSAL:
            xa, xb = load_rows(q + i0 * q_t, p, inside, q_t, q_d, D, R, P, TILES, INTERLEAVED, ACC)
            given = load_values(grad_o + i0 * o_t, p, e, inside, o_t, o_e, E, BLOCK_E)
            fa, fb = features(xa, xb, inside, D, P, TILES, SIGNED, PHI, ALL_ROWS=True)
            weight = pair_weights(high, low, document, CHUNK, DECAY, DOCUMENTS, True, ACC)
            if PLAIN:
                scale = 1.0 / tl.load(den + bh * T + i0 + p, mask=inside, other=1.0)
                share = tl.load(d_den + bh * T + i0 + p, mask=inside, other=0.0)
                pa, pb = summed_features(fa, fb, D, P, TILES, SIGNED)
                pa, pb = scaled(pa, pb, share, TILES)
            fa, fb = rotate_all(fa, fb, cos, sin, R, TILES)
            if PLAIN:  # in place of ∂o, which products then take as it was loaded
                fa, fb = scaled(fa, fb, scale, TILES)
            rotated_q = operands(fa, fb, TILES, LOW, PRECISION, EMULATED)
        values = read_state(rotated_k, past, TILES, LOW, ACC, PRECISION, EMULATED)
        if WEIGHTED:
            values = values * kept[:, None]
        d = read_state_back(across, past, TILES, LOW, ACC, PRECISION, EMULATED)
        if WEIGHTED:
            d = times(d, kept, TILES)
        if CAUSAL:
            pairs = dots(rotated_k, rotated_q, TILES, LOW, ACC, PRECISION, EMULATED) * weight
            values += product(pairs, given, LOW, ACC, PRECISION, EMULATED)
            pairs = product(across, tl.trans(given), LOW, ACC, PRECISION, EMULATED) * weight
            d = add_products(d, pairs, rotated_q, TILES, LOW, ACC, PRECISION, EMULATED)
            if WEIGHTED:
                given = given * reach[:, None]
            state_tiles = grown(state_tiles, rotated_q, given, passed, TILES, WEIGHTED, LOW, ACC, PRECISION, EMULATED)

        da, db = halves(d, TILES)
        if MASKED:
            values = tl.where(valid[:, None], values, 0.0)
        store_values(d_v + (bh * T + i0) * E, p, e, inside, values.to(d_v.dtype.element_ty), E, BLOCK_E)
        if D_THETA:
            crosses, placed = more_crosses(crosses, placed, ta, tb, da, db, place + p, TILES)
        if D_DECAY:  # ∂log_decay is a difference of sums in which most terms are the same, with the same rounding
            ta, tb = as_operands(ta, tb, TILES, LOW, PRECISION, EMULATED)
            running = terms(ta, tb, da, db, TILES)
        da, db = rotate_all(da, db, cos, sin, R, TILES, True)
        if SUMS:  # the sum of later ∂den φ(q)
            once = kept
            if PARTIAL:
                once = tl.where(e_block == 0, kept, 0.0)
            d = read_sums_back(once, u, TILES, LOW, ACC, PRECISION, EMULATED)
            if CAUSAL and PLAIN:
                if PARTIAL:
                    weight = tl.where(e_block == 0, weight, 0.0)
                plain_q = operands(pa, pb, TILES, LOW, PRECISION, EMULATED)
                d = add_products(d, weight, plain_q, TILES, LOW, ACC, PRECISION, EMULATED)
                u = grown_sums(u, plain_q, reach, passed, TILES, WEIGHTED, LOW, ACC, PRECISION, EMULATED)
            elif CAUSAL and WEIGHTED:
                n = ()
                for tile in tl.static_range(TILES):
                    n = n + (u[tile] * passed,)
                u = n
            if D_DECAY:
                more_a, more_b = halves(d, TILES)
                running += terms(ga, gb, more_a, more_b, TILES)
            da, db = added(da, db, d, TILES)
        if D_DECAY:
            tl.store(d_running + part * T + i0 + p, tl.sum(running, axis=1), mask=inside)
        if not PARTIAL:
            da, db = vjp_features(ya, yb, ga, gb, da, db, D, P, TILES, SIGNED, PHI, D_THETA or D_DECAY)
        if MASKED:
            da, db = only_valid(da, db, valid, TILES)
        store_rows(out + (part * T + i0) * D, p, inside, da, db, D, R, P, TILES, INTERLEAVED)
    if D_THETA:
        store_crosses(d_theta + (part * stretches + s) * 2 * (R // 2), crosses, placed, R, P, TILES)
