"""Initialise modules anew, as layers do after `to_empty`."""

from __future__ import annotations

from itertools import chain

from torch import nn

from linrope.errors import InputError


def reset(module: nn.Module | None) -> None:
    """Initialise all parameters and buffers of a module: by its `reset_parameters`, or child by child without one.

    None is left out. InputError for a module that has parameters and no `reset_parameters`.
    """
    if module is None:
        return
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
        return
    own = [name for name, _ in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))]
    if own:
        raise InputError(
            f"{type(module).__name__} has {', '.join(own)} and no reset_parameters(): define one, which fills them."
        )
    for child in module.children():
        reset(child)
