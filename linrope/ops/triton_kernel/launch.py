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
import sys
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor

from linrope.ops.call import Call
from linrope.ops.triton_kernel.plan import (
    LONGEST_CHUNK,
    Chosen,
    Described,
    Plan,
    all_kernels,
    cdiv,
    interpreted,
    plan_of,
    power_of_two,
)
from linrope.utils import kept_tensors

INSTALLED = find_spec("triton") is not None  # asked here: a compiled graph cannot ask on every release of PyTorch
MAX_WIDTH = 256
"""The largest D and E."""
SCAN_BLOCK = 512
"""Entries of a state of one program of a scan."""
ANGLE_BLOCK = 4
"""Rows of a table of angles of one program."""
MOST_ANGLES = 32 * 2**20
"""Bytes of a table of angles that is kept: those of 16 heads with bases of their own take 4 MiB and more."""
PIPELINED = 4
"""Stretches ahead of which a scan reads."""
FINISHED = 32
"""Rows of one program of `finish_features`."""


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
    if not torch.compiler.is_compiling() and (reason := why_refused()):
        return reason
    if q.dtype == torch.float64 and not interpreted():
        return "the tensors are float64, it takes float32, bfloat16 and float16"
    if max(q.shape[-1], width) > MAX_WIDTH:
        return f"q has {q.shape[-1]} features and v {width} values, it takes at most {MAX_WIDTH}"
    if q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) < (8, 0):
        return f"{torch.cuda.get_device_name(q.device)} is older than compute capability 8.0, which it needs"
    return None


@functools.cache
def why_refused() -> str | None:
    """The reason why the installed Triton refuses the kernels, for a message; None if it takes them."""
    try:
        all_kernels()
    except Exception as error:  # a release of Triton may refuse what those before it took, with any type of error
        release = getattr(sys.modules.get("triton"), "__version__", "")
        return f"Triton {release} refuses its kernels, {type(error).__name__}: {error}"
    return None


def addressable(x: Tensor) -> Tensor:
    """x, or a copy if its strides are too large for the 32-bit offsets within a chunk."""
    far = LONGEST_CHUNK * abs(x.stride(2)) + x.shape[3] * abs(x.stride(3))
    return x if far < 2**31 else x.contiguous()


class Launch:
    """The kernels, with the tensors and the plan of one call. `exact`: no bfloat16 in the products."""

    def __init__(self, call: Call, exact: bool = False, chosen: Chosen | None = None):
        q, k, v = (addressable(x) for x in (call.q, call.k, call.v))
        if q is not call.q or k is not call.k or v is not call.v:
            call = replace(call, q=q, k=k, v=v)
        self.call = call
        self.plan = plan_of(call, exact) if chosen is None else Plan(call, exact, chosen)

    @functools.cached_property
    def angles(self) -> Tensor | None:
        """Rotations of each position in a stretch and of each stretch's start, cosines then sines."""
        call, plan = self.call, self.plan
        if call.theta is None:
            return None
        rows, of_theta = plan.rows_of_angles, kept_tensors.key_of(call.theta)
        if of_theta is None:
            return self._write_angles(rows)
        key = "angles", of_theta, plan.dtype, call.start, rows, plan.stretch
        return kept_tensors.keep(key, call.q.device, functools.partial(self._write_angles, rows), MOST_ANGLES)

    def _write_angles(self, rows: int) -> Tensor:
        plan = self.plan
        angles = plan.empty(2, plan.heads_of_theta, rows, plan.rotated // 2)

        def describe() -> Described:
            sizes = {"R": plan.rotated, "P": power_of_two(plan.rotated // 2), "STRETCH": plan.stretch}
            programs = plan.heads_of_theta * cdiv(rows, ANGLE_BLOCK)
            return "write_angles", programs, (rows, plan.sines), sizes | {"BLOCK": ANGLE_BLOCK}

        plan.site("write_angles", describe)(self.call.theta.contiguous(), angles, self.call.start)
        return angles

    def states(self, x, u, first, den=None, d_den=None, later=False) -> tuple[Tensor, Tensor, Tensor]:
        """The state before each stretch and after the last, and the last one's kv and k_sum. With `later`, their
        gradients from the end, and those of the first.

        Args:
            x, u: keys and values; or queries and ∂o, with `den` and `d_den` if there is a denominator.
            first: kv (B, H, D, E) and k_sum (B, H, D) to begin with, or None for 0.
        """
        call, plan, length = self.call, self.plan, x.shape[2]
        n = plan.stretches(length)
        out = plan.empty_states(n + 1)
        between = plan.empty(plan.batch, plan.heads_of_decay, n) if plan.weighted else None
        mask = None if later else call.key_mask

        def describe() -> Described:
            flags = {"LATER": later, "PLAIN": call.plain, "DECAY": plan.decay, "DOCUMENTS": plan.documents}
            flags["MASKED"] = mask is not None
            numbers = plan.heads, length, n, *x.stride(), *u.stride(), *plan.decay_strides, plan.sines
            numbers = *numbers, plan.heads_of_theta, plan.heads_of_decay, plan.bucket(length)
            programs = plan.batch * plan.heads * n * plan.e_blocks
            return "stretch_sums", programs, numbers, plan.features_of | plan.sizes | flags | plan.products

        site = plan.site(("stretch_sums", later, u.stride()), describe)
        site(x, u, den, d_den, out, between, self.angles, call.log_decay, call.documents, mask)
        return out, *self.scan(out, first, between, later)

    def scan(self, state: Tensor, first, between: Tensor | None, later: bool) -> tuple[Tensor, Tensor]:
        """From what each stretch adds to the states, in place. Returns the last one's kv and k_sum."""
        plan, (_, slots, whole) = self.plan, state.shape
        last_kv, last_k_sum = plan.empty_state()
        first_kv, first_k_sum = (None if x is None else x.contiguous() for x in first)

        def describe() -> Described:
            given = {"GIVEN_KV": first_kv is not None, "GIVEN_SUM": first_k_sum is not None}
            sizes = {"KV": plan.features * plan.width, "X": whole, "SCAN_BLOCK": SCAN_BLOCK, "ACC": plan.acc}
            flags = {"LATER": later, "WEIGHTED": plan.weighted, "PIPELINED": PIPELINED}
            programs = plan.batch * plan.heads * cdiv(whole, SCAN_BLOCK)
            return "scan", programs, (plan.heads, slots - 1, plan.heads_of_decay), given | sizes | flags

        site = plan.site(("scan", slots, later, first_kv is None, first_k_sum is None), describe)
        site(state, first_kv, first_k_sum, last_kv, last_k_sum, between)
        return last_kv, last_k_sum

    def attend(self, state: Tensor, o: Tensor, den: Tensor) -> None:
        """Write o, and den if there is one."""
        call, plan, slots = self.call, self.plan, state.shape[1] - 1
        q, k, v = call.q, call.k, call.v

        def describe() -> Described:
            numbers = call.eps, plan.heads, plan.queries, slots, slots
            numbers = *numbers, *q.stride(), *k.stride(), *v.stride(), *plan.decay_strides, plan.sines
            numbers = *numbers, plan.heads_of_theta, plan.bucket(plan.queries)
            programs = plan.batch * plan.heads * plan.stretches(plan.queries) * plan.e_blocks
            return "attend", programs, numbers, plan.features_of | plan.sizes | plan.flags | plan.products

        tensors = q, k, v, o, den, state, self.angles, call.log_decay, call.documents, call.key_mask
        plan.site("attend", describe)(*tensors)

    def gradients(self, grad_o, state, den, d_den, o=None, d_v=None, d_theta=None, d_running=None, sums=False):
        """∂q, and ∂den into `d_den`; or, with `d_v` to write to, ∂k. The latter reads the states' gradients.

        Args:
            o: the output, for ∂q.
            d_theta, d_running: what `query_gradients` and `key_gradients` write; None if it is not needed.
            sums: whether the sums of features have a gradient.
        """
        call, plan, of_keys = self.call, self.plan, d_v is not None
        q, k, v = call.q, call.k, call.v
        x = k if of_keys else q
        partial = plan.e_blocks > 1
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        parts = plan.empty(plan.e_blocks, *x.shape) if partial else out
        given = {"PARTIAL": partial, "D_THETA": d_theta is not None, "D_DECAY": d_running is not None}
        given |= {"SUMS": sums} if of_keys else {}

        def describe() -> Described:
            slots, length = state.shape[1] - 1, x.shape[2]
            strides = *q.stride(), *k.stride(), *v.stride(), *grad_o.stride(), *plan.decay_strides
            numbers = plan.heads, length, slots, 0 if of_keys else slots, *strides, plan.sines
            numbers = *numbers, plan.heads_of_theta, plan.bucket(length)
            programs = plan.batch * plan.heads * plan.stretches(length) * plan.e_blocks
            constants = plan.features_of | plan.sizes | plan.flags | given | plan.products
            return "key_gradients" if of_keys else "query_gradients", programs, numbers, constants

        own = (grad_o, den, d_den, parts, d_v) if of_keys else (grad_o, o, den, d_den, parts)
        tensors = q, k, v, *own, state, self.angles, call.log_decay, call.documents, call.key_mask, d_theta, d_running
        plan.site(("gradients", of_keys, grad_o.stride(), *given.values()), describe)(*tensors)
        if partial:
            self.finish_features(x, parts, out, call.key_mask if of_keys else None)
        return out

    def finish_features(self, x: Tensor, parts: Tensor, out: Tensor, mask: Tensor | None) -> None:
        """∂x from the gradients of its features, of which each block of values has its part."""
        plan, length = self.plan, x.shape[2]

        def describe() -> Described:
            constants = plan.features_of | {"MASKED": mask is not None, "ACC": plan.acc, "CHUNK": FINISHED}
            numbers = plan.heads, length, len(parts), parts[0].numel(), *x.stride()
            return "finish_features", plan.batch * plan.heads * cdiv(length, FINISHED), numbers, constants

        plan.site(("finish_features", length, x.stride(), mask is None), describe)(x, parts, out, mask)

    def finish_log_decay(self, of_queries: Tensor, of_keys: Tensor, state: Tensor, d_state: Tensor) -> Tensor:
        """∂log_decay (B, H, T)."""
        plan, out = self.plan, torch.empty_like(of_queries[0])

        def describe() -> Described:
            n, sizes = plan.stretches(plan.queries), {"STRETCH": plan.stretch, "SCAN_BLOCK": SCAN_BLOCK}
            numbers = plan.queries, n, state.shape[2], len(of_queries), of_queries[0].numel()
            return "finish_log_decay", plan.batch * plan.heads * n, numbers, sizes | {"ACC": plan.acc}

        plan.site("finish_log_decay", describe)(of_queries, of_keys, out, state, d_state)
        return out.to(self.call.log_decay.dtype)

    def one_token(self, kv: Tensor, k_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """o, and the new kv and k_sum, of a decoding step."""
        call, plan = self.call, self.plan
        kv, k_sum = kv.contiguous(), k_sum.contiguous()
        new_kv, new_k_sum = plan.empty_state()
        o = torch.empty((*call.q.shape[:3], plan.width), dtype=call.v.dtype, device=call.v.device)
        log_decay, theta = (None if x is None else x.contiguous() for x in (call.log_decay, call.theta))
        on_device = call.position is not None

        def describe() -> Described:
            e_block = min(32, max(16, power_of_two(plan.width)))
            flags = {"PLAIN": call.plain, "DECAY": plan.decay, "MASKED": call.key_mask is not None}
            sizes = plan.features_of | {"E": plan.width, "BLOCK_E": e_block, "ACC": plan.acc}
            sizes["P"] = power_of_two(sizes.pop("TILES") * sizes["P"])
            strides = (x.stride(d) for x in (call.q, call.k, call.v) for d in (0, 1, 3))
            numbers = call.eps, plan.heads, *strides, plan.heads_of_theta
            programs = plan.batch * plan.heads * cdiv(plan.width, e_block)
            return "decode", programs, numbers, sizes | flags | {"ON_DEVICE": on_device}

        position = call.position if on_device else call.start
        tensors = call.q, call.k, call.v, o, kv, k_sum, new_kv, new_k_sum, log_decay, theta, call.key_mask
        plan.site(("decode", on_device), describe)(*tensors, position)
        return o, new_kv, new_k_sum
