"""The configurations that autotuning tries: tokens of a chunk, warps, and stages of the loads.

No product of more than two warps has 64 rows: a chunk has 32 tokens at most, and a tile of the state 32 dimensions. So
none is WGMMA on Hopper, and on all GPUs the products are `mma.sync`, each of one warp, whatever the number of warps:
`benchmarks/speed/compile_kernels.py` looks at the code. With WGMMA more than 4 warps would be one product, which
compilers got wrong.

Loops have the stages of their configuration by name: those of a launch hold for loads that a product takes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from linrope.ops.triton_kernel.plan import CHUNK, interpreted, is_small

TINY, LARGE = 32 * 32, 64 * 128
"""Entries of a state up to which two warps hold the pairs of a longer chunk too, and from which 4 warps have too few
registers, but for products of bfloat16."""


def _config(chunk: int, warps: int, stages: int) -> triton.Config:
    return triton.Config({"CHUNK": chunk, "STAGES": stages}, num_warps=warps, num_stages=stages)


ON_GPUS = [
    _config(CHUNK, 2, 3), _config(2 * CHUNK, 2, 3), _config(CHUNK, 2, 2),
    _config(CHUNK, 4, 3), _config(CHUNK, 8, 1), _config(CHUNK, 8, 2), _config(CHUNK, 8, 3), _config(2 * CHUNK, 8, 2),
]  # fmt: skip
"""Few, since a user waits while each is compiled: those that were fastest for some size on an H100 or an H200, and some
with fewer stages for GPUs with less shared memory. The first that fits a size needs at most 99 KiB, which all have."""
INTERPRETED = [_config(64, 4, 1)]
"""The interpreter's time grows with the number of chunks."""
CONFIGS = INTERPRETED if interpreted() else ON_GPUS
TUNED_BY = [
    "bucket", "D", "E", "R", "SIGNED", "P", "TILES", "BLOCK_E", "STRETCH", "PHI", "INTERLEAVED", "CAUSAL", "PLAIN",
    "SUMS", "LATER", "DECAY", "DOCUMENTS", "MASKED", "PARTIAL", "D_THETA", "D_DECAY", "PRECISION",
]  # fmt: skip
"""What a configuration is chosen for, beside the tensors' dtypes. The choice is kept on disk as JSON, so none of these
is a dtype. LOW and ACC follow from PRECISION and the tensors' dtypes."""


def fitting(configs: list[triton.Config], named_args: Mapping[str, Any], **constants: Any) -> list[triton.Config]:
    """Those whose state fits into registers; the interpreter's always do. Autotuning itself skips what takes more
    shared memory than the device has."""
    if configs == INTERPRETED:
        return configs
    constants = {**named_args, **constants}
    state = 2 * constants["P"] * constants["TILES"] * constants["BLOCK_E"]
    low = constants["LOW"] == tl.bfloat16
    fewest, most = (2, 2) if is_small(state, low) else (4 if low or state < LARGE else 8, 8)
    longest = CHUNK if "CAUSAL" in constants and state > TINY else 2 * CHUNK  # pairs take registers too
    return [one for one in configs if fewest <= one.num_warps <= most and one.kwargs["CHUNK"] <= longest]


def autotuned(kernel: Any) -> Any:
    """The kernel, with one of `CONFIGS` chosen for each combination of those arguments in `TUNED_BY` that it has."""
    key = [name for name in TUNED_BY if name in kernel.arg_names]
    prune = {"early_config_prune": fitting}
    return triton.autotune(CONFIGS, key=key, prune_configs_by=prune, cache_results=True)(kernel)
