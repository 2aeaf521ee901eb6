"""The machine and the versions that a result depends on."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import linrope
from linrope.utils.machine import processor


def device_name(device: str) -> str:
    """The name of the processor ("cpu") or of the GPU ("cuda")."""
    return torch.cuda.get_device_name() if device == "cuda" else processor()


def surroundings(device: str, command: str, args: list[str] | None) -> dict[str, Any]:
    """What a reader needs to judge or repeat a run: command, machine, versions, commit."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "linrope": linrope.__version__}
    for name in ("triton", "flash-linear-attention", "fla-core"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "command": shlex.join(["python", "-m", f"benchmarks.{command}", *(sys.argv[1:] if args is None else args)]),
        "machine": {
            "device": device_name(device),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": versions,
        "commit": commit(),
    }


def commit() -> str | None:
    """The commit of this checkout, with "+" if tracked files differ from it; None outside a checkout."""

    def git(*args: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
