"""Sizes and durations as text, and sizes from text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from linrope.errors import InputError


def parse_bytes(text: str, name: str = "") -> int:
    """The number of bytes in "4GiB", "500 MB" or "1000". InputError, which begins with `name`, if it is no size, or not
    above 0."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?\s*", text, re.IGNORECASE)
    nbytes = 0
    if match:
        unit = 1024 if match[3] else 1000
        nbytes = int(float(match[1]) * unit ** (" KMGT".index(match[2].upper()) if match[2] else 0))
    if nbytes < 1:
        raise InputError(f"{name}{text!r} is no size: give one such as 4GiB or 500MB.")
    return nbytes


BYTES, COUNTS = ["B", "KiB", "MiB", "GiB", "TiB"], ["", "k", "M", "G", "T", "P"]


def scaled(value: float, units: list[str], base: int) -> str:
    """The number with three digits, in the first unit that is large enough: 12.3 MiB."""
    power = _power(value, len(units), base)
    return f"{three_digits(value / base**power)} {units[power]}".strip()


def _power(value: float, n_units: int, base: int) -> int:
    power = 0
    while value / base**power >= 999.5 and power < n_units - 1:
        power += 1
    return power


def three_digits(value: float) -> str:
    """12,345, 123, 12.3 or 1.23."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def bytes_text(nbytes: float) -> str:
    return scaled(nbytes, BYTES, 1024)


def count_text(count: float) -> str:
    return scaled(count, COUNTS, 1000).replace(" ", "")


def count_of(n: int, noun: str, several: str | None = None) -> str:
    """1 step, 1,000 steps; `several` is the plural where it does not end in s alone."""
    return f"{n:,} {noun if n == 1 else several or f'{noun}s'}"


def in_one_unit(values: Sequence[float], units: list[str], base: int) -> tuple[str, list[str]]:
    """A unit, and the numbers in it, for a column of a table: the unit that suits the smallest number."""
    power = _power(min(values), len(units), base)
    return units[power], [three_digits(value / base**power) for value in values]


def duration_text(seconds: float) -> str:
    """A duration in its two largest units: "3 h 20 min"."""
    units = ("d", 86400, "h", 3600, 30), ("h", 3600, "min", 60, 0.5), ("min", 60, "s", 1, 0.5)
    for name, size, smaller, part, missing in units:  # what is missing would be rounded to the whole unit
        if seconds >= size - missing:
            whole, rest = divmod(round(seconds / part), size // part)
            return f"{whole:,} {name} {rest} {smaller}"
    return f"{seconds:.2g} s"
