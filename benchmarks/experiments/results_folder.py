"""The folder of a grid's results: which runs are done, and how fast the variants train."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.experiments.grid import Grid, Settings, longest_context, text_fingerprint
from benchmarks.harness.machine import commit, device_name
from linrope.errors import InputError
from linrope.utils.files import whole_file


@dataclass(frozen=True)
class Speed:
    """The training speed of a variant: the median of the rounds."""

    tokens_per_second: float
    spread: float | None = None
    """Interquartile range of the rounds, as a share of the median."""
    machine: str | None = None
    """The processor or GPU that it was measured on."""


class Folder:
    """The folder: `runs/VARIANT-seedN.json`, and `speed.json` with the training speeds."""

    def __init__(self, path: Path, grid: Grid, settings: dict[str, Settings], device: str = "cpu"):
        self.path, self.grid, self.settings, self.device = path, grid, settings, device
        self.runs = path / "runs"
        self.longest_context = longest_context(settings.values())

    def check(self, runs_follow: bool) -> None:
        """Raise InputError if the folder holds results of another grid, or, if `runs_follow`, of another text."""
        self.read_speeds()
        for file in sorted(self.runs.glob("*.json")):
            found = read_object(file)
            known = {"variant", "fingerprint", "settings"} <= found.keys()
            if not known or not isinstance(found.get("measured"), dict) or "title" not in found["measured"]:
                raise InputError(f"--output {self.path}: {file} is not a result of a grid. Give another folder.")
            variant = found["variant"]
            if found["measured"]["title"] != self.grid.title:
                other = f"those of {found['measured']['title']!r}"
            elif variant in self.settings and not self._matches(found):
                other = f"runs of {variant!r} with other options ({self._difference(found)})"
            elif runs_follow and variant in self.settings and not self._same_text(found):
                other = f"runs of {variant!r} on another text (another version of Python has another standard library)"
            else:
                continue
            raise InputError(
                f"--output {self.path} holds results of another grid: {other}. Nothing there was changed; "
                "give another folder, or another name to the changed variant."
            )

    def _matches(self, found: dict[str, Any]) -> bool:
        own = self.settings[found["variant"]]
        measured = found["measured"] == self.grid.measured and self._validated_on(found) == self.longest_context
        return measured and found["fingerprint"] == own.fingerprint

    def _validated_on(self, found: dict[str, Any]) -> int | None:
        """The length of the validation windows; without an entry, the run's own context."""
        return found.get("longest_context", longest_context([Settings(**found["settings"])]))

    def _same_text(self, found: dict[str, Any]) -> bool:
        return found.get("text") == text_fingerprint(self.settings[found["variant"]])

    def _difference(self, found: dict[str, Any]) -> str:
        then = {**found["measured"], **found["settings"], "longest context": self._validated_on(found)}
        own = asdict(self.settings[found["variant"]])
        now = {**self.grid.measured, **own, "longest context": self.longest_context}
        return ", ".join(f"{name} was {then[name]}" for name in then if then[name] != now.get(name))

    def result_of(self, variant: str, seed: int) -> Path:
        return self.runs / f"{variant}-seed{seed}.json"

    def results(self) -> list[dict[str, Any]]:
        """Every finished run of the grid."""
        files = (self.result_of(*run) for run in self.grid.runs)
        return [read_object(file) for file in files if file.exists()]

    @property
    def missing(self) -> list[tuple[str, int]]:
        return [run for run in self.grid.runs if not self.result_of(*run).exists()]

    def identity(self, variant: str, seed: int) -> dict[str, Any]:
        """The entries of a result that identify its run."""
        own = self.settings[variant]
        return {
            "variant": variant,
            "seed": seed,
            "measured": self.grid.measured,
            "fingerprint": own.fingerprint,
            "settings": asdict(own),
            "text": text_fingerprint(own),
            "longest_context": self.longest_context,
            "device": self.device,
            "processor": device_name(self.device),
            "commit": commit(),
            "torch": torch.__version__,
        }

    def read_speeds(self) -> dict[str, Speed]:
        speeds, keys = self._known_speeds(), self._speed_keys()
        try:
            return {name: Speed(**speeds[key]) for name, key in keys.items() if key in speeds}
        except TypeError as error:
            raise InputError(
                f"--output {self.path}: speed.json holds an entry that is not a speed. "
                "Move the file, and all speeds are measured again."
            ) from error

    def write_speeds(self, speeds: dict[str, Speed]) -> None:
        """Write the speeds; those of variants that this grid does not have are kept."""
        keys = self._speed_keys()
        known = self._known_speeds() | {keys[name]: asdict(speed) for name, speed in speeds.items()}
        with whole_file(self.path / "speed.json") as file:
            file.write((json.dumps(known, indent=1) + "\n").encode())

    @property
    def timed(self) -> Collection[str]:
        """The variants with a single speed: those without a curriculum."""
        return self._speed_keys().keys()

    def _speed_keys(self) -> dict[str, str]:
        timed = {name: own for name, own in self.settings.items() if own.curriculum is None}
        return {name: own.speed_key(self.device) for name, own in timed.items()}

    def _known_speeds(self) -> dict[str, dict[str, Any]]:
        file = self.path / "speed.json"
        return read_object(file) if file.exists() else {}


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file of the folder.

    Raises:
        InputError: it cannot be read, or is not an object.
    """
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}. Move it, and its contents are measured again.") from error
    if not isinstance(found, dict):
        raise InputError(f"{file} is not a result of a grid. Move it, or give another --output.")
    return found
