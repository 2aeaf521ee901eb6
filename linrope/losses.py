"""Cross entropy of tokens, and bits per byte."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from linrope.errors import InputError
from linrope.ops.checks import is_transformed
from linrope.utils.gradients import GradientSums, trained_elsewhere
from linrope.utils.values import extremes

IGNORE = -100
"""The target of positions without a loss; not a token."""
SLICE = {"cpu": 2**20, "cuda": 2**24}
"""Logits of a slice, by device: on CPUs the fastest of the sizes tried, on GPUs 64 MiB of float32, not measured."""
FEWEST_ROWS = 512
"""Rows of a slice at least: the gradient of the output layer's weight is read and written once a slice."""


def summed_cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Sum of the cross entropies in nats, float32 or float64, of logits (..., V); targets (...) of IGNORE add 0.

    With `label_smoothing` s the target distribution is (1 - s) · one-hot + s / V (arXiv 1512.00567, section 7).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    options = {"reduction": "sum", "ignore_index": IGNORE, "label_smoothing": label_smoothing}
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropies in nats, (...) float32, of logits (..., V); 0 where a target (...) is IGNORE."""
    losses = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none", ignore_index=IGNORE)
    return losses.view_as(targets)


def rows_of_slice(vocab_size: int, device: str) -> int:
    """Rows whose logits are computed at once by the functions below."""
    return max(FEWEST_ROWS, SLICE.get(device, SLICE["cuda"]) // vocab_size)


def summed_cross_entropy_of(
    output: nn.Module, x: Tensor, targets: Tensor, rows: int, label_smoothing: float = 0.0
) -> Tensor:
    """`summed_cross_entropy(output(x), targets, label_smoothing)`, in slices of so many rows.

    The logits of the other rows are not held. On CPUs none are computed where there is no target.

    The gradients of a slice are computed with its loss. So the backward keeps them alone, of the sizes of x and of the
    output layer, and computes nothing twice; there is no second derivative. An output layer that computes with trained
    tensors beside its parameters (of a hook, for example) computes each slice again in the backward, with a warning. In
    a graph of torch.compile and in transforms of torch.func, all rows are one slice.

    Args:
        output: the output layer, (..., D) to logits (..., V).
        x: (B, T, D), its inputs.
        targets: (B, T) tokens, or IGNORE.
        rows: rows of a slice, at least 1.
        label_smoothing: from 0 to 1, see `summed_cross_entropy`.
    """
    if torch.compiler.is_compiling() or is_transformed(x, *output.parameters()):
        return summed_cross_entropy(output(x), targets, label_smoothing)
    x, targets = _asked(x.flatten(0, 1), targets.flatten())

    def of_slice(some: Tensor, of_some: Tensor) -> Tensor:
        return summed_cross_entropy(output(some), of_some, label_smoothing)

    if not torch.is_grad_enabled():
        return sum(of_slice(*one) for one in _slices(x, targets, rows))
    trained = [parameter for parameter in output.parameters() if parameter.requires_grad]
    try:
        return _SummedCrossEntropy.apply(of_slice, rows, targets, x, *trained)
    except _OthersAreTrained:
        warnings.warn(
            "the output layer computes with trained tensors that are not its parameters: the loss computes its logits "
            "again in the backward. Make them parameters of model.output to save that time.",
            stacklevel=2,
        )
        return sum(checkpoint(of_slice, *one, use_reentrant=False) for one in _slices(x, targets, rows))


def _slices(x: Tensor, targets: Tensor, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(x.split(rows), targets.split(rows), strict=True)


def _asked(x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of x (N, D) and targets (N,) that have a target. On a GPU all rows: their number would have to be waited
    for."""
    if x.device.type != "cpu" or not (targets == IGNORE).any().item():  # fake tensors answer 0
        return x, targets
    (asked,) = torch.nonzero(targets != IGNORE, as_tuple=True)
    return x[asked], targets[asked]


def token_losses_of(output: nn.Module, x: Tensor, targets: Tensor, rows: int) -> Tensor:
    """`token_losses(output(x), targets)`, in slices of so many rows; where gradients are asked for, all are kept."""
    slices = _slices(x.flatten(0, 1), targets.flatten(), rows)
    return torch.cat([token_losses(output(some), of_some) for some, of_some in slices]).view_as(targets)


class _OthersAreTrained(Exception):
    """A loss has a gradient for more than it was asked for."""


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, of_slice, rows, targets: Tensor, x: Tensor, *parameters: Tensor) -> Tensor:
        total, of_x, of_parameters = 0, [], GradientSums(parameters)
        for some, of_some in _slices(x, targets, rows):
            with torch.enable_grad():
                some = some.detach().requires_grad_()
                through = some.view_as(some)  # hooks of modules on inputs, as of FlopCounterMode, take no leaves here
                loss = of_slice(through, of_some)
                if not of_x and trained_elsewhere([loss], [some, *parameters]) is not None:
                    raise _OthersAreTrained
                found = torch.autograd.grad(loss, [some, *parameters], allow_unused=True)
            total = total + loss.detach()
            of_x.append(torch.zeros_like(some) if found[0] is None else found[0])
            of_parameters.add(found[1:])
        ctx.save_for_backward(torch.cat(of_x), *of_parameters.rounded())
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        if torch.is_grad_enabled():
            raise InputError(
                "create_graph=True asks for a second derivative, which a loss in slices does not have: compute it from "
                "the logits, summed_cross_entropy(model(tokens), targets)."
            )
        return None, None, None, *(None if x is None else x * grad.to(x.dtype) for x in ctx.saved_tensors)


def check_targets(targets: Tensor, tokens: Tensor, vocab_size: int, name: str = "tokens") -> None:
    """Raise InputError unless there is one for each of the `tokens`, which the caller calls `name`: int64 in
    [0, vocab_size), or IGNORE. On a GPU the loss asserts the range, and a compiled graph does not check it."""
    if not isinstance(targets, Tensor):
        raise InputError(f"targets is a {type(targets).__name__}: pass int64 of the shape of {name}.")
    if targets.is_meta != tokens.is_meta:
        raise InputError(f"targets is on {targets.device}, {name} on {tokens.device}: use one device.")
    if targets.shape != tokens.shape:
        raise InputError(f"targets is {tuple(targets.shape)}, {name} {tuple(tokens.shape)}: pass one for each token.")
    if targets.dtype != torch.int64:
        raise InputError(f"targets are {targets.dtype}: pass int64.")
    if targets.device.type != "cpu" or (ends := extremes(targets.masked_fill(targets == IGNORE, 0))) is None:
        return
    if wrong := [end for end in ends if not 0 <= end < vocab_size]:
        raise InputError(
            f"targets has {wrong[0]}, vocab_size is {vocab_size}: pass 0 … {vocab_size - 1}, or "
            f"{IGNORE} where there is no target."
        )


def per_target(total: float, n_targets: float) -> float:
    """The mean of what was added up over targets; NaN without targets, where 0 would be a perfect loss."""
    return total / n_targets if n_targets else math.nan


def bits_per_byte(nats: float, n_bytes: float) -> float:
    """Bits per byte of a text: the nats of all its tokens, separators included, over its bytes; NaN without bytes."""
    return nats / math.log(2) / n_bytes if n_bytes else math.nan
