"""How many bytes ranks that share a sequence exchange in one attention layer.

With B rows of T tokens on P ranks, H heads of D features and E values, d = H·D, and b bytes a number, one rank sends to
each other rank, to one, or in all:

    method                              forward                        backward                     grows with
    linrope                             all-gather B·H·(D·E + D + 1)   reduce-scatter of as many    P
    LASP-2 (arXiv 2502.07563)           all-gather B·H·D·E             all-gather of as many        P
    ring attention (arXiv 2310.01889)   (P - 1) times 2·B·(T/P)·d      (P - 1) times 4·B·(T/P)·d    T
    Ulysses (arXiv 2309.14509)          all-to-all of 4·B·(T/P)·d      all-to-all of 4·B·(T/P)·d    T/P

An all-gather brings each rank the states of the P - 1 others, whatever T is. linrope and LASP-2 communicate alike:
ours carries the sum of keys (D) and the total log decay (1) beside the D·E of each head, which LASP-2 has not. Ring
attention passes keys and values of T/P tokens from neighbour to neighbour until each rank has seen all, and their
gradients with them in the backward. Ulysses exchanges tokens for heads: queries, keys and values before attention, its
outputs after it. It needs a head for each rank, P ≤ H.
"""

from __future__ import annotations

FLOAT32, BFLOAT16, INT64 = 4, 2, 8
"""Bytes of a number."""


def state_bytes(rows: int, heads: int, features: int, values: int, itemsize: int = FLOAT32) -> int:
    """What a rank gives to the all-gather of a linear layer: B·H·(D·E + D + 1) numbers, kv, k_sum and log decay."""
    return rows * heads * (features * values + features + 1) * itemsize


def lasp2_bytes(rows: int, heads: int, features: int, values: int, itemsize: int = FLOAT32) -> int:
    """What a rank gives to the all-gather of LASP-2: B·H·D·E numbers."""
    return rows * heads * features * values * itemsize


def tail_bytes(rows: int, channels: int, taps: int, itemsize: int = FLOAT32) -> int:
    """The inputs of a short convolution that a rank sends to the next: B·(taps - 1)·channels numbers."""
    return rows * (taps - 1) * channels * itemsize


def window_bytes(rows: int, heads: int, features: int, values: int, window: int, itemsize: int = FLOAT32) -> int:
    """The keys and values that a rank sends to the next: B·(window - 1)·H·(D + E) numbers."""
    return rows * (window - 1) * heads * (features + values) * itemsize


def ring_bytes(tokens: float, ranks: int, width: int, itemsize: int = BFLOAT16) -> tuple[float, float]:
    """What a rank of ring attention sends to its neighbour, (forward, backward): all T/P keys and values of width d in
    P - 1 steps, in the backward with their gradients."""
    keys_values = 2 * tokens / ranks * width * itemsize
    return (ranks - 1) * keys_values, (ranks - 1) * 2 * keys_values


def ulysses_bytes(tokens: float, ranks: int, width: int, itemsize: int = BFLOAT16) -> tuple[float, float]:
    """What a rank of Ulysses gives to all-to-all, (forward, backward): q, k, v and outputs of its T/P tokens. Of these
    1/P stays on the rank."""
    four = 4 * tokens / ranks * width * itemsize
    return four, four
