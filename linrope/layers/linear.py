"""Linear layers: `Linear`, with the faster of PyTorch's two libraries on CPUs, and `Float32Linear`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linrope.ops.call import without_autocast
from linrope.utils.machine import mkl_lacks_avx512

SMALLEST = 2**24
"""Multiplications of a call from which on oneDNN is faster: its calls take longer to start."""

BY_CONVOLUTION = mkl_lacks_avx512()
"""Whether such calls are convolutions on this machine."""

ALL = slice(None)
"""All features or channels."""


class Linear(nn.Linear):
    """`x Wᵀ + b`, as `torch.nn.Linear`.

    PyTorch computes float32 products with MKL, which uses AVX512 on Intel's processors only. On others that have it,
    large products are convolutions of width 1 here, which oneDNN computes: the same float32 products in half the time.
    On two cores of an AMD EPYC a step of `linrope fit --config configs/quickstart.yaml --trainer.precision 32-true
    --optimizer.name adamw` takes 64 ms instead of 90.
    """

    def forward(self, x: Tensor, features: slice = ALL) -> Tensor:
        """(..., in_features) -> (..., out_features), or only these of the features."""
        weight, bias = self.weight, self.bias
        if features != ALL:
            weight, bias = weight[features], None if bias is None else bias[features]
        if not self._by_convolution(x, len(weight)):
            return F.linear(x, weight, bias)
        rows = x.reshape(1, 1, -1, self.in_features).permute(0, 3, 1, 2)  # (1, in, 1, rows), channels last in memory
        y = F.conv2d(rows, weight[:, :, None, None], bias)
        return y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], len(weight))

    def _by_convolution(self, x: Tensor, out_features: int) -> bool:
        # fake tensors, for estimates, and other subclasses have a type of their own
        return (
            BY_CONVOLUTION
            and type(x) is Tensor
            and not torch.compiler.is_exporting()
            and x.dtype == self.weight.dtype == torch.float32
            and x.device.type == "cpu"
            and x.numel() * out_features >= SMALLEST
            and not torch.is_autocast_enabled("cpu")
        )


class Float32Linear(nn.Linear):
    """`x Wᵀ + b` in float32 (float64 for float64 x), also under autocast and with weights of half precision."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        with without_autocast(x):
            dtype = torch.promote_types(x.dtype, torch.float32)
            bias = None if self.bias is None else self.bias.to(dtype)
            return F.linear(x.to(dtype), self.weight.to(dtype), bias)


def accept_weights_without_linear(module: nn.Module) -> None:
    """Let `load_state_dict` take the weights of `module.linear` also under the names `weight` and `bias`."""
    module.register_load_state_dict_pre_hook(_rename)


def _rename(_, state_dict: dict[str, Tensor], prefix: str, *unused) -> None:
    for name in ("weight", "bias"):
        if f"{prefix}{name}" in state_dict:
            state_dict[f"{prefix}linear.{name}"] = state_dict.pop(f"{prefix}{name}")
