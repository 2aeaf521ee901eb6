"""Checks of configuration values against the types that their dataclasses declare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from linrope.errors import InputError, require_choice, suggest


def check_keys(values: Any, config: type, section: str = "") -> None:
    """Raise InputError unless `values` is a dictionary of fields of the dataclass `config`, with all it must have.

    `section` stands before names in messages: `model.rope.`.
    """
    if not isinstance(values, dict):
        raise InputError(f"{values!r} is no set of options of {config.__name__}: it must be a dictionary.")
    known = [f.name for f in fields(config)]
    for key in values:
        if key not in known:
            name = f"{section}{key}" if section else key
            raise InputError(f"{name!r} is no option of {config.__name__}.{suggest(key, known)}")
    for f in fields(config):
        if f.name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise InputError(f"{config.__name__} has no {section + f.name!r}: give it, there is no default.")


def check_types(values: Any, config: type | None = None, section: str = "") -> None:
    """Raise InputError unless every value is of the kind that its name is declared to have; unknown names pass.

    A whole number will do for a float and a tuple for a list, but no bool for a number: YAML's `yes` is no 1.

    Args:
        values: a dataclass; or a dictionary of what `config` is to be made of, where dictionaries will do for the
            dataclasses within, and are looked into.
        config: that class, a dataclass or one whose constructor takes the values.
        section: what stands before names in messages: `model.`.
    """
    raw = config is not None
    config = config or type(values)
    kinds = get_type_hints(config if is_dataclass(config) else config.__init__)
    for name, value in (values if raw else vars(values)).items():
        kind = kinds.get(name, Any)
        options = next(filter(is_dataclass, (kind, *get_args(kind))), None)
        if raw and options is not None and isinstance(value, dict):
            check_keys(value, options, f"{section}{name}.")
            check_types(value, options, f"{section}{name}.")
        elif get_origin(kind) is Literal:
            require_choice(f"{section}{name}", value, get_args(kind))
        elif not _is_of(value, kind, raw):
            raise InputError(
                f"{section}{name}={value!r} is of the wrong kind: it must be {_spelled(kind)}.{_unquoted(value)}"
            )


def _is_of(value: object, kind: Any, raw: bool) -> bool:
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(_is_of(value, part, raw) for part in parts)
    if origin is Literal:
        return value in parts
    if origin in (list, tuple, Sequence):
        return isinstance(value, (list, tuple)) and all(_is_of(one, parts[0], raw) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is_of(one, parts[1], raw) for one in value.values())
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind) or (raw and is_dataclass(kind) and isinstance(value, dict))


def _unquoted(value: object) -> str:
    """What to say of text that was meant to be none: YAML takes 1e6 for text, and everything in quotes."""
    if not isinstance(value, str):
        return ""
    try:
        float(value)
    except ValueError:
        if value.lower() not in ("true", "false", "yes", "no", "on", "off", "null", "none"):
            return ""
    return " (It is text, as 1e6 is to YAML: write 1_000_000, 1.0e-2, true or null, without quotes.)"


def _spelled(kind: Any) -> str:
    """A kind in words: "a whole number, or None"."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return ", or ".join(map(_spelled, parts))
    if origin is Literal:
        return ", or ".join(map(repr, parts))
    if origin in (list, tuple, Sequence):
        return f"a list, each entry {_spelled(parts[0])}"
    if origin is dict:
        return "a set of options" + ("" if parts[1] is Any else f", each {_spelled(parts[1])}")
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "a string", type(None): "None"}
    return words.get(kind) or (f"options of {kind.__name__}" if is_dataclass(kind) else f"a {kind.__name__}")
