"""What the kernels of gradients do with a chunk's ∂q̃ and ∂k̃ after their products. The two halves of pairs are in two
tuples of tiles, as in `primitives.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def more_crosses(crosses, placed, ta, tb, da, db, positions, TILES: tl.constexpr):
    """∂θ needs Σ of the pairs' t × ∂t, and the same times the positions; with those of more rotated rows t."""
    nc, np = (), ()
    for tile in tl.static_range(TILES):
        cross = (ta[tile] * db[tile] - tb[tile] * da[tile]).to(tl.float64)
        nc = nc + (crosses[tile] + tl.sum(cross, axis=0),)
        np = np + (placed[tile] + tl.sum(cross * positions[:, None], axis=0),)
    return nc, np


@triton.jit
def store_crosses(ptr, crosses, placed, R: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr):
    """(2, R/2), contiguous."""
    for tile in tl.static_range(TILES):
        m = tile * P + tl.arange(0, P)
        tl.store(ptr + m, crosses[tile], mask=m < R // 2)
        tl.store(ptr + R // 2 + m, placed[tile], mask=m < R // 2)


@triton.jit
def terms(fa, fb, da, db, TILES: tl.constexpr):
    """What adds up to f · d in each row, (C, P)."""
    total = fa[0] * da[0] + fb[0] * db[0]
    for tile in tl.static_range(1, TILES):
        total += fa[tile] * da[tile] + fb[tile] * db[tile]
    return total


@triton.jit
def only_valid(da, db, valid, TILES: tl.constexpr):
    """Zeros in the other rows."""
    na, nb = (), ()
    for tile in tl.static_range(TILES):
        na = na + (tl.where(valid[:, None], da[tile], 0.0),)
        nb = nb + (tl.where(valid[:, None], db[tile], 0.0),)
    return na, nb
