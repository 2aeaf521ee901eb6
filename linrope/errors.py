"""What linrope raises when its caller made a mistake, and how it words it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """An argument that cannot be served. The message names the argument, its value and the mend."""


def suggest(name: str, choices: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the choice closest to `name`, or `""` where nothing is close."""
    nearest = difflib.get_close_matches(str(name), list(choices), n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def require_choice(argument: str, value: object, choices: Iterable[str]) -> None:
    """Raise InputError unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise InputError(f"{argument}={value!r} is unknown: choose one of {known}.{suggest(str(value), choices)}")
