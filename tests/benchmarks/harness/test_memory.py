"""Peaks are measured in new processes, and one that runs out of memory or dies is told apart."""

import os
import signal
import sys

import pytest
import torch

from benchmarks.harness import memory
from benchmarks.harness.memory import Failed, OutOfMemory
from benchmarks.harness.processes import in_new_process
from benchmarks.speed.methods import Method, Setting, SoftmaxDecoding, linear, softmax, softmax_materialised

linux = pytest.mark.skipif(sys.platform != "linux", reason="limits and sizes as Linux has them")


def complain() -> None:
    raise ValueError("a reason\nand more")


def allocate(nbytes: int, limit: int) -> int:
    memory.limit_to(limit, "cpu")
    return torch.ones(nbytes, dtype=torch.uint8).numel()


@pytest.mark.exhaustive
def test_work_in_a_new_process_gives_its_answer():
    assert in_new_process(os.getpid) != os.getpid()
    assert in_new_process(torch.get_num_threads) == torch.get_num_threads()


@pytest.mark.parametrize(
    ("work", "args", "error", "message"),
    [
        (complain, (), Failed, "ValueError: a reason and more"),
        (signal.raise_signal, (signal.SIGTERM,), Failed, "the process was ended by SIGTERM"),
        (signal.raise_signal, (signal.SIGKILL,), OutOfMemory, "killed by the system"),
        pytest.param(os._exit, (3,), Failed, "process ended with status 3", marks=pytest.mark.exhaustive),
    ],
)
def test_a_process_that_ends_badly_says_how(work, args, error, message):
    with pytest.raises(error, match=message):
        in_new_process(work, *args)


@linux
def test_memory_beyond_the_limit_is_an_error_in_the_process():
    assert in_new_process(allocate, 2**20, 2**26) == 2**20
    with pytest.raises(OutOfMemory, match="tried to allocate 268435456 bytes"):
        in_new_process(allocate, 2**28, 2**26)


@linux
def test_a_peak_is_what_the_call_took():
    setting, weights = Setting(1024, heads=2, head_dim=32), 2 * 1024**2 * 4
    forms = Method("materialised", softmax_materialised), Method("fused", softmax)
    all_pairs, fused = (in_new_process(memory.measure, form, setting) for form in forms)
    assert 3 * weights < all_pairs.extra < 10 * weights
    assert fused.extra < weights
    assert all_pairs.process > all_pairs.extra
    assert all_pairs.seconds > 0


@linux
def test_the_past_counts_in_decoding():
    setting = Setting(10_000, heads=2, head_dim=32, mode="decode")
    cache = 2 * 2 * 10_000 * 32 * 4
    peak = in_new_process(memory.measure, Method("softmax", softmax, SoftmaxDecoding), setting)
    assert 0.9 * cache < peak.extra < 2 * cache


@linux
def test_a_call_beyond_the_limit_is_out_of_memory():
    setting = Setting(4096, heads=2, head_dim=32)  # each tensor takes 1 MiB, and there are eight
    with pytest.raises(OutOfMemory):
        in_new_process(memory.measure, Method("linear", linear), setting, 2**22)


def test_ways_of_running_out_of_memory():
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("std::bad_alloc")):
        assert memory.is_out_of_memory(error)
    assert not memory.is_out_of_memory(RuntimeError("shapes differ"))


def test_available_memory_is_known():
    assert memory.available() > 2**20
