"""What a call would launch: its kernels with their grids and arguments, recorded instead of run.

Calls on "meta" tensors of any length are recorded without memory for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.speed.gpu_correctness import Case, inputs_of
from linrope import RotaryEmbedding
from linrope.ops.call import Call, check_call
from linrope.ops.triton_kernel import kernel as triton_kernel
from linrope.ops.triton_kernel import plan as planning
from linrope.utils import kept_tensors


@dataclass(frozen=True)
class Recorded:
    """One launch: the kernel's name, the number of programs, and its arguments."""

    kernel: str
    programs: int
    args: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def role(self) -> str:
        """The kernel, and which of its tasks."""
        return f"{self.kernel} later" if self.constants.get("LATER") else self.kernel


class Recorder:
    """Stands in for the module of kernels: `recorder.NAME[grid](...)` is remembered and does nothing."""

    def __init__(self) -> None:
        self.launches: list[Recorded] = []

    def __getattr__(self, name: str) -> Any:
        return planning.Grid(partial(self._keep, name))

    def _keep(self, name: str, grid: tuple[int], *args: Any, **constants: Any) -> None:
        self.launches.append(Recorded(name, grid[0], args, constants))


def launches_of(case: Case, device: str = "cpu", backward: bool = True) -> list[Recorded]:
    """Everything that the case would launch, forward and backward, or for its one token."""
    recorder, nothing_kept = Recorder(), mock.patch.dict(kept_tensors._kept, clear=True)  # tables that nothing writes
    with mock.patch.object(planning, "all_kernels", return_value=recorder), nothing_kept:
        launch(call_of(case, device), backward)
    return recorder.launches


def launch(call: Call, backward: bool = True) -> None:
    """Run the call's kernels, forward and backward, or for its one token."""
    past = (None, None) if call.state is None else (call.state.kv, call.state.k_sum)
    if call.q.shape[2] == 1:
        triton_kernel.one_token(call, call.past.kv, call.past.k_sum)
        return
    *saved, last_kv, last_k_sum = triton_kernel.forward(call, *past)
    if backward:
        trained = call.theta is not None and call.theta.requires_grad
        given = (last_kv, last_k_sum) if call.state is not None else (None, None)
        grad_o = torch.empty_like(saved[0])
        triton_kernel.backward(call, saved, grad_o, *given, call.log_decay is not None, trained)


def call_of(case: Case, device: str = "cpu") -> Call:
    """The case's call, whose past is one of zeros if the case has one."""
    tensors, fixed = inputs_of(case, device)
    rope = None if case.rope is None else RotaryEmbedding(case.dim, **case.rope).to(device)
    options = {"eps": 1e-6, "log_decay": tensors.get("log_decay"), **fixed, **case.options}
    call = check_call(*(tensors[name] for name in "qkv"), rope, **options)
    return call if case.past is None else replace(call, state=call.past, start=case.past)
