"""The configurations that autotuning tries: tokens of a chunk, warps, and stages of the loads."""

from __future__ import annotations

import os

import triton

MOST_WARPS = 4
"""On Hopper and later, for chunks of 64 tokens, whose products may be WGMMA."""


def _config(chunk: int, warps: int, stages: int) -> triton.Config:
    return triton.Config({"CHUNK": chunk}, num_warps=warps, num_stages=stages)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CONFIGS = [_config(64, 4, 1)] if INTERPRETED else [
    _config(32, 4, 2), _config(32, 4, 1), _config(32, 8, 2), _config(16, 4, 2), _config(64, 4, 1), _config(64, 8, 1)
]
