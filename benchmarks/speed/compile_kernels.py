"""Compile the CUDA kernels without a GPU: registers, spills, shared memory and the length of the loop of each.

Launches of calls on the CPU are recorded instead of run, and compiled for each target. The exit status is 1 if a kernel
does not compile, reads 16 bits at a time or local memory in a loop, keeps in memory what registers have room for,
multiplies with several warps at once (WGMMA of Hopper, tcgen05 of Blackwell), which compilers got wrong, or if its
usual configuration takes more shared memory than the target has: of the other ones autotuning skips what does not fit.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from rich.console import Group

from benchmarks.harness.runner import AddOption, Benchmark
from benchmarks.speed.gpu_correctness import Case
from benchmarks.speed.launches import Recorded, launches_of
from linrope.ops.triton_kernel.plan import MARCHING, REGISTERS, cdiv
from linrope.ops.triton_kernel.self_check import ptxas_version
from linrope.utils.formatting import bytes_text
from linrope.utils.terminal import new_table

SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes that one program may take, by compute capability."""
TRAINED = {"rope": {"trainable": True}}
EVERYTHING = {"decay": 0.1, "packed": True, "masked": True}
HALF_SPLIT = {"rope": {"interleaved": False, "rotary_dim": 40}, "options": {"feature_map": "softmax"}}
CASES = {
    name: Case(**{"length": 1024} | changes)
    for name, changes in {
        "16, everything, trained θ": {"dim": 16, "width": 16, **TRAINED, **EVERYTHING},
        "64": {},
        "128": {"dim": 128, "width": 128},
        "128, decay": {"dim": 128, "width": 128, "decay": 0.1},
        "64, everything, trained θ": TRAINED | EVERYTHING,
        "128, everything": {"dim": 128, "width": 128, **EVERYTHING},
        "256": {"dim": 256, "width": 256},
        "256, split values": {"dim": 16, "width": 256, "length": 64},
        "80 and 96, half-split, softmax features": {"dim": 80, "width": 96, **HALF_SPLIT},
        "64, signed, float16, decay": {"dtype": "float16", "rope": {"signed": True}, "decay": 0.1},
        "64, float32": {"dtype": "float32"},
        "128, float32": {"dim": 128, "width": 128, "dtype": "float32"},
        "256, float32, everything": {"dim": 256, "width": 256, "dtype": "float32", **EVERYTHING},
        "256, float16": {"dim": 256, "width": 256, "dtype": "float16"},
        "256, trained θ": {"dim": 256, "width": 256, **TRAINED},
        "64, no positions, no denominator": {"rope": None, "options": {"normalize": "none"}},
        "64, not causal": {"options": {"causal": False}},
        "64, one token": {"decay": 0.1, "length": 1},
    }.items()
}
"""Calls whose launches are compiled, forward and backward."""


@dataclass(frozen=True)
class Compiled:
    """What a compiled launch takes, of each thread and of a program."""

    registers: int
    stack: int  # bytes of a thread in memory instead of registers
    shared: int  # bytes
    warps: int
    ptx: str
    loop: tuple[int, int]  # instructions and barriers of its longest loop


@dataclass(frozen=True)
class Configuration:
    """How a launch is compiled: constants that autotuning chooses, warps, stages of the loads."""

    constants: dict[str, Any]
    warps: int
    stages: int

    def __str__(self) -> str:
        chunk = f"chunk {self.constants['CHUNK']}, " if self.constants else ""
        return f"{chunk}{self.warps} warps, {self.stages} stages"

    @property
    def numbers(self) -> str:
        """The same without words, for a narrow column."""
        return f"{self.constants.get('CHUNK', '-')}, {self.warps}, {self.stages}"


def compile_launch(launch: Recorded, capability: int, configuration: Configuration) -> Compiled:
    """Compile the launch, its arguments specialised as they would be on the GPU."""
    from triton import compile as compile_source
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from linrope.ops.triton_kernel import kernels as triton_kernels

    kernel = getattr(triton_kernels, launch.kernel)
    function = getattr(kernel, "fn", kernel) if type(kernel).__name__ == "Autotuner" else kernel
    constants = {name: value for name, value in launch.constants.items() if name in function.arg_names}
    constants |= configuration.constants
    signature, attributes = dict.fromkeys(constants, "constexpr"), {}
    unspecialised = {parameter.name for parameter in function.params if parameter.do_not_specialize}
    for index, (name, value) in enumerate(zip(function.arg_names, launch.args, strict=False)):
        kind, divisible = kind_of(value, name not in unspecialised)
        signature[name] = kind
        if kind == "constexpr":
            constants[name] = value
        elif divisible:
            attributes[(index,)] = [["tt.divisibility", 16]]
    signature = {name: signature[name] for name in function.arg_names}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    options = {name: value for name, value in launch.constants.items() if name not in function.arg_names}
    options |= {"num_warps": configuration.warps, "num_stages": configuration.stages}
    made = compile_source(source, target=GPUTarget("cuda", capability, 32), options=options)
    cubin, shared = made.asm["cubin"], made.metadata.shared
    return Compiled(*usage_of(cubin), shared, configuration.warps, made.asm["ptx"], longest_loop(code_of(cubin)))


TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
TYPES |= {torch.int64: "i64", torch.bool: "i1"}


def kind_of(value: Any, specialised: bool = True) -> tuple[str, bool]:
    """An argument's type for the compiler, and whether it is known to be a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}", value.data_ptr() % 16 == 0
    if value is None or (specialised and isinstance(value, int) and value == 1):
        return "constexpr", False
    if isinstance(value, int):
        return ("i32" if abs(value) < 2**31 else "i64"), specialised and value % 16 == 0
    return "fp32", False


def usage_of(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack."""
    said = said_of(cubin, "-res-usage")
    registers, stack = (int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK"))
    return registers, stack


def code_of(cubin: bytes) -> list[tuple[int, str]]:
    """The GPU's own instructions, with their addresses."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", said_of(cubin, "-sass"), re.MULTILINE)
    return [(int(address, 16), instruction) for address, instruction in lines]


def said_of(cubin: bytes, option: str) -> str:
    """What Triton's disassembler says of a compiled kernel."""
    import triton as language

    tool = Path(language.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def longest_loop(code: list[tuple[int, str]]) -> tuple[int, int]:
    """Instructions of the longest loop, and how many of them are barriers; (0, 0) without a loop."""
    found = (0, 0)
    for end, jump in code:
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", jump)
        if target and int(target[1], 16) < end:
            inside = [one for address, one in code if int(target[1], 16) <= address <= end]
            found = max(found, (len(inside), sum(bool(re.search(r"\bBAR\.", one)) for one in inside)))
    return found


WARPS = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}
"""That a multiprocessor holds at once; its 65,536 registers, and a little more shared memory than one program may take,
are divided among them."""


def occupancy(made: Compiled, capability: int) -> float:
    """The share of a multiprocessor's warps that are there at once."""
    registers = 8 * cdiv(made.registers, 8) * 32 * made.warps
    programs = min(65_536 // registers, WARPS[capability] // made.warps)
    if made.shared:
        programs = min(programs, (SHARED_MEMORY[capability] + 1024) // (made.shared + 1024))
    return programs * made.warps / WARPS[capability]


def in_loops(ptx: str) -> dict[str, int]:
    """How many instructions between a label and a jump back to it are 16-bit global loads, and loads or stores of local
    memory."""
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {line[:-1]: number for number, line in enumerate(lines) if line.startswith("$") and line.endswith(":")}
    inside = set()
    for number, line in enumerate(lines):
        target = re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line)
        if target and labels.get(target[1], number) < number:
            inside |= set(range(labels[target[1]], number))
    body = [lines[number] for number in inside]
    narrow = sum(bool(re.search(r"\bld\.global(?:\.\w+)*?\.[bus]16\b", line)) and ".v" not in line for line in body)
    return {"16-bit loads": narrow, "local": sum(bool(re.search(r"\b(?:ld|st)\.local\b", line)) for line in body)}


def products_of_several_warps(ptx: str) -> int:
    """How many instructions are WGMMA or tcgen05; `mma.sync` belongs to one warp."""
    return len(re.findall(r"^\s*(?:@\S+ )?(?:wgmma\.mma_async|tcgen05\.mma)", ptx, re.MULTILINE))


def configurations(launch: Recorded) -> list[Configuration]:
    """Those that autotuning tries, the usual one first, or the only one."""
    from linrope.ops.triton_kernel import configurations as tuned
    from linrope.ops.triton_kernel import kernels as triton_kernels

    if not hasattr(getattr(triton_kernels, launch.kernel), "configs"):
        return [Configuration({}, launch.constants.get("num_warps", 4), launch.constants.get("num_stages", 3))]
    tried = tuned.fitting(tuned.ON_GPUS, launch.constants)
    return [Configuration(one.kwargs, one.num_warps, one.num_stages) for one in tried]


def jobs(options: argparse.Namespace) -> Iterator[tuple[str, Recorded, int, Configuration, bool]]:
    """Case, launch, target and configuration, and whether this is the usual one."""
    for name in options.case:
        seen = set()
        for launch in launches_of(CASES[name]):
            if launch.role in seen:
                continue  # the states are made again on the way back
            seen.add(launch.role)
            tried = configurations(launch)
            for configuration in tried if options.all_configurations else tried[:1]:
                usual = configuration is tried[0]
                yield from ((name, launch, target, configuration, usual) for target in options.target)


class CompileKernels(Benchmark):
    name = "compile_kernels"
    output = ""

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        targets, default = sorted(SHARED_MEMORY), [80, 86, 90, 100, 120]
        add("--target", type=int, nargs="+", default=default, choices=targets, help="compute capabilities")
        add("--case", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME", help="; ".join(CASES))
        text = "compile each configuration that autotuning tries, not one for each kernel"
        add("--all_configurations", action="store_true", help=text)

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        if os.environ.get("TRITON_INTERPRET") == "1":
            parser.error("TRITON_INTERPRET=1 is set, and the interpreter compiles nothing: unset it")

    def measure(self) -> None:
        self.rows, self.failures = [], []
        everything = list(jobs(self.options))
        tick = self.progress("", len(everything))
        for name, launch, target, configuration, usual in everything:
            tick(description=f"{name}: {launch.role}, sm_{target}")
            row = [name, launch.role, str(target), str(configuration)]
            try:
                made = compile_launch(launch, target, configuration)
                fits = made.shared <= SHARED_MEMORY[target]
                occupied = f"{occupancy(made, target):.0%}" if fits else "does not fit"
                loop = "{}, {}".format(*made.loop) if launch.kernel in MARCHING else ""
                numbers = str(made.registers), str(made.stack), bytes_text(made.shared), occupied, loop
                self.rows.append([name, launch.role, str(target), configuration.numbers, *numbers])
                if usual and not fits:
                    self.failures.append(f"{', '.join(row)}: {made.shared:,} bytes of shared memory")
                slow = [f"{count} {what}" for what, count in in_loops(made.ptx).items() if count]
                if slow and launch.kernel in MARCHING:
                    self.failures.append(f"{', '.join(row)}: {' and '.join(slow)} in loops")
                if launch.kernel in MARCHING and made.stack and made.registers < REGISTERS:
                    held = f"{made.registers} registers, and {made.stack} bytes of stack"
                    self.failures.append(f"{', '.join(row)}: {held}")
                if count := products_of_several_warps(made.ptx):
                    self.failures.append(f"{', '.join(row)}: {count} products of several warps")
            except Exception as error:  # the compiler's errors have many types
                self.failures.append(f"{', '.join(row)}: {type(error).__name__}: {error}")
            tick(advance=1)

    def table(self) -> Group:
        """One table for each case, so that 80 columns hold it."""
        tables = []
        for case, rows in groupby(self.rows, key=itemgetter(0)):
            numbers = ("sm", "chunk, warps, stages", "regs", "stack", "shared", "occ.", "loop")
            tables.append(new_table(case, *numbers, text=["kernel"]))
            for _, *row in rows:
                tables[-1].add_row(*row)
        return Group(*tables)

    def remarks(self) -> list[str]:
        versions = {target: ptxas_version(target // 10) for target in self.options.target}
        used = ", ".join(f"{version} for sm_{target}" for target, version in versions.items())
        legend = "regs: registers of each thread, stack: its bytes in memory instead of those; occ.: occupancy; "
        legend += "loop: instructions of a warp for a chunk, and barriers"
        return [legend, f"assembled by ptxas {used}", *self.failures]

    def status(self) -> int:
        return 1 if self.failures else 0


if __name__ == "__main__":
    sys.exit(CompileKernels.main())
