"""`State`, what linear attention keeps of the past, and `merge`, which joins the states of two runs of tokens.

For a run of n tokens, in the frame of its own first token, with `G` the running sum of `log_decay`:

    kv      = Σ_j e^{G_n - G_j} R_j φ(k_j) v_jᵀ          k_sum     = Σ_j e^{G_n - G_j} φ(k_j)
    length  = n                                          log_decay = G_n

`merge` is associative and `State.zeros` is its identity. Chunked kernels, streaming, decoding and splitting a
sequence over devices are all prefix sums with it. A run with a document boundary has `log_decay = -inf`: what came
before has weight e^{-inf} = 0.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from linrope.errors import InputError
from linrope.ops.checks import check_rope
from linrope.rotary import RotaryEmbedding, check_positions, rotate, unit_rotations


@dataclass(frozen=True)
class State:
    """What linear attention keeps of a run of tokens: tensors whose size does not depend on the length.

    float32, or float64 for float64 inputs.

    Attributes:
        kv: (B, H, D, E), decayed sum of rotated keys times values.
        k_sum: (B, H, D), decayed sum of unrotated keys, for the denominator.
        length: number of tokens in the run, which is the position of the next token. A whole number () on the device
            is read there, in steps of decoding by backend="triton": a captured CUDA graph then continues.
        log_decay: (B, H), the run's total log decay, at most 0; None is replaced by zeros.
        k_rotated_sum: (B, H, D), decayed sum of rotated keys; only with `normalize="rotary"`, else None.
    """

    kv: Tensor
    k_sum: Tensor
    length: int | Tensor
    log_decay: Tensor | None = None
    k_rotated_sum: Tensor | None = None

    def __post_init__(self):
        if self.log_decay is None:
            object.__setattr__(self, "log_decay", self.kv.new_zeros(self.kv.shape[:2]))

    @classmethod
    def zeros(
        cls,
        batch: int,
        n_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        normalize: str = "plain",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> State:
        """The state of no tokens: the identity of `merge`.

        Args:
            batch, n_heads, head_dim: B, H and D (the number of features, if φ changes it).
            value_dim: E; None for `head_dim`.
            normalize: as in `linear_attention`; "rotary" has one more sum.
            dtype: float32, or float64 for float64 inputs.
        """
        value_dim = head_dim if value_dim is None else value_dim
        kv = torch.zeros(batch, n_heads, head_dim, value_dim, dtype=dtype, device=device)
        k_sum = kv.new_zeros(batch, n_heads, head_dim)
        return cls(kv, k_sum, 0, k_rotated_sum=torch.zeros_like(k_sum) if normalize == "rotary" else None)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The state's tensors by name, without those that are None."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "length"}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def _map(self, change) -> State:
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors.items()})

    def detach(self) -> State:
        """The same values, detached from the graph; see `detached`."""
        return self._map(detached)

    def to(self, *args, **kwargs) -> State:
        """The state on another device or in another dtype, as `torch.Tensor.to`, but float32 at least."""
        return self._map(lambda tensor: moved(tensor, args, kwargs, least=torch.float32))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def moved(x: Tensor, args: tuple, kwargs: dict[str, Any], least: torch.dtype | None = None) -> Tensor:
    """`x.to(*args, **kwargs)`, with the dtype `least` at least; integers and booleans keep their own."""
    target = torch.empty(0, dtype=x.dtype, device=x.device).to(*args, **kwargs)
    dtype = target.dtype if least is None else torch.promote_types(target.dtype, least)
    how = {name: kwargs[name] for name in ("copy", "non_blocking") if name in kwargs}
    return x.to(target.device, dtype if x.is_floating_point() else x.dtype, **how)


def detached(x: Tensor) -> Tensor:
    """The same values without a graph; a copy of what `torch.inference_mode` made, which no gradient could pass."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not x.is_inference():
        return x.detach()
    return x.clone()


def merge(left: State, right: State, rope: RotaryEmbedding | None = None) -> State:
    """The state of the tokens of `left` followed by those of `right`.

        State(e^{g} left.kv + R_{left.length} right.kv,  e^{g} left.k_sum + right.k_sum,  lengths and log_decays added)

    with g = right.log_decay. Associative and differentiable; `State.zeros` is neutral on both sides.

    Args:
        left, right: states of the same shapes, dtype and device, each in the frame of its own first token.
        rope: the rotation that both were made with; None for linear attention without positions.

    Raises:
        InputError: an argument that is not a State; states of different shapes, dtypes or devices, or of different
            `normalize`; a rope of another size; a length that is not a whole number, or beyond 2^53.
    """
    _check_pair(left, right, rope)
    decay = right.log_decay.exp()
    rotation, interleaved = None, True
    if rope is not None:
        position = torch.full((), left.length, dtype=torch.int64, device=left.kv.device)
        rotation, interleaved = unit_rotations(position, rope.frequencies(left.kv.device)), rope.interleaved
    k_rotated_sum = None
    if left.k_rotated_sum is not None:
        rotated = rotate_keys(right.k_rotated_sum[..., None], rotation, interleaved)[..., 0]
        k_rotated_sum = decay[..., None] * left.k_rotated_sum + rotated
    return State(
        kv=decay[..., None, None] * left.kv + rotate_keys(right.kv, rotation, interleaved),
        k_sum=decay[..., None] * left.k_sum + right.k_sum,
        length=left.length + right.length,
        log_decay=left.log_decay + right.log_decay,
        k_rotated_sum=k_rotated_sum,
    )


def rotate_keys(kv: Tensor, rotation: Tensor | None, interleaved: bool) -> Tensor:
    """`R kv`: rotate the D axis of kv (..., H, D, E) by one rotation, (R/2,) or (H, 1, R/2); None changes nothing."""
    return kv if rotation is None else rotate(kv.mT, rotation, interleaved).mT


def _check_pair(left: State, right: State, rope: RotaryEmbedding | None) -> None:
    for name, state in (("left", left), ("right", right)):
        if not isinstance(state, State):
            raise InputError(f"{name} is a {type(state).__name__}: pass a linrope.State.")
    check_rope(rope, *left.kv.shape[1:3])
    for name in ("kv", "k_sum", "log_decay", "k_rotated_sum"):
        a, b = getattr(left, name), getattr(right, name)
        if (a is None) != (b is None):
            raise InputError("left and right come from different normalize: only 'rotary' carries k_rotated_sum.")
        if a is not None and (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            raise InputError(
                f"left.{name} is {tuple(a.shape)} {a.dtype} on {a.device}, right.{name} {tuple(b.shape)} {b.dtype} on "
                f"{b.device}: merge takes two states of one shape, dtype and device."
            )
    check_positions("right.length", right.length, 0)
    check_positions("left.length", left.length, right.length)
