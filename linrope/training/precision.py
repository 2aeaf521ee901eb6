"""`trainer.precision: auto`: the faster number format of the device that a run computes on."""

from __future__ import annotations

import torch

from linrope.utils.machine import has_fast_bfloat16

AUTO = "auto"


def is_nvidia(accelerator: object) -> bool:
    """Whether the Trainer's option `accelerator` means NVIDIA GPUs on this machine."""
    return accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())


def has_bfloat16(device: str) -> bool:
    """Whether a type of device, such as "cpu", multiplies bfloat16 faster than float32; False where unknown."""
    if device == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return device == "cpu" and has_fast_bfloat16()


def why_slow(precision: str, device: str) -> str | None:
    """A warning if a type of device is slow in the products of a precision of Lightning's; else None.

    Two cores of an AMD EPYC with AVX2 alone train configs/quickstart.yaml at 810 tokens a second in bf16-mixed and at
    8,600 in 32-true. Two of an Intel Xeon with AVX512-BF16 and without AMX train configs/enwik8-small.yaml at 2,500 and
    at 3,300.
    """
    if not precision.startswith("bf16") or device not in ("cpu", "cuda") or has_bfloat16(device):
        return None
    name = "processor" if device == "cpu" else "GPU"
    return (
        f"trainer.precision={precision} is slow here: this {name} has no fast instructions for products of bfloat16, "
        "which can take twice to ten times as long as those of float32: set 32-true."
    )


def automatic_precision(accelerator: object) -> tuple[str, str]:
    """The Trainer's precision for its option `accelerator`, and the reason in words.

    bf16-mixed where the device has fast instructions for products of bfloat16; 32-true elsewhere, where bfloat16 saves
    no time, and on devices of which that is unknown.
    """
    if is_nvidia(accelerator):
        device, native = "GPU", has_bfloat16("cuda")
    elif accelerator == "cpu" or (accelerator == "auto" and not torch.backends.mps.is_available()):
        device, native = "processor", has_bfloat16("cpu")
    else:
        return "32-true", f"whether bfloat16 is fast on {accelerator} is unknown"
    if native:
        return "bf16-mixed", f"the {device} multiplies bfloat16 fast"
    return "32-true", f"the {device} does not multiply bfloat16 fast"
