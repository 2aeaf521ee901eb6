"""Whether the CUDA backend can take a call. Importing this needs no Triton."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from linrope.ops.call import Call

INSTALLED = find_spec("triton") is not None  # asked here: a compiled graph cannot ask on every release of PyTorch
MAX_WIDTH = 256
"""The largest D and E."""


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors: TRITON_INTERPRET=1 in the environment."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not(call: Call) -> str | None:
    """The reason why the kernels cannot take a call, for a message; None if they can."""
    q = call.q
    width = call.v.shape[-1] + (call.normalize == "rotary")  # whose denominator is one more value column
    if not INSTALLED:
        return "Triton is not installed: pip install triton"
    if q.device.type != "cuda" and not interpreted():
        return f"the tensors are on {q.device.type}, it needs CUDA (or, slowly, TRITON_INTERPRET=1)"
    if torch.version.hip is not None:
        return "it is made for NVIDIA GPUs"
    if q.dtype == torch.float64 and not interpreted():
        return "the tensors are float64, it takes float32, bfloat16 and float16"
    if max(q.shape[-1], width) > MAX_WIDTH:
        return f"q has {q.shape[-1]} features and v {width} values, it takes at most {MAX_WIDTH}"
    if q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) < (8, 0):
        return f"{torch.cuda.get_device_name(q.device)} is older than compute capability 8.0, which it needs"
    return None
