"""The short convolution that attention layers may have before their queries, keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linrope.errors import InputError
from linrope.ops.documents import number_documents


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
        if width < 2:
            raise InputError(f"short_conv={width}: a convolution sees at least 2 tokens (0 for no convolution).")
        self.width, self.without_silu = width, without_silu
        self.weight = nn.Parameter(torch.empty(channels, width).uniform_(-(width**-0.5), width**-0.5))

    def forward(
        self, x: Tensor, tail: Tensor | None = None, segment_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Convolve x (B, T, C), to (B, T, C) and the tail for the tokens after x.

        The `tail` (B, width - 1, C) are the inputs before x; None for zeros. With the `segment_ids` (B, T) of packed
        rows a token sees its own document only, and the tail belongs to the first one.
        """
        if tail is None:
            tail = x.new_zeros(x.shape[0], self.width - 1, x.shape[2])
        padded = torch.cat((tail.to(x.dtype), x), dim=1)
        tail = padded[:, x.shape[1] :].clone()  # a view would keep all of `padded` in memory
        if segment_ids is None or x.shape[1] == 0:
            # oneDNN is three times faster on long inputs, and slower on short ones and in float64. cuDNN would use TF32
            # for float32, so that a text in pieces would not give what it gives as a whole.
            fast = x.device.type == "cpu" and x.shape[1] >= 256 and x.dtype != torch.float64
            return self._activated(self._as_image(padded) if fast else self._sum_of_taps(padded)), tail
        document = F.pad(number_documents(segment_ids), (self.width - 1, 0))
        still_open = (document == document[:, -1:])[:, x.shape[1] :, None]
        return self._activated(self._sum_of_taps(padded, document)), tail * still_open

    def _activated(self, y: Tensor) -> Tensor:
        if not self.without_silu:
            return F.silu(y)
        return torch.cat((y[..., : self.without_silu], F.silu(y[..., self.without_silu :])), dim=-1)

    def _sum_of_taps(self, padded: Tensor, document: Tensor | None = None) -> Tensor:
        """The formula: (B, width - 1 + T, C) -> (B, T, C), each token with the tokens of its own document."""
        weight, length = self.weight.to(padded.dtype), padded.shape[1] - self.width + 1
        y = padded[:, self.width - 1 :] * weight[:, -1]
        for i in range(self.width - 1):
            seen = padded[:, i : i + length]
            if document is not None:
                seen = seen * (document[:, i : i + length] == document[:, self.width - 1 :])[..., None]
            y = torch.addcmul(y, seen, weight[:, i])
        return y

    def _as_image(self, padded: Tensor) -> Tensor:
        """The same as a channels-last conv2d of height 1, for which (B, T, C) needs no copy."""
        image = padded.mT.unsqueeze(2)
        weight = self.weight.to(padded.dtype)[:, None, None, :]
        return F.conv2d(image, weight, groups=weight.shape[0]).squeeze(2).mT
