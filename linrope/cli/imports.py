"""`--import FILE.py`: code of your own that a command needs, such as feature maps and classes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from linrope.cli.config_files import values_of, without_option
from linrope.errors import InputError

IMPORT = "--import"
imported: list[str] = []
"""What the command line of this process imports, for the lines to copy that a command prints."""


def import_code(args: Sequence[str]) -> list[str]:
    """Import what the options --import of a command line name; return the other arguments.

    Raises:
        InputError: no such file or module, or a file whose name is that of another module.
    """
    imported[:] = values_of(args, IMPORT)
    for source in imported:
        _import(source)
    return without_option(args, IMPORT)


def _import(source: str) -> None:
    file = Path(source).expanduser()
    if file.suffix != ".py":
        try:
            importlib.import_module(source)
        except (ValueError, ModuleNotFoundError) as error:
            if isinstance(error, ModuleNotFoundError) and error.name not in (source, source.partition(".")[0]):
                raise  # of an import within the module
            message = f"{IMPORT} {source}: there is no module of that name. Give the path of a file: FILE.py."
            raise InputError(message) from error
        return
    if not file.is_file():
        raise InputError(f"{IMPORT} {source}: the file does not exist.")
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # data workers find the module there too
    module = importlib.import_module(file.stem)
    if Path(getattr(module, "__file__", None) or "").resolve() != file.resolve():
        raise InputError(f"{IMPORT} {source}: another module has the name {file.stem!r}. Rename the file.")
