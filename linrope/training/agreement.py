"""Ranks of one run must have the same configuration and package versions, compared before anything is exchanged, and
the same data."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

from linrope import __version__
from linrope.errors import InputError
from linrope.training.checkpoint import TEXT_MODIFIED, TEXT_PLACE
from linrope.training.rank_board import RankBoard, names

MAY_DIFFER = ("run.folder", "trainer.default_root_dir")
"""Options of which those of rank 0 count."""
MOST_DIFFERENCES = 10
"""Differences that a message lists."""


def run_values(config: Mapping[str, Any]) -> dict[str, str]:
    """What all ranks of a run must have in common: its options, by dotted name, and the versions of packages."""
    versions = {"linrope": __version__, "torch": torch.__version__, "lightning": version("lightning")}
    values = {f"the version of {name}": value for name, value in versions.items()}
    values["the version of Python"] = platform.python_version()
    options = {name: str(value) for name, value in _flat(config) if name not in MAY_DIFFER}
    return {**values, **options}


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def differences_of(values: Mapping[int, Mapping[str, str]]) -> list[str]:
    """One line for each value in which ranks differ from rank 0, with the ranks and both values."""
    expected, lines = values[0], []
    for name in dict.fromkeys(name for one in values.values() for name in one):
        others: dict[str, list[int]] = {}
        for rank, one in values.items():
            if one.get(name) != expected.get(name):
                others.setdefault(one.get(name, "not set"), []).append(rank)
        for value, ranks in others.items():
            lines.append(f"{name}: {expected.get(name, 'not set')} on rank 0, {value} on {names(ranks)}")
    return lines


def require_agreement(board: RankBoard, values: Mapping[str, str], seconds: float) -> None:
    """Raise InputError, the same on every rank, if the `values` of the ranks differ. Every rank must call it.

    Raises:
        InputError: the ranks differ.
        RankLost: a rank has not called it in `seconds`, or has failed before.
    """
    board.write(f"values/{board.rank}", values)
    if board.rank == 0:
        board.write("differences/0", differences_of(board.wait_for("values", range(board.world_size), seconds)))
    _require_none(board.wait_for("differences", [0], 2 * seconds)[0])


def require_same_samples(orders: Sequence[Mapping[str, Any]]) -> None:
    """Raise InputError if what decides the training samples, `run_order` of each rank, differs."""
    may_differ = TEXT_MODIFIED, TEXT_PLACE  # a copy of the text may have new times
    plain = [{name: str(value) for name, value in one.items() if name not in may_differ} for one in orders]
    _require_none(differences_of(dict(enumerate(plain))))


def _require_none(differences: list[str]) -> None:
    if not differences:
        return
    more = [f"and {len(differences) - MOST_DIFFERENCES} more"] if len(differences) > MOST_DIFFERENCES else []
    raise InputError(
        "the ranks of this run differ; start all of them with the same options, files and packages:\n  "
        + "\n  ".join([*differences[:MOST_DIFFERENCES], *more])
    )
