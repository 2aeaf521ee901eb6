"""`Launch`: the Triton kernels with the sizes and options of one call; `why_not`: whether they can take it.

One causal call reads (r) and writes (w), in tensors as large as q, and in states, one for each stretch of tokens:

    forward                                        backward
    write_angles     w one small table             query_gradients   r q, k, v, o, ∂o, states   w ∂q, ∂den
    stretch_sums     r k, v            w states    stretch_sums      r q, ∂o, ∂den              w states
    scan             r states          w states    scan              r states                   w states
    attend           r q, k, v, states w o, den    key_gradients     r q, k, v, ∂o, ∂den, states w ∂k, ∂v
                                                   finish_log_decay  r, w numbers a token, if it is trained

The backward reads the states of the forward; where θ is trained it sums them again, with exact products. Heads with
more values than `most_columns` split them among programs, whose gradients of features `finish_features` adds. A
decoding step is one launch.

The first call with new sizes or options compiles its kernels and times a few configurations: before the capture of a
CUDA graph, call forward and backward once.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from linrope.ops.call import Call
from linrope.utils import kept_tensors

INSTALLED = find_spec("triton") is not None  # asked here: a compiled graph cannot ask on every release of PyTorch
MAX_WIDTH = 256
"""The largest D and E."""
SHORTEST, LONGEST_WITH_DECAY = 256, 512
"""Tokens from one state to the next: see `stretch_of`."""
PROGRAMS = 256
"""About two for each multiprocessor of a large GPU."""
SCAN_BLOCK = 512
"""Entries of a state of one program of a scan."""
ANGLE_BLOCK = 4
"""Rows of a table of angles of one program."""
CHUNK = 16
"""Tokens of a chunk, unless autotuning finds others faster: that of `configurations.py`."""
LOCAL, STEP = 64, 16
"""Of the table of angles: see `primitives.py`."""
PIPELINED = 4
"""Stretches ahead of which a scan reads."""
TILE = 32
"""Pairs of dimensions of one tile. Its products have no 64 rows, as WGMMA would need, which compilers got wrong."""


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors: TRITON_INTERPRET=1 in the environment."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not(call: Call) -> str | None:
    """The reason why the kernels cannot take a call, for a message; None if they can."""
    q = call.q
    width = call.v.shape[-1] + (call.normalize == "rotary")  # whose denominator is one more value column
    if not INSTALLED:
        return "Triton is not installed: pip install triton"
    if q.device.type != "cuda" and not interpreted():
        return f"the tensors are on {q.device.type}, it needs CUDA (or, slowly, TRITON_INTERPRET=1)"
    if torch.version.hip is not None:
        return "it is made for NVIDIA GPUs"
    if q.dtype == torch.float64 and not interpreted():
        return "the tensors are float64, it takes float32, bfloat16 and float16"
    if max(q.shape[-1], width) > MAX_WIDTH:
        return f"q has {q.shape[-1]} features and v {width} values, it takes at most {MAX_WIDTH}"
    if q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) < (8, 0):
        return f"{torch.cuda.get_device_name(q.device)} is older than compute capability 8.0, which it needs"
    return None


@functools.cache
def all_kernels() -> Any:
    """The module of kernels, which needs Triton."""
    from linrope.ops.triton_kernel import kernels  # only here: Triton is optional

    return kernels


@dataclass(frozen=True)
class Chosen:
    """What a check decides in place of the sizes and of autotuning: tokens from one state to the next, and what stands
    in for the module of kernels."""

    stretch: int
    kernels: Any


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def stretch_of(rows: int, length: int, width: int, decay: bool) -> int:
    """The number of tokens between two states, for B·H rows.

    Each state is written and read a few times; with 16 tokens for each value, all of that is about an eighth of reading
    and writing q, k, v and o. Stretches are shorter if there would be too few programs to fill a GPU, and with decay,
    whose gradient is a sum over a stretch that loses digits.
    """
    longest = max(1024, min(2048, 16 * _power_of_two(width)))
    stretch = min(longest, LONGEST_WITH_DECAY) if decay else longest
    while stretch > SHORTEST and rows * length < PROGRAMS * stretch:
        stretch //= 2
    return stretch


def most_columns(features: int, low: bool) -> int:
    """Columns of a state that fit into the registers of one program."""
    whole = 2 * TILE * cdiv(features, 2 * TILE)
    return max(16, min(128, _power_of_two((16_384 if low else 8_192) // whole + 1) // 2))


def addressable(x: Tensor) -> Tensor:
    """x, or a copy if its strides are too large for the 32-bit offsets within a chunk."""
    far = LOCAL * abs(x.stride(2)) + x.shape[3] * abs(x.stride(3))
    return x if far < 2**31 else x.contiguous()


class Launch:
    """The kernels, with the sizes and options of one call. `exact`: no bfloat16 in the products."""

    def __init__(self, call: Call, exact: bool = False, chosen: Chosen | None = None):
        import triton.language as tl

        self.call = call
        q = call.q
        self.batch, self.heads, _, self.features = q.shape
        self.width = call.v.shape[-1]
        low = q.dtype == call.v.dtype == torch.bfloat16 and not exact
        acc = tl.float64 if call.dtype == torch.float64 else tl.float32
        self.decay, self.documents = call.log_decay is not None, call.documents is not None
        self.weighted = self.decay or self.documents
        self.e_block = max(16, min(_power_of_two(self.width), most_columns(self.features, low)))
        self.e_blocks = cdiv(self.width, self.e_block)
        longest = max(q.shape[2], call.k.shape[2])
        if chosen is None:
            chosen = Chosen(stretch_of(self.batch * self.heads, longest, self.width, self.decay), all_kernels())
        self.stretch, self.kernels = chosen.stretch, chosen.kernels
        self.rotated = 0 if call.theta is None else 2 * call.theta.shape[-1]
        self.heads_of_theta = 1 if call.theta is None or call.theta.ndim == 1 else self.heads
        pairs = cdiv(self.features, 2)
        tile = TILE if pairs > 16 else 16
        self.features_of = {"D": self.features, "R": self.rotated, "SIGNED": call.signed, "PHI": call.feature_map}
        self.features_of |= {"P": tile, "TILES": cdiv(pairs, tile), "INTERLEAVED": call.interleaved}
        self.sizes = {"E": self.width, "BLOCK_E": self.e_block, "STRETCH": self.stretch}
        self.products = {"LOW": tl.bfloat16 if low else acc, "ACC": acc}
        self.products |= {"PRECISION": self._precision(exact), "EMULATED": low and interpreted()}
        self.acc = acc

    def _precision(self, exact: bool) -> str:
        """Products of float32 are three products of TF32, with the digits of float32, unless PyTorch allows TF32. TF32
        has all of float16's digits. Exact products of bfloat16 inputs take three products too."""
        dtype = self.call.q.dtype
        if dtype == torch.float64:
            return "ieee"
        if dtype == torch.bfloat16:
            return "tf32x3" if exact else "tf32"
        allowed = dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32"
        return "tf32" if allowed else "tf32x3"

    def empty(self, *shape: int) -> Tensor:
        """In the dtype of sums."""
        return torch.empty(shape, dtype=self.call.dtype, device=self.call.q.device)

    def lengths(self, x: Tensor) -> tuple[int, int]:
        """Tokens and stretches of x."""
        return x.shape[2], cdiv(x.shape[2], self.stretch)

    def empty_states(self, x: Tensor) -> Tensor:
        """For the states before each stretch of x and after the last."""
        return self.empty(self.batch * self.heads, self.lengths(x)[1] + 1, self.features * (self.width + 1))

    def empty_state(self) -> tuple[Tensor, Tensor]:
        """For kv and k_sum."""
        sums = self.batch, self.heads, self.features
        return self.empty(*sums, self.width), self.empty(*sums)

    def split(self, state: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """kv (B, H, D, E) and k_sum (B, H, D) of one of the states, as views."""
        kv, k_sum = state[:, slot].split((self.features * self.width, self.features), dim=-1)
        rows = self.batch, self.heads, self.features
        return kv.unflatten(-1, rows[2:] + (self.width,)).unflatten(0, rows[:2]), k_sum.unflatten(0, rows[:2])

    @functools.cached_property
    def angles(self) -> Tensor | None:
        """Rotations within a chunk, of chunks in a stretch and of each stretch's start, cosines then sines."""
        if self.call.theta is None:
            return None
        within = LOCAL + self.stretch // STEP
        rows = within + max(self.lengths(self.call.q)[1], self.lengths(self.call.k)[1])
        start, of_theta = self.call.start, kept_tensors.key_of(self.call.theta)
        if of_theta is None:
            return self._write_angles(rows)
        key = "angles", of_theta, self.call.dtype, start, rows, self.stretch
        return kept_tensors.keep(key, self.call.q.device, functools.partial(self._write_angles, rows))

    def _write_angles(self, rows: int) -> Tensor:
        angles = self.empty(2, self.heads_of_theta, rows, self.rotated // 2)
        theta, sizes = self.call.theta.contiguous(), {"STRETCH": self.stretch, "BLOCK": ANGLE_BLOCK}
        pairs = _power_of_two(self.rotated // 2)
        self.kernels.write_angles[(self.heads_of_theta * cdiv(rows, ANGLE_BLOCK),)](
            theta, angles, self.call.start, rows, angles[0].numel(), R=self.rotated, P=pairs, **sizes
        )
        return angles

    @property
    def sines(self) -> int:
        """Where the sines begin in the table of angles."""
        return 0 if self.angles is None else self.angles[0].numel()

    @property
    def decay_strides(self) -> tuple[int, int, int]:
        return (0, 0, 0) if self.call.log_decay is None else self.call.log_decay.stride()

    @property
    def heads_of_decay(self) -> int:
        return self.heads if self.decay else 1

    def bucket(self, x: Tensor) -> int:
        """The size of a call in powers of two: autotuning chooses for each."""
        return (self.batch * self.heads * self.lengths(x)[1]).bit_length()

    @property
    def flags(self) -> dict[str, bool]:
        """What all kernels that march through pairs are compiled for."""
        call = self.call
        masked = call.key_mask is not None
        flags = {"CAUSAL": call.causal, "PLAIN": call.plain, "DECAY": self.decay}
        return flags | {"DOCUMENTS": self.documents, "MASKED": masked}

    def states(self, x, u, first, den=None, d_den=None, later=False) -> tuple[Tensor, Tensor, Tensor]:
        """The state before each stretch and after the last, and the last one's kv and k_sum. With `later`, their
        gradients from the end, and those of the first.

        Args:
            x, u: keys and values; or queries and ∂o, with `den` and `d_den` if there is a denominator.
            first: kv (B, H, D, E) and k_sum (B, H, D) to begin with, or None for 0.
        """
        call, (length, n) = self.call, self.lengths(x)
        x, u = addressable(x), addressable(u)
        out = self.empty_states(x)
        between = self.empty(self.batch, self.heads_of_decay, n) if self.weighted else None
        mask = None if later else call.key_mask
        flags = {"LATER": later, "PLAIN": call.plain, "DECAY": self.decay, "DOCUMENTS": self.documents}
        flags["MASKED"] = mask is not None
        tensors = x, u, den, d_den, out, between, self.angles, call.log_decay, call.documents, mask
        numbers = self.heads, length, n, *x.stride(), *u.stride(), *self.decay_strides, self.sines
        self.kernels.stretch_sums[(self.batch * self.heads * n * self.e_blocks,)](
            *tensors, *numbers, self.heads_of_theta, self.heads_of_decay, self.bucket(x),
            **self.features_of, **self.sizes, **flags, **self.products,
        )  # fmt: skip
        return out, *self.scan(out, first, between, later)

    def scan(self, state: Tensor, first, between: Tensor | None, later: bool) -> tuple[Tensor, Tensor]:
        """From what each stretch adds to the states, in place. Returns the last one's kv and k_sum."""
        n, whole = state.shape[1] - 1, state.shape[2]
        last_kv, last_k_sum = self.empty_state()
        first_kv, first_k_sum = (None if x is None else x.contiguous() for x in first)
        given = {"GIVEN_KV": first_kv is not None, "GIVEN_SUM": first_k_sum is not None}
        sizes = {"KV": self.features * self.width, "X": whole, "SCAN_BLOCK": SCAN_BLOCK, "ACC": self.acc}
        self.kernels.scan[(self.batch * self.heads * cdiv(whole, SCAN_BLOCK),)](
            state, first_kv, first_k_sum, last_kv, last_k_sum, between, self.heads, n, self.heads_of_decay,
            LATER=later, WEIGHTED=self.weighted, PIPELINED=PIPELINED, **given, **sizes,
        )  # fmt: skip
        return last_kv, last_k_sum

    def attend(self, state: Tensor, o: Tensor, den: Tensor) -> None:
        """Write o, and den if there is one."""
        call, (length, n) = self.call, self.lengths(self.call.q)
        q, k, v = map(addressable, (call.q, call.k, call.v))
        tensors = q, k, v, o, den, state, self.angles, call.log_decay, call.documents, call.key_mask
        slots = state.shape[1] - 1
        numbers = call.eps, self.heads, length, slots, slots
        strides = (*q.stride(), *k.stride(), *v.stride(), *self.decay_strides)
        self.kernels.attend[(self.batch * self.heads * n * self.e_blocks,)](
            *tensors, *numbers, *strides, self.sines, self.heads_of_theta, self.bucket(q),
            **self.features_of, **self.sizes, **self.flags, **self.products,
        )  # fmt: skip

    def gradients(self, grad_o, state, den, d_den, o=None, d_v=None, d_theta=None, d_running=None, sums=False):
        """∂q, and ∂den into `d_den`; or, with `d_v` to write to, ∂k. The latter reads the states' gradients.

        Args:
            o: the output, for ∂q.
            d_theta, d_running: what `query_gradients` and `key_gradients` write; None if it is not needed.
            sums: whether the sums of features have a gradient.
        """
        call, of_keys = self.call, d_v is not None
        x = call.k if of_keys else call.q
        length, n = self.lengths(x)
        q, k, v, grad_o = map(addressable, (call.q, call.k, call.v, grad_o))
        partial = self.e_blocks > 1
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        parts = self.empty(self.e_blocks, *x.shape) if partial else out
        own = (grad_o, den, d_den, parts, d_v) if of_keys else (grad_o, o, den, d_den, parts)
        tensors = q, k, v, *own, state, self.angles, call.log_decay, call.documents, call.key_mask, d_theta, d_running
        slots = state.shape[1] - 1
        numbers = self.heads, length, slots, 0 if of_keys else slots
        strides = (*q.stride(), *k.stride(), *v.stride(), *grad_o.stride(), *self.decay_strides)
        given = {"PARTIAL": partial, "D_THETA": d_theta is not None, "D_DECAY": d_running is not None}
        given |= {"SUMS": sums} if of_keys else {}
        launched = self.kernels.key_gradients if of_keys else self.kernels.query_gradients
        launched[(self.batch * self.heads * n * self.e_blocks,)](
            *tensors, *numbers, *strides, self.sines, self.heads_of_theta, self.bucket(x),
            **self.features_of, **self.sizes, **self.flags, **given, **self.products,
        )  # fmt: skip
        if partial:
            self.finish_features(k if of_keys else q, parts, out, call.key_mask if of_keys else None)
        return out

    def finish_features(self, x: Tensor, parts: Tensor, out: Tensor, mask: Tensor | None) -> None:
        """∂x from the gradients of its features, of which each block of values has its part."""
        constants = self.features_of | {"MASKED": mask is not None, "ACC": self.acc, "CHUNK": 32}
        length = x.shape[2]
        self.kernels.finish_features[(self.batch * self.heads * cdiv(length, 32),)](
            x, parts, out, mask, self.heads, length, len(parts), parts[0].numel(), *x.stride(), **constants
        )

    def finish_log_decay(self, of_queries: Tensor, of_keys: Tensor, state: Tensor, d_state: Tensor) -> Tensor:
        """∂log_decay (B, H, T)."""
        out = torch.empty_like(of_queries[0])
        length, n = self.lengths(self.call.q)
        sizes = {"STRETCH": self.stretch, "SCAN_BLOCK": SCAN_BLOCK, "ACC": self.acc}
        numbers = length, n, state.shape[2], len(of_queries), of_queries[0].numel()
        self.kernels.finish_log_decay[(self.batch * self.heads * n,)](
            of_queries, of_keys, out, state, d_state, *numbers, **sizes
        )
        return out.to(self.call.log_decay.dtype)

    def one_token(self, kv: Tensor, k_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """o, and the new kv and k_sum, of a decoding step."""
        call = self.call
        kv, k_sum = kv.contiguous(), k_sum.contiguous()
        new_kv, new_k_sum = torch.empty_like(kv), torch.empty_like(k_sum)
        o = torch.empty((*call.q.shape[:3], self.width), dtype=call.v.dtype, device=call.v.device)
        e_block = min(32, max(16, _power_of_two(self.width)))
        log_decay, theta = (None if x is None else x.contiguous() for x in (call.log_decay, call.theta))
        tensors = call.q, call.k, call.v, o, kv, k_sum, new_kv, new_k_sum, log_decay, theta, call.key_mask
        flags = {"PLAIN": call.plain, "DECAY": self.decay, "MASKED": call.key_mask is not None}
        flags["ON_DEVICE"] = call.position is not None
        position = call.start if call.position is None else call.position
        sizes = self.features_of | {"E": self.width, "BLOCK_E": e_block, "ACC": self.acc}
        sizes["P"] = _power_of_two(sizes.pop("TILES") * sizes["P"])
        strides = (x.stride(d) for x in (call.q, call.k, call.v) for d in (0, 1, 3))
        self.kernels.decode[(self.batch * self.heads * cdiv(self.width, e_block),)](
            *tensors, position, call.eps, self.heads, *strides, self.heads_of_theta, **sizes, **flags
        )
        return o, new_kv, new_k_sum
