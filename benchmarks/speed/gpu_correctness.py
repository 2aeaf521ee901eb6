"""The CUDA backend against the definition in float64, on the GPU: one list of cases, and features of CUDA alone.

Each check runs in a process of its own, several at a time: kernels compile on all cores, a fault in one check does not
affect the others, and a check that hangs ends with the run. `torch.empty` is filled with NaN.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.memory import describe
from benchmarks.speed.methods import DTYPES
from linrope import RotaryEmbedding, State, linear_attention

PASS, FAIL, FAILED = "pass", "FAIL", "failed"
TOLERANCES = {"bfloat16": 2**-7, "float16": 2**-9, "high": 2**-9, "highest": 1e-5}
"""Largest ‖actual - exact‖ / ‖exact‖. bfloat16 rounds to 2^-9, float16 and TF32 to 2^-12 and 2^-11, and inputs of
products, products and outputs are rounded in turn; float32 ("highest") rounds to 6e-8, over sums of thousands. The
gradients, with as many products again between them and the inputs, may be twice as far off."""
LONGEST_BY_DEFINITION = 1100
"""For longer rows the exact result is that of the chunked backend, which the tests compare with the definition."""
STEP = "one token at a time"


@dataclass(frozen=True)
class Case:
    """One call, forward and backward. In float32, `precision` is that of PyTorch's matrix products."""

    dim: int = 64
    width: int = 64
    length: int = 1000
    batch: int = 2
    heads: int = 2
    dtype: str = "bfloat16"
    precision: str = "highest"
    rope: dict[str, Any] | None = field(default_factory=dict)
    decay: float = 0.0
    masked: bool = False
    packed: bool = False
    past: int | None = None
    steps: int = 0  # number of last tokens that are decoded one by one, without gradients
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.precision if self.dtype == "float32" else self.dtype]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one check: its worst tensor, and the error of it."""

    name: str
    result: str
    tolerance: float | None = None
    worst: float | None = None
    tensor: str = ""
    seconds: float = 0.0


SIGNED = {"rotary_dim": 32, "signed": True}
EVERYTHING = {"decay": 0.1, "masked": True, "packed": True, "past": 77}
OPTIONS: dict[str, dict[str, Any]] = {
    "decay": {"decay": 0.1},
    "strong decay": {"decay": 30.0, "steps": 1},  # a query sees little but its own key: its gradients cancel
    "packed": {"packed": True},
    "masked": {"masked": True},
    "no positions": {"rope": None},
    "half-split": {"rope": {"interleaved": False}},
    "half-split, part": {"rope": {"interleaved": False, "rotary_dim": 32}},
    "signed": {"rope": SIGNED},
    "normalize=none": {"options": {"normalize": "none"}},
    "normalize=rotary": {"options": {"normalize": "rotary", "eps": 1.0}, "length": 300},
    "state in and out": {"past": 1000},
    "state from far away": {"past": 10**9, "decay": 0.1},
    "noncausal": {"options": {"causal": False}},
    "noncausal, masked, state": {"options": {"causal": False}, "masked": True, "past": 77},
    "trained θ": {"rope": {"trainable": True}},
    "trained θ of each head": {"rope": {"trainable": True, "base": (10000.0, 100.0)}, "past": 77},
    "relu": {"options": {"feature_map": "relu"}},
    "exp": {"options": {"feature_map": "exp"}},
    "softmax features": {"options": {"feature_map": "softmax"}},
    "everything": EVERYTHING,
    "everything, signed": {**EVERYTHING, "rope": {**SIGNED, "interleaved": False}},
    STEP: {"steps": 8, "decay": 0.1, "past": 10**6},
    f"{STEP}, signed": {"steps": 8, "rope": SIGNED},
}


def shapes(*sizes: tuple[int, int]) -> dict[str, dict[str, Any]]:
    return {f"D={dim}, E={width}": {"dim": dim, "width": width} for dim, width in sizes}


SHAPES, RARER = shapes((64, 64), (128, 128), (256, 256)), shapes((16, 16), (80, 80), (80, 16), (64, 256))
SIZES = {f"T={length:,}": {"length": length} for length in (1, 63, 4097)} | {
    "B·H=1": {"batch": 1, "heads": 1},
    "B·H=16, T=4,097, D=128": {"heads": 8, "length": 4097, "dim": 128, "width": 128},
}
SIZES["T=1"] |= {"past": 77}  # without a past o is v, and the gradients of q and k cancel
OTHERS = {"float16": {"dtype": "float16"}} | {
    f"float32 {precision}": {"dtype": "float32", "precision": precision} for precision in ("highest", "high")
}


def all_cases(quick: bool = False) -> dict[str, Case]:
    """By name, the most used first: shapes and options in bfloat16, then in the other dtypes."""
    varied = SHAPES | OPTIONS | SIZES | RARER
    if quick:
        varied = SHAPES | {name: OPTIONS[name] for name in ("decay", "trained θ", "everything", STEP)}
    cases = {f"bfloat16, {name}": Case(**one) for name, one in varied.items()}
    in_others = SHAPES | RARER | {name: OPTIONS[name] for name in ("trained θ", "everything", STEP)}
    for dtype, kind in OTHERS.items():
        chosen = list(in_others.items())[: 1 if quick else None]
        cases |= {f"{dtype}, {name}": Case(**kind, **one) for name, one in chosen}
    return cases


def inputs_of(case: Case, device: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The differentiable inputs by name, in the case's dtype, and the other inputs."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta") if device == "meta" else torch.randn(*shape, generator=draw)

    b, h, t = case.batch, case.heads, case.length
    # values as a projection leaves them: heads inside
    tensors = {"q": random(b, h, t, case.dim), "k": random(b, h, t, case.dim), "v": random(b, t, h, case.width)}
    tensors = {name: x.to(device, DTYPES[case.dtype]) for name, x in tensors.items()}
    tensors["v"] = tensors["v"].transpose(1, 2)
    if case.decay:
        tensors["log_decay"] = (-case.decay * torch.rand(b, h, t, generator=draw)).to(device)
    if case.past is not None:
        tensors["past kv"] = random(b, h, case.dim, case.width).to(device)
        tensors["past k_sum"] = (10 * random(b, h, case.dim).abs()).to(device)
    fixed = {}
    if case.masked:
        fixed["key_mask"] = (torch.rand(b, t, generator=draw) > 0.3).to(device)
    if case.packed:
        fixed["segment_ids"] = (torch.rand(b, t, generator=draw) < 0.01).cumsum(1).to(device)
    return tensors, fixed


def outputs_of(case: Case, tensors: dict[str, Tensor], fixed: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    """Output, final state and the gradients of all inputs, in the dtype of `tensors`; without gradients for steps."""
    leaves = {name: x.detach().requires_grad_(not case.steps) for name, x in tensors.items()}
    rope = None if case.rope is None else RotaryEmbedding(case.dim, **case.rope).to(leaves["q"].device)
    past = None if case.past is None else State(leaves["past kv"], leaves["past k_sum"], case.past)
    pieces = [slice(0, case.length)]
    if case.steps and backend == "triton":
        first = case.length - case.steps
        pieces = [slice(0, first), *(slice(t, t + 1) for t in range(first, case.length))]
    parts = []
    for piece in pieces:
        q, k, v = (leaves[name][:, :, piece] for name in "qkv")
        options = {"state": past, "return_state": True, "backend": backend, **fixed, **case.options}
        if case.decay:
            options["log_decay"] = leaves["log_decay"][:, :, piece]
        o, past = linear_attention(q, k, v, rope, **options)
        parts.append(o)
    found = {"o": torch.cat(parts, dim=2), "kv": past.kv, "k_sum": past.k_sum}
    if rope is not None and rope.trainable:
        leaves["theta"] = rope.theta
    return found if case.steps else found | gradients(found, leaves)


def gradients(outputs: dict[str, Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of all leaves, for a fixed random gradient of each output."""
    draw = torch.Generator().manual_seed(1)
    given = [torch.randn(x.shape, generator=draw).to(x.device, torch.bfloat16).to(x.dtype) for x in outputs.values()]
    found = torch.autograd.grad(list(outputs.values()), list(leaves.values()), given, allow_unused=True)
    return {f"grad {name}": x for name, x in zip(leaves, found) if x is not None}


def errors(actual: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """‖actual - exact‖ / ‖exact‖ of each; for small gradients relative to a thousandth of the largest."""
    if actual.keys() != exact.keys():
        raise AssertionError(f"{sorted(actual)} where there should be {sorted(exact)}")
    norms = {name: x.detach().double().norm().item() for name, x in exact.items()}
    largest = max((norm for name, norm in norms.items() if name.startswith("grad")), default=0.0)
    scales = {name: max(norm, 1e-3 * largest * name.startswith("grad")) for name, norm in norms.items()}
    off = {name: (actual[name].detach().double() - exact[name].detach()).norm().item() for name in exact}
    return {name: off[name] / scales[name] if scales[name] else off[name] for name in exact}


def errors_of(case: Case, device: str) -> dict[str, float]:
    """The case on the CUDA backend against the same numbers in float64."""
    torch.set_float32_matmul_precision(case.precision)
    tensors, fixed = inputs_of(case, device)
    actual = outputs_of(case, tensors, fixed, "triton")
    backend = "reference" if case.length <= LONGEST_BY_DEFINITION else "chunked"
    return errors(actual, outputs_of(case, {name: x.double() for name, x in tensors.items()}, fixed, backend))


def plain_call(length: int = 1000, heads: int = 4, dtype: torch.dtype = torch.bfloat16) -> tuple[Callable, list]:
    """`linear_attention` with RoPE on the CUDA backend, and q, k, v that require gradients."""
    rope = RotaryEmbedding(64)
    torch.manual_seed(0)
    tensors = [torch.randn(1, heads, length, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    return lambda q, k, v, backend="triton": linear_attention(q, k, v, rope, backend=backend), tensors


def results_of(attend: Callable, tensors: list[Tensor]) -> dict[str, Tensor]:
    o = attend(*tensors)
    given = torch.ones_like(o)
    return {"o": o, **{f"grad {n}": x for n, x in zip("qkv", torch.autograd.grad(o, tensors, given))}}


def compiled() -> dict[str, float]:
    """torch.compile without a graph break gives the same as the call."""
    attend, tensors = plain_call()
    return errors(results_of(torch.compile(attend, fullgraph=True), tensors), results_of(attend, tensors))


def repeated() -> dict[str, float]:
    """The same call twice gives the same bits."""
    attend, tensors = plain_call(4097)
    first, second = (results_of(attend, tensors) for _ in range(2))
    return {name: float(not torch.equal(first[name], second[name])) for name in first}


def replayed(length: int) -> dict[str, float]:
    """A captured CUDA graph replayed on other numbers, to the bit: forward and backward, or a step of decoding."""
    attend, tensors = plain_call(length)

    def call() -> dict[str, Tensor]:
        return results_of(attend, tensors) if length > 1 else {"o": attend(*(x.detach() for x in tensors))}

    call()  # compiles, and chooses
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    with torch.no_grad():
        for x in tensors:
            x.normal_()
    graph.replay()
    again = call()
    return {name: float(not torch.equal(found[name], again[name])) for name in found}


def beyond_32_bits() -> dict[str, float]:
    """Tensors of more than 2^31 numbers: the last head equals the same head alone. The values have their heads inside,
    so that offsets within a head are as large."""
    attend, tensors = plain_call(2**21 + 1, heads=17)
    tensors[2] = tensors[2].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    found = {name: x[:, -1:] for name, x in results_of(attend, tensors).items()}
    alone = [x.detach()[:, -1:].double().requires_grad_() for x in tensors]
    return errors(found, results_of(partial(attend, backend="chunked"), alone))


TRAITS: dict[str, tuple[float, Callable[[], dict[str, float]]]] = {
    "beyond 2^31 numbers": (TOLERANCES["bfloat16"], beyond_32_bits),
    "torch.compile, fullgraph": (TOLERANCES["bfloat16"], compiled),
    "CUDA graph": (0.0, partial(replayed, 1000)),
    "CUDA graph, one token": (0.0, partial(replayed, 1)),
    "the same twice": (0.0, repeated),
}


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Fill `torch.empty` with NaN, so that unwritten entries show; restore the settings that a check changes."""
    precision = torch.get_float32_matmul_precision()
    torch.use_deterministic_algorithms(True, warn_only=True)  # PyTorch's own sums have no such form on CUDA
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(precision)


def check(name: str, tolerance: float, measure: Callable[[], dict[str, float]]) -> Outcome:
    """Measure, and compare with the tolerance; an error is an outcome too."""
    begin = time.perf_counter()
    try:
        with unwritten_is_nan():
            found = measure()
    except Exception as error:
        return Outcome(name, f"{FAILED}: {describe(error)}", tolerance, seconds=time.perf_counter() - begin)
    allowed = {name: tolerance * (2 if name.startswith("grad") else 1) for name in found}
    missed = {name: not error <= allowed[name] for name, error in found.items()}  # a NaN does not pass
    tensor = max(found, key=lambda name: (missed[name], math.isnan(found[name]), found[name]))
    worst = found[tensor] if math.isfinite(found[tensor]) else None  # JSON has no NaN
    result = f"{FAIL}: not finite" if worst is None else FAIL if missed[tensor] else PASS
    return Outcome(name, result, allowed[tensor], worst, tensor, time.perf_counter() - begin)


def checks(quick: bool = False) -> list[tuple[str, float, Callable[[], dict[str, float]]]]:
    """All checks on a GPU, as arguments of `check`, the slowest first."""
    cases = all_cases(quick).items()
    traits = [(name, *trait) for name, trait in TRAITS.items()]
    return traits + [(name, case.tolerance, partial(errors_of, case, "cuda")) for name, case in cases]


def _check(arguments: tuple) -> Outcome:
    return check(*arguments)


def _prepare(cache: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = cache  # autotuning beside other work must not decide later calls
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a process of a pool must not start processes
    torch.set_num_threads(1)


def in_processes(work: list[tuple], seconds: float, cache: str) -> Iterator[Outcome]:
    """Outcomes as they arrive, each from a new process, until the time is over."""
    deadline = time.monotonic() + seconds
    workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _prepare, (cache,), maxtasksperchild=1) as pool:
        answers = pool.imap_unordered(_check, work)
        for _ in work:
            try:
                yield answers.next(timeout=max(0.0, deadline - time.monotonic()))
            except multiprocessing.TimeoutError:
                return
