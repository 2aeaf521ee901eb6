"""What a configuration's YAML must be before a parser reads it: text in UTF-8, of bounded size, each option once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from linrope.errors import InputError

MAX_BYTES = 1_000_000
MAX_DEPTH = 50
MAX_NODES = 20_000
"""Values of a configuration, with those that its aliases repeat."""


CONFIG = ("-c", "--config")
"""The names of the option of a configuration."""


def names_and_values(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each word of a command line as an option, without its `=VALUE`, and the value that it has if it is one."""
    for arg, following in zip(args, [*args, ""][1:]):
        name, equals, value = arg.partition("=")
        yield name, value if equals else following


def values_of(args: Sequence[str], *options: str) -> list[str]:
    """The values that a command line gives to an option, which may have several names."""
    return [value for name, value in names_and_values(args) if name in options]


def without_option(args: Sequence[str], option: str) -> list[str]:
    """`args` without `option VALUE` and `option=VALUE`."""
    kept = [arg for arg in args if not arg.startswith(f"{option}=")]
    while option in kept:
        at = kept.index(option)
        del kept[at : at + 2]
    return kept


def config_files(args: Sequence[str]) -> list[str]:
    """The values of --config."""
    return values_of(args, *CONFIG)


def require_sound_configs(args: Sequence[str]) -> None:
    """Raise InputError for a file of --config that is not what this module's docstring says, or has no options.

    What else is wrong with a file is for the parser to say.
    """
    for name in config_files(args):
        if os.path.isfile(name):  # Path.is_file raises for YAML itself, which is too long for a name
            _require_sound(_text_of(Path(name)), name)


def _text_of(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"--config {path} has more than {MAX_BYTES:,} bytes: that is no configuration.")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"--config {path} is not text in UTF-8: save it in that encoding.") from error
    except OSError as error:
        raise InputError(f"--config {path} cannot be read: {error.strerror}.") from error


def _require_sound(text: str, name: str) -> None:
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise InputError(f"--config {name}{line}: it is no YAML: {error.problem}.") from error
    except yaml.YAMLError as error:
        raise InputError(f"--config {name}: it is no YAML: {error}.") from error
    except RecursionError as error:
        raise InputError(f"--config {name} is nested in more than {MAX_DEPTH} levels.") from error
    if root is None:
        raise InputError(f"--config {name} is empty: give it sections with options, or leave it out.")
    if not isinstance(root, yaml.MappingNode):
        raise InputError(f"--config {name} is a list or a value: give it sections with options, as `trainer:`.")
    lines: dict[str, int] = {}
    for option, line, depth in _values(root):
        if option in lines:
            raise InputError(
                f"--config {name} gives {option} twice, in line {lines[option]} and in line {line}: remove one."
            )
        if depth > MAX_DEPTH:  # an alias within its own value has no end
            raise InputError(f"--config {name} is nested in more than {MAX_DEPTH} levels, in line {line}.")
        if len(lines) == MAX_NODES:
            raise InputError(f"--config {name} stands for more than {MAX_NODES:,} values: remove aliases.")
        lines[option] = line


def _values(node: yaml.Node, prefix: str = "", depth: int = 1) -> Iterator[tuple[str, int, int]]:
    """(dotted name, line, depth) of each value within a node, again for each alias."""
    parts = []
    if isinstance(node, yaml.MappingNode):
        parts = [(f"{prefix}.{key.value}" if prefix else str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        parts = [(f"{prefix}[{number}]", part, part) for number, part in enumerate(node.value)]
    for name, place, value in parts:
        yield name, place.start_mark.line + 1, depth
        yield from _values(value, name, depth + 1)
