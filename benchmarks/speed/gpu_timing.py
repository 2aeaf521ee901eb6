"""What is timed on a GPU: each function is the work of one process, which verifies its results before it times them."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from benchmarks.harness import memory, timing
from benchmarks.harness.timing import Alternation, Call, Several, clock
from benchmarks.speed.gpu_correctness import NOT_RUN, TOLERANCES
from benchmarks.speed.gpu_profile import profile
from benchmarks.speed.gpu_sizes import Size
from benchmarks.speed.methods import DECODE, LINEAR, Inputs, LinearDecoding, Method, call_of, gpu_forms, linear
from linrope.ops.triton_kernel.self_check import errors, first_wrong

MEASURED, WRONG, EXTRAPOLATED = "measured", "wrong", "extrapolated"
ROUNDS = 7
TURN = 0.02
"""Seconds of short calls in a row that are timed as one call."""
LONGEST_CALL = 15.0
"""Seconds: a call that would take longer is extrapolated; one of more than a tenth of them is made once."""
NEEDED = 1.15
"""Memory of a call over that of q, k, v, o and their gradients; peers rotate q and k into two tensors more."""
SHORT = 0.01
"""Seconds of a call up to which the host may be what takes them: it is timed as a CUDA graph too."""
HOST_CALLS = 20
"""Calls in a row whose launches a GPU's queue takes without a wait."""
STEPS = 200
"""Tokens in a row that are timed as one call."""
EAGER, GRAPHED = "decode, eager", "decode, CUDA graph"


@dataclass
class Timing:
    """One form of attention at one size: forward and backward, or one token."""

    method: str
    size: Size
    status: str = NOT_RUN
    detail: str = ""
    seconds: float | None = None
    seconds_q1: float | None = None
    seconds_q3: float | None = None
    host_seconds: float | None = None
    """Until a short call returns, while the GPU may still be at work: what the host does."""
    graphed_seconds: float | None = None
    """Of a replay of the call as a CUDA graph, without the host's time; None if it cannot be captured."""
    extra_memory: float | None = None
    """Peak beyond inputs, outputs and gradients, over these."""
    copy_rate: float | None = None
    """Bytes a second that a large copy reads and writes."""
    kernels: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        known = "" if self.seconds is None else f", {timing.milliseconds_text(self.seconds)} ms"
        return f"{self.method}, {self.size}: {self.status}{known}" + f" ({self.detail})" * bool(self.detail)


def predicted(points: list[Timing], method: str, size: Size, quadratic: bool) -> float | None:
    """Seconds of one call by the form's last point at a shorter length; None without one."""
    for p in reversed(points):
        same = p.method == method and replace(p.size, length=size.length) == size
        if same and p.seconds is not None and p.size.length < size.length:
            return p.seconds * (size.length / p.size.length) ** (1 + quadratic)
    return None


def time_form(method: str, size: Size, device: str = "cuda", rounds: int = ROUNDS) -> Timing:
    """Forward and backward of one form; ours is verified first, and its kernels are profiled."""
    found = Timing(method, size)
    form = gpu_forms()[method]
    if form.absent:
        return replace(found, detail=form.absent)
    needed, free = int(NEEDED * (8 + 2 * (method != LINEAR)) * size.tensor), memory.available(device)
    if needed > free:
        return replace(found, detail=f"it needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free")
    inputs = size.inputs(device)
    call = call_of(attend_of(form, size), inputs)
    call()  # compiles, and chooses
    if method == LINEAR:
        if wrong := first_wrong(errors_of_one_head(inputs, size), TOLERANCES[_precision(size)]):
            return replace(found, status=WRONG, detail=f"the last head: {wrong}")
        extra = memory.peak_of(lambda: call, device).extra - 4 * inputs.q.nbytes
        found.extra_memory = extra / (8 * inputs.q.nbytes)  # o, ∂q, ∂k, ∂v are among what the call adds
    time_call(found, call, device, rounds)
    if method == LINEAR:
        found.kernels = [asdict(one) for one in profile(call, device)]
    if found.seconds is not None and found.seconds < SHORT:
        found.host_seconds = host_seconds(call, device, rounds)
        try:
            found.graphed_seconds = graphed_seconds(call, device, rounds)
        except RuntimeError as error:
            found.detail = f"no CUDA graph: {memory.describe(error)}"
    return found


def host_seconds(call: Call, device: str, rounds: int) -> float:
    """Median seconds until a call returns, of a few in a row that wait for no result."""
    calls = Several(call, HOST_CALLS)
    return statistics.median(timing.clock(calls, device, wait=False) for _ in range(rounds)) / HOST_CALLS


def graphed_seconds(call: Call, device: str, rounds: int) -> float:
    """Seconds of a replay of the call, captured as a CUDA graph."""
    gc.collect()  # a graph of autograd that is still there belongs to another stream
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        kept = call()  # its memory is that of the replays
    replays = {"replay": Several(graph.replay, 20)}
    seconds = timing.alternate(replays, rounds, device, count=False).samples["replay"].median
    del kept
    return seconds


def attend_of(form: Method, size: Size) -> Callable:
    return partial(linear, backend="triton", decay=size.decay) if form.name == LINEAR else form.attend


def _precision(size: Size) -> str:
    return "highest" if size.dtype == "float32" else size.dtype


def errors_of_one_head(inputs: Inputs, size: Size) -> dict[str, float]:
    """Output and gradients of the last head at the full length, against the same head in float64."""
    names = ["o", "grad q", "grad k", "grad v"] + ["grad log_decay"] * size.decay

    def results(x: Inputs, backend: str) -> dict[str, torch.Tensor]:
        o, gradients = call_of(partial(linear, backend=backend, decay=size.decay), x)()
        return dict(zip(names, (o, *gradients)))

    of_head = {
        name: getattr(inputs, name).detach()[:, -1:].double().requires_grad_() for name in ("q", "k", "v", "log_decay")
    }
    alone = replace(inputs, grad=inputs.grad[:, -1:].double(), **of_head)
    found = {name: x[:, -1:] for name, x in results(inputs, "triton").items()}
    return errors(found, results(alone, "chunked"))


def time_call(found: Timing, call: Call, device: str, rounds: int) -> None:
    """Time the call and a large copy in turn; a call of seconds once."""
    seconds = clock(call, device)
    copy, copied = timing.copy(device)
    calls: dict[str, Call] = {"copy": Several(copy, 10)}
    if seconds < LONGEST_CALL / 10:
        calls["call"] = Several(call, max(1, min(50, round(TURN / seconds))))
    samples = timing.alternate(calls, rounds, device, count=False).samples
    found.status, found.copy_rate = MEASURED, copied / samples["copy"].median
    if "call" in samples:
        found.seconds, (found.seconds_q1, found.seconds_q3) = samples["call"].median, samples["call"].quartiles
    else:
        found.seconds = found.seconds_q1 = found.seconds_q3 = seconds
        found.detail = "one call"


def time_step(size: Size, graphed: bool, device: str = "cuda", rounds: int = ROUNDS) -> Timing:
    """One token after `size.length` others, eager or by a captured graph, whose output is that of the eager step."""
    found = Timing(GRAPHED if graphed else EAGER, size)
    step = LinearDecoding(size.inputs(device, DECODE), decay=size.decay, backend="triton")
    if graphed:
        step.state = replace(step.state, length=torch.tensor(size.length, device=device))
    expected, _ = step()
    call: Call = step
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, _ = step()
        graph.replay()
        if not torch.equal(o, expected):
            return replace(found, status=WRONG, detail="the replayed step differs from the eager one")
        call = graph.replay
    seconds = Alternation({"step": Several(call, STEPS)}, device, count=False).run(rounds).samples["step"]
    found.status, found.seconds, (found.seconds_q1, found.seconds_q3) = MEASURED, seconds.median, seconds.quartiles
    return found
