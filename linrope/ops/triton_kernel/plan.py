"""`Plan`: what calls of equal sizes and options share, worked out once. `Site`: one of their launches.

At short lengths and in decoding a GPU waits for Python, so nothing is worked out twice: a call finds its plan by its
sizes, layouts and options, and a launch finds its compiled kernel by what differs between calls of one plan.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linrope.ops.call import Call

SHORTEST, LONGEST_WITH_DECAY = 256, 512
"""Tokens from one state to the next: see `stretch_of`."""
PROGRAMS = 256
"""About two for each multiprocessor of a large GPU."""
CHUNK = 16
"""Tokens of a chunk in the first configuration, which the models of traffic and FLOPs count."""
LONGEST_CHUNK = 64
"""The interpreter's."""
SMALL = 64 * 64
"""Entries of a state up to which two warps hold it, where products are bfloat16. In others operands take twice the
registers, and half as many are small."""
TILE, SMALL_TILE = 32, 16
"""Pairs of dimensions of one tile, of a small state and of others, at most. The latter are held by more warps, whose
products must not have 64 rows: on Hopper they would be WGMMA, which compilers got wrong."""
OPTIONS = {"enable_fp_fusion": True}
"""Of the compiler, for all kernels: a product and a sum are one instruction. Triton 3.10 makes two of them unasked."""
MARCHING = ("stretch_sums", "attend", "query_gradients", "key_gradients")
"""The kernels whose loops go through a stretch in chunks. They have configurations."""
REGISTERS = 255
"""Of a thread at most, in kernels that march through pairs: all that there are. Unasked, ptxas 13 gives some of these
kernels 168 or 32 and keeps the rest in memory."""
MOST_PLANS = 256
"""How many are kept, the latest used ones."""
_plans: dict[Hashable, Plan] = {}
"""Without a lock, since a call in a signal handler may interrupt another one: each step is one operation of the dict,
and what is lost between two is made again."""

_tuning = threading.RLock()
"""Triton's autotuner keeps the arguments of a launch on itself, so that two threads must not use it at once."""


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors: TRITON_INTERPRET=1 in the environment."""
    return os.environ.get("TRITON_INTERPRET") == "1"


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


class Grid:
    """A kernel of a stand-in: `kernel[grid](…)` calls `run` with the grid and the arguments."""

    def __init__(self, run: Callable[..., None]):
        self.run = run

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return functools.partial(self.run, grid)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest one that is at least n."""
    return 1 << (n - 1).bit_length()


def stretch_of(rows: int, length: int, width: int, decay: bool) -> int:
    """The number of tokens between two states, for B·H rows.

    Each state is written and read a few times; with 16 tokens for each value, all of that is about an eighth of reading
    and writing q, k, v and o. Stretches are shorter if there would be too few programs to fill a GPU, and with decay,
    whose gradient is a sum over a stretch that loses digits.
    """
    longest = max(1024, min(2048, 16 * power_of_two(width)))
    stretch = min(longest, LONGEST_WITH_DECAY) if decay else longest
    while stretch > SHORTEST and rows * length < PROGRAMS * stretch:
        stretch //= 2
    return stretch


def stretch_of_call(call: Call) -> int:
    """The number of tokens between two states of a call."""
    (batch, heads, queries, _), (keys, width) = call.q.shape, call.v.shape[2:]
    width += call.normalize == "rotary"  # whose denominator is one more value column
    return stretch_of(batch * heads, max(queries, keys), width, call.log_decay is not None)


def is_small(state: int, low: bool) -> bool:
    """Whether two warps hold a state of so many entries. `low`: the products are bfloat16."""
    return state <= (SMALL if low else SMALL // 2)


def most_columns(features: int, low: bool) -> int:
    """Columns of a state that fit into the registers of one program."""
    whole = 2 * TILE * cdiv(features, 2 * TILE)
    return max(16, min(128, power_of_two((16_384 if low else 8_192) // whole + 1) // 2))


def usual(call: Call) -> Chosen:
    """What a call takes if nothing else is chosen for it."""
    return Chosen(stretch_of_call(call), all_kernels())


def plan_of(call: Call, exact: bool = False) -> Plan:
    """The usual plan of a call, which is kept."""
    chosen = usual(call)
    if not isinstance(chosen.kernels, ModuleType):  # a stand-in, which a benchmark or a test will take away again
        return Plan(call, exact, chosen)
    tensors = call.q, call.k, call.v, call.log_decay, call.theta, call.key_mask, call.documents
    layouts = tuple([None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors])
    options = call.feature_map, call.normalize, call.eps, call.interleaved, call.causal, call.signed
    key = call.q.device, layouts, options, chosen.stretch, precision_of(call, exact)
    if (plan := _plans.pop(key, None)) is None:
        plan = Plan(call, exact, chosen)
        for oldest in list(_plans)[: -MOST_PLANS + 1]:
            _plans.pop(oldest, None)
    _plans[key] = plan  # the last to go
    return plan


def precision_of(call: Call, exact: bool) -> str:
    """Products of float32 are three products of TF32, with the digits of float32, unless PyTorch allows TF32. TF32 has
    all of float16's digits. Exact products of bfloat16 inputs take three products too."""
    dtype = call.q.dtype
    if dtype == torch.float64:
        return "ieee"
    if dtype == torch.bfloat16:
        return "tf32x3" if exact else "tf32"
    allowed = dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed else "tf32x3"


class Plan:
    """Sizes and options, as the kernels take them. `exact`: no bfloat16 in the products."""

    def __init__(self, call: Call, exact: bool, chosen: Chosen):
        import triton.language as tl

        q = call.q
        self.device, self.dtype = q.device, call.dtype
        self.batch, self.heads, self.queries, self.features = q.shape
        self.keys, self.width = call.v.shape[2:]
        self.decay, self.documents = call.log_decay is not None, call.documents is not None
        self.weighted = self.decay or self.documents
        self.stretch, self.kernels = chosen.stretch, chosen.kernels
        low = q.dtype == call.v.dtype == torch.bfloat16 and not exact
        self.acc = tl.float64 if call.dtype == torch.float64 else tl.float32
        self.e_block = max(16, min(power_of_two(self.width), most_columns(self.features, low)))
        self.e_blocks = cdiv(self.width, self.e_block)
        self.rotated = 0 if call.theta is None else 2 * call.theta.shape[-1]
        self.heads_of_theta = 1 if call.theta is None or call.theta.ndim == 1 else self.heads
        self.heads_of_decay = self.heads if self.decay else 1
        self.decay_strides = call.log_decay.stride() if self.decay else (0, 0, 0)
        pairs = cdiv(self.features, 2)
        wide, narrow = (max(8, min(tile, power_of_two(pairs))) for tile in (TILE, SMALL_TILE))
        tile = wide if is_small(2 * wide * cdiv(pairs, wide) * self.e_block, low) else narrow
        self.features_of = {"D": self.features, "R": self.rotated, "SIGNED": call.signed, "PHI": call.feature_map}
        self.features_of |= {"P": tile, "TILES": cdiv(pairs, tile), "INTERLEAVED": call.interleaved}
        self.sizes = {"E": self.width, "BLOCK_E": self.e_block, "STRETCH": self.stretch}
        self.products = {"LOW": tl.bfloat16 if low else self.acc, "ACC": self.acc}
        self.products |= {"PRECISION": precision_of(call, exact), "EMULATED": low and interpreted()}
        masked = call.key_mask is not None
        self.flags = {"CAUSAL": call.causal, "PLAIN": call.plain, "DECAY": self.decay}
        """What all kernels that march through pairs are compiled for."""
        self.flags |= {"DOCUMENTS": self.documents, "MASKED": masked, "maxnreg": REGISTERS}
        self.sites: dict[Hashable, Site] = {}

    def site(self, key: Hashable, describe: Callable[[], Described]) -> Site:
        """The launch of that key, by `describe` if it is the first one.

        Args:
            key: everything that its description depends on, beside the plan.
        """
        if (site := self.sites.get(key)) is None:
            site = self.sites[key] = Site(self.kernels, *describe())
        return site

    @functools.cached_property
    def rows_of_angles(self) -> int:
        """Rotations of each position in a stretch, and of each stretch's start."""
        return self.stretch + max(self.stretches(self.queries), self.stretches(self.keys))

    @functools.cached_property
    def sines(self) -> int:
        """Where the sines begin in the table of angles."""
        return self.heads_of_theta * self.rows_of_angles * (self.rotated // 2)

    def stretches(self, length: int) -> int:
        """Stretches of that many tokens."""
        return cdiv(length, self.stretch)

    def bucket(self, length: int) -> int:
        """The size of a call in powers of two, and the kind of the GPU: autotuning chooses for each."""
        major, minor = torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else (0, 0)
        return 64 * (16 * major + minor) + (self.batch * self.heads * self.stretches(length)).bit_length()

    def empty(self, *shape: int) -> Tensor:
        """In the dtype of sums."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def empty_states(self, slots: int) -> Tensor:
        """For the states before each stretch and after the last."""
        return self.empty(self.batch * self.heads, slots, self.features * (self.width + 1))

    def empty_state(self) -> tuple[Tensor, Tensor]:
        """For kv and k_sum."""
        sums = self.batch, self.heads, self.features
        return self.empty(*sums, self.width), self.empty(*sums)

    def split(self, state: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """kv (B, H, D, E) and k_sum (B, H, D) of one of the states, as views."""
        kv, k_sum = state[:, slot].split((self.features * self.width, self.features), dim=-1)
        rows = self.batch, self.heads, self.features
        return kv.unflatten(-1, rows[2:] + (self.width,)).unflatten(0, rows[:2]), k_sum.unflatten(0, rows[:2])


Described = tuple[str, int, tuple[float, ...], dict[str, Any]]
"""A kernel's name, the number of programs, its arguments after those that a call gives, and its constants."""


class Site:
    """A kernel with its grid, and with all arguments but the first ones, which each call gives.

    Triton compiles a kernel for the arguments' types, for tensors at addresses that are multiples of 16, and for
    particular values of numbers. Here the given numbers are positions, for whose values nothing is compiled, and all
    others are the same each time. So `_kind` of the given arguments decides which compiled kernel is launched, and only
    the first launch of a kind goes through Triton's autotuning and its look at each argument.
    """

    def __init__(self, kernels: Any, name: str, programs: int, rest: tuple[float, ...], constants: dict[str, Any]):
        self.kernel = getattr(kernels, name)
        self.programs, self.rest, self.constants = programs, rest, constants
        self.compiled: dict[tuple, Callable[..., None]] = {}

    def __call__(self, *given: Tensor | int | None) -> None:
        kind = tuple(map(_kind, given))
        if (launch := self.compiled.get(kind)) is not None:
            launch(*given, *self.others)
            return
        with _tuning:
            compiled = self.kernel[(self.programs,)](*given, *self.rest, **self.constants, **OPTIONS)
        if _is_compiled(compiled):
            constants = self.kernel.arg_names[len(given) + len(self.rest) :]  # in their order; they are not read again
            self.others = *self.rest, *map(self.constants.get, constants)
            self.compiled[kind] = compiled[(self.programs, 1, 1)]


def _is_compiled(kernel: Any) -> bool:
    """Whether it can be launched by itself: the interpreter returns None, asynchronous compilation a promise."""
    from triton.compiler import CompiledKernel

    return isinstance(kernel, CompiledKernel)


def _kind(x: Tensor | int | None) -> Hashable:
    """What Triton compiles for a tensor or a position."""
    if x is None:
        return None
    if isinstance(x, int):
        return x.bit_length() > 31  # one of 32 bits or of 64
    return x.dtype, x.data_ptr() % 16 == 0
