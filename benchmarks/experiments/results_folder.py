"""The folder of a grid's results: which runs are done, and how fast the variants train."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.experiments.grid import Grid, Settings, hash_of, longest_context, opened
from benchmarks.harness.machine import commit, device_name
from linrope.errors import InputError
from linrope.utils.files import claim, whole_file


class RunFailed(RuntimeError):
    """A run's process ended without a result; the message holds its last output."""


@contextmanager
def claimed(file: Path) -> Iterator[Path | None]:
    """Make the file, lock it, and remove it at the end; None if another process holds the lock."""
    with file.open("a") as lock:
        if not claim(lock):
            yield None
            return
        try:
            yield file
        finally:
            file.unlink(missing_ok=True)


@dataclass(frozen=True)
class Speed:
    """The training speed of a variant: the median of the rounds."""

    tokens_per_second: float
    spread: float | None = None
    """Interquartile range of the rounds, as a share of the median."""
    machine: str | None = None
    """The processor or GPU that it was measured on."""


class Folder:
    """The folder: `runs/VARIANT-seedN.json`, and `speed.json` with the training speeds. `speed_keys` has the variants
    with a single speed, those without a curriculum."""

    def __init__(self, path: Path, grid: Grid, settings: dict[str, Settings], device: str = "cpu"):
        self.path, self.grid, self.settings, self.device = path, grid, settings, device
        self.runs = path / "runs"
        self.longest_context = longest_context(settings.values())
        timed = {name: own for name, own in settings.items() if own.curriculum is None}
        self.speed_keys = {name: own.speed_key(device, grid.bfloat16) for name, own in timed.items()}

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
            elif variant in self.settings and (difference := self._difference(found)):
                other = f"runs of {variant!r} with other options ({difference})"
            elif runs_follow and variant in self.settings and found.get("text") != self._text_of(variant):
                other = f"runs of {variant!r} on another text (another version of Python has another standard library)"
            else:
                continue
            raise InputError(
                f"--output {self.path} holds results of another grid: {other}. Nothing there was changed; "
                "give another folder, or another name to the changed variant."
            )

    def _difference(self, found: dict[str, Any]) -> str:
        """The options of a run that this grid has with other values; "" if it is a run of this grid."""
        # without an entry, the run was validated on windows of its own context
        validated_on = found.get("longest_context", longest_context([Settings(**found["settings"])]))
        then = {**found["measured"], **found["settings"], "longest context": validated_on}
        own = asdict(self.settings[found["variant"]])
        now = {**self.grid.measured, **own, "longest context": self.longest_context}
        return ", ".join(f"{name} was {then.get(name)}" for name in then | now if then.get(name) != now.get(name))

    def _text_of(self, variant: str) -> str | None:
        """A hash of the variant's text and its splits; None if the task makes its own rows."""
        own = self.settings[variant]
        if own.task != "text":
            return None
        return hash_of({name: corpus.fingerprint() for name, corpus in opened(own).corpora.items()})

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
            "text": self._text_of(variant),
            "longest_context": self.longest_context,
            "device": self.device,
            "processor": device_name(self.device),
            "commit": commit(),
            "torch": torch.__version__,
        }

    def read_speeds(self) -> dict[str, Speed]:
        speeds = self._known_speeds()
        try:
            return {name: Speed(**speeds[key]) for name, key in self.speed_keys.items() if key in speeds}
        except TypeError as error:
            raise InputError(
                f"--output {self.path}: speed.json holds an entry that is not a speed. "
                "Move the file, and all speeds are measured again."
            ) from error

    def write_speeds(self, speeds: dict[str, Speed]) -> None:
        """Write the speeds; those of variants that this grid does not have are kept."""
        known = self._known_speeds() | {self.speed_keys[name]: asdict(speed) for name, speed in speeds.items()}
        with whole_file(self.path / "speed.json") as file:
            file.write((json.dumps(known, indent=1) + "\n").encode())

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
