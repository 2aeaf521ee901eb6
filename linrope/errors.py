"""The exceptions of linrope, and helpers for their messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """An argument that linrope cannot use. The message names the argument, its value and the fix."""


class NonFiniteError(RuntimeError):
    """A loss, gradient or logit is infinite or NaN. For a gradient it is raised before the weights change."""


def suggest(name: str, choices: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` with the choice closest to `name`, or `""` if none is close."""
    close = difflib.get_close_matches(str(name), list(choices))
    nearest = next((choice for choice in close if choice.startswith(str(name))), close[0] if close else None)
    return "" if nearest is None else f" Did you mean {nearest!r}?"


def require_choice(argument: str, value: object, choices: Iterable[str]) -> None:
    """Raise InputError unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise InputError(f"{argument}={value!r} is unknown: choose one of {known}.{suggest(str(value), choices)}")
