"""Files of JSON: whole ones, and JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from linrope.data.finetune.examples import read_lines
from linrope.errors import InputError


def read_json(path: Path) -> Any:
    """The value in a file. InputError, naming file and line, for one that is not JSON."""
    text = "\n".join(read_lines(path))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise InputError(f"{path}, line {line}: it is not valid JSON ({error}).") from error


def read_json_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line, object) of each line that is not empty. InputError, naming file and line, for one that is no JSON
    object, or without any."""
    found = []
    for line, text in enumerate(read_lines(path), 1):
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {line}: it is not valid JSON ({error}).") from error
        if not isinstance(value, dict):
            raise InputError(f"{path}, line {line}: it is no JSON object: give one object a line.")
        found.append((line, value))
    if not found:
        raise InputError(f"{path} has no JSON objects: give one a line.")
    return found


def require_text(value: dict[str, Any], name: str, where: str) -> str:
    """The text under a key. InputError, naming `where`, without one."""
    if name not in value:
        raise InputError(f"{where}: it has no {name!r}, but {', '.join(map(repr, value)) or 'nothing'}: add it.")
    if not isinstance(text := value[name], str):
        raise InputError(f"{where}: {name!r} is {text!r:.60}, and must be a text.")
    return text
