"""What this machine is."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import torch


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def has_fast_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 faster than float32, and PyTorch has a library (oneDNN) that does so.

    Without such instructions PyTorch converts to float32 and back. Virtual machines often hide AMX of Intel's
    processors and show AVX512-BF16: in linear layers it has half the speed of float32.
    """
    fast = has_fast_avx512_bf16() or bool({"amx_bf16", "bf16"} & instructions())  # bf16: AArch64's extension
    return torch.backends.mkldnn.is_available() and fast


def has_fast_avx512_bf16() -> bool:
    """Whether the processor has AVX512-BF16 and multiplies faster with it than in float32. Intel's processors begin one
    such product every second cycle, and two of float32 in each."""
    vendor = " ".join(_listed("vendor_id")) or platform.processor()
    return "avx512_bf16" in instructions() and "GenuineIntel" not in vendor


def mkl_lacks_avx512() -> bool:
    """Whether PyTorch's float32 products leave AVX512 unused: MKL has such code for Intel's processors only. oneDNN,
    which computes PyTorch's convolutions, has it for all. False where the system does not list the vendor."""
    libraries = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return libraries and has_avx512 and _listed("vendor_id") not in ({"GenuineIntel"}, set())


def instructions() -> set[str]:
    """The names of the processor's instructions, as Linux lists them; on other systems those for bfloat16 alone."""
    if sys.platform == "win32":
        told = getattr(torch.cpu, "get_capabilities", dict)()  # PyTorch tells from version 2.13 on
        return {name for name in ("avx512_bf16", "amx_bf16") if told.get(name)}
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
