"""The memory that a process may have, and freed memory that it keeps."""

import os
import platform
import subprocess
import sys

import pytest

from linrope.utils import memory
from linrope.utils.memory import keep_freed_memory, memory_of

STEPS = """
import os, resource, torch
from linrope.ops.torch_kernel.memory import give_back
from linrope.utils.memory import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def step():  # 128 MiB, in the sizes of activations
    activations = [torch.ones(2**18) for _ in range(128)]

assert keep_freed_memory() is True
step()
before = faults()
step()
new_faults, kept = faults() - before, resident()
give_back()
print(new_faults, kept - resident())
"""
GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is that of glibc")
DECISIONS = ("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "MALLOC_CONF", "LD_PRELOAD", "GLIBC_TUNABLES")


def undecided() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in DECISIONS}


@pytest.mark.exhaustive
@GLIBC
def test_the_second_step_takes_hardly_any_page_faults_and_memory_can_still_be_given_back():
    command = [sys.executable, "-c", STEPS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=undecided())
    assert done.returncode == 0, done.stderr
    new_faults, given_back = map(int, done.stdout.split())
    assert new_faults < 3_000  # a step writes 32,768 pages; the heap may grow by a few tensors
    assert given_back > 100 * 2**20


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_ARENA_MAX", "1"),
        ("MALLOC_CONF", "narenas:1"),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so.2"),
        ("GLIBC_TUNABLES", "glibc.cpu.x86_shstk=off:glibc.malloc.trim_threshold=4096"),
    ],
)
def test_a_user_who_configures_the_allocator_has_decided(name, value, monkeypatch):
    for decision in DECISIONS:
        monkeypatch.delenv(decision, raising=False)
    monkeypatch.setattr("linrope.utils.memory.ctypes.CDLL", lambda _: pytest.fail("the C library was asked"))
    monkeypatch.setenv(name, value)
    assert keep_freed_memory() is False


@pytest.mark.parametrize(("system", "library"), [("darwin", None), ("linux", object())], ids=["macOS", "musl"])
def test_other_systems_and_c_libraries_stay_as_they_are(system, library, monkeypatch):
    for decision in DECISIONS:
        monkeypatch.delenv(decision, raising=False)
    monkeypatch.setattr("linrope.utils.memory.sys.platform", system)
    monkeypatch.setattr("linrope.utils.memory.ctypes.CDLL", lambda _: library)
    assert keep_freed_memory() is False


@pytest.mark.parametrize(("limit", "may_have"), [("4096", 4096), ("max", None), (str(2**63), None)])
def test_a_container_limits_the_memory(limit, may_have, tmp_path, monkeypatch):
    file = tmp_path / "memory.max"
    file.write_text(f"{limit}\n")
    monkeypatch.setattr(memory, "CONTAINER_LIMITS", ())
    of_machine = memory_of()
    monkeypatch.setattr(memory, "CONTAINER_LIMITS", (file, tmp_path / "missing"))
    assert memory_of() == (may_have or of_machine)
