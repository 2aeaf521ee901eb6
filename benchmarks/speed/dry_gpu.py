"""A GPU that does nothing: Triton looks at arguments, tunes and launches as on a real one, with tensors of the CPU.

For what the host does: with which code and arguments it launches, and how long it takes. Nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

from linrope.ops.triton_kernel import kernels, plan
from linrope.ops.triton_kernel.plan import interpreted


@dataclass(frozen=True)
class Launched:
    """One launch: the kernel's name and what Triton would compile it for, programs, and arguments that are no
    constants."""

    name: str
    code: tuple[str, ...]
    programs: int
    args: tuple[Any, ...]


@dataclass
class DryGPU:
    """Stands in for Triton's driver, of an H100."""

    remembers: bool = True
    """Whether `launched` grows."""
    launched: list[Launched] = field(default_factory=list)
    options: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Kernels that Triton would have compiled, and the compiler's options of each."""

    @property
    def compiled(self) -> int:
        """How many kernels Triton would have compiled."""
        return len(self.options)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_benchmarker(self) -> Any:
        """Each configuration takes as long as all others: the first is chosen."""
        return lambda call, quantiles: [1.0] * len(quantiles)

    def compile(self, source: Any, target: GPUTarget, options: dict[str, Any]) -> Compiled:
        self.options.append((source.fn.__name__, options))
        return Compiled(self, source, options)


class Compiled(CompiledKernel):
    """In place of a compiled kernel: a launch is remembered."""

    def __init__(self, gpu: DryGPU, source: Any, options: dict[str, Any]):
        self.gpu, self.src, self.name = gpu, source, source.fn.__name__
        self.function = self.packed_metadata = None
        self.module = self  # not None: loaded
        chosen = options["num_warps"], options["num_stages"]
        self.code = tuple(map(repr, (source.signature, source.constants, source.attrs, chosen)))
        self.taken = [kind != "constexpr" for kind in source.signature.values()]
        self._run = self._remember

    def _remember(self, programs, _y, _z, _stream, _function, _packed, _metadata, _enter, _exit, *args) -> None:
        if not self.gpu.remembers:
            return
        args = tuple(x for x, one in zip(args, self.taken, strict=True) if one)
        self.gpu.launched.append(Launched(self.name, self.code, programs, args))


@contextmanager
def dry_gpu() -> Iterator[DryGPU]:
    """Within it, kernels are launched on a `DryGPU`. For a process that uses no GPU and no interpreter."""
    assert not interpreted(), "TRITON_INTERPRET=1 is set: unset it"
    gpu = DryGPU()
    with ExitStack() as stack:
        stack.enter_context(mock.patch("triton.compiler.compile", gpu.compile))
        stack.enter_context(mock.patch.object(plan, "_plans", {}))
        for kernel in (getattr(kernels, name) for name in kernels.__all__):
            function = kernel
            if isinstance(kernel, triton.runtime.Autotuner):
                function = kernel.fn
                for name, value in (("cache", {}), ("cache_results", False)):  # on disk, real GPUs would find them
                    stack.enter_context(mock.patch.object(kernel, name, value))
                vars(kernel).pop("do_bench", None)  # which it keeps from the driver that it saw first
                stack.callback(vars(kernel).pop, "do_bench", None)
            function.device_caches.clear()
            stack.callback(function.device_caches.clear)
        driver.set_active(gpu)
        yield gpu


def without_addresses(launched: list[Launched]) -> list[Launched]:
    """Their tensors by dtype, shape and strides, to compare launches of equal calls."""

    def known(x: Any) -> Any:
        return (x.dtype, x.shape, x.stride()) if isinstance(x, Tensor) else x

    return [Launched(one.name, one.code, one.programs, tuple(map(known, one.args))) for one in launched]
