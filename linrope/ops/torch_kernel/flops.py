"""FLOPs of the chunked kernel's matrix products: multiplications and additions.

All products that it computes are counted, the whole of a chunk's pairs and the backward's recomputation included, so
that a rate in FLOP/s compares with that of a matrix product.
"""

from __future__ import annotations

from linrope.ops.torch_kernel.plan import Partition, sum_chunk


def causal_flops(batch: int, heads: int, length: int, features: int, width: int, n_sums: int, backward: bool) -> int:
    """Of one pass over `length` tokens with D features and E values.

    Args:
        n_sums: the number of running sums of features.
        backward: the backward pass instead of the forward.
    """
    total = 0
    for block in Partition.of(batch, heads, length, max(features, width)).blocks(length):
        n, c = block.n_chunks, block.chunk
        pairs_qk, pairs_v, state = n * c * c * features, n * c * c * width, n * c * features * width
        pass_states = n * n * features * width
        fine = sum_chunk(c)
        running_sum = n * c * fine * features + (n * c // fine) ** 2 * features
        if backward:
            total += 3 * pairs_qk + 2 * pairs_v + 5 * state + 2 * pass_states
        else:
            total += pairs_qk + pairs_v + 2 * state + pass_states
        total += n_sums * running_sum
    return 2 * batch * heads * total


def noncausal_flops(rows: int, queries: int, keys: int, features: int, width: int, backward: bool) -> int:
    """Of one pass over all queries and keys: two products with the state, and four in the backward."""
    return 2 * rows * (2 * keys + 2 * queries if backward else keys + queries) * features * width
