"""Command-line parsers whose errors are one readable line with the nearest option, not a usage dump."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from docstring_parser import parse_from_object
from jsonargparse import ActionYesNo, ArgumentError, ArgumentParser, Namespace, set_parsing_settings
from jsonargparse.typing import register_type

from linrope.cli.commands import COMMANDS
from linrope.cli.config_files import CONFIG, config_files, names_and_values
from linrope.errors import InputError, require_choice, suggest, suggest_file

set_parsing_settings(docstring_parse_attribute_docstrings=True)  # the docstring of a field is its help


def _seconds(value: Any) -> timedelta:
    if isinstance(value, bool) or not float(value) > 0:
        raise ValueError(f"{value} is no number of seconds above 0")
    return timedelta(seconds=float(value))


# A time is a number of seconds: `trainer.strategy.timeout: 600`.
register_type(timedelta, lambda time: time.total_seconds(), _seconds)

Config = TypeVar("Config")


def parse_command(
    command: str, config: type[Config], args: Sequence[str], usage: str, **by_hand: dict[str, Any]
) -> Config:
    """Parse the command line of a command whose options are the fields of the dataclass `config`; `usage` shows them.

    `by_hand`: see `add_options`. Raises InputError as `parse` does, and what `config` raises.
    """
    parser = ArgumentParser(usage=f"linrope {command} {usage}", **parser_settings(command))
    add_options(parser, config, **by_hand)
    return config(**vars(parse(parser, args, {"--": config})))


def parser_settings(command: str) -> dict[str, Any]:
    """What the parsers of all commands have in common, as arguments of jsonargparse's ArgumentParser."""
    names = {"prog": f"linrope {command}", "description": COMMANDS[command]}
    return {**names, "allow_abbrev": False, "exit_on_error": False}


def add_options(parser: ArgumentParser, config: type, **by_hand: dict[str, Any]) -> None:
    """Add an option for each field of a dataclass; an option for a boolean is a flag, which needs no value.

    `by_hand` has, by field, arguments of `add_argument` for an option that its type does not describe; with
    `positional: True` it is an argument without a name.
    """
    helps = {parameter.arg_name: parameter.description for parameter in parse_from_object(config).params}
    for field in fields(config):
        if field.type in ("bool", bool):
            flag = {"action": ActionYesNo, "nargs": "?", "default": field.default, "help": helps[field.name]}
            by_hand = {**by_hand, field.name: flag}
    parser.add_class_arguments(config, skip=set(by_hand))
    for name, arguments in by_hand.items():
        positional = arguments.get("positional", False)
        others = {key: value for key, value in arguments.items() if key != "positional"}
        parser.add_argument(name if positional else f"--{name}", **others)


def parse(parser: ArgumentParser, args: Sequence[str], sections: Mapping[str, type]) -> Namespace:
    """Parse a command line with a parser that has `exit_on_error=False`. Raises InputError for an unknown option, a
    --config file that is missing, or a value that jsonargparse refuses. The files are sound (`require_sound_configs`).

    `sections` has dataclasses of options, by what stands before their names in messages: "optimizer.", or "--"."""
    try:
        return parser.parse_args(list(args))
    except ArgumentError as error:
        require_files(args)
        require_known(parser, args)
        require_config_option(parser, args)
        for prefix, config in sections.items():
            require_choices(args, prefix, config)
        raise InputError(str(error)) from error


def require_files(args: Sequence[str]) -> None:
    """Raise InputError for a --config file that does not exist, or is a folder."""
    for text in config_files(args):
        file = Path(text)
        if os.path.isdir(text):
            raise InputError(f"--config {file} is a folder: name a file of YAML.")
        if not (os.path.isfile(text) or _mapping(text)):
            raise InputError(f"--config {file} does not exist.{suggest_file(file)}")


def require_known(parser: ArgumentParser, args: Sequence[str]) -> None:
    """Raise InputError for an option, on the command line or in a --config file, that the parser does not have."""
    known = list(_dotted(parser.get_defaults()))
    accepted = {*known, *(f"no_{name}" for name in known), "help", "print_config"}
    leaves = [name for name in known if not any(other.startswith(f"{name}.") for other in known)]
    given = [arg.removeprefix("--").partition("=")[0].removesuffix("+") for arg in args if arg.startswith("--")]
    for text in config_files(args):
        values = options_in(text)
        given += _dotted(values)
        for name, value in values.items():
            if value is None and isinstance(parser.get_defaults().get(name), Namespace):
                raise InputError(f"--config {text}: section {name} has no value: give it options, or remove the line.")
    for name in given:
        # what stands within an option's own value, `data.curriculum.tokens`, is for jsonargparse to judge
        if name.endswith(".class_path") and name.split(".")[0] in known:
            continue
        if name not in accepted and not any(name.startswith(f"{leaf}.") for leaf in leaves):
            raise InputError(f"unknown option {name!r}.{_nearest(name, known)} `{parser.prog} --help` lists options.")


def require_config_option(parser: ArgumentParser, args: Sequence[str]) -> None:
    """Raise InputError for a YAML file without --config before it, if the parser has that option."""
    if "config" not in parser.get_defaults():
        return
    for before, arg in zip(["", *args], args):
        of_an_option = arg.startswith("-") or (before.startswith("-") and "=" not in before)
        if Path(arg).suffix in (".yaml", ".yml") and not of_an_option:
            raise InputError(f"{arg!r} has no option before it. Did you mean '--config {arg}'?")


def require_choices(args: Sequence[str], prefix: str, config: type) -> None:
    """Raise InputError for a value that is none of those that its option may have, where types can be evaluated."""
    try:
        hints = get_type_hints(config if is_dataclass(config) else config.__init__)
    except NameError:  # imported for type checkers only, in a class of the user's own
        return
    for name, hint in hints.items():
        nested = next(filter(is_dataclass, (hint, *get_args(hint))), None)
        if nested is not None:
            require_choices(args, f"{prefix}{name}.", nested)
        elif _is_choice(hint):
            for value in values_given(args, f"{prefix}{name}".removeprefix("--")):
                if value is not None:
                    require_choice(f"{prefix}{name}", value, literals_of(hint))


def _is_choice(hint: Any) -> bool:
    """Whether a type has Literals alone, and None perhaps."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return all(get_origin(part) is Literal or part is type(None) for part in parts)


def literals_of(hint: Any) -> Iterator[Any]:
    """The values of all Literals in a type."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        for part in get_args(hint):
            yield from literals_of(part)


def values_given(args: Sequence[str], option: str) -> Iterator[Any]:
    """The values that a command line and its --config files give to an option, `trainer.precision` for example."""
    for name, value in names_and_values(args):
        yield from value_in_words(name, value, option)


def value_in_words(name: str, value: str, option: str) -> Iterator[Any]:
    """The values that one word of a command line, with what follows it, gives to an option."""
    if name in CONFIG:
        *sections, last = option.split(".")
        values: Any = options_in(value)
        for section in sections:
            values = values.get(section) if isinstance(values, dict) else None
        yield from (values[key] for key in (last, f"{last}+") if isinstance(values, dict) and key in values)
    elif name.removesuffix("+") == f"--{option}":
        try:
            yield yaml.safe_load(value)
        except yaml.YAMLError:
            yield value


def _nearest(name: str, known: list[str]) -> str:
    same_name = [option for option in known if option.split(".")[-1] == name.split(".")[-1]]
    if len(same_name) == 1:
        return f" Did you mean {same_name[0]!r}?"
    return suggest(name, [option for option in known if not name.startswith(f"{option}.")])


def options_in(config: str) -> dict[str, Any]:
    """The options that a value of --config sets, the name of a YAML file or YAML itself; none if it is no mapping."""
    try:  # os.path, because Path.is_file raises for a text that is too long for a name
        return _mapping(Path(config).read_text() if os.path.isfile(config) else config)
    except (OSError, UnicodeDecodeError):
        return {}  # the parser names it


def _mapping(text: str) -> dict[str, Any]:
    """The options that a YAML text sets; none where it is not a YAML mapping."""
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _dotted(section: Mapping[str, Any] | Namespace, prefix: str = "") -> Iterator[str]:
    """The dotted names of all options and sections in a section. In jsonargparse's values a dataclass within another
    one is a `class_path` and its `init_args`; they are not part of the name."""
    for name, value in (vars(section) if isinstance(section, Namespace) else section).items():
        inner = value if isinstance(value, Mapping | Namespace) else {}
        if name == "init_args":
            yield from _dotted(inner, prefix)
        elif name != "class_path" and not name.startswith("__"):
            yield f"{prefix}{name}"
            yield from _dotted(inner, f"{prefix}{name}.")
