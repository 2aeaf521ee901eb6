"""The CUDA backend against the definition in float64, on the GPU: one list of cases, and features of CUDA alone.

The cases take the configurations of the kernels in turn, so that nothing depends on what autotuning chooses beside
other work. The sizes of production are checked with every configuration, and with the stretches that they have.
`torch.empty` is filled with NaN.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.harness.memory import describe, is_out_of_memory
from benchmarks.speed.gpu_sizes import Size, short, sizes_of_all_code
from benchmarks.speed.methods import DTYPES
from linrope import RotaryEmbedding, State, linear_attention
from linrope.ops.triton_kernel import plan, self_check
from linrope.ops.triton_kernel.self_check import errors

PASS, FAIL, FAILED = "pass", "FAIL", "failed"
NOT_RUN, FITS_NOTHING = "not run", "fits no kernel"
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
    without_mma_v3: str = ""
    """The result with DISABLE_MMA_V3=1, for a check that is wrong."""


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


def errors_of(case: Case, device: str, configuration: int = 0) -> dict[str, float]:
    """The case on the CUDA backend, with that configuration, against the same numbers in float64."""
    torch.set_float32_matmul_precision(case.precision)
    tensors, fixed = inputs_of(case, device)
    with one_configuration(configuration):
        actual = outputs_of(case, tensors, fixed, "triton")
    backend = "reference" if case.length <= LONGEST_BY_DEFINITION else "chunked"
    return errors(actual, outputs_of(case, {name: x.double() for name, x in tensors.items()}, fixed, backend))


def configurations() -> list[Any]:
    """Those that autotuning tries."""
    from linrope.ops.triton_kernel.configurations import CONFIGS  # only here: Triton is optional

    return CONFIGS


@contextmanager
def one_configuration(number: int) -> Iterator[None]:
    """The kernels with that configuration; where it does not fit, with the first that does."""
    from linrope.ops.triton_kernel.one_configuration import OneConfiguration

    every = configurations()
    kernels = OneConfiguration(every[number % len(every)])
    with mock.patch.object(plan, "all_kernels", return_value=kernels):
        yield


def errors_at(size: Size, configuration: int, device: str) -> dict[str, float]:
    """Code for that size, with that configuration, on a shorter row: its own stretch, options and layouts."""
    with mock.patch.object(plan, "stretch_of", return_value=size.stretch):
        return self_check.errors_with(size.call(device, length=1024), configurations()[configuration])


def plain_call(length: int = 1000, heads: int = 4, device: str = "cuda") -> tuple[Callable, list]:
    """`linear_attention` with RoPE on the CUDA backend, and q, k, v that require gradients."""
    rope = RotaryEmbedding(64)
    torch.manual_seed(0)
    options = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    tensors = [torch.randn(1, heads, length, 64, **options) for _ in range(3)]
    return lambda q, k, v, backend="triton": linear_attention(q, k, v, rope, backend=backend), tensors


def results_of(attend: Callable, tensors: list[Tensor]) -> dict[str, Tensor]:
    o = attend(*tensors)
    given = torch.ones_like(o)
    return {"o": o, **{f"grad {n}": x for n, x in zip("qkv", torch.autograd.grad(o, tensors, given))}}


def compiled() -> dict[str, float]:
    """torch.compile without a graph break gives the same as the call."""
    attend, tensors = plain_call()
    return errors(results_of(torch.compile(attend, fullgraph=True), tensors), results_of(attend, tensors))


def repeated(device: str = "cuda") -> dict[str, float]:
    """The same call twice gives the same bits."""
    attend, tensors = plain_call(4097, device=device)
    first, second = (results_of(attend, tensors) for _ in range(2))
    return {name: float(not torch.equal(first[name], second[name])) for name in first}


def known_launches(device: str = "cuda", length: int = 300) -> dict[str, float]:
    """Launches that go past Triton's look at each argument give the bits of new ones, wherever the tensors lie."""
    attend, tensors = plain_call(length, device=device)
    begun_late = [x.detach().new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x.detach()) for x in tensors]
    heads_inside = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    found = dict.fromkeys(("o", "grad q", "grad k", "grad v"), 0.0)
    for layout in (tensors, begun_late, heads_inside, tensors, begun_late, heads_inside):
        given = [x.detach().requires_grad_() for x in layout]
        known = results_of(attend, given)
        with mock.patch.object(plan, "_plans", {}):
            new = results_of(attend, given)
        found = {name: max(found[name], float(not torch.equal(known[name], new[name]))) for name in found}
    return found


def across_configurations(device: str = "cuda", length: int = 4097) -> dict[str, float]:
    """The results of each configuration against those of the first: 0 if they are the same to the bit."""
    attend, tensors = plain_call(length, device=device)
    found: list[dict[str, Tensor]] = []
    for number in range(len(configurations())):
        with one_configuration(number):
            found.append(results_of(attend, tensors))
    differences = [errors(one, found[0]) for one in found]
    return {name: max(one[name] for one in differences) for name in found[0]}


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


def captured(function: Callable[[], None]) -> Callable[[], None]:
    """The function, called once and then captured, as a graph to replay."""
    function()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def replayed_steps(steps: int = 100, device: str = "cuda", capture: Callable = captured) -> dict[str, float]:
    """One captured step of decoding, replayed for many tokens, to the bit: each at its own position."""
    rope, names = RotaryEmbedding(64), ("kv", "k_sum", "length")
    draw = torch.Generator(device).manual_seed(0)
    tokens = torch.randn(steps, 3, 1, 4, 1, 64, generator=draw, device=device).bfloat16()
    zeros = partial(State.zeros, 1, 4, 64, device=device)
    state = replace(zeros(), length=torch.zeros((), dtype=torch.int64, device=device))
    given, o = tokens[0].clone(), torch.empty_like(tokens[0, 0])

    @torch.no_grad()
    def step(qkv: Tensor, past: State) -> tuple[Tensor, State]:
        return linear_attention(*qkv, rope, state=past, return_state=True, backend="triton")

    def in_place() -> None:
        output, new = step(given, state)
        o.copy_(output)
        for name in names:
            getattr(state, name).copy_(getattr(new, name))

    replay = capture(in_place)
    for name in names:
        getattr(state, name).zero_()
    eager, wrong = zeros(), 0.0
    for qkv in tokens:
        given.copy_(qkv)
        replay()
        expected, eager = step(qkv, eager)
        wrong += float(not torch.equal(o, expected))
    return {"o": wrong, "kv": float(not torch.equal(state.kv, eager.kv))}


def beyond_32_bits() -> dict[str, float]:
    """Tensors of more than 2^31 numbers: the last head equals the same head alone. The values have their heads inside,
    so that offsets within a head are as large."""
    attend, tensors = plain_call(2**21 + 1, heads=17)
    tensors[2] = tensors[2].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    found = {name: x[:, -1:] for name, x in results_of(attend, tensors).items()}
    alone = [x.detach()[:, -1:].double().requires_grad_() for x in tensors]
    return errors(found, results_of(partial(attend, backend="chunked"), alone))


TWICE, SAME = "the same twice", "the same with every configuration"
TRAITS: dict[str, tuple[float, Callable[[], dict[str, float]]]] = {
    "beyond 2^31 numbers": (TOLERANCES["bfloat16"], beyond_32_bits),
    "torch.compile, fullgraph": (TOLERANCES["bfloat16"], compiled),
    "CUDA graph": (0.0, partial(replayed, 1000)),
    "CUDA graph, one token": (0.0, partial(replayed, 1)),
    "CUDA graph, 100 tokens": (0.0, replayed_steps),
    TWICE: (0.0, repeated),
    "known launches": (0.0, known_launches),
}


def with_first_configuration(measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Without autotuning, whose choices beside other work are of no use. Launches are planned, as those of users."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(plan, "_plans", {}))
        for name in plan.MARCHING:
            stack.enter_context(mock.patch.object(getattr(plan.all_kernels(), name), "configs", configurations()[:1]))
        return measure()


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
        unable = NOT_RUN if is_out_of_memory(error) else FAILED
        return Outcome(name, f"{unable}: {describe(error)}", tolerance, seconds=time.perf_counter() - begin)
    if not found:
        return Outcome(name, FITS_NOTHING, tolerance, seconds=time.perf_counter() - begin)
    allowed = {name: tolerance * (2 if name.startswith("grad") else 1) for name in found}
    missed = {name: not error <= allowed[name] for name, error in found.items()}  # a NaN does not pass
    tensor = max(found, key=lambda name: (missed[name], math.isnan(found[name]), found[name]))
    worst = found[tensor] if math.isfinite(found[tensor]) else None  # JSON has no NaN
    result = f"{FAIL}: not finite" if worst is None else FAIL if missed[tensor] else PASS
    return Outcome(name, result, allowed[tensor], worst, tensor, time.perf_counter() - begin)


Check = tuple[str, float, Callable[[], dict[str, float]]]
"""Arguments of `check`."""


def checks(quick: bool = False) -> list[Check]:
    """All checks on a GPU, the slowest first."""
    traits = [(name, tolerance, partial(with_first_configuration, one)) for name, (tolerance, one) in TRAITS.items()]
    traits.append((SAME, TOLERANCES["bfloat16"], across_configurations))
    cases = [
        (name, case.tolerance, partial(errors_of, case, "cuda", number))
        for number, (name, case) in enumerate(all_cases(quick).items())
    ]
    return traits + production_checks(quick) + cases


def production_checks(quick: bool = False, device: str = "cuda") -> list[Check]:
    """Each size that is measured, with each configuration: their kernels are compiled then, too."""
    every = configurations()
    return [
        (
            f"{size}, {short(str(config))}",
            self_check.TOLERANCES[size.torch_dtype],
            partial(errors_at, size, every.index(config), device),
        )
        for size in sizes_of_all_code(quick)
        for config in size.fitting(every)
    ]
