"""What linrope raises when its caller made a mistake, and how it words it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any


class InputError(ValueError):
    """An argument that cannot be served. The message names the argument, its value and the mend."""


class NonFiniteError(RuntimeError):
    """A loss, a gradient (raised before the weights change) or a logit is infinite or NaN."""


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


def check_keys(values: Any, config: type) -> None:
    """Raise InputError unless `values` is a dictionary of fields of the dataclass `config`, with all it must have."""
    if not isinstance(values, dict):
        raise InputError(f"{values!r} is no set of options of {config.__name__}: it must be a dictionary.")
    known = [f.name for f in fields(config)]
    for key in values:
        if key not in known:
            raise InputError(f"{key!r} is no option of {config.__name__}.{suggest(key, known)}")
    for f in fields(config):
        if f.name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise InputError(f"{config.__name__} {values!r} has no {f.name!r}: give it, there is no default.")
