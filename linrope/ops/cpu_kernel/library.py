"""The compiled library: which one this processor takes, or why there is none.

`hatch_build.py` compiles the files of `source/` at installation, once for each instruction set:

    v3      x86-64 with AVX2 and FMA (Intel since 2013, AMD since 2015)
    v4      x86-64 with AVX-512; bfloat16 inputs are multiplied as such where that is faster: with AMX, and with
            AVX512-BF16 of AMD
    neon    aarch64

The environment variable LINROPE_CPU names the one to use, or is "off". Without it the best for the processor is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from linrope.errors import InputError
from linrope.ops.checks import is_transformed
from linrope.utils.machine import has_fast_avx512_bf16, instructions

FOLDER = Path(__file__).parent
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
CHOICES = ("v3", "v4", "neon", "off")
OFF = "LINROPE_CPU=off"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the library takes, in the order of `DType` in `source/parallel.h`."""
_NAMES = ("sizes", "forward", "backward", "one_token", "convolve", "convolve_backward", "swiglu", "swiglu_backward")
_NAMES += ("rms_norm", "rms_norm_backward")
FUNCTIONS = tuple(f"linrope_{name}" for name in _NAMES)
AGAIN = "install linrope again to compile it: pip install --force-reinstall --no-deps"


class Tokens(ctypes.Structure):
    """(B, H, T, X) with strides in entries; the last dimension is contiguous."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("token", ctypes.c_int64),
    )  # fmt: skip


_SIZES = ("batch", "heads", "queries", "keys", "features", "width", "rotary", "signed_features")
_OPTIONS = ("dtype", "value_dtype", "feature_map", "plain", "causal", "interleaved", "threads", "exact",
            "products")  # fmt: skip
_TOKENS = ("q", "k", "v", "o", "grad_o", "dq", "dk", "dv", "log_decay")
_POINTERS = ("kv", "k_sum", "kv_out", "k_sum_out", "kv_at", "k_sum_at", "den", "d_log_decay", "d_theta")


class Record(ctypes.Structure):
    """One call, as `source/call.h` declares it."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in (*_SIZES, *_OPTIONS)),
        ("eps", ctypes.c_double),
        *((name, Tokens) for name in _TOKENS),
        *((name, ctypes.c_void_p) for name in ("key_mask", "documents", "local", "frames")),
        *((name, ctypes.c_int64) for name in ("local_head", "frames_head")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("middle", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("workspace", "parts", "parallel_for")),
    )


class Products(IntEnum):
    """What products take, as in `source/call.h`."""

    OF_FLOAT32 = 0
    IN_VECTORS = 1
    IN_TILES = 2


@dataclass(frozen=True)
class Library:
    """The functions of the loaded library."""

    target: str
    functions: ctypes.CDLL
    lanes: int
    """Entries of a vector: tables have rows of whole vectors."""
    parallel_for: int
    """The address of PyTorch's own parallel loop: a second pool of threads would compete with it."""
    products: Products
    """How it multiplies in calls of bfloat16: where that is faster it rounds the operands to bfloat16."""


def library() -> Library:
    """The library for this processor, which `why_none` said is there."""
    assert isinstance(_found, Library)
    return _found


def why_none() -> str | None:
    """Why there is no library, for a message; None if there is one."""
    return None if isinstance(_found, Library) else _found


@contextlib.contextmanager
def used(choice: str) -> Iterator[None]:
    """Within it, calls use the library that LINROPE_CPU=choice names (to measure it); InputError if there is none."""
    global _found
    before, other = _found, find(choice)
    if not isinstance(other, Library):
        raise InputError(f"there is no library {choice!r} to use: {other}.")
    _found = other
    try:
        yield
    finally:
        _found = before


def supported() -> tuple[str, ...]:
    """The targets that this processor can run, the best first."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return ("neon",)
    capability = torch.backends.cpu.get_cpu_capability()
    return {"AVX512": ("v4", "v3"), "AVX2": ("v3",)}.get(capability, ())


def source_checksum() -> int:
    """A number for the source files: `checksums.json` says from which the libraries were compiled."""
    files = sorted(path for path in (FOLDER / "source").iterdir() if path.suffix in (".h", ".cpp"))
    return zlib.crc32(b"".join(path.read_bytes() for path in files))


def find(choice: str | None) -> Library | str:
    """The library for the value of LINROPE_CPU, or why there is none.

    Raises:
        InputError: an unknown value.
    """
    if choice is not None and choice not in CHOICES:
        raise InputError(f"LINROPE_CPU={choice!r} is unknown: set it to one of {', '.join(CHOICES)}, or unset it.")
    if choice == "off":
        return OFF
    there = supported()
    if choice is not None and choice not in there:
        return f"LINROPE_CPU={choice}, and this processor runs {' and '.join(there) or 'none of the targets'}"
    if not there:
        return "this processor has no AVX2"
    reasons = []
    for target in there if choice is None else (choice,):
        found = _load(target)
        if isinstance(found, Library):
            return found
        reasons.append(found)
    return reasons[0]


def _load(target: str) -> Library | str:
    path = FOLDER / "lib" / f"linear_attention_{target}{SUFFIX}"
    if not path.is_file():
        why = path.with_name("why_missing.txt")
        if why.is_file():
            return f"it was not compiled when linrope was installed: {why.read_text(encoding='utf-8')}"
        return f"{path} is missing ({AGAIN})"
    try:
        checksums = json.loads(path.with_name("checksums.json").read_text(encoding="utf-8"))
        if zlib.crc32(path.read_bytes()) != checksums[path.name]:  # loading part of a file would end the process
            return f"{path} is damaged ({AGAIN})"
        if source_checksum() != checksums["source"]:
            return f"{path} was compiled from other source files ({AGAIN})"
        functions = ctypes.CDLL(str(path))
        for name in FUNCTIONS:
            getattr(functions, name).restype = None
        parallel_for = ctypes.cast(_torch_library().torch_parallel_for, ctypes.c_void_p).value
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return f"{path} cannot be loaded, {error!r} ({AGAIN})"
    return Library(target, functions, functions.linrope_lanes(), parallel_for, _fastest_products(target, functions))


def _fastest_products(target: str, functions: ctypes.CDLL) -> Products:
    if target == "v4" and "amx_bf16" in instructions() and functions.linrope_may_use_tiles():
        return Products.IN_TILES
    return Products.IN_VECTORS if target == "v4" and has_fast_avx512_bf16() else Products.OF_FLOAT32


def _torch_library() -> ctypes.CDLL:
    name = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}.get(sys.platform, "libtorch_cpu.so")
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))


_found = find(os.environ.get("LINROPE_CPU"))  # asked here, once: a compiled graph cannot ask


def makes_one_pass(*tensors: Tensor, fewest: int) -> bool:
    """Whether the library takes an operation around attention on these tensors, of the dtype of the first one, which
    has `fewest` entries or more. Inductor makes one pass of a formula by itself."""
    if torch.compiler.is_compiling():
        return False  # before a size is looked at, to which this would hold the graph
    x = tensors[0]
    fits = all(one.device.type == "cpu" and one.dtype == x.dtype for one in tensors) and x.dtype in DTYPES
    return fits and x.numel() >= fewest and why_none() is None and not is_transformed(*tensors)
