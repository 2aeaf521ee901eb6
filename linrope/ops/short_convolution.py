"""The short convolution with SiLU as one operator: its definition, and the compiled form for CPUs.

y_t = silu(Σ_i w_i x_{t - width + 1 + i})
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from linrope.ops.checks import is_transformed
from linrope.ops.cpu_kernel.library import DTYPES, library, why_none

WIDEST = 8
"""The largest width of the compiled form."""
SHORTEST = 16
"""Fewer tokens take less time in a few operations of PyTorch."""
BLOCK = 256
"""Tokens of a task of the compiled form: the same for any number of threads, and so are the sums of the gradients."""


def short_convolution(x: Tensor, tail: Tensor, weight: Tensor, documents: Tensor | None, without_silu: int) -> Tensor:
    """Convolve each channel causally, then SiLU.

    Args:
        x: (B, T, C).
        tail: (B, width - 1, C), the inputs before x.
        weight: (C, width); the last column multiplies the present token.
        documents: (B, T) numbers of packed documents, each of which sees itself only; the tail belongs to number 0.
        without_silu: number of first channels without SiLU.

    Returns:
        (B, T, C) in x's dtype.
    """
    if is_compiled(x, tail, weight):
        return torch.ops.linrope.short_convolution(x, tail, weight, documents, without_silu)
    return by_definition(x, tail, weight, documents, without_silu)


def is_compiled(x: Tensor, tail: Tensor, weight: Tensor) -> bool:
    """Whether the compiled form takes x. It has no rules for `torch.func` and forward-mode derivatives."""
    fits = x.device.type == "cpu" and x.dtype in DTYPES and weight.shape[1] <= WIDEST
    # a graph for any length would be held to those on the same side as its example
    is_short = statically_known_true(x.shape[1] < SHORTEST) or statically_known_true(x.numel() == 0)
    if not fits or is_short or why_none() is not None:
        return False
    return torch.compiler.is_compiling() or not is_transformed(x, tail, weight)


def by_definition(x: Tensor, tail: Tensor, weight: Tensor, documents: Tensor | None, without_silu: int) -> Tensor:
    """The formula, as a sum of `width` products."""
    width, length = weight.shape[1], x.shape[1]
    padded, weight = torch.cat((tail.to(x.dtype), x), dim=1), weight.to(x.dtype)
    numbers = None if documents is None else F.pad(documents, (width - 1, 0))
    y = x * weight[:, -1]
    for i in range(width - 1):
        seen = padded[:, i : i + length]
        if numbers is not None:
            seen = seen * (numbers[:, i : i + length] == documents)[..., None]
        y = torch.addcmul(y, seen, weight[:, i])
    if not without_silu:
        return F.silu(y)
    return torch.cat((y[..., :without_silu], F.silu(y[..., without_silu:])), dim=-1)


class Record(ctypes.Structure):
    """One call, as `cpu_kernel/source/short_convolution.cpp` declares it."""

    _fields_ = (
        *((n, ctypes.c_int64) for n in ("batch", "length", "channels", "width", "without_silu", "dtype")),
        *((n, ctypes.c_int64) for n in ("block", "x_batch", "x_token")),
        *((n, ctypes.c_void_p) for n in ("x", "tail", "weight", "documents", "y", "grad", "dx", "d_tail", "d_weight")),
        ("parallel_for", ctypes.c_void_p),
    )


def _record(x: Tensor, without_silu: int, **tensors: Tensor | None) -> Record:
    batch, length, channels = x.shape
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
    return Record(
        batch=batch, length=length, channels=channels, width=tensors["weight"].shape[0], without_silu=without_silu,
        dtype=DTYPES.index(x.dtype), block=BLOCK, x_batch=x.stride(0), x_token=x.stride(1), x=x.data_ptr(),
        parallel_for=library().parallel_for, **pointers,
    )  # fmt: skip


def _inputs(x: Tensor, tail: Tensor, weight: Tensor, documents: Tensor | None) -> tuple[Tensor | None, ...]:
    """As the compiled form reads them: channels contiguous, weights (width, C) in float32."""
    x = x if x.stride(2) == 1 else x.contiguous()
    taps = weight.detach().to(torch.float32).mT.contiguous()
    return x, tail.to(x.dtype).contiguous(), taps, None if documents is None else documents.contiguous()


torch.library.define(
    "linrope::short_convolution",
    "(Tensor x, Tensor tail, Tensor weight, Tensor? documents, int without_silu) -> Tensor",
)
torch.library.define(
    "linrope::short_convolution_backward",
    "(Tensor grad, Tensor x, Tensor tail, Tensor weight, Tensor? documents, int without_silu) -> "
    "(Tensor, Tensor, Tensor)",
)


@torch.library.impl("linrope::short_convolution", "cpu")
def _(x, tail, weight, documents, without_silu):
    x, tail, taps, documents = _inputs(x, tail, weight, documents)
    y = torch.empty(x.shape, dtype=x.dtype)
    record = _record(x, without_silu, tail=tail, weight=taps, documents=documents, y=y)
    library().functions.linrope_convolve(ctypes.byref(record))
    return y


@torch.library.impl("linrope::short_convolution_backward", "cpu")
def _(grad, x, tail, weight, documents, without_silu):
    x_read, tail_read, taps, documents = _inputs(x, tail, weight, documents)
    grad = grad.contiguous()
    dx, d_tail = torch.empty(x.shape, dtype=x.dtype), torch.empty(tail.shape, dtype=x.dtype)
    d_weight = torch.empty(x.shape[0] * -(-x.shape[1] // BLOCK), *taps.shape, dtype=torch.float32)
    tensors = {"tail": tail_read, "weight": taps, "documents": documents}
    record = _record(x_read, without_silu, **tensors, grad=grad, dx=dx, d_tail=d_tail, d_weight=d_weight)
    library().functions.linrope_convolve_backward(ctypes.byref(record))
    return dx, d_tail.to(tail.dtype), d_weight.sum(dim=0).mT.to(weight.dtype).contiguous()


@torch.library.register_fake("linrope::short_convolution")
def _(x, tail, weight, documents, without_silu):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("linrope::short_convolution_backward")
def _(grad, x, tail, weight, documents, without_silu):
    return tuple(torch.empty_like(y, memory_format=torch.contiguous_format) for y in (x, tail, weight))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.without_silu = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grad):
    if torch.is_grad_enabled():  # a second derivative is asked for: the definition has it
        *saved, documents = ctx.saved_tensors
        tensors = [tensor.view_as(tensor) for tensor in saved]  # or gradients of x would go on to what x is made from
        y = by_definition(*tensors, documents, ctx.without_silu)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
        return *(next(found) if tensor.requires_grad else None for tensor in tensors), None, None
    gradients = torch.ops.linrope.short_convolution_backward(grad, *ctx.saved_tensors, ctx.without_silu)
    return *gradients, None, None


torch.library.register_autograd("linrope::short_convolution", _differentiate, setup_context=_save)
