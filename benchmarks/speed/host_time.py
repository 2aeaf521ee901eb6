"""What the host does for the CUDA kernels: the time of a call on a GPU that needs none, on any machine.

A known call finds its launches prepared. A call of new sizes goes through Triton's look at each argument; nothing is
compiled here. PyTorch's tensors are those of the CPU: allocating on a GPU takes longer.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from unittest import mock

import torch
from rich.table import Table

from benchmarks.harness.runner import AddOption, Benchmark
from benchmarks.harness.timing import Call, Several, alternate
from benchmarks.speed.dry_gpu import dry_gpu
from linrope import RotaryEmbedding, State, linear_attention
from linrope.ops.triton_kernel import launch, plan
from linrope.utils.terminal import new_table

MANY = 30
"""Calls of one measurement."""


class HostTime(Benchmark):
    name = "host_time"
    output = ""

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        add("--rounds", type=int, default=30, help=f"measurements of {MANY} calls each")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        if os.environ.get("TRITON_INTERPRET") == "1":
            parser.error("TRITON_INTERPRET=1 is set, and the interpreter needs no host: unset it")

    def measure(self) -> None:
        torch.set_num_threads(1)
        calls = {"forward and backward": _forward_and_backward(), "one token": _one_token()}
        every = {(name, True): Several(call, MANY) for name, call in calls.items()}
        every |= {(name, False): Several(partial(_new_sizes, call), MANY) for name, call in calls.items()}
        with dry_gpu() as gpu, mock.patch.object(launch, "why_not", return_value=None):
            gpu.remembers = False
            self.samples = alternate(every, self.options.rounds, count=False).samples
        self.points = list(calls)

    def table(self) -> Table:
        table = new_table("time of the host", "known call", "quartiles", "new sizes", "quartiles", text=["call"])
        for name in self.points:
            both = [self.samples[name, known] for known in (True, False)]
            texts = [(f"{1e6 * one.median:.0f} µs", "–".join(f"{1e6 * x:.0f}" for x in one.quartiles)) for one in both]
            table.add_row(name, *texts[0], *texts[1])
        return table


def _new_sizes(call: Call) -> None:
    plan._plans.clear()
    call()


def _forward_and_backward() -> Call:
    rope = RotaryEmbedding(64)
    q, k, v = (torch.randn(1, 16, 64, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    given = torch.randn_like(v)

    def call() -> None:
        torch.autograd.grad(linear_attention(q, k, v, rope, backend="triton"), (q, k, v), given)

    return call


def _one_token() -> Call:
    rope, state = RotaryEmbedding(64), State.zeros(1, 16, 64, 64)
    q, k, v = (torch.randn(1, 16, 1, 64, dtype=torch.bfloat16) for _ in range(3))

    @torch.no_grad()
    def call() -> None:
        linear_attention(q, k, v, rope, state=state, return_state=True, backend="triton")

    return call


if __name__ == "__main__":
    sys.exit(HostTime.main())
