"""The "cpu" backend: one compiled pass over each head, linear in the length. `registration.py` makes operators from it.

Here PyTorch's tensors become the record that the library reads; the mathematics stands in `source/`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from linrope.ops.call import Call
from linrope.ops.cpu_kernel.library import DTYPES, Products, Record, Tokens, library, why_none
from linrope.ops.theta_gradient import ThetaGradient
from linrope.ops.torch_kernel.memory import Pool, empty
from linrope.rotary import unit_rotations

KEEPS_STATES = True
"""`forward` returns the states that `backward` needs: those before each block and at the end."""
CHUNK, BLOCK = 64, 256
"""Tokens of a chunk and of a block, as in `source/call.h`."""
MAX_FEATURES = 256
LONG = 32_768
"""With decay, longer calls keep the sums over their chunks in double: the gradient of log_decay is a difference of two
such sums. In float32 it would be off by 6e-6 at 262,144 tokens."""
KEPT_CHUNKS = 1024
"""Chunks of the longest call whose rotations are kept: of longer ones they take little of the time, and much memory."""
SIZES = attrgetter("batch", "heads", "queries", "keys", "features", "width", "causal", "threads", "exact")
"""What the sizes of the workspace depend on."""
FEATURE_MAPS = ("elu1", "relu", "exp", "identity", "softmax")
TAKES_NO_PAST = False
"""`forward` is given zeros where there is no past."""


def why_not(call: Call) -> str | None:
    """The reason why the kernel cannot take a call, for a message; None if it can."""
    if call.q.device.type != "cpu":
        return f"the tensors are on {call.q.device.type}, it needs them on the CPU"
    if call.q.dtype not in DTYPES:
        return f"the tensors are {str(call.q.dtype).removeprefix('torch.')}, it takes float32, bfloat16 and float16"
    if call.q.shape[-1] > MAX_FEATURES:
        return f"q has {call.q.shape[-1]} features, it takes at most {MAX_FEATURES}"
    return why_none()


def outputs(call: Call, kv: Tensor, k_sum: Tensor, make: Callable = torch.empty) -> tuple[Tensor, ...]:
    """Empty tensors for what `forward` returns."""
    batch, heads, length, _ = call.q.shape
    n_states = (length + BLOCK - 1) // BLOCK + 1 if call.causal else 2
    o = make((batch, heads, length, call.v.shape[-1]), dtype=call.v.dtype, device=call.v.device)
    den = kv.new_empty((batch, heads, length) if call.plain else (0,))
    at = kv.new_empty(n_states, *kv.shape), k_sum.new_empty(n_states, *k_sum.shape)
    return o, den, *at, kv.new_empty(kv.shape), k_sum.new_empty(k_sum.shape)


def forward(call: Call, kv: Tensor, k_sum: Tensor) -> tuple[Tensor, ...]:
    """Returns o, den, kv_at, k_sum_at, kv, k_sum: the output, what the backward needs, and the final state."""
    o, den, kv_at, k_sum_at, kv_out, k_sum_out = outputs(call, kv, k_sum, empty)
    filled = Filled(call)
    filled.tokens(o=o)
    filled.contiguous(kv=kv, k_sum=k_sum, kv_out=kv_out, k_sum_out=k_sum_out, kv_at=kv_at, k_sum_at=k_sum_at, den=den)
    filled.with_workspace()
    library().functions.linrope_forward(ctypes.byref(filled.record))
    return o, den, kv_at, k_sum_at, kv_out, k_sum_out


def backward(call: Call, saved, grad_o, grad_kv, grad_k_sum, d_decay: bool, d_theta: bool) -> tuple[Tensor, ...]:
    """Returns the gradients of q, k, v, log_decay, theta, kv and k_sum; those not needed are empty.

    saved: `forward`'s first four tensors. grad_kv and grad_k_sum: None for 0.
    """
    o, den, kv_at, k_sum_at = saved
    dq, dk, dv = (empty(x.shape, dtype=x.dtype, device=x.device) for x in (call.q, call.k, call.v))
    d_kv, d_k_sum = torch.empty_like(kv_at[0]), torch.empty_like(k_sum_at[0])
    filled = Filled(call)
    filled.tokens(o=o, grad_o=grad_o, dq=dq, dk=dk, dv=dv)
    filled.contiguous(kv_out=d_kv, k_sum_out=d_k_sum, kv_at=kv_at, k_sum_at=k_sum_at, den=den)
    filled.contiguous(kv=grad_kv, k_sum=grad_k_sum)
    nothing = call.q.new_empty(0)
    d_log_decay, d_theta_out, shares = nothing, nothing.clone(), None
    if d_decay:
        d_log_decay = torch.empty(call.q.shape[:3], dtype=torch.float32)
        filled.contiguous(d_log_decay=d_log_decay)
    stripes = filled.with_workspace()
    if d_theta:
        shares = torch.zeros(*call.q.shape[:2], stripes, call.theta.shape[-1], dtype=torch.float64)
        filled.contiguous(d_theta=shares)
    library().functions.linrope_backward(ctypes.byref(filled.record))
    if d_theta:
        gradient = ThetaGradient(call.theta, call.q.shape[2], call.interleaved)
        gradient.total += shares.sum(dim=(0, 1, 2) if call.theta.ndim == 1 else (0, 2))
        final = torch.zeros_like(d_kv) if grad_kv is None else grad_kv
        gradient.add_origin(call.start, (kv_at[0].mT, d_kv.mT), (kv_at[-1].mT, final.mT))
        d_theta_out = gradient.total
    return dq, dk, dv, d_log_decay, d_theta_out, d_kv, d_k_sum


def one_token(call: Call, kv: Tensor, k_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(o, kv, k_sum) of a causal call of one token, without a gradient."""
    o = call.v.new_empty(*call.q.shape[:3], call.v.shape[-1])
    kv_out, k_sum_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (kv, k_sum))
    filled = Filled(call)
    filled.tokens(o=o)
    filled.contiguous(kv=kv, k_sum=k_sum, kv_out=kv_out, k_sum_out=k_sum_out)
    filled.with_workspace()
    library().functions.linrope_one_token(ctypes.byref(filled.record))
    return o, kv_out, k_sum_out


def flops(call: Call, backward: bool, sums_needed: bool = False) -> int:
    """Multiplications and additions of the matrix products that one call computes: of pairs those below the diagonal.
    `call` has shapes in place of tensors."""
    (batch, heads, length, features), (_, _, keys, width) = call.q, call.v
    if not call.causal:
        return 2 * batch * heads * (2 if backward else 1) * (keys + length) * features * width
    whole, rest = divmod(length, CHUNK)
    pairs = (whole * CHUNK * (CHUNK + 1) + rest * (rest + 1)) // 2
    if backward:
        return 2 * batch * heads * (pairs * (3 * features + 2 * width) + 5 * length * features * width)
    return 2 * batch * heads * (pairs * (features + width) + 2 * length * features * width)


class Filled:
    """The record of one call, and the tensors that it points to."""

    def __init__(self, call: Call):
        batch, heads, queries, features = call.q.shape
        keys, width = call.v.shape[2:]
        self.tensors: list[Tensor] = []
        self.record = Record(
            batch=batch, heads=heads, queries=queries, keys=keys, features=features, width=width,
            signed_features=call.signed, dtype=DTYPES.index(call.q.dtype), value_dtype=DTYPES.index(call.v.dtype),
            eps=call.eps, feature_map=FEATURE_MAPS.index(call.feature_map), plain=call.plain, causal=call.causal,
            interleaved=call.interleaved, threads=torch.get_num_threads(), middle=queries // 2,
            exact=call.log_decay is not None and queries > LONG,
            products=library().products if call.q.dtype == call.v.dtype == torch.bfloat16 else Products.OF_FLOAT32,
            parallel_for=library().parallel_for,
        )  # fmt: skip
        self.tokens(q=call.q, k=call.k, v=call.v)
        if call.log_decay is not None:
            self.tokens(log_decay=call.log_decay.expand(batch, heads, queries)[..., None])
        self.contiguous(key_mask=call.key_mask, documents=call.documents)
        if call.theta is not None:
            self.rotations(_rotations(call, max(queries, keys)))

    def tokens(self, **tensors: Tensor) -> None:
        """(B, H, T, X), copied if the last dimension is not contiguous."""
        for name, x in tensors.items():
            if x.shape[-1] > 1 and x.stride(-1) != 1:
                x = x.contiguous()
            self.tensors.append(x)
            setattr(self.record, name, Tokens(x.data_ptr(), *x.stride()[:3]))

    def contiguous(self, **tensors: Tensor | None) -> None:
        for name, x in tensors.items():
            if x is not None:
                x = x.contiguous()
                self.tensors.append(x)
                setattr(self.record, name, x.data_ptr())

    def rotations(self, rotations: Rotations) -> None:
        local, frames = rotations.local, rotations.frames
        self.contiguous(local=local, frames=frames)
        self.record.local += local.itemsize * rotations.first * local.shape[-1]
        self.record.rotary = rotations.rotary_dim
        if local.ndim > 3:
            self.record.local_head, self.record.frames_head = local.stride(0), frames.stride(0)

    def with_workspace(self) -> int:
        """Add the workspace; returns the number of stripes that each head is computed in."""
        record, pool = self.record, Pool.on(torch.device("cpu"))

        def made() -> tuple[Tensor, Tensor, int]:
            sizes = (ctypes.c_int64 * 3)()
            library().functions.linrope_sizes(ctypes.byref(record), sizes)
            slot, parts, stripes = sizes
            workspace = pool("cpu workspace", (slot * record.threads,), torch.float32)
            return workspace, pool("cpu parts", (parts,), torch.float32), stripes

        workspace, parts, stripes = pool.keep("cpu workspace", (library().lanes, *SIZES(record)), made, most=32)
        record.workspace, record.parts = workspace.data_ptr(), parts.data_ptr()
        return stripes


@dataclass(frozen=True)
class Rotations:
    """cos and sin of rotations, for both dimensions of a pair: sin is negative for the first.

    Beyond the rotated dimensions they are 1 and 0. With one θ for each head the heads are the first axis.
    """

    local: Tensor  # (2, CHUNK, D'): of tokens within a chunk; D' is D rounded up to whole vectors
    frames: Tensor  # (chunks, 2, D'): of the first token of each chunk
    rotary_dim: int
    first: int = 0  # where in a chunk the first token stands


def _rotations(call: Call, length: int) -> Rotations:
    """The rotations of a call's tokens. Those of a sequence's start are kept, since training needs them at each step,
    and those of the chunk that decoding has come to."""
    theta, chunks, start, first = call.theta.detach(), -(-length // CHUNK), call.start, 0
    width = -(-call.q.shape[-1] // library().lanes) * library().lanes
    if length == 1:
        start, first = start - start % CHUNK, start % CHUNK

    def local() -> Tensor:
        return _expanded(unit_rotations(torch.arange(CHUNK), theta), call.interleaved, width, stack=-3)

    def frames() -> Tensor:
        starts = start + CHUNK * torch.arange(chunks)
        return _expanded(unit_rotations(starts, theta), call.interleaved, width, stack=-2)

    rotary_dim = 2 * theta.shape[-1]
    if call.theta.requires_grad:
        return Rotations(local(), frames(), rotary_dim, first)
    pool = Pool.on(theta.device)
    key = (theta.numpy().tobytes(), theta.shape, call.interleaved, width)
    kept = pool.keep("cpu local", key, local, most=32)
    if (start != 0 and length > 1) or chunks > KEPT_CHUNKS:
        return Rotations(kept, frames(), rotary_dim)
    return Rotations(kept, pool.keep("cpu frames", (*key, chunks, start), frames, most=32), rotary_dim, first)


def _expanded(rotations: Tensor, interleaved: bool, width: int, stack: int) -> Tensor:
    """cos and sin (..., n, width) of rotations (..., n, R/2), stacked along a new axis."""
    real, imag = rotations.real.to(torch.float32), rotations.imag.to(torch.float32)
    cos, sin = real.new_ones(*real.shape[:-1], width), real.new_zeros(*real.shape[:-1], width)
    half = real.shape[-1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    cos[..., first], cos[..., second], sin[..., first], sin[..., second] = real, real, -imag, imag
    return torch.stack((cos, sin), dim=stack)
