"""`Launch`: the Triton kernels with the sizes and options of one call; `why_not`: whether they can take it.

One causal call reads (r) and writes (w), in tensors as large as q, and in states, one for each stretch of tokens:

    forward                                        backward
    write_angles   w two small tables              write_angles, write_weights, as forward
    write_weights  r log_decay, w 4 numbers a      write_d_den        r ∂o, o
                   token; only with decay          stretch_sums       r k, v                  w states
                   or documents                    scan               r states                w states
    stretch_sums   r k, v            w states      attend             r q, k, v, ∂o, states   w ∂q
    scan           r states          w states      stretch_sums       r q, ∂o                 w states
    attend         r q, k, v, states w o           scan               r states                w states
                                                   attend             r q, k, v, ∂o, states   w ∂k, ∂v
                                                   finish_log_decay   r, w numbers a token, if it is trained

The backward sums the states again, and their gradient then takes their memory (a trained `log_decay` needs both). Heads
wider than 64 compute ∂k and ∂v in two launches. A decoding step is one launch.

The first call with new sizes or options compiles its kernels and times a few configurations: before the capture of a
CUDA graph, call forward and backward once.
"""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from linrope.ops.call import Call

INSTALLED = find_spec("triton") is not None  # asked here: a compiled graph cannot ask on every release of PyTorch
MAX_WIDTH = 256
"""The largest D and E."""
SHORTEST, LONGEST = 128, 512
"""Tokens from one state to the next: see `stretch_of`."""
PROGRAMS = 256
"""About two for each multiprocessor of a large GPU."""
BLOCK = 64
"""Tokens of one program; fewer if its matrices would not fit into registers."""
SCAN_BLOCK = 1024
"""Entries of a state of one program of a scan."""
ANGLE_BLOCK = 4
"""Rows of a table of angles of one program."""


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
def _kernels() -> Any:
    from linrope.ops.triton_kernel import kernels  # only here: Triton is optional

    return kernels


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def stretch_of(rows: int, length: int, width: int, itemsize: int) -> int:
    """The number of tokens between two states, for B·H rows.

    A state costs memory and its traffic. A longer stretch costs products, since all its pairs are computed. The states
    take half of q's memory, which keeps both costs below that of reading and writing q, k, v and o. Stretches are
    shorter if there would be too few programs to fill a GPU.
    """
    stretch = min(max(_power_of_two(8 * width // itemsize), SHORTEST), LONGEST)
    while stretch > SHORTEST and rows * length < PROGRAMS * stretch:
        stretch //= 2
    return stretch


class Launch:
    """The kernels, with the sizes and options of one call. `exact`: no bfloat16 in the products."""

    def __init__(self, call: Call, exact: bool = False):
        import triton.language as tl

        self.call = call
        q = call.q
        self.batch, self.heads, _, self.features = q.shape
        self.width = call.v.shape[-1]
        low = q.dtype == call.v.dtype == torch.bfloat16 and not exact
        self.acc = tl.float64 if call.dtype == torch.float64 else tl.float32
        widest, limit = max(self.features, self.width), 128 if low else 64
        # so that matrices stay in registers and in the 99 KiB that small GPUs give a program
        self.block = BLOCK if widest <= limit else BLOCK // 2 if widest <= 128 or low else BLOCK // 4
        self.e_block = max(16, min(_power_of_two(self.width), limit))
        self.e_blocks = cdiv(self.width, self.e_block)
        longest = max(q.shape[2], call.k.shape[2])
        self.stretch = stretch_of(self.batch * self.heads, longest, self.width, q.itemsize)
        self.decay, self.documents = call.log_decay is not None, call.documents is not None
        self.weighted = self.decay or self.documents
        self.heads_of_weights = self.heads if self.decay else 1
        self.rotated = 0 if call.theta is None else 2 * call.theta.shape[-1]
        self.heads_of_theta = 1 if call.theta is None or call.theta.ndim == 1 else self.heads
        pairs = max(16, _power_of_two(cdiv(self.features, 2)))
        self.features_of = {"D": self.features, "R": self.rotated, "P": pairs, "SIGNED": call.signed}
        self.features_of |= {"PHI": call.feature_map, "INTERLEAVED": call.interleaved}
        self.sizes = {"E": self.width, "BLOCK_E": self.e_block, "STRETCH": self.stretch, "BLOCK": self.block}
        self.products = {"LOW": tl.bfloat16 if low else self.acc, "ACC": self.acc}
        self.products |= {"PRECISION": self._precision(exact), "EMULATED": low and interpreted()}

    def _precision(self, exact: bool) -> str:
        """Products of float32 are exact unless PyTorch allows TF32, which has all of float16's digits. Exact products
        of bfloat16 inputs take three products of TF32."""
        dtype = self.call.q.dtype
        if dtype == torch.bfloat16 and exact:
            return "tf32x3"
        allowed = dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32"
        return "tf32" if allowed and dtype != torch.float64 else "ieee"

    def empty(self, *shape: int) -> Tensor:
        """In the dtype of sums."""
        return torch.empty(shape, dtype=self.call.dtype, device=self.call.q.device)

    def lengths(self, x: Tensor) -> tuple[int, int]:
        """Tokens and stretches of x."""
        return x.shape[2], cdiv(x.shape[2], self.stretch)

    @functools.cached_property
    def angles(self) -> Tensor | None:
        """Rotations within a stretch and of each stretch's start, cosines then sines."""
        if self.call.theta is None:
            return None
        rows = self.stretch + max(self.lengths(self.call.q)[1], self.lengths(self.call.k)[1])
        angles = self.empty(2, self.heads_of_theta, rows, self.rotated // 2)
        theta, sizes = self.call.theta.contiguous(), {"STRETCH": self.stretch, "BLOCK": ANGLE_BLOCK}
        _kernels().write_angles[(self.heads_of_theta * cdiv(rows, ANGLE_BLOCK),)](
            theta, angles, self.call.start, rows, angles[0].numel(), R=self.rotated, P=self.features_of["P"], **sizes
        )
        return angles

    @functools.cached_property
    def decay_weights(self) -> tuple[Tensor | None, Tensor | None]:
        """The weights of tokens, (4, B, H or 1, T), and of what a stretch keeps of the past, (B, H or 1, N)."""
        if not self.weighted:
            return None, None
        log_decay, length, n, heads = self.call.log_decay, *self.lengths(self.call.q), self.heads_of_weights
        weights, between = self.empty(4, self.batch, heads, length), self.empty(self.batch, heads, n)
        strides = (0, 0, 0) if log_decay is None else log_decay.stride()
        tensors = log_decay, self.call.documents, weights, between
        flags = {"STRETCH": self.stretch, "DECAY": self.decay, "DOCUMENTS": self.documents}
        _kernels().write_weights[(self.batch * heads * n,)](
            *tensors, heads, length, n, *strides, weights[0].numel(), **flags
        )
        return weights, between

    @property
    def tables(self) -> tuple[int, ...]:
        """Sizes in the tables: cosines, heads with their own θ and weights, and weights of one sort."""
        sines, weights = (0 if x is None else x[0].numel() for x in (self.angles, self.decay_weights[0]))
        return sines, self.heads_of_theta, self.heads_of_weights, weights

    def d_den(self, grad_o: Tensor, o: Tensor, den: Tensor) -> Tensor:
        """∂den (B, H, T)."""
        d_den, length = torch.empty_like(den), grad_o.shape[2]
        sizes = {"E": self.width, "BLOCK_E": self.e_block, "BLOCK": BLOCK, "ACC": self.acc}
        _kernels().write_d_den[(self.batch * self.heads * cdiv(length, BLOCK),)](
            grad_o, o, den, d_den, self.heads, length, *grad_o.stride(), **sizes
        )
        return d_den

    def states(self, x, u, first, den=None, d_den=None, later=False, out=None) -> tuple[Tensor, Tensor, Tensor]:
        """The state before each stretch and after the last, and the last one's kv and k_sum. With `later`, their
        gradients from the end, and those of the first.

        Args:
            x, u: keys and values; or queries and ∂o, with `den` and `d_den` if there is a denominator.
            first: kv (B, H, D, E) and k_sum (B, H, D) to begin with, or None for 0.
            out: memory to use.
        """
        length, n = self.lengths(x)
        kv, whole = self.features * self.width, self.features * (self.width + 1)
        if out is None or out.shape[1] != n + 1:
            out = self.empty(self.batch * self.heads, n + 1, whole)
        mask = None if later else self.call.key_mask
        flags = {"LATER": later, "PLAIN": self.call.plain, "WEIGHTED": self.weighted, "MASKED": mask is not None}
        flags["num_warps"] = 8 if self.features_of["P"] * self.e_block >= 64 * 128 else 4
        flags["num_stages"] = 2 if self.block == BLOCK else 1
        tensors = x, u, den, d_den, out, self.angles, self.decay_weights[0], mask
        numbers = self.heads, length, n, *x.stride(), *u.stride(), *self.tables
        _kernels().stretch_sums[(self.batch * self.heads * n * self.e_blocks,)](
            *tensors, *numbers, **self.features_of, **self.sizes, **flags, **self.products
        )
        last_kv = self.empty(self.batch, self.heads, self.features, self.width)
        last_k_sum = self.empty(self.batch, self.heads, self.features)
        first_kv, first_k_sum = (None if x is None else x.contiguous() for x in first)
        given = {"GIVEN_KV": first_kv is not None, "GIVEN_SUM": first_k_sum is not None}
        sizes = {"KV": kv, "X": whole, "SCAN_BLOCK": SCAN_BLOCK, "ACC": self.acc}
        tensors = out, first_kv, first_k_sum, last_kv, last_k_sum, self.decay_weights[1]
        _kernels().scan[(self.batch * self.heads * cdiv(whole, SCAN_BLOCK),)](
            *tensors, self.heads, n, self.heads_of_weights, LATER=later, WEIGHTED=self.weighted, **given, **sizes
        )
        return out, last_kv, last_k_sum

    def attend(
        self, own: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], state: Tensor, *, values: Tensor | None = None,
        features: Tensor | None = None, den: Tensor | None = None, d_den: Tensor | None = None,
        d_theta: Tensor | None = None, d_running: Tensor | None = None, later: bool = False, sums: bool = False,
    ) -> None:  # fmt: skip
        """Write values, or features, or both, of the `own` (features, values) rows, which see the `other` rows."""
        (x, u), (y, w), call = own, other, self.call
        length, n = x.shape[2], state.shape[1] - 1
        programs = self.batch * self.heads * cdiv(length, self.block) * (1 if features is not None else self.e_blocks)
        tensors = x, y, u, w, values, features, den, d_den, state, self.angles, self.decay_weights[0]
        optional = call.documents, call.key_mask, d_theta, d_running
        numbers = call.eps, self.heads, length, n, 0 if later else n
        strides = (step for tensor in (x, y, u, w) for step in tensor.stride())
        outputs = {"VALUES": values is not None, "FEATURES": features is not None, "SUMS": sums, "LATER": later}
        options = {"CAUSAL": call.causal, "PLAIN": call.plain, "DECAY": self.decay, "DOCUMENTS": self.documents}
        given = {"MASKED": call.key_mask is not None, "D_THETA": d_theta is not None, "D_DECAY": d_running is not None}
        sizes = self.features_of | self.sizes | {"BLOCK_SUM": min(self.e_block, 64)}
        constants = sizes | outputs | options | given | self.products
        _kernels().attend[(programs,)](*tensors, *optional, *numbers, *strides, *self.tables, **constants)

    def finish_log_decay(self, of_queries: Tensor, of_keys: Tensor, state: Tensor, d_state: Tensor) -> Tensor:
        """∂log_decay (B, H, T)."""
        out = torch.empty_like(of_queries)
        length, n = self.lengths(self.call.q)
        sizes = {"STRETCH": self.stretch, "SCAN_BLOCK": SCAN_BLOCK, "ACC": self.acc}
        _kernels().finish_log_decay[(self.batch * self.heads * n,)](
            of_queries, of_keys, out, state, d_state, length, n, state.shape[2], **sizes
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
        sizes = self.features_of | {"E": self.width, "BLOCK_E": e_block, "ACC": self.acc}
        strides = (x.stride(d) for x in (call.q, call.k, call.v) for d in (0, 1, 3))
        _kernels().decode[(self.batch * self.heads * cdiv(self.width, e_block),)](
            *tensors, call.start, call.eps, self.heads, *strides, self.heads_of_theta, **sizes, **flags
        )
        return o, new_kv, new_k_sum
