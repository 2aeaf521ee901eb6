"""How many floating-point operations the chunked kernel's matrix products take: multiplications and additions.

These are the products it computes, the whole of a chunk's pairs and the backward's recomputation included, so that a
rate in FLOP/s compares with that of a matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence

from linrope.ops.torch_kernel.blocks import Span, sum_chunk


def causal_flops(rows: int, spans: Sequence[Span], features: int, width: int, n_sums: int, backward: bool) -> int:
    """Of one pass over the blocks, each holding some tokens of `rows` heads with D features and E values.

    Args:
        n_sums: how many running sums of features it takes.
        backward: of the pass back instead of the one forward.
    """
    total = 0
    for span in spans:
        n, c = span.n_chunks, span.chunk
        pairs_qk, pairs_v, state = n * c * c * features, n * c * c * width, n * c * features * width
        pass_states = n * n * features * width
        fine = sum_chunk(c)
        running_sum = n * c * fine * features + (n * c // fine) ** 2 * features
        if backward:
            total += 3 * pairs_qk + 2 * pairs_v + 5 * state + 2 * pass_states
        else:
            total += pairs_qk + pairs_v + 2 * state + pass_states
        total += n_sums * running_sum
    return 2 * rows * total


def noncausal_flops(rows: int, queries: int, keys: int, features: int, width: int, backward: bool) -> int:
    """Of one pass over all queries and keys: two products with the state each way, and two more on the way back."""
    return 2 * rows * (2 * keys + 2 * queries if backward else keys + queries) * features * width
