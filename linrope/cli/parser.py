"""Command-line parsers whose errors are one readable line, with the nearest right option, instead of a usage dump."""

from __future__ import annotations

import re
from argparse import SUPPRESS, Action
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from linrope.errors import InputError, suggest

# How jsonargparse words an option that it does not know, with the section it stands in where it says so.
_UNKNOWN_OPTION = (
    r"unrecognized arguments: --(?P<option>[^\s=]+)",
    r"Group '(?P<section>[^']+)' does not accept option '(?P<option>[^']+)'",
    r"Parser key \"(?P<section>[^\"]+)\":[\s\S]*?unknown option '(?P<option>[^']+)'",  # ours, nested
    r"Parser key \"(?P<section>[^\"]+)\":[\s\S]*?Option '(?P<option>[^']+)' is not accepted",
    r"Option '(?P<option>[^']+)' is not accepted",
)


class ReadableErrors:
    """Mixin of a jsonargparse parser: raises InputError where the parser would print its usage and exit."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if missing := re.search(r"File does not exist: '([^']+)'", message):
            file = Path(missing[1])
            siblings = [sibling.name for sibling in file.parent.iterdir()] if file.parent.is_dir() else []
            raise InputError(f"--config {file} does not exist.{suggest(file.name, siblings)}") from ex
        if key := _unknown_option(message):
            raise InputError(f"unknown option {key!r}.{self._nearest(key)} `{self.prog} --help` lists all.") from ex
        if lacking := re.search(r"Parser key \"([^\"]+)\":[\s\S]*? arguments are required: (.+)", message):
            raise InputError(f"option {lacking[1]!r} lacks {lacking[2]}: give it, there is no default.") from ex
        raise InputError(message.replace('Parser key "', 'option "')) from ex

    def _nearest(self, key: str) -> str:
        known = list(_dotted(self.get_defaults()))
        same_name = [option for option in known if option.split(".")[-1] == key.split(".")[-1]]
        if len(same_name) == 1:
            return f" Did you mean {same_name[0]!r}?"
        of_entries = [f"{action.dest}.{name}" for action in self._actions for name in _entry_options(action)]
        return suggest(key, [option for option in known + of_entries if not key.startswith(f"{option}.")])


class TrainingParser(ReadableErrors, LightningArgumentParser):
    """Parser of `linrope fit`, `validate` and `test`.

    Options in `left_out_of_help` are accepted and saved like the others; they are too many for a newcomer to read.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.left_out_of_help: list[Action] = []

    def format_help(self) -> str:
        helps = [action.help for action in self.left_out_of_help]
        for action in self.left_out_of_help:
            action.help = SUPPRESS  # only now: jsonargparse would not save an option whose help is suppressed
        try:
            return super().format_help()
        finally:
            for action, help_ in zip(self.left_out_of_help, helps, strict=True):
                action.help = help_


class PlainParser(ReadableErrors, ArgumentParser):
    """Parser of a command that has nothing to do with Lightning; its booleans are flags, which need no value."""

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        added = super().add_class_arguments(*args, **kwargs)
        for action in self._actions:
            if getattr(action, "_typehint", None) is bool:
                action.nargs, action.const = "?", True
        return added


def _unknown_option(message: str) -> str | None:
    """The dotted name of the option that an error message calls unknown, or None for another error."""
    for pattern in _UNKNOWN_OPTION:
        if match := re.search(pattern, message):
            parts = match.groupdict()
            return f"{parts['section']}.{parts['option']}" if parts.get("section") else parts["option"]
    return None


def _entry_options(action: Action) -> Iterator[str]:
    """The options of what an option is a list of: `curriculum` has stages, which have tokens."""
    hints = [getattr(action, "_typehint", None)]
    while hints:
        hint = hints.pop()
        hints += get_args(hint)
        if is_dataclass(hint):
            yield from (field.name for field in fields(hint))


def _dotted(section: Namespace, prefix: str = "") -> Iterator[str]:
    """The dotted names of all options, sections among them."""
    for name, value in vars(section).items():
        if name == "init_args":  # how jsonargparse nests a dataclass within a section
            yield from _dotted(value, prefix)
        elif name not in ("class_path", "__subclasses_disabled__"):
            yield prefix + name
            if isinstance(value, Namespace):
                yield from _dotted(value, f"{prefix}{name}.")
