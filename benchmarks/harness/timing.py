"""Time, FLOPs, and what the machine itself can do.

Calls that are compared run in turn, round after round in one process: a slow moment of the machine affects all of them.
A turn is a few calls in a row; the first finds the caches as another call left them, and is not counted if there are
more. Results are medians of the rounds, and ratios of medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

GEMM_SIZE = 2048
"""Rows and columns of the matrix product that measures the device's rate."""
COPY_ELEMENTS = 2**25
"""float32 numbers that are copied to measure the memory's rate: 128 MiB, more than any cache."""
TURN_SECONDS, TURN_CALLS = 0.5, 5
"""A turn ends after this many seconds or calls, whichever comes first."""
Call = Callable[[], object]


@dataclass(frozen=True)
class Sample:
    """Seconds of one call in each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of the rounds lie between them."""
        if len(self.rounds) < 2:
            return self.rounds[0], self.rounds[0]
        low, _, high = statistics.quantiles(self.rounds, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """Interquartile range as a share of the median."""
        low, high = self.quartiles
        return (high - low) / self.median


@dataclass(frozen=True)
class Several:
    """Calls in a row that are timed together, because a short call alone cannot be timed well."""

    call: Call
    count: int

    def __call__(self) -> None:
        for _ in range(self.count):
            self.call()


def clock(call: Call, device: str = "cpu", wait: bool = True) -> float:
    """Wall seconds of one call; unless `wait`, until it returns, whatever the device has still to do."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    begin = time.perf_counter()
    call()
    if wait:
        synchronize()
    return time.perf_counter() - begin


def turn(call: Call, device: str = "cpu") -> float:
    """Median seconds of a few calls in a row without the first, or the seconds of one long call."""
    times = [clock(call, device)]
    while len(times) < TURN_CALLS and sum(times) < TURN_SECONDS:
        times.append(clock(call, device))
    return statistics.median(times[1:] or times)


class Alternation:
    """Calls timed in turn, round after round. The first round is warm-up; it also counts the FLOPs if `count`.

    Attributes:
        seconds: by call, the rounds so far; they stay when `run` is interrupted.
        flops: by call; 0 if nothing could be counted.
        failures: by call, the exception it raised; later rounds omit the call.
    """

    def __init__(self, calls: Mapping[str, Call], device: str = "cpu", count: bool = True):
        self.calls, self.device, self.count = dict(calls), device, count
        self.seconds: dict[str, list[float]] = {name: [] for name in self.calls}
        self.flops: dict[str, int] = {}
        self.failures: dict[str, Exception] = {}

    def run(self, rounds: int, tick: Callable[[str], None] = lambda name: None) -> Alternation:
        """Run them all `rounds` times and once more; `tick(name)` comes before each call."""
        for number in range(rounds + 1):
            for name, call in self.calls.items():
                tick(name)
                if name not in self.failures:
                    self._once(name, call, warm_up=number == 0)
        return self

    def _once(self, name: str, call: Call, warm_up: bool) -> None:
        try:
            if warm_up and self.count:
                self.flops[name] = count_flops(call)
            elif warm_up:
                call()
            else:
                self.seconds[name].append(turn(call, self.device))
        except Exception as error:
            self.failures[name] = error.with_traceback(None)  # which would keep the call's tensors alive

    @property
    def samples(self) -> dict[str, Sample]:
        """By call, of one of `Several`; without calls that failed or have no round yet."""
        found = {}
        for name, times in self.seconds.items():
            count = call.count if isinstance(call := self.calls[name], Several) else 1
            if times and name not in self.failures:
                found[name] = Sample(tuple(time / count for time in times))
        return found


def alternate(calls: Mapping[str, Call], rounds: int, device: str = "cpu", count: bool = True) -> Alternation:
    """All calls in turn.

    Raises:
        Exception: the exception of a call.
    """
    alternation = Alternation(calls, device, count).run(rounds)
    for error in alternation.failures.values():
        raise error
    return alternation


def _formulas() -> dict:
    """FLOPs of the fused attention on CPUs, counted as PyTorch counts them on GPUs: all pairs, causal or not."""
    forward = "_scaled_dot_product_flash_attention_for_cpu"
    fused = {
        forward: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        f"{forward}_backward": lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v),
    }
    known = {getattr(torch.ops.aten, name, None): formula for name, formula in fused.items()}
    return {operator: formula for operator, formula in known.items() if operator and operator not in flop_registry}


def count_flops(call: Call) -> int:
    """FLOPs of the matrix products in one call, as `torch.utils.flop_counter` counts them."""
    with FlopCounterMode(display=False, custom_mapping=_formulas()) as counter:
        call()
    return counter.get_total_flops()


def gemm(dtype: torch.dtype, device: str = "cpu") -> tuple[Call, int]:
    """A square matrix product, and its FLOPs."""
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=device).to(dtype) for _ in range(2))
    return lambda: torch.mm(a, b), 2 * GEMM_SIZE**3


def copy(device: str = "cpu") -> tuple[Call, int]:
    """A large copy, and the bytes it reads and writes."""
    source = torch.ones(COPY_ELEMENTS, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.nbytes


def gemm_rate(dtype: torch.dtype, device: str = "cpu", rounds: int = 5) -> float:
    """Measured FLOPs per second of a large matrix product."""
    product, flops = gemm(dtype, device)
    return flops / alternate({"gemm": product}, rounds, device, count=False).samples["gemm"].median


def milliseconds_text(seconds: float) -> str:
    """Seconds as text in milliseconds, so that a column of times lines up."""
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.{3 if milliseconds < 1 else 2 if milliseconds < 10 else 1}f}"
