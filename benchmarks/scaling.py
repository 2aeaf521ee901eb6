"""Time of linear attention against softmax attention, both with RoPE, as the length grows.

    python -m benchmarks.scaling --lengths 512 2048 8192

Every length is run by all methods in turn, round after round in one process, so that a slow moment of the machine
falls on all; the first round is warm-up. What is shown is the median of the rounds, and the ratio of medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from linrope import RotaryEmbedding, linear_attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def linear_rope(q: Tensor, k: Tensor, v: Tensor, rope: RotaryEmbedding) -> Tensor:
    """`linear_attention` with RoPE in the numerator."""
    return linear_attention(q, k, v, rope)


def linear_rope_decay(q: Tensor, k: Tensor, v: Tensor, rope: RotaryEmbedding) -> Tensor:
    """The same with a decay for each head and token."""
    log_decay = torch.full(q.shape[:3], -0.02, device=q.device)
    return linear_attention(q, k, v, rope, log_decay=log_decay)


def softmax_rope(q: Tensor, k: Tensor, v: Tensor, rope: RotaryEmbedding) -> Tensor:
    """RoPE on q and k, then PyTorch's fused causal attention."""
    return F.scaled_dot_product_attention(rope.rotate(q), rope.rotate(k), v, is_causal=True)


METHODS = {"linear-rope": linear_rope, "linear-rope-decay": linear_rope_decay, "softmax-rope": softmax_rope}


def seconds(method: Callable, tensors: list[Tensor], rope: RotaryEmbedding, backward: bool) -> float:
    """Wall time of one call, with its backward where asked."""
    q, k, v, grad = tensors
    synchronize = torch.cuda.synchronize if q.is_cuda else lambda: None
    synchronize()
    begin = time.perf_counter()
    with torch.set_grad_enabled(backward):
        o = method(q, k, v, rope)
    if backward:
        torch.autograd.grad(o, (q, k, v), grad)
    synchronize()
    return time.perf_counter() - begin


def measure(length: int, options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of each method at one length."""
    shape = (options.batch, options.heads, length, options.head_dim)
    tensors = [torch.randn(shape, device=options.device, dtype=DTYPES[options.dtype]) for _ in range(4)]
    for tensor in tensors[:3]:
        tensor.requires_grad_()
    rope = RotaryEmbedding(options.head_dim)
    times: dict[str, list[float]] = {name: [] for name in options.methods}
    for _ in range(options.repeats + 1):
        for name in options.methods:
            times[name].append(seconds(METHODS[name], tensors, rope, options.mode == "forward+backward"))
    return {name: statistics.median(rounds[1:]) for name, rounds in times.items()}


def parse(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--mode", choices=["forward", "forward+backward"], default="forward+backward")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=7, help="rounds that count; one more is warm-up")
    options = parser.parse_args(args)
    for name in ("batch", "heads", "head_dim", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: must be at least 1")
    if min(options.lengths) < 1:
        parser.error(f"--lengths {min(options.lengths)}: a length is at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no CUDA device here; use cpu")
    return options


def main(args: list[str] | None = None) -> None:
    options = parse(args)
    console = Console()
    setting = f"B={options.batch} H={options.heads} D={options.head_dim} {options.dtype} {options.device}"
    setting += f" ({torch.get_num_threads()} threads)" if options.device == "cpu" else ""
    table = Table(title=f"{options.mode}, ms (tokens/s)\n{setting}")
    table.add_column("length", justify="right")
    for name in options.methods:
        table.add_column(name, justify="right")
    against = "softmax-rope" if {"softmax-rope", "linear-rope"} <= set(options.methods) else None
    if against:
        table.add_column("softmax / linear", justify="right")
    for length in track(options.lengths, "measuring", console=console, transient=True):
        medians = measure(length, options)
        cells = [f"{1e3 * t:.1f} ({options.batch * length / t:,.0f})" for t in medians.values()]
        ratio = [f"{medians[against] / medians['linear-rope']:.1f}×"] if against else []
        table.add_row(f"{length:,}", *cells, *ratio)
    console.print(table)


if __name__ == "__main__":
    main()
