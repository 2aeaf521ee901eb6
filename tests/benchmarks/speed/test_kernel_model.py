"""Traffic, FLOPs, launches and compiled code of the CUDA kernels, held to their goals without a GPU."""

import re
import subprocess
import sys

import pytest
import torch

from benchmarks.speed.compile_kernels import in_loops, longest_loop, products_of_several_warps
from benchmarks.speed.gpu_correctness import Case
from benchmarks.speed.kernel_model import KernelModel, Model, cost_of
from benchmarks.speed.launches import launches_of
from linrope import RotaryEmbedding, linear_attention
from linrope.utils import kept_tensors
from tests.benchmarks.commands import refusal
from tests.interpreter import interpret_kernels

kernels = pytest.importorskip("linrope.ops.triton_kernel.kernels", reason="Triton is there for Linux only")


@pytest.mark.parametrize(("dim", "both", "flops"), [(64, 2.7, 42e3), (128, 2.8, 132e3)])
def test_the_goals_for_traffic_flops_and_launches(dim, both, flops):
    model = Model.of(Case(dim=dim, width=dim, batch=1, heads=16, length=65_536))
    assert 1.5 < model.traffic(backward=False) <= 1.65  # q and o once, k and v twice
    assert 2.5 < model.traffic(backward=True) <= both
    assert 6 * dim**2 < model.flops <= flops
    assert [role for role, _ in model.both] == [
        "write_angles", "stretch_sums", "scan", "attend", "query_gradients", "stretch_sums later", "scan later",
        "key_gradients",
    ]  # fmt: skip


def test_costs_are_counted_from_grids_and_tiles():
    """By hand: 2 rows of 600 tokens, in stretches of 256 of which the last is ragged, D = E = 64, chunks of 16."""
    launches = {one.role: cost_of(one) for one in launches_of(Case(batch=1, heads=2, length=600), "meta")}
    tokens, state = 2 * 600, 4 * 65 * 64 * 2
    assert launches["stretch_sums"].read == tokens * 2 * 64 * 2
    assert launches["stretch_sums"].written == 3 * state
    assert launches["stretch_sums"].flops == 2 * 38 * 2 * 16 * 64 * 64
    assert launches["attend"].read == tokens * 2 * 64 * 3 + 3 * state
    assert launches["attend"].written == tokens * (2 * 64 + 4)
    assert launches["scan"].bytes == (3 + 4) * state + state
    split = {one.role: cost_of(one) for one in launches_of(Case(width=256, batch=1, heads=2, length=600), "meta")}
    assert split["attend"].read == tokens * 2 * (2 * 2 * 64 + 256) + 3 * 2 * 4 * 64 * (256 + 2)
    assert split["finish_features"].read == tokens * 64 * (2 + 2 * 4)


MAKE_NOTHING = {
    "alias", "as_strided", "chunk", "detach", "detach_", "empty", "empty_like", "empty_strided", "expand", "new_empty",
    "promote_types", "reshape",
    "resolve_conj", "resolve_neg", "result_type", "select", "slice", "split", "split_with_sizes", "to",
    "transpose", "unbind", "unflatten", "unsqueeze", "view", "_reshape_alias", "contiguous",
}  # fmt: skip
"""Operators of PyTorch that launch nothing on a GPU."""


def test_a_call_launches_no_kernels_of_pytorch(monkeypatch):
    """Once its tables are kept: seven kernels of Triton, and nothing else."""
    interpret_kernels(monkeypatch)
    monkeypatch.setattr(kept_tensors, "_kept", {})
    q, k, v, grad = torch.randn(4, 1, 1, 20, 16).unbind()
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    rope = RotaryEmbedding(16)

    def both():
        return torch.autograd.grad(linear_attention(*inputs, rope, backend="triton"), inputs, grad)

    both()
    launched = []
    for kind in {type(kernels.attend), type(kernels.scan)}:
        remember = lambda kernel, grid: lambda *args, **constants: launched.append(kernel)  # noqa: E731
        monkeypatch.setattr(kind, "__getitem__", remember)
    with torch.profiler.profile() as seen:
        both()
    names = {event.key.removeprefix("aten::") for event in seen.key_averages() if event.key.startswith("aten::")}
    assert len(launched) == 7
    assert names - MAKE_NOTHING == set()


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", [80, 90, 100])
def test_loops_of_compiled_kernels_read_whole_vectors_and_no_local_memory(monkeypatch, target):
    """The command's exit status says that no loop reads 16 bits at a time or local memory."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compile_kernels", "--target", str(target)]
    done = subprocess.run([*command, "--case", "64"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    occupied = [int(found) for found in re.findall(r"(\d+)%", done.stdout)]
    assert len(occupied) == 8
    # 8 of 64 warps: two for a program, with many registers, were faster on an H100 than more.
    assert min(occupied) >= 12


@pytest.mark.exhaustive
def test_the_largest_state_fits_a_gpu_with_the_least_shared_memory(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compile_kernels", "--target", "86"]
    case = "256, float32, everything"
    done = subprocess.run([*command, "--case", case], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_a_loop_does_is_found_in_its_code():
    loop = "$L__BB0_1:\n\tld.global.b16 \t%rs1, [%rd1];\n\tst.local.b32 \t[%rd2], %r1;\n\t@%p1 bra \t$L__BB0_1;\n"
    outside = "\tld.global.b16 \t%rs1, [%rd1];\n\tld.global.v8.b16 \t{%rs1}, [%rd1];\n"
    assert in_loops(outside) == {"16-bit loads": 0, "local": 0}
    assert in_loops(outside + loop + outside) == {"16-bit loads": 1, "local": 1}


def test_the_longest_loop_is_found_with_its_barriers():
    code = ["MOV R1, R2", "BAR.SYNC 0x0", "@P0 BRA 0x10", "FADD R1, R1, R2", "BAR.SYNC 0x0", "LDGDEPBAR", "BRA 0x30"]
    assert longest_loop([(16 * n, one) for n, one in enumerate(code)]) == (4, 1)
    assert longest_loop([(0, "BRA 0x10"), (16, "EXIT")]) == (0, 0)


def test_products_of_several_warps_are_found():
    """WGMMA and tcgen05; the configurations with 8 warps rely on there being none."""
    assert products_of_several_warps("\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1};\n") == 0
    both = "\t@%p1 wgmma.mma_async.sync.aligned.m64n64k16 {%r1};\n\ttcgen05.mma.cta_group::1.kind::f16 [%r1];\n"
    assert products_of_several_warps(both) == 2


def test_what_the_command_refuses(capsys):
    assert "--dims: the kernels take heads of at most 256" in refusal(KernelModel, ["--dims", "512"], capsys)
