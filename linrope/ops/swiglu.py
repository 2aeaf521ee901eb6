"""`swiglu`: silu(a) ∘ b, in one compiled pass on CPUs (SwiGLU, arXiv 2002.05202)."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from linrope.errors import InputError
from linrope.ops.cpu_kernel.library import DTYPES, library, makes_one_pass

FEWEST = 2**12
"""Fewer entries take less time in a few operations of PyTorch."""


def swiglu(x: Tensor) -> Tensor:
    """silu of the first half of each row, times the second half: (..., 2 W) -> (..., W), in x's dtype.

    Raises InputError for rows of an odd length.
    """
    return torch.ops.linrope.swiglu(x) if makes_one_pass(x, fewest=FEWEST) else by_definition(x)


def by_definition(x: Tensor) -> Tensor:
    """The formula."""
    a, b = x.unflatten(-1, (2, _width(x))).unbind(-2)
    return F.silu(a) * b


class Record(ctypes.Structure):
    """One call, as `cpu_kernel/source/swiglu.cpp` declares it."""

    _fields_ = (
        *((n, ctypes.c_int64) for n in ("rows", "width", "dtype")),
        *((n, ctypes.c_void_p) for n in ("x", "y", "grad", "dx", "parallel_for")),
    )


def _record(x: Tensor, **tensors: Tensor) -> Record:
    width = _width(x)
    pointers = {name: tensor.data_ptr() for name, tensor in {"x": x, **tensors}.items()}
    sizes = {"rows": x.shape[:-1].numel(), "width": width, "dtype": DTYPES.index(x.dtype)}
    return Record(**sizes, **pointers, parallel_for=library().parallel_for)


def _width(x: Tensor) -> int:
    if x.shape[-1] % 2:
        raise InputError(f"swiglu: x is {tuple(x.shape)}, and its last dimension must have two halves of one size.")
    return x.shape[-1] // 2


torch.library.define("linrope::swiglu", "(Tensor x) -> Tensor")
torch.library.define("linrope::swiglu_backward", "(Tensor grad, Tensor x) -> Tensor")


@torch.library.impl("linrope::swiglu", "cpu")
def _(x):
    x = x.contiguous()
    y = torch.empty(*x.shape[:-1], _width(x), dtype=x.dtype)
    if y.numel() > 0:
        library().functions.linrope_swiglu(ctypes.byref(_record(x, y=y)))
    return y


@torch.library.impl("linrope::swiglu_backward", "cpu")
def _(grad, x):
    x, grad = x.contiguous(), grad.contiguous()
    dx = torch.empty_like(x)
    if x.numel() > 0:
        library().functions.linrope_swiglu_backward(ctypes.byref(_record(x, grad=grad, dx=dx)))
    return dx


@torch.library.register_fake("linrope::swiglu")
def _(x):
    return x.new_empty(*x.shape[:-1], _width(x))


@torch.library.register_fake("linrope::swiglu_backward")
def _(grad, x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, grad):
    (x,) = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return torch.ops.linrope.swiglu_backward(grad, x)
    a, b = x.chunk(2, dim=-1)  # a second derivative is asked for
    s = a.sigmoid()
    return torch.cat((grad * b * s * (1 + a * (1 - s)), grad * a * s), dim=-1)


torch.library.register_autograd("linrope::swiglu", _differentiate, setup_context=_save)
