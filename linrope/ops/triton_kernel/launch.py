"""The CUDA backend: launches of the kernels in `triton_kernels.py`, and what they cover.

One causal call reads (r) and writes (w), in tensors as large as q, and in states, one for each stretch of tokens:

    forward                                        backward
    write_angles   w two small tables              write_angles, write_weights, as forward
    write_weights  r log_decay, w 4 numbers a      write_d_den        r ∂o, o
                   token; where something is       stretch_sums       r k, v                  w states
                   forgotten                       scan               r states                w states
    stretch_sums   r k, v            w states      attend             r q, k, v, ∂o, states   w ∂q
    scan           r states          w states      stretch_sums       r q, ∂o                 w states
    attend         r q, k, v, states w o           scan               r states                w states
                                                   attend             r q, k, v, ∂o, states   w ∂k, ∂v
                                                   finish_log_decay   r, w numbers a token, where it is trained

The states are summed again on the way back, and their gradient then takes their place in memory (a trained `log_decay`
needs both). Heads wider than 64 take ∂k and ∂v in two launches. A step of decoding is one launch.

The first call of a kind compiles its kernels and times a few configurations: inside a CUDA graph call forward and
backward once before the capture.
"""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from linrope.ops.call import Options
from linrope.ops.theta_gradient import ThetaGradient

INSTALLED = find_spec("triton") is not None  # asked here: a compiled graph cannot ask on every release of PyTorch


MAX_WIDTH = 256
"""The largest D and E."""


SHORTEST, LONGEST = 128, 512
"""Tokens from one state to the next: see `stretch_of`."""


PROGRAMS = 256
"""About two for each multiprocessor of a large GPU."""


BLOCK = 64
"""Tokens that one program takes; half as many where its tiles would not fit into registers."""


KEEPS_STATES = False
"""What `forward` returns of them is empty: `backward` starts again from the past."""


SPAN = 1024
"""Numbers of a state that one program of a scan takes."""


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors: TRITON_INTERPRET=1 in the environment."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not(q: Tensor, v: Tensor, normalize: str = "plain") -> str | None:
    """What keeps a call from the kernels, for people to read; None where nothing does."""
    width = v.shape[-1] + (normalize == "rotary")  # whose denominator is one more value
    if not INSTALLED:
        return "Triton is not installed: pip install triton"
    if q.device.type != "cuda" and not interpreted():
        return f"the tensors are on {q.device.type}, and it runs on CUDA (with TRITON_INTERPRET=1 anywhere, slowly)"
    if torch.version.hip is not None:
        return "it is made for NVIDIA GPUs"
    if q.dtype == torch.float64 and not interpreted():
        return "the tensors are float64, and it takes float32, bfloat16 and float16"
    if max(q.shape[-1], width) > MAX_WIDTH:
        return f"q has {q.shape[-1]} features and v {width} values, and it takes at most {MAX_WIDTH}"
    if q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) < (8, 0):
        return f"{torch.cuda.get_device_name(q.device)} is older than what it is made for, compute capability 8.0"
    return None


@functools.cache
def _kernels() -> Any:
    from linrope.ops.triton_kernel import kernels as triton_kernels  # Triton is needed from here on, and not before

    return triton_kernels


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def stretch_of(rows: int, length: int, width: int, itemsize: int) -> int:
    """How many tokens lie between two states, for B·H rows of so many tokens.

    A state costs memory and its traffic, a longer stretch costs products, as all its pairs are formed. So many tokens
    that the states take half of q's memory keep both below what reading and writing q, k, v and o takes; fewer where
    there would not be programs enough to fill a GPU.
    """
    stretch = min(max(_power_of_two(8 * width // itemsize), SHORTEST), LONGEST)
    while stretch > SHORTEST and rows * length < PROGRAMS * stretch:
        stretch //= 2
    return stretch


class Launch:
    """The kernels, with the sizes and options of one call.

    Args:
        exact: keep bfloat16 out of the products.
    """

    def __init__(self, q, k, v, log_decay, theta, options: Options, exact: bool = False):
        import triton.language as tl

        self.q, self.k, self.v, self.log_decay, self.theta, self.options = q, k, v, log_decay, theta, options
        self.batch, self.heads, _, self.features = q.shape
        self.width = v.shape[-1]
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        low = q.dtype == v.dtype == torch.bfloat16 and not exact
        acc = tl.float64 if self.dtype == torch.float64 else tl.float32
        widest, limit = max(self.features, self.width), 128 if low else 64
        pairs = max(16, _power_of_two(_cdiv(self.features, 2)))
        # so that tiles stay in registers and in the 99 KiB that small GPUs give a program
        self.block = BLOCK if widest <= limit else BLOCK // 2 if widest <= 128 or low else BLOCK // 4
        self.tile = max(16, min(_power_of_two(self.width), limit))
        self.tiles = _cdiv(self.width, self.tile)
        longest = max(q.shape[2], k.shape[2])
        self.stretch = stretch_of(self.batch * self.heads, longest, self.width, q.itemsize)
        self.decay, self.documents = log_decay is not None, options.documents is not None
        self.weighted = self.decay or self.documents
        self.heads_of_weights = self.heads if self.decay else 1
        self.turned = 0 if theta is None else 2 * theta.shape[-1]
        self.heads_of_theta = 1 if theta is None or theta.ndim == 1 else self.heads
        self.shape = {"D": self.features, "R": self.turned, "P": pairs, "INTERLEAVED": options.interleaved}
        self.phi = {"SIGNED": options.signed, "PHI": options.feature_map}
        self.sizes = {"E": self.width, "E_TILE": self.tile, "STRETCH": self.stretch, "BLOCK": self.block}
        self.products = {
            "LOW": tl.bfloat16 if low else acc,
            "ACC": acc,
            "PRECISION": self._precision(exact),
            "EMULATED": low and interpreted(),
        }
        self.acc = acc

    def _precision(self, exact: bool) -> str:
        """Products of float32 are exact unless PyTorch is told otherwise; TF32 has all of float16's digits. Those of
        bfloat16 inputs that are to be exact take three products of TF32."""
        if self.q.dtype == torch.bfloat16 and exact:
            return "tf32x3"
        allowed = self.q.dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32"
        return "tf32" if allowed and self.q.dtype != torch.float64 else "ieee"

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.q.device)

    def stretches(self, x: Tensor) -> int:
        return _cdiv(x.shape[2], self.stretch)

    @functools.cached_property
    def angles(self) -> Tensor | None:
        """Turns within a stretch and of each stretch's start, cosines then sines."""
        if self.theta is None:
            return None
        rows = self.stretch + max(self.stretches(self.q), self.stretches(self.k))
        angles, block = self._empty(2, self.heads_of_theta, rows, self.turned // 2), 4
        _kernels().write_angles[(self.heads_of_theta * _cdiv(rows, block),)](
            self.theta.contiguous(),
            angles,
            self.options.start,
            rows,
            angles[0].numel(),
            R=self.turned,
            P=self.shape["P"],
            STRETCH=self.stretch,
            BLOCK=block,
        )
        return angles

    @functools.cached_property
    def _weights(self) -> tuple[Tensor | None, Tensor | None]:
        """What tokens count for, (4, B, H or 1, T), and what a stretch leaves of the past, (B, H or 1, N)."""
        if not self.weighted:
            return None, None
        length, n, heads = self.q.shape[2], self.stretches(self.q), self.heads_of_weights
        weights, between = self._empty(4, self.batch, heads, length), self._empty(self.batch, heads, n)
        _kernels().write_weights[(self.batch * heads * n,)](
            self.log_decay,
            self.options.documents,
            weights,
            between,
            heads,
            length,
            n,
            *((0, 0, 0) if self.log_decay is None else self.log_decay.stride()),
            weights[0].numel(),
            STRETCH=self.stretch,
            DECAY=self.decay,
            DOCUMENTS=self.documents,
        )
        return weights, between

    @property
    def weights(self) -> Tensor | None:
        return self._weights[0]

    @property
    def between(self) -> Tensor | None:
        return self._weights[1]

    @property
    def tables(self) -> tuple[int, ...]:
        """How far apart the sines lie from the cosines, and the kinds of weights, and how many heads have their own."""
        sines, weights = (0 if x is None else x[0].numel() for x in (self.angles, self.weights))
        return sines, self.heads_of_theta, self.heads_of_weights, weights

    def d_den(self, grad_o: Tensor, o: Tensor, den: Tensor) -> Tensor:
        """∂den (B, H, T)."""
        d_den, length = torch.empty_like(den), self.q.shape[2]
        _kernels().write_d_den[(self.batch * self.heads * _cdiv(length, BLOCK),)](
            grad_o,
            o,
            den,
            d_den,
            self.heads,
            length,
            *grad_o.stride(),
            E=self.width,
            E_TILE=self.tile,
            BLOCK=BLOCK,
            ACC=self.acc,
        )
        return d_den

    def states(self, x, u, first, den=None, d_den=None, later=False, out=None) -> tuple[Tensor, Tensor, Tensor]:
        """The state before each stretch and after the last, and the last one's kv and k_sum; `later`, the gradient of
        those from the end, and the first one's.

        Args:
            x, u: keys and values; or queries and ∂o, with `den` and `d_den` where there is a denominator.
            first: kv (B, H, D, E) and k_sum (B, H, D) to begin with, or None for 0.
            out: memory for them.
        """
        n, kv, whole = self.stretches(x), self.features * self.width, self.features * (self.width + 1)
        if out is None or out.shape[1] != n + 1:
            out = self._empty(self.batch * self.heads, n + 1, whole)
        mask = None if later else self.options.key_mask
        _kernels().stretch_sums[(self.batch * self.heads * n * self.tiles,)](
            x,
            u,
            den,
            d_den,
            out,
            self.angles,
            self.weights,
            mask,
            self.heads,
            x.shape[2],
            n,
            *x.stride(),
            *u.stride(),
            *self.tables,
            **self.shape,
            **self.phi,
            **self.sizes,
            LATER=later,
            PLAIN=self.options.plain,
            WEIGHTED=self.weighted,
            MASKED=mask is not None,
            **self.products,
            num_warps=8 if self.shape["P"] * self.tile >= 64 * 128 else 4,
            num_stages=2 if self.block == BLOCK else 1,
        )
        last_kv = self._empty(self.batch, self.heads, self.features, self.width)
        last_k_sum = self._empty(self.batch, self.heads, self.features)
        first_kv, first_k_sum = (None if x is None else x.contiguous() for x in first)
        _kernels().scan[(self.batch * self.heads * _cdiv(whole, SPAN),)](
            out,
            first_kv,
            first_k_sum,
            last_kv,
            last_k_sum,
            self.between,
            self.heads,
            n,
            self.heads_of_weights,
            KV=kv,
            X=whole,
            SPAN=SPAN,
            LATER=later,
            WEIGHTED=self.weighted,
            GIVEN_KV=first_kv is not None,
            GIVEN_SUM=first_k_sum is not None,
            ACC=self.acc,
        )
        return out, last_kv, last_k_sum

    def attend(
        self,
        own: tuple[Tensor, Tensor],
        other: tuple[Tensor, Tensor],
        state: Tensor,
        *,
        values: Tensor | None = None,
        features: Tensor | None = None,
        den: Tensor | None = None,
        d_den: Tensor | None = None,
        d_theta: Tensor | None = None,
        d_running: Tensor | None = None,
        later: bool = False,
        sums: bool = False,
    ) -> None:
        """Write values, or features, or both, of `own` (features, values) rows that look at `other` ones."""
        (x, u), (y, w) = own, other
        length, n = x.shape[2], state.shape[1] - 1
        programs = self.batch * self.heads * _cdiv(length, self.block) * (1 if features is not None else self.tiles)
        _kernels().attend[(programs,)](
            x,
            y,
            u,
            w,
            values,
            features,
            den,
            d_den,
            state,
            self.angles,
            self.weights,
            self.options.documents,
            self.options.key_mask,
            d_theta,
            d_running,
            self.options.eps,
            self.heads,
            length,
            n,
            0 if later else n,
            *x.stride(),
            *y.stride(),
            *u.stride(),
            *w.stride(),
            *self.tables,
            **self.shape,
            **self.phi,
            **self.sizes,
            LATER=later,
            VALUES=values is not None,
            FEATURES=features is not None,
            CAUSAL=self.options.causal,
            PLAIN=self.options.plain,
            SUMS=sums,
            DECAY=self.decay,
            DOCUMENTS=self.documents,
            MASKED=self.options.key_mask is not None,
            D_THETA=d_theta is not None,
            D_DECAY=d_running is not None,
            SUM_TILE=min(self.tile, 64),
            **self.products,
        )


def outputs(q, v, kv, k_sum, options: Options) -> tuple[Tensor, ...]:
    """Room for what `forward` returns. It keeps no states."""
    return *_room(q, v, kv, options), kv.new_empty(kv.shape), k_sum.new_empty(k_sum.shape)


def _room(q, v, kv, options: Options) -> tuple[Tensor, ...]:
    """For o and den, and for no states."""
    o = torch.empty((*q.shape[:3], v.shape[-1]), dtype=v.dtype, device=v.device)
    return o, kv.new_empty(q.shape[:3] if options.plain else (0,)), kv.new_empty(0), kv.new_empty(0)


def forward(q, k, v, log_decay, theta, kv, k_sum, options: Options) -> tuple[Tensor, ...]:
    """Returns o, den, two empty tensors, kv and k_sum: the output, what the backward needs, and the final state."""
    o, den, *nothing = _room(q, v, kv, options)
    launch = Launch(q, k, v, log_decay, theta, options)
    state, last_kv, last_k_sum = launch.states(k, v, (kv, k_sum))
    launch.attend((q, v), (k, v), state, values=o, den=den, sums=options.plain)
    return o, den, *nothing, last_kv, last_k_sum


def backward(
    grad_o, grad_kv, grad_k_sum, o, den, kv, k_sum, d_decay, d_theta, q, k, v, log_decay, theta, options: Options
) -> tuple[Tensor, ...]:
    """Returns the gradients of q, k, v, log_decay, theta, kv and k_sum; those not asked for are empty."""
    # ∂θ is a small difference of large sums: products of bfloat16 would cost it its digits
    launch = Launch(q, k, v, log_decay, theta, options, exact=d_theta)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    d_den = launch.d_den(grad_o, o, den) if options.plain else None
    common = {"den": den, "d_den": d_den}
    running = [launch._empty(*q.shape[:3]) if d_decay else None for _ in range(2)]
    shares = [_theta_shares(launch, x) if d_theta else None for x in (q, k)]

    state, last_kv, _ = launch.states(k, v, (kv, k_sum))
    to_queries = {"d_theta": shares[0], "d_running": running[0], "sums": options.plain}
    launch.attend((q, grad_o), (k, v), state, features=dq, **common, **to_queries)
    room = None if d_decay else state
    d_state, d_kv, d_k_sum = launch.states(q, grad_o, (grad_kv, grad_k_sum), **common, later=True, out=room)
    to_keys = {"d_theta": shares[1], "d_running": running[1], "sums": options.plain or grad_k_sum is not None}
    keys, queries = (k, v), (q, grad_o)
    if max(launch.features, launch.width) <= 64:  # the accumulators of both fit into registers
        launch.attend(keys, queries, d_state, values=dv, features=dk, later=True, **common, **to_keys)
    else:
        launch.attend(keys, queries, d_state, values=dv, later=True, **common)
        launch.attend(keys, queries, d_state, features=dk, later=True, **common, **to_keys)

    nothing = q.new_empty(0)
    d_log_decay = _finish_log_decay(launch, *running, state, d_state) if d_decay else nothing
    total = _finish_theta(launch, *shares, (kv, d_kv), (last_kv, grad_kv)) if d_theta else nothing.clone()
    return dq, dk, dv, d_log_decay, total, d_kv, d_k_sum


def _theta_shares(launch: Launch, x: Tensor) -> Tensor:
    """Room for each block's share of ∂θ."""
    return launch._empty(launch.batch, launch.heads, _cdiv(x.shape[2], launch.block), 2, launch.turned // 2)


def _finish_theta(launch: Launch, of_queries: Tensor, of_keys: Tensor, first, last) -> Tensor:
    """∂θ from the shares of all blocks, in float64 around the middle of the sequence."""
    options = launch.options
    gradient = ThetaGradient(launch.theta, launch.q.shape[2], options.interleaved)
    for share in (of_queries, of_keys):
        crosses, placed = share.to(torch.float64).unbind(dim=3)
        blocks = torch.arange(share.shape[2], device=share.device)
        starts = blocks * launch.block // launch.stretch * launch.stretch - gradient.middle
        total = placed.sum(dim=2) + (starts.to(torch.float64)[:, None] * crosses).sum(dim=2)
        gradient.total += total.sum(dim=gradient.sharing)
    d_last = torch.zeros_like(last[0]) if last[1] is None else last[1]
    gradient.add_origin(options.start, (first[0].mT, first[1].mT), (last[0].mT, d_last.mT))
    return gradient.total


def _finish_log_decay(launch: Launch, of_queries, of_keys, state: Tensor, d_state: Tensor) -> Tensor:
    """∂log_decay (B, H, T)."""
    out = torch.empty_like(of_queries)
    length, n = launch.q.shape[2], launch.stretches(launch.q)
    _kernels().finish_log_decay[(launch.batch * launch.heads * n,)](
        of_queries,
        of_keys,
        out,
        state,
        d_state,
        length,
        n,
        state.shape[2],
        STRETCH=launch.stretch,
        SPAN=SPAN,
        ACC=launch.acc,
    )
    return out.to(launch.log_decay.dtype)


def one_token(q, k, v, log_decay, theta, kv, k_sum, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """o, and the new kv and k_sum, of a step of decoding: one launch, without a gradient. The given state is not
    overwritten: it may be gone on from more than once."""
    launch = Launch(q, k, v, log_decay, theta, options)
    kv, k_sum = kv.contiguous(), k_sum.contiguous()
    new_kv, new_k_sum = torch.empty_like(kv), torch.empty_like(k_sum)
    o = torch.empty((*q.shape[:3], launch.width), dtype=v.dtype, device=v.device)
    width = launch.width
    tile = min(32, max(16, _power_of_two(width)))
    _kernels().decode[(launch.batch * launch.heads * _cdiv(width, tile),)](
        q,
        k,
        v,
        o,
        kv,
        k_sum,
        new_kv,
        new_k_sum,
        None if log_decay is None else log_decay.contiguous(),
        None if theta is None else theta.contiguous(),
        options.key_mask,
        options.start,
        options.eps,
        launch.heads,
        *(x.stride(d) for x in (q, k, v) for d in (0, 1, 3)),
        launch.heads_of_theta,
        **launch.shape,
        **launch.phi,
        E=width,
        E_TILE=tile,
        PLAIN=options.plain,
        DECAY=launch.decay,
        MASKED=options.key_mask is not None,
        ACC=launch.acc,
    )
    return o, new_kv, new_k_sum


def flops(q_shape, v_shape, options: Options, backward: bool, sums_asked: bool = False) -> int:
    """Multiplications and additions of the matrix products of one call; those of running sums, which only a decay or
    documents need, are left out. Stretches are taken to be those of bfloat16."""
    (batch, heads, length, features), (_, _, keys, width) = q_shape, v_shape
    state, pairs = features * width, 0
    if options.causal:
        stretch = stretch_of(batch * heads, length, width, itemsize=2)
        whole, rest = divmod(length, stretch)
        blocks = [stretch // BLOCK] * whole + [_cdiv(rest, BLOCK)]
        pairs = sum(n * (n + 1) // 2 for n in blocks) * BLOCK**2 * (features + width)
    products = 3 * (pairs + keys * state) + 2 * length * state if backward else pairs + (keys + length) * state
    return 2 * batch * heads * products
