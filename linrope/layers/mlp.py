"""The gated MLP of a block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class GatedMLP(nn.Module):
    """W_out (silu(W_gate x) ∘ W_up x)  (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, d_model: int, width: int):
        super().__init__()
        self.gate_up = nn.Linear(d_model, 2 * width, bias=False)
        self.out = nn.Linear(width, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., d_model)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # (..., width) each
        return self.out(F.silu(gate) * up)
