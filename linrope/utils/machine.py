"""What this machine is."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import torch

BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Names of the instructions that multiply bfloat16, in Linux's list of x86 and of AArch64 processors."""


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for products of bfloat16, and PyTorch a library (oneDNN) that uses them.

    Without them PyTorch converts to float32 and back, which is slower than float32. PyTorch itself tells from version
    2.13 on (`torch.cpu.get_capabilities`); older ones do not.
    """
    return torch.backends.mkldnn.is_available() and bool(BFLOAT16_FLAGS & _instructions())


def mkl_lacks_avx512() -> bool:
    """Whether PyTorch's float32 products leave AVX512 unused: MKL has such code for Intel's processors only. oneDNN,
    which computes PyTorch's convolutions, has it for all. False where the system does not list the vendor."""
    libraries = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return libraries and has_avx512 and _listed("vendor_id") not in ({"GenuineIntel"}, set())


def _instructions() -> set[str]:
    """The names of the processor's instructions, as far as the system lists them."""
    if sys.platform != "darwin":
        return _listed("flags", "Features")
    try:
        asked = subprocess.run(["sysctl", "-n", "hw.optional.arm.FEAT_BF16"], capture_output=True, check=False)
    except OSError:
        return set()
    return {"bf16"} if asked.stdout.strip() == b"1" else set()


def _listed(*names: str) -> set[str]:
    """The words that Linux lists for the first processor under the first of these names; none on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return set(next((line.split(":", 1)[1] for line in lines if line.startswith(names)), "").split())
