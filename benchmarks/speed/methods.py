"""The methods that are measured: each form of attention as one call, on tensors that exist before it.

All forms take the same `Inputs`. A library that is missing, or that cannot run on the device, is a method with the
reason in `absent`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from linrope import RotaryEmbedding, State, linear_attention
from linrope.feature_maps import elu1
from linrope.ops.backends import BACKENDS
from linrope.rotary import unit_rotations

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
FORWARD, BOTH, DECODE = "forward", "forward+backward", "decode"
MODES = (FORWARD, BOTH, DECODE)
LINEAR, SOFTMAX, FLA = "linear", "RoPE + SDPA flash", "flash-linear-attention"
"""The forms that the CUDA backend is compared with, and itself."""
EPS = 1e-6
"""ε of the denominator, that of `linear_attention`."""


@dataclass(frozen=True)
class Setting:
    """One problem size; in mode "decode", `length` counts the tokens before the one that is decoded."""

    length: int
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    value_dim: int | None = None
    dtype: str = "float32"
    device: str = "cpu"
    mode: str = "forward+backward"

    @property
    def new_tokens(self) -> int:
        """Tokens that one call processes."""
        return self.batch * (1 if self.mode == "decode" else self.length)


@dataclass(frozen=True)
class Inputs:
    """Seeded random tensors of a setting: q, k (B, H, T, D), v and ∂o (B, H, T, E), log_decay (B, H, T), and RoPE."""

    setting: Setting
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    log_decay: Tensor
    rope: RotaryEmbedding

    @classmethod
    def make(cls, setting: Setting) -> Inputs:
        generator = torch.Generator(setting.device).manual_seed(0)
        length = 1 if setting.mode == "decode" else setting.length
        leaf = setting.mode == "forward+backward"

        def normal(width: int, requires_grad: bool = leaf) -> Tensor:
            shape = (setting.batch, setting.heads, length, width)
            options = {"dtype": DTYPES[setting.dtype], "device": setting.device, "generator": generator}
            return torch.randn(shape, requires_grad=requires_grad, **options)

        q, k = normal(setting.head_dim), normal(setting.head_dim)
        v = normal(setting.value_dim or setting.head_dim)
        grad = normal(v.shape[-1], requires_grad=False)
        decay_dtype = torch.promote_types(q.dtype, torch.float32)
        log_decay = torch.full(q.shape[:3], -0.02, dtype=decay_dtype, device=q.device, requires_grad=leaf)
        return cls(setting, q, k, v, grad, log_decay, RotaryEmbedding(setting.head_dim))

    def angles(self) -> tuple[Tensor, Tensor]:
        """cos and sin for the peers of the CUDA backend."""
        return angle_tables(self.q.shape[2], self.q.shape[3], self.q.dtype, self.q.device)


@dataclass(frozen=True)
class Method:
    """A form of attention, and whether its cost grows with all pairs of tokens.

    `decoding` makes a callable that decodes one token after `setting.length` others, with the bytes of its state or
    cache in `nbytes`; None if the form has no decoding step.
    """

    name: str
    attend: Callable[[Inputs], Tensor]  # to o (B, H, T, E)
    decoding: Callable[[Inputs], Callable[[], Tensor]] | None = None
    quadratic: bool = False
    quadratic_memory: bool = False
    absent: str = ""  # why it cannot run here

    def time_growth(self, mode: str) -> int:
        """n if the time of a call grows as lengthⁿ."""
        return (2 if self.quadratic else 1) - (mode == "decode")

    def memory_growth(self, mode: str) -> int:
        """n if the memory of a call (in decoding with its state or cache) grows as lengthⁿ."""
        if mode == "decode":
            return int(self.quadratic)
        return 2 if self.quadratic_memory else 1

    def prepare(self, inputs: Inputs) -> Callable[[], object]:
        """The call to be measured."""
        return self.decoding(inputs) if inputs.setting.mode == "decode" else call_of(self.attend, inputs)


def call_of(attend: Callable[[Inputs], Tensor], inputs: Inputs) -> Callable[[], object]:
    """One forward, or one forward and backward, of `attend`; it returns the tensors that a caller keeps."""

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(inputs)

    def forward_backward() -> tuple:
        o = attend(inputs)
        leaves = (inputs.q, inputs.k, inputs.v, inputs.log_decay)
        return o, torch.autograd.grad(o, leaves, inputs.grad, allow_unused=True)  # most forms have no decay

    return forward_backward if inputs.setting.mode == "forward+backward" else forward


def linear(x: Inputs, *, rope: bool = True, decay: bool = False, **options) -> Tensor:
    """`linear_attention`, with RoPE in the numerator (`rope`) and a decay for each head and token (`decay`)."""
    log_decay = x.log_decay if decay else None
    return linear_attention(x.q, x.k, x.v, x.rope if rope else None, log_decay=log_decay, **options)


def softmax(x: Inputs) -> Tensor:
    """RoPE on q and k, then PyTorch's fused causal attention."""
    return F.scaled_dot_product_attention(x.rope.rotate(x.q), x.rope.rotate(x.k), x.v, is_causal=True)


def softmax_materialised(x: Inputs) -> Tensor:
    """The same with the T × T matrix of weights in memory, which the fused form avoids."""
    scores = x.rope.rotate(x.q) @ x.rope.rotate(x.k).mT * x.q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(dim=-1) @ x.v


def whole_sequence(x: Inputs, chunk: int = 64) -> Tensor:
    """Chunked linear attention on whole tensors, differentiated by autograd: the simplest way to write it.

    T is a multiple of the chunk. The goals compare `linear_attention`, which works block by block, with it.
    """
    q, k = elu1(x.q), elu1(x.k)
    den = (q * k.cumsum(dim=2)).sum(dim=-1, keepdim=True)
    by_chunk = partial(rearrange, pattern="b h (n c) d -> b h n c d", c=chunk)
    q, k, v = by_chunk(x.rope.rotate(q)), by_chunk(x.rope.rotate(k)), by_chunk(x.v)
    own = k.mT @ v  # (B, H, N, D, E)
    before = own.cumsum(dim=2) - own
    num = (q @ k.mT).tril() @ v + q @ before
    return rearrange(num, "b h n c d -> b h (n c) d") / (den + EPS)


def fast_transformers(x: Inputs) -> Tensor:
    """The same operator around the causal product of idiap/fast-transformers."""
    from fast_transformers.causal_product import causal_dot_product

    q, k = elu1(x.q), elu1(x.k)
    den = (q * k.cumsum(dim=2)).sum(dim=-1, keepdim=True)
    return causal_dot_product(x.rope.rotate(q), x.rope.rotate(k), x.v) / (den + EPS)


# The peers of the CUDA backend.
#
# Their tables of angles exist before the call, and their elementwise operations are compiled, so that only their
# kernels and the memory traffic between them are timed. Both pair dimension m with m + D/2, as they do by default.


@lru_cache(maxsize=2)
def angle_tables(length: int, dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin (T, D/2) of the angles of `RotaryEmbedding(dim)`."""
    theta = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    rotations = unit_rotations(torch.arange(length, device=device), theta)
    return rotations.real.to(dtype), rotations.imag.to(dtype)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on pairs (m, m + D/2) of x (..., T, D)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def divide(num: Tensor, den: Tensor) -> Tensor:
    return num / (den + EPS)


@cache
def fused(function: Callable) -> Callable:
    """The function, compiled once for all lengths."""
    return torch.compile(function, dynamic=True)


def softmax_flash(x: Inputs) -> Tensor:
    """RoPE, then FlashAttention-2 of PyTorch; not cuDNN's kernel, which PyTorch may prefer on newer GPUs."""
    rotate, angles = fused(rotate_halves), x.angles()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(rotate(x.q, *angles), rotate(x.k, *angles), x.v, is_causal=True)


def fused_linear_attention(x: Inputs) -> Tensor:
    """The same operator on the chunked kernel and the rotary embedding of fla-org/flash-linear-attention.

    They take (B, T, H, D). The inputs' memory is read as such without a copy, which makes other numbers of it. The
    denominator is the same kernel's with values of 1, so that no running sum of features is written.
    """
    from fla.modules.rotary import rotary_embedding
    from fla.ops.simple_gla import chunk_simple_gla

    q, k, v = (tensor.view(tensor.shape[0], tensor.shape[2], tensor.shape[1], -1) for tensor in (x.q, x.k, x.v))
    q, k = (fused(elu1)(tensor) for tensor in (q, k))
    angles = x.angles()
    num, _ = chunk_simple_gla(rotary_embedding(q, *angles), rotary_embedding(k, *angles), v, scale=1.0)
    den, _ = chunk_simple_gla(q, k, torch.ones_like(v[..., :16], memory_format=torch.contiguous_format), scale=1.0)
    return fused(divide)(num, den[..., :1]).reshape(x.v.shape)


def gpu_forms() -> dict[str, Method]:
    """Ours on the CUDA backend, then its peers; a missing package is absent with the reason."""
    forms = (
        Method(LINEAR, partial(linear, backend="triton")),
        Method(SOFTMAX, softmax_flash, quadratic=True),
        Method(FLA, fused_linear_attention, absent=missing_fla()),
    )
    return {form.name: form for form in forms}


class LinearDecoding:
    """One token after `setting.length` others: `linear_attention` from one state to the next."""

    def __init__(self, x: Inputs, *, rope: bool = True, decay: bool = False, **options):
        dtype = torch.promote_types(x.q.dtype, torch.float32)
        zero = State.zeros(*x.q.shape[:2], x.q.shape[-1], x.v.shape[-1], dtype=dtype, device=x.q.device)
        k_sum = torch.rand_like(zero.k_sum) * x.setting.length
        self.state = State(torch.randn_like(zero.kv), k_sum, x.setting.length)
        self.nbytes = zero.nbytes
        self.inputs, self.rope = x, x.rope if rope else None
        self.options = {**options, "log_decay": x.log_decay if decay else None}

    @torch.no_grad()
    def __call__(self) -> tuple[Tensor, State]:
        x = self.inputs
        return linear_attention(x.q, x.k, x.v, self.rope, state=self.state, return_state=True, **self.options)


class SoftmaxDecoding:
    """One token after `setting.length` others: written into the cache, then attention to all of it.

    Args:
        cache: (2, B, H, at least length + 1, D) rotated keys, and values; None makes one of random numbers.
    """

    def __init__(self, x: Inputs, cache: Tensor | None = None):
        n_keys = x.setting.length + 1
        if cache is None:
            cache = torch.randn(2, *x.q.shape[:2], n_keys, x.q.shape[-1], dtype=x.q.dtype, device=x.q.device)
        self.inputs = x
        self.k, self.v = cache[:, :, :, :n_keys]
        self.nbytes = self.k.nbytes + self.v.nbytes

    @torch.no_grad()
    def __call__(self) -> Tensor:
        x, position = self.inputs, self.inputs.setting.length
        self.k[:, :, position:] = x.rope.rotate(x.k, position)
        self.v[:, :, position:] = x.v
        return F.scaled_dot_product_attention(x.rope.rotate(x.q, position), self.k, self.v)


def catalogue(device: str, dtype: str) -> dict[str, Method]:
    """Every method by name, also those that cannot run there."""
    reasons = {name: _unfit(name, device, dtype) for name in BACKENDS if name != "reference"}
    alone = list(reasons.values()).count("") == 1
    methods = [
        _linear_method("linear-rope" if alone and not absent else f"linear-rope[{name}]", absent, backend=name)
        for name, absent in reasons.items()
    ]
    fast = missing("fast_transformers.causal_product") or ("float32 only" if dtype != "float32" else "")
    flash = missing_fla() or ("needs CUDA" if device != "cuda" else "")
    methods += [
        _linear_method("linear-rope-decay", decay=True),
        _linear_method("linear", rope=False),
        Method("softmax-rope", softmax, SoftmaxDecoding, quadratic=True),
        Method("softmax-rope-materialised", softmax_materialised, quadratic=True, quadratic_memory=True),
        Method("fast-transformers", fast_transformers, absent=fast),
        Method(FLA, fused_linear_attention, absent=flash),
    ]
    return {method.name: method for method in methods}


def _linear_method(name: str, absent: str = "", **options) -> Method:
    return Method(name, partial(linear, **options), partial(LinearDecoding, **options), absent=absent)


def _unfit(backend: str, device: str, dtype: str) -> str:
    """Why a backend does not take such tensors, or "", found by the smallest call."""
    setting = Setting(2, heads=1, head_dim=2, device=device, dtype=dtype, mode="forward")
    try:
        linear(Inputs.make(setting), backend=backend)
    except Exception as error:
        return f"does not run here: {error}"
    return ""


def missing_fla() -> str:
    return missing("fla.modules.rotary") or missing("fla.ops.simple_gla")


def missing(module: str) -> str:
    """Why a module cannot be imported, or ""."""
    try:
        importlib.import_module(module)
    except ImportError:
        return "not installed"
    except Exception as error:  # a binary for another version may raise anything
        return f"cannot be imported: {error}"
    return ""
