"""`rms_norm`: x / √(mean of x² + ε) ∘ weight, in one compiled pass on CPUs (RMSNorm, arXiv 1910.07467)."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from linrope.ops.cpu_kernel.library import DTYPES, library, makes_one_pass

FEWEST = 2**12
"""Fewer entries take less time in a few operations of PyTorch."""
BLOCK = 2**14
"""Entries of the rows whose share of the weight's gradient is summed together: the same for any number of threads."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row of x (..., W) over the root of the mean of its squares, plus ε, times weight (W,): in x's dtype."""
    if makes_one_pass(x, weight, fewest=FEWEST) and x.shape[-1:] == weight.shape:
        return torch.ops.linrope.rms_norm(x, weight, eps)
    return by_definition(x, weight, eps)


def by_definition(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """PyTorch's own, which takes six passes over memory on CPUs."""
    return F.rms_norm(x, weight.shape, weight, eps)


class Record(ctypes.Structure):
    """One call, as `cpu_kernel/source/rms_norm.cpp` declares it."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "width", "dtype", "block")),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("x", "weight", "y", "grad", "dx", "d_weight", "parallel_for")),
    )


def _record(x: Tensor, eps: float, **tensors: Tensor) -> Record:
    width = x.shape[-1]
    pointers = {name: tensor.data_ptr() for name, tensor in {"x": x, **tensors}.items()}
    sizes = {"rows": x.numel() // width, "width": width, "dtype": DTYPES.index(x.dtype), "block": _block(width)}
    return Record(**sizes, **pointers, eps=eps, parallel_for=library().parallel_for)


def _block(width: int) -> int:
    return max(1, BLOCK // width)


torch.library.define("linrope::rms_norm", "(Tensor x, Tensor weight, float eps) -> Tensor")
torch.library.define(
    "linrope::rms_norm_backward", "(Tensor grad, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)"
)


@torch.library.impl("linrope::rms_norm", "cpu")
def _(x, weight, eps):
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty_like(x)
    library().functions.linrope_rms_norm(ctypes.byref(_record(x, eps, weight=weight, y=y)))
    return y


@torch.library.impl("linrope::rms_norm_backward", "cpu")
def _(grad, x, weight, eps):
    x, weight, grad = x.contiguous(), weight.contiguous(), grad.contiguous()
    dx = torch.empty_like(x)
    rows = x.numel() // x.shape[-1]
    shares = torch.zeros(-(-rows // _block(x.shape[-1])), x.shape[-1], dtype=torch.float32)
    tensors = {"weight": weight, "grad": grad, "dx": dx, "d_weight": shares}
    library().functions.linrope_rms_norm_backward(ctypes.byref(_record(x, eps, **tensors)))
    return dx, shares.sum(dim=0).to(weight.dtype)


@torch.library.register_fake("linrope::rms_norm")
def _(x, weight, eps):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("linrope::rms_norm_backward")
def _(grad, x, weight, eps):
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


def _save(ctx, inputs, output) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx, grad):
    x, weight = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return *torch.ops.linrope.rms_norm_backward(grad, x, weight, ctx.eps), None
    scale = (x.float().square().mean(dim=-1, keepdim=True) + ctx.eps).rsqrt()  # a second derivative is asked for
    n, weighted = x * scale, grad * weight
    dx = scale * (weighted - n * (weighted * n).mean(dim=-1, keepdim=True))
    d_weight = (grad * n).reshape(-1, x.shape[-1]).sum(dim=0)
    return dx.to(x.dtype), d_weight.to(weight.dtype), None


torch.library.register_autograd("linrope::rms_norm", _differentiate, setup_context=_save)
