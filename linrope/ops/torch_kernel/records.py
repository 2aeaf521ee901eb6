"""What the forward saves for the backward, and what the backward writes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from linrope.ops.theta_gradient import ThetaGradient


@dataclass(frozen=True)
class Saved:
    """What the forward writes and the backward reads. `den` is empty without a denominator."""

    o: Tensor
    den: Tensor
    kv_at: Tensor  # (n, b, h, E, D): causal, before each block and at the end; else before and after
    k_sum_at: Tensor  # (n, b, h, D)

    def rows(self, batch: slice, heads: slice) -> Saved:
        o, den = (x if x.numel() == 0 else x[batch, heads] for x in (self.o, self.den))
        return Saved(o, den, self.kv_at[:, batch, heads], self.k_sum_at[:, batch, heads])


@dataclass(frozen=True)
class Gradients:
    """What the backward writes. `d_kv` and `d_k_sum` are those of the final state first, and of the past at the end."""

    grad_o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_log_decay: Tensor | None
    d_theta: ThetaGradient | None
    d_kv: Tensor  # (b, h, E, D)
    d_k_sum: Tensor  # (b, h, D)
    reach_sums: bool  # whether any gradient comes through sums of unrotated keys

    def rows(self, batch: slice, heads: slice) -> Gradients:
        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[batch, heads]

        return Gradients(
            *map(cut, (self.grad_o, self.dq, self.dk, self.dv, self.d_log_decay)),
            None if self.d_theta is None else self.d_theta.of_heads(heads),
            *map(cut, (self.d_kv, self.d_k_sum)),
            self.reach_sums,
        )
