"""Classes of your own for a section of a run: `data: {class_path: my_data.MyData, context: 512}`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from linrope.cli.config_files import CONFIG, names_and_values
from linrope.cli.parser import options_in
from linrope.errors import InputError
from linrope.utils.options import class_path_of

CLASS_PATH = "class_path"


def own_classes(args: Sequence[str], sections: Mapping[str, type]) -> dict[str, type]:
    """The classes that a command line names for sections by `class_path`, in its --config files or options.

    Raises:
        InputError: no such class, one that is no subclass of the section's own, or two for one section.
    """
    found: dict[str, type] = {}
    for section, class_path in _named(args, sections):
        one = _own_class(section, class_path, sections[section])
        if found.setdefault(section, one) is not one:
            raise InputError(
                f"{section}.{CLASS_PATH} names two classes, {class_path_of(found[section])} and {class_path}: give one."
            )
    return found


def _named(args: Sequence[str], sections: Mapping[str, type]) -> Iterator[tuple[str, Any]]:
    for name, value in names_and_values(args):
        section, _, option = name.removeprefix("--").partition(".")
        if name in CONFIG:
            for section, options in options_in(value).items():
                if section in sections and isinstance(options, dict) and CLASS_PATH in options:
                    yield section, options[CLASS_PATH]
        elif name.startswith("--") and section in sections and option == CLASS_PATH:
            yield section, value


def import_class(option: str, class_path: Any) -> Any:
    """What `MODULE.CLASS` names. InputError, naming the option, if there is nothing of that name."""
    module, _, name = str(class_path).rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ValueError, ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not f"{module}.".startswith(f"{error.name}."):
            raise  # of an import within the module
        raise InputError(
            f"{option}={class_path!r} is no class ({error}): give MODULE.CLASS, and --import FILE.py for "
            "a module that is not on Python's path."
        ) from error


def _own_class(section: str, class_path: Any, base: type) -> type:
    one = import_class(f"{section}.{CLASS_PATH}", class_path)
    if not (isinstance(one, type) and issubclass(one, base)):
        raise InputError(
            f"{section}.{CLASS_PATH}={class_path!r} must be a subclass of {class_path_of(base)}, whose options this "
            "section has. For a model of another task name it: --task translation, for example."
        )
    return one
