"""Compiles the CPU kernel into the wheel: the build hook of `pip install .`, `pip install -e .` and `pip wheel .`.

The compiler is clang from the package `ziglang`, a build requirement, so that no compiler need be installed. Where
compiling fails, the package is built without the kernel, and the reason is kept where `linrope` finds it.

LINROPE_PLATFORM builds for another platform than this one: a key of `PLATFORMS`.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNEL = Path("linrope", "ops", "cpu_kernel")
PLATFORMS = {  # clang's name of the platform, the wheel's tag, the suffix of a library
    "linux-x86_64": ("x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64", ".so"),
    "linux-aarch64": ("aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64", ".so"),
    "darwin-arm64": ("aarch64-macos.11.0", "macosx_11_0_arm64", ".dylib"),
    "windows-amd64": ("x86_64-windows-gnu", "win_amd64", ".dll"),
}
TARGETS = {"v3": "x86_64_v3", "v4": "x86_64_v4+avx512bf16+amx_tile+amx_bf16"}  # of bfloat16: where it is fast
ARM_TARGETS = {"neon": "generic"}
OPTIONS = ["-O3", "-std=c++17", "-ffp-contract=fast", "-fno-exceptions", "-fno-rtti", "-nostdlib++"]
OPTIONS += ["-shared", "-fPIC", "-g0", "-s"]


class CompileKernel(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        name = os.environ.get("LINROPE_PLATFORM") or f"{platform.system()}-{platform.machine()}".lower()
        folder = root / KERNEL / "lib"
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        try:
            compile_kernel(root / KERNEL / "source", folder, name)
            build_data["pure_python"], build_data["tag"] = False, f"py3-none-{PLATFORMS[name][1]}"
        except (OSError, RuntimeError) as error:
            (folder / "why_missing.txt").write_text(str(error), encoding="utf-8")
            self.app.display_warning(f"linrope is built without its CPU kernel: {error}")
        build_data["artifacts"] += [f"{KERNEL.as_posix()}/lib/*"]  # git ignores them


def compile_kernel(source: Path, folder: Path, name: str) -> None:
    """Write one library for each target of the platform.

    Raises:
        RuntimeError: the platform is unknown, or the compiler failed.
    """
    if name not in PLATFORMS:
        raise RuntimeError(f"there is none for {name}, only for {', '.join(PLATFORMS)}")
    triple, _, suffix = PLATFORMS[name]
    files = sorted(path for path in source.iterdir() if path.suffix in (".h", ".cpp"))
    running = {}
    for target, cpu in (ARM_TARGETS if "aarch64" in triple else TARGETS).items():
        library = folder / f"linear_attention_{target}{suffix}"
        command = [sys.executable, "-m", "ziglang", "c++", "-target", triple, f"-mcpu={cpu}", *OPTIONS]
        command += ["-o", str(library), *map(str, sorted(source.glob("*.cpp")))]
        running[library] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for process in running.values():
        printed = process.communicate()[0]
        if process.returncode:
            raise RuntimeError(f"the compiler failed: {printed.strip()[-500:]}")
    checksums = {"source": zlib.crc32(b"".join(path.read_bytes() for path in files))}
    checksums |= {library.name: zlib.crc32(library.read_bytes()) for library in running}
    (folder / "checksums.json").write_text(json.dumps(checksums, indent=2), encoding="utf-8")
    for extra in folder.glob("*.lib"), folder.glob("*.pdb"):  # what a linker for Windows leaves beside a library
        for path in extra:
            path.unlink()
