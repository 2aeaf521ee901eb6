"""Checks of configuration values against the types that their dataclasses declare."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from linrope.errors import InputError, require_choice, suggest


def class_path_of(one: type) -> str:
    """`module.Class`, by which `loaded_subclass` finds it again."""
    return f"{one.__module__}.{one.__qualname__}"


def loaded_subclass(base: type, class_path: str) -> type:
    """The class of that name among `base` and its imported subclasses. InputError if there is none."""
    found, waiting = {}, [base]
    while waiting:
        one = waiting.pop()  # the newest first: a notebook may define a class again
        found.setdefault(class_path_of(one), one)
        waiting += one.__subclasses__()
    if class_path not in found:
        module, _, name = str(class_path).rpartition(".")
        if isinstance(getattr(sys.modules.get(module), name, None), type):
            raise InputError(
                f"class_path={class_path!r} is no {base.__name__}: give a model of that class. `linrope test` and "
                "`linrope predict` take those of each --task."
            )
        raise InputError(
            f"class_path={class_path!r} is no imported subclass of {base.__name__}: import it first, on the command "
            "line with --import FILE.py."
        )
    return found[class_path]


def check_keys(values: Any, config: type, section: str = "") -> None:
    """Raise InputError unless `values` is a dictionary of fields of the dataclass `config`, with all required ones.

    `section` is put before names in messages: `model.rope.`.
    """
    if not isinstance(values, dict):
        raise InputError(f"{values!r} cannot be the options of {config.__name__}: pass a dictionary.")
    known = [f.name for f in fields(config)]
    for key in values:
        if key not in known:
            name = f"{section}{key}" if section else key
            raise InputError(f"{name!r} is not an option of {config.__name__}.{suggest(key, known)}")
    for f in fields(config):
        if f.name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise InputError(f"{config.__name__} needs {section + f.name!r}, which has no default: set it.")


def check_types(values: Any, config: type | None = None, section: str = "") -> None:
    """Raise InputError unless every value has the declared type of its name; unknown names are ignored.

    An int is accepted as a float and a tuple as a list, but a bool not as a number: YAML's `yes` is not 1.

    Args:
        values: a dataclass; or a dictionary of arguments for `config`, which may have dictionaries in place of nested
            dataclasses. These are checked too, their keys included.
        config: a dataclass, or a class whose constructor takes the values.
        section: put before names in messages: `model.`.
    """
    raw = config is not None
    config = config or type(values)
    hints = get_type_hints(config if is_dataclass(config) else config.__init__)
    for name, value in (values if raw else vars(values)).items():
        hint = hints.get(name, Any)
        nested = next(filter(is_dataclass, (hint, *get_args(hint))), None)
        if raw and nested is not None and isinstance(value, dict):
            check_keys(value, nested, f"{section}{name}.")
            check_types(value, nested, f"{section}{name}.")
        elif get_origin(hint) is Literal:
            require_choice(f"{section}{name}", value, get_args(hint))
        elif not _has_type(value, hint, raw):
            raise InputError(
                f"{section}{name}={value!r} has the wrong type: it must be {_in_words(hint)}.{_yaml_hint(value)}"
            )


def require_whole(name: str, value: Any, otherwise: str = "", least: int = 1) -> None:
    """Raise InputError, with what else there is, unless `value` is a whole number, at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise InputError(f"{name}={value!r} must be a whole number, at least {least}{otherwise}.")


def _has_type(value: object, hint: Any, raw: bool) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_has_type(value, part, raw) for part in parts)
    if origin is Literal:
        return value in parts
    if origin in (list, tuple, Sequence):
        return isinstance(value, (list, tuple)) and all(_has_type(one, parts[0], raw) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_has_type(one, parts[1], raw) for one in value.values())
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    if origin is not None:  # others, such as those in a configuration of a user's own
        return isinstance(value, origin)
    return isinstance(value, hint) or (raw and is_dataclass(hint) and isinstance(value, dict))


def _yaml_hint(value: object) -> str:
    """What to add for a string that looks like another type: YAML reads 1e6 as text, and everything in quotes."""
    if not isinstance(value, str):
        return ""
    try:
        float(value)
    except ValueError:
        if value.lower() not in ("true", "false", "yes", "no", "on", "off", "null", "none"):
            return ""
    return " (It is text, as YAML reads 1e6: write 1_000_000, 1.0e-2, true or null, without quotes.)"


def _in_words(hint: Any) -> str:
    """A type in words: "a whole number, or None"."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return ", or ".join(map(_in_words, parts))
    if origin is Literal:
        return ", or ".join(map(repr, parts))
    if origin in (list, tuple, Sequence):
        return f"a list, each entry {_in_words(parts[0])}"
    if origin is dict:
        return "a dictionary" + ("" if parts[1] is Any else f", each value {_in_words(parts[1])}")
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "a string", type(None): "None"}
    return words.get(hint) or (f"options of {hint.__name__}" if is_dataclass(hint) else f"a {hint.__name__}")
