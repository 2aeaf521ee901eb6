"""Shuffling by arithmetic: sample `i` of the order follows from the seed and `i` alone."""

from __future__ import annotations

_UINT64 = (1 << 64) - 1
_FEISTEL_ROUNDS = 6


def mix(*values: int) -> int:
    """A 64-bit hash of integers: splitmix64's finalizer (Steele et al., OOPSLA 2014), folded over them."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _UINT64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _UINT64
        state ^= state >> 31
    return state


def permute(index: int, n: int, *key: int) -> int:
    """The element at `index` of a permutation of `0 … n-1`, which `key` decides.

    A Feistel network permutes the next power of four; repeating it until the value is below `n` permutes `0 … n-1`
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). On average it takes fewer than four repetitions.
    """
    if not 0 <= index < n:
        raise IndexError(f"permute({index}, {n}): the index is outside 0 … {n - 1}")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for round_ in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (mix(*key, round_, right) & mask)
        index = left << half | right
        if index < n:
            return index
