"""The folders of sharded checkpoints: PATH is a link to PATH.N. `linrope.models.sharded_checkpoint` reads one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

META_FILE, INDEX_FILE = "meta.pt", ".metadata"


def is_sharded_checkpoint(path: str | Path) -> bool:
    """Whether a path leads to the folder of a sharded checkpoint."""
    return Path(path, META_FILE).is_file() and Path(path, INDEX_FILE).is_file()


def folders_of(path: Path) -> dict[int, Path]:
    """The folders PATH.N of a checkpoint PATH, by N."""
    found = ((place.name.removeprefix(f"{path.name}."), place) for place in path.parent.glob(f"{path.name}.*"))
    return {int(number): place for number, place in found if number.isdecimal()}


def new_folder(path: Path) -> Path:
    """The folder for the next checkpoint PATH."""
    return path.with_name(f"{path.name}.{1 + max(folders_of(path), default=0)}")


def folder_of_link(path: Path) -> Path | None:
    """The folder PATH.N to which PATH leads; None if PATH is no such link."""
    target = os.readlink(path) if path.is_symlink() else None
    return next((folder for folder in folders_of(path).values() if folder.name == target), None)


def make_replaceable(path: Path) -> None:
    """Let PATH be a link if it is the folder of a copied checkpoint: a file or a link can replace only that."""
    if is_sharded_checkpoint(path) and not path.is_symlink():
        folder = new_folder(path)
        path.rename(folder)
        path.symlink_to(folder.name)


def remove_others(path: Path) -> None:
    """Remove the folders PATH.N to which PATH does not lead: earlier ones, and one of a process killed."""
    kept = folder_of_link(path)
    for folder in folders_of(path).values():
        if folder != kept:
            shutil.rmtree(folder, ignore_errors=True)
