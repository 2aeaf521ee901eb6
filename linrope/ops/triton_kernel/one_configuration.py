"""The kernels with one configuration, in place of the one that autotuning would choose: for checks."""

from __future__ import annotations

from functools import partial
from typing import Any

import triton
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.errors import OutOfResources, PTXASError

from linrope.ops.triton_kernel import configurations, kernels
from linrope.ops.triton_kernel.plan import MARCHING, Grid

DOES_NOT_FIT = (OutOfResources, CompileTimeAssertionFailure, PTXASError)
"""The errors after which autotuning goes on to the next configuration."""


class OneConfiguration:
    """Stands in for the module of kernels. A kernel that the configuration does not fit takes the first that fits, as
    it might in earnest."""

    def __init__(self, config: triton.Config):
        self.config = config
        self.ran: set[str] = set()
        """The tuned kernels that ran with it."""

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(kernels, name)
        return Grid(partial(self._run, name, kernel.fn)) if name in MARCHING else kernel

    def _run(self, name: str, function: Any, grid: tuple[int], *args: Any, **constants: Any) -> None:
        usual = configurations.fitting(configurations.CONFIGS, constants)
        tried = [one for one in usual if one is self.config] + [one for one in usual if one is not self.config]
        for config in tried:
            try:
                function[grid](*args, **constants, **config.all_kwargs())
            except DOES_NOT_FIT:
                if config is tried[-1]:
                    raise
            else:
                self.ran |= {name} if config is self.config else set()
                return
