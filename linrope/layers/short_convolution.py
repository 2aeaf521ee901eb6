"""The short convolution that attention layers may have before their queries, keys and values."""

from __future__ import annotations

from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linrope.errors import InputError
from linrope.layers.linear import ALL
from linrope.ops.documents import check_segment_ids, number_documents
from linrope.ops.short_convolution import short_convolution


class ShortConvolution(nn.Module):
    """Depthwise causal convolution over the last few tokens, then SiLU.

        y_t = silu(Σ_i w_i x_{t - width + 1 + i})

    Args:
        channels: C, each with its own `width` weights.
        width: tokens seen, the present one included; at least 2.
        without_silu: number of first channels without SiLU, which has hardly any values below 0.
    """

    def __init__(self, channels: int, width: int, without_silu: int = 0):
        super().__init__()
        if not isinstance(width, Integral) or width < 2:
            raise InputError(f"short_conv={width!r}: a convolution sees at least 2 tokens (0 for no convolution).")
        self.width, self.without_silu = width, without_silu
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights up to ± width^-½, PyTorch's default."""
        nn.init.uniform_(self.weight, -(self.width**-0.5), self.width**-0.5)

    def forward(
        self, x: Tensor, tail: Tensor | None = None, segment_ids: Tensor | None = None, channels: slice = ALL
    ) -> tuple[Tensor, Tensor]:
        """Convolve x (B, T, C), to (B, T, C) and the tail for the tokens after x.

        The `tail` (B, width - 1, C) are the inputs before x; None for zeros. With the `segment_ids` (B, T) of packed
        rows a token sees its own document only, and the tail belongs to the first one. `channels`, a slice with a
        start, are those of x and tail if they are not all.

        Raises InputError for a tail or segment_ids of another shape.
        """
        shape = (x.shape[0], self.width - 1, x.shape[2])
        if tail is None:
            tail = x.new_zeros(shape)
        elif tail.shape != shape:
            raise InputError(f"tail is {tuple(tail.shape)}, this call needs {shape}: the last inputs of the same rows.")
        if segment_ids is not None:
            check_segment_ids(segment_ids, *x.shape[:2], x.device)
        documents = None
        if segment_ids is not None and x.shape[1]:
            documents = number_documents(segment_ids)
        weight, without_silu = self.weight, self.without_silu
        if channels != ALL:
            weight, without_silu = weight[channels], min(max(without_silu - channels.start, 0), x.shape[2])
        y = short_convolution(x, tail, weight, documents, without_silu)
        # a copy: a view would keep all of x in memory
        last = x[:, torch.sym_max(x.shape[1] - self.width + 1, 0) :]  # no -width, which graphs take for long rows alone
        following = torch.cat((tail.to(x.dtype), last), dim=1)[:, -self.width + 1 :].clone()
        if documents is not None:
            still_open = F.pad(documents, (self.width - 1, 0))[:, -self.width + 1 :] == documents[:, -1:]
            following = following * still_open[..., None]
        return y, following
