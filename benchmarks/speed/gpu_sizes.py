"""The sizes at which the CUDA backend is measured, and those whose code is checked."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.speed.methods import BOTH, DTYPES, Inputs, Setting
from linrope import RotaryEmbedding
from linrope.ops.call import Call, check_call
from linrope.ops.triton_kernel.plan import plan_of, stretch_of

LENGTHS, LONG = (4096, 65_536, 524_288), 65_536


@dataclass(frozen=True)
class Size:
    """`rows` heads of `dim` features and values in one row of tokens, as (B·H, D = E, T), and how they are computed."""

    length: int
    rows: int = 16
    dim: int = 64
    dtype: str = "bfloat16"
    decay: bool = False
    interleaved: bool = True

    def __str__(self) -> str:
        options = "" if self.dtype == "bfloat16" else f", {self.dtype}"
        options += ", decay" * self.decay + ", half-split" * (not self.interleaved)
        return f"B·H={self.rows}, D={self.dim}, T={self.length:,}{options}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def tensor(self) -> int:
        """Bytes of q, and of each of the seven others: k, v, o and the gradients."""
        return self.rows * self.dim * self.length * self.torch_dtype.itemsize

    @property
    def stretch(self) -> int:
        """Tokens from one state to the next."""
        return stretch_of(self.rows, self.length, self.dim, self.decay)

    def inputs(self, device: str, mode: str = BOTH) -> Inputs:
        setting = Setting(self.length, 1, self.rows, self.dim, None, self.dtype, device, mode)
        rope = RotaryEmbedding(self.dim, interleaved=self.interleaved)
        return replace(Inputs.make(setting), rope=rope)

    def fitting(self, configs: list[Any]) -> list[Any]:
        """Those of the configurations that its kernels may have."""
        from linrope.ops.triton_kernel.configurations import fitting  # only here: Triton is optional

        plan = plan_of(self.call("cpu", 1))
        return fitting(configs, plan.features_of | plan.sizes | plan.products)

    def call(self, device: str, length: int) -> Call:
        """The checked call of a row of that length."""
        x = replace(self, length=length).inputs(device)
        options: dict[str, Any] = {"log_decay": x.log_decay if self.decay else None, "eps": 1e-6}
        return check_call(x.q, x.k, x.v, x.rope, **options)


GOALS = [Size(length) for length in LENGTHS]
"""Those of the goals, where other forms are measured too."""
SHAPES = [Size(LONG, rows, dim) for rows, dim in ((16, 128), (64, 64), (64, 128))]
VARIANTS = [Size(LONG, decay=True), Size(LONG, dtype="float32"), Size(LONG, interleaved=False)]

OTHERS = ((4097, 64, 128, False), (4096, 32, 64, False), (4096, 32, 128, False), (4096, 16, 128, False))
OTHERS += ((4096, 16, 64, True), (65_536, 16, 256, False))
"""T, B·H, D and decay of usual calls whose stretches no measured size has: from 256 to 2,048."""


def sizes(quick: bool = False) -> list[Size]:
    """All sizes, the most important first."""
    return GOALS[:2] if quick else [*GOALS, *SHAPES, *VARIANTS]


def sizes_of_all_code(quick: bool = False) -> list[Size]:
    """One size for each code that the measured sizes and other usual ones have: by shape, options and stretch."""
    others = [Size(length, rows, dim, decay=decay) for length, rows, dim, decay in OTHERS]
    every = [*sizes(quick), *others[: 0 if quick else None]]
    return list({(one.stretch, replace(one, length=0, rows=0)): one for one in reversed(every)}.values())[::-1]


def short(configuration: str) -> str:
    """Chunk, warps, stages and largest number of registers of a configuration of Triton."""
    known = dict(re.findall(r"(\w+): (\w+)", configuration))
    names = {"CHUNK": "chunk {}", "num_warps": "{} warps", "num_stages": "{} stages", "maxnreg": "≤ {} registers"}
    return ", ".join(text.format(known[name]) for name, text in names.items() if known.get(name, "None") != "None")
