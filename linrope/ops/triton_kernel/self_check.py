"""The first use of a kernel on a GPU checks it: compilers have made wrong code of right kernels.

A small call with the options, sizes and layouts of the real one is computed by the kernels, with each configuration
that autotuning may choose, and by the chunked backend in float64. LINROPE_SELF_CHECK=0 in the environment turns it off.
Nothing is checked while a graph is traced or captured: call the model once before.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linrope.ops.call import Call
from linrope.ops.state import State
from linrope.ops.torch_kernel import kernel as chunked
from linrope.ops.torch_kernel.memory import Pool
from linrope.ops.triton_kernel import kernel, plan
from linrope.ops.triton_kernel.plan import Chosen, stretch_of_call
from linrope.utils import kept_tensors

TOLERANCES = {torch.bfloat16: 2**-6, torch.float16: 2**-8, torch.float32: 2**-8, torch.float64: 1e-9}
"""Largest ‖actual - exact‖ / ‖exact‖, far above rounding and far below wrong code; float32 may have products of TF32.
Gradients may be twice as far off."""
_found: dict[Hashable, str | None] = {}
_lock = threading.RLock()  # a call in a signal handler may interrupt another one


def why_wrong(call: Call, training: bool) -> str | None:
    """Why the kernels are not to be used for such calls, for a message; None if they agree, or are not checked."""
    device = call.q.device
    if device.type != "cuda" or torch.compiler.is_compiling() or type(call.q) is not Tensor or call.is_empty:
        return None
    if os.environ.get("LINROPE_SELF_CHECK") == "0" or not kept_tensors.may_keep(device):
        return None
    return checked(call, training)


def checked(call: Call, training: bool) -> str | None:
    """As `why_wrong`, wherever the kernels run; the answer is kept. Warns if there is none, for want of memory."""
    key = key_of(call, training)
    if key not in _found:
        with _lock:
            if key not in _found:
                try:
                    _found[key] = _in_a_thread(call, training)
                except Exception as error:  # of the backend that it is compared with
                    _found[key] = None
                    text = f"linrope uses its CUDA kernels unchecked: {type(error).__name__}: {error}"
                    warnings.warn(text, stacklevel=2)
    return _found[key]


def key_of(call: Call, training: bool) -> Hashable:
    """What decides which code runs, but for the alignment of addresses."""
    tensors = call.q, call.k, call.v, call.log_decay
    layouts = tuple(None if x is None else (x.dtype, *map(_special, x.stride())) for x in tensors)
    sizes = call.q.shape[3], call.v.shape[3], _special(call.q.shape[1]), stretch_of_call(call), call.q.shape[2] == 1
    given = call.key_mask is not None, call.documents is not None, call.state is not None
    options = call.feature_map, call.normalize, call.interleaved, call.causal, call.signed, call.position is not None
    positions = None if call.theta is None else call.theta.shape[-1] * 2 + call.theta.ndim
    tf32 = call.q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision
    return call.q.device, layouts, sizes, given, options, positions, tf32, _trained(call, training)


def _special(number: int) -> int:
    """What Triton knows of a number when it compiles: that it is 1, or a multiple of 16, or 0 for nothing."""
    return 1 if number == 1 else 16 * (number % 16 == 0)


def _trained(call: Call, training: bool) -> tuple[bool, bool, bool]:
    """Whether there are gradients, and those of log_decay and θ."""
    return training, *(training and x is not None and x.requires_grad for x in (call.log_decay, call.theta))


def _in_a_thread(call: Call, training: bool) -> str | None:
    """There no mode of the caller's holds: no autocast, inference mode, transform, default device or counter.

    Autograd's engine cannot be used there: in a backward its thread is the one that waits here.
    """
    stream = torch.cuda.current_stream(call.q.device) if call.q.is_cuda else None  # a thread begins on another one

    def check() -> str | None:
        with torch.cuda.stream(stream):
            return _check(call, training)

    with ThreadPoolExecutor(1) as one:
        return one.submit(check).result()


def _check(call: Call, training: bool) -> str | None:
    small = small_call(call)
    exact = _by_chunked(in_float64(small), call, training)
    if not (plan.interpreted() or _is_one_token(call, training)):
        _compile_ahead(small, call, training)
    for name, operator in _operators(call, training):
        if wrong := _wrong(operator, small, exact):
            return f"its kernels failed their check of themselves on {where(call.q.device)}, {name}: {wrong}"
    return None


def _wrong(operator: Callable[[Call], Outputs], small: Call, exact: Outputs, tries: int = 2) -> str | None:
    """What is off, or the error of the last try."""
    try:
        return first_wrong(errors(operator(small), exact), TOLERANCES[small.q.dtype])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the compilers' errors have many types
        if tries == 1:
            return f"{type(error).__name__}: {error}"
    torch.cuda.empty_cache()  # PyTorch may hold all memory, so that the driver has none for a kernel's code
    return _wrong(operator, small, exact, tries - 1)


def _compile_ahead(small: Call, like: Call, training: bool) -> None:
    """Compile the kernels that the check runs, all at once. They write nothing, and no table of angles is kept: θ of
    the small call is a tensor of its own, which is no key."""
    from linrope.ops.triton_kernel.compile_ahead import Recorder, compile_all  # only here: Triton is optional

    recorder = Recorder()
    _by_kernels(small, like, training, Chosen(stretch_of_call(like), recorder))
    compile_all(recorder.jobs, small.q.device)


def errors_with(call: Call, config: Any) -> dict[str, float]:
    """Errors of the small call, forward and backward, with one configuration; empty if it fits no kernel."""
    from linrope.ops.triton_kernel.one_configuration import OneConfiguration

    small, kernels = small_call(call), OneConfiguration(config)
    actual = _by_kernels(small, call, True, Chosen(stretch_of_call(call), kernels))
    return errors(actual, _by_chunked(in_float64(small), call, True)) if kernels.ran else {}


Outputs = dict[str, Tensor]
"""Output and final state, and the gradients, by name."""


def _operators(call: Call, training: bool) -> Iterator[tuple[str, Callable[[Call], Outputs]]]:
    """What is checked, by name: the kernel of decoding, or the others with each configuration."""
    from linrope.ops.triton_kernel.configurations import CONFIGS  # only here: Triton is optional
    from linrope.ops.triton_kernel.one_configuration import OneConfiguration

    if _is_one_token(call, training):
        yield "one token", _one_token
    else:
        for config in CONFIGS:
            chosen = Chosen(stretch_of_call(call), OneConfiguration(config))
            yield str(config), partial(_by_kernels, like=call, training=training, chosen=chosen)


def _is_one_token(call: Call, training: bool) -> bool:
    """Whether it is a decoding step, which has a kernel of its own."""
    return call.q.shape[2] == 1 and call.causal and not training


def small_call(call: Call) -> Call:
    """A call of one row with the options and layouts of `call`: one token, or one and a half stretches."""
    draw = torch.Generator().manual_seed(0)
    heads, length, stretch, device = call.q.shape[1], call.q.shape[2], stretch_of_call(call), call.q.device
    if call.theta is None or call.theta.ndim == 1:
        heads = {1: 1, 16: 16, 0: 3}[_special(heads)]
    if length > 1:
        length = stretch + stretch // 2 + (16 if length % 16 == 0 else 7)

    def random(like: Tensor) -> Tensor:
        x = torch.randn(1, heads, length, *like.shape[3:], generator=draw)
        return _laid_out(x.to(device, like.dtype), like)

    q, k, v = random(call.q), random(call.k), random(call.v)
    if call.feature_map in ("identity", "relu"):
        q, k = q.abs(), k.abs()  # a denominator near 0 would magnify all rounding
    if call.normalize == "rotary":  # as `backends.py` brings it to the kernels
        v = torch.nn.functional.pad(v.to(call.dtype), (0, 1), value=1)
    if not call.plain:
        v = v * length**-0.5  # within the range of float16
    found: dict[str, Any] = {"q": q, "k": k, "v": v, "normalize": "plain" if call.plain else "none"}
    if call.log_decay is not None:
        found["log_decay"] = _laid_out(-0.1 * random(call.log_decay).abs(), call.log_decay)
    if call.documents is not None:  # of a call that is not causal, each is a call of its own
        found["documents"] = (
            (torch.arange(length, device=device) // max(1, stretch // 3))[None] if call.causal else None
        )
    if call.key_mask is not None:
        found["key_mask"] = (torch.arange(length, device=device) % 5 != 3)[None]
    found["start"] = 0 if call.state is None else 77
    found["position"] = None if call.position is None else torch.tensor(found["start"], device=device)
    if call.state is not None:
        kv = torch.ones(1, heads, q.shape[3], v.shape[3], dtype=call.dtype, device=device)
        found["state"] = State(kv, torch.ones_like(kv[..., 0]), length=77)
    theta = None if call.theta is None else call.theta.detach().clone()
    return replace(call, **found, theta=theta)


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """x with its dimensions in memory in the order of those of `like`."""
    order = sorted(range(x.ndim), key=lambda dim: -like.stride(dim))
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.ndim)])


def in_float64(call: Call) -> Call:
    """The same numbers in float64."""
    tensors = {name: getattr(call, name).double() for name in "qkv"}
    tensors["log_decay"] = None if call.log_decay is None else call.log_decay.double()
    state = None if call.state is None else call.state.to(torch.float64)
    return replace(call, **tensors, state=state)


def _by_chunked(call: Call, like: Call, training: bool) -> Outputs:
    """By the chunked backend."""
    with Pool.held():
        return _with_gradients(chunked, call, like, training)


def _by_kernels(call: Call, like: Call, training: bool, chosen: Chosen) -> Outputs:
    """By the kernels themselves."""
    return _with_gradients(kernel, call, like, training, chosen)


def _with_gradients(backend: ModuleType, call: Call, like: Call, training: bool, *chosen: Chosen) -> Outputs:
    """By a backend's functions, without autograd, with the gradients that `like` needs."""
    none = call.state is None and backend.TAKES_NO_PAST
    past = (None, None) if none else (call.past.kv, call.past.k_sum)
    *saved, kv, k_sum = backend.forward(call, *past, *chosen)
    found = {"o": saved[0], "kv": kv, "k_sum": k_sum}
    if names := _names_of_trained(like, training):
        given = torch.full_like(saved[0], _weight_of_o(call)), torch.ones_like(kv), None
        gradients = backend.backward(call, saved, *given, "log_decay" in names, "theta" in names, *chosen)
        found |= {f"grad {name}": x for name, x in zip(TRAINABLE, gradients) if name in names}
    return found


def _one_token(call: Call) -> Outputs:
    past = call.past
    return dict(zip(("o", "kv", "k_sum"), kernel.one_token(call, past.kv, past.k_sum)))


TRAINABLE = ("q", "k", "v", "log_decay", "theta")


def _names_of_trained(like: Call, training: bool) -> list[str]:
    """The tensors that have gradients; q, k and v always do."""
    needed = (True, True, True, *_trained(like, training)[1:])
    return [name for name, one in zip(TRAINABLE, needed) if training and one]


def _weight_of_o(call: Call) -> float:
    """The gradient of each output."""
    return 1.0 if call.plain else 1 / call.q.shape[2]  # within the range of float16


def errors(actual: Outputs, exact: Outputs) -> dict[str, float]:
    """‖actual - exact‖ / ‖exact‖ of each; for small gradients relative to a thousandth of the largest."""
    if actual.keys() != exact.keys():
        raise AssertionError(f"{sorted(actual)} where there should be {sorted(exact)}")
    norms = {name: x.detach().double().norm().item() for name, x in exact.items()}
    largest = max((norm for name, norm in norms.items() if name.startswith("grad")), default=0.0)
    scales = {name: max(norm, 1e-3 * largest * name.startswith("grad")) or 1.0 for name, norm in norms.items()}
    off = {name: (actual[name].detach().double() - exact[name].detach()).norm().item() for name in exact}
    return {name: off[name] / scales[name] for name in exact}


def first_wrong(found: dict[str, float], tolerance: float) -> str | None:
    """The first tensor that is off by more than the tolerance, gradients twice as much; and by how much."""
    for name, error in found.items():
        if not error <= tolerance * (1 + name.startswith("grad")):  # a NaN does not pass
            return f"{name} is off by {error:.1e} of its norm"
    return None


def where(device: torch.device) -> str:
    """The device and the compilers, for a message."""
    import triton

    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else str(device)
    major = torch.cuda.get_device_capability(device)[0] if on_gpu else 0
    return f"{name} (Triton {triton.__version__}, ptxas {ptxas_version(major)})"


def ptxas_version(major: int) -> str:
    """The version of the assembler that Triton takes for that compute capability, or "unknown"."""
    try:  # releases have different rules
        from triton.backends.nvidia.compiler import get_ptxas

        return version_of(get_ptxas(10 * major).path)
    except (ImportError, AttributeError, RuntimeError):
        return "unknown"


def version_of(tool: str) -> str:
    """What an assembler says of itself, or "unknown"."""
    try:
        said = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    found = re.search(r"V(\d+\.\d+\.\d+)", said)
    return found[1] if found else "unknown"
