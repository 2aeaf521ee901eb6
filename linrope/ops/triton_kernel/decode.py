"""The kernel of a decoding step."""

from __future__ import annotations

import triton
import triton.language as tl

from linrope.ops.triton_kernel.primitives import OPEN, exact_rotation, features, halves, is_mapped, load_halves, rotate


# fmt: off
@triton.jit(do_not_specialize=OPEN)
def decode(
    q, k, v, o, kv, k_sum, new_kv, new_k_sum, log_decay, theta, key_mask, position, eps, H, qb, qh, qd, kb, kh, kd,
    vb, vh, ve, heads_of_theta,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, SIGNED: tl.constexpr, P: tl.constexpr, BLOCK_E: tl.constexpr,
    PHI: tl.constexpr, INTERLEAVED: tl.constexpr, PLAIN: tl.constexpr, DECAY: tl.constexpr, MASKED: tl.constexpr,
    ACC: tl.constexpr,
):
    # fmt: on
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
