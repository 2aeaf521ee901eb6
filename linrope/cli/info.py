"""`linrope info`: versions, the processor, and which backends of the operator work here. Paste it into a bug report."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

import torch

import linrope
from linrope.cli.parser import parse_command
from linrope.ops.cpu_kernel import library
from linrope.ops.cpu_kernel.library import Products
from linrope.ops.triton_kernel.launch import INSTALLED
from linrope.utils.machine import has_fast_bfloat16, processor


@dataclass(frozen=True, kw_only=True)
class InfoConfig:
    """There are no options."""


def run(args: Sequence[str]) -> None:
    """Run `linrope info` with the command line `args`."""
    parse_command("info", InfoConfig, args, "[--help]")
    for name, text in facts().items():
        print(f"{name:<14}{text}")


def facts() -> dict[str, str]:
    """What is printed, by the name of its line."""
    return {
        "linrope": linrope.__version__,
        "PyTorch": torch.__version__,
        "Lightning": version("lightning"),
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "processor": processor(),
        "instructions": _instructions(),
        "threads": str(torch.get_num_threads()),
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "reference": "yes: the quadratic definition",
        "chunked": "yes: PyTorch operations, any device",
        "cpu": _cpu(),
        "triton": _triton(),
    }


def _instructions() -> str:
    return torch.backends.cpu.get_cpu_capability() + (", fast bfloat16" if has_fast_bfloat16() else "")


def _cpu() -> str:
    if (reason := library.why_none()) is not None:
        return f"no: {reason}"
    one = library.library()
    products = {Products.IN_VECTORS: ", bfloat16 by AVX512-BF16", Products.IN_TILES: ", bfloat16 by AMX"}
    return f"yes: compiled for {one.target}{products.get(one.products, '')}"


def _triton() -> str:
    if not INSTALLED:
        return "no: Triton is not installed"
    there = torch.cuda.is_available() and torch.version.hip is None
    return "yes: NVIDIA GPUs" if there else "no: there is no NVIDIA GPU"
